"""What needs torch_npu's wheel: run by `make test-npu` in an environment of its own, with stand-ins
for CANN (`tests.npu.cann_stub`); elsewhere nothing of it is collected."""

import importlib.util

if importlib.util.find_spec("torch_npu") is None:
    collect_ignore_glob = ["test_*.py"]
