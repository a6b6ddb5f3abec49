"""The machine of an emulated device: the host is its memory, the calling thread its queue."""

import contextlib

import torch

from nanoactor.models.devices.protocols import Memory


class HostMachine:
    """A machine without an accelerator; no amount of memory means anything."""

    torch_device = torch.device("cpu")
    collective_backend = "gloo"
    default_dtype = torch.float32

    def prepare_thread(self, threads):
        torch.set_num_threads(threads)

    def memory(self):
        return Memory(1 << 32, 1 << 31)

    def reset_peak_memory(self):
        pass

    def peak_memory(self):
        return 0

    def empty_pinned(self, *shape, dtype):
        # Not zeros: what was never written must not look like a result.
        return torch.full(shape, -7, dtype=dtype)

    def synchronize(self):
        pass

    @contextlib.contextmanager
    def stream(self):
        with torch.inference_mode():
            yield
