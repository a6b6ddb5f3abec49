"""For processes that a test's engine starts: what NANOACTOR_TEST_RUNTIME names ("module:class")
stands in for the NPU's half of the device there too. Python imports this file by its name."""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys

DEVICES = "nanoactor.models.devices"


class Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        original = module.open_device

        def open_device(name, rank=0, options=None):
            if not name.startswith("npu"):
                return original(name, rank, options)
            from nanoactor.models.devices.npu.device import NPUDevice

            home, _, runtime = os.environ["NANOACTOR_TEST_RUNTIME"].partition(":")
            return NPUDevice(getattr(importlib.import_module(home), runtime)(rank), options)

        module.open_device = open_device


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != DEVICES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Loader(spec.loader)
        return spec


if "NANOACTOR_TEST_RUNTIME" in os.environ:
    sys.meta_path.insert(0, Finder())
