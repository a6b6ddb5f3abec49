"""An event of a device whose queue is the calling thread."""

import time


class HostEvent:
    def __init__(self):
        self.at = 0

    def record(self):
        self.at = time.monotonic_ns()

    def done(self):
        return True

    def wait(self):
        pass

    def milliseconds_until(self, later):
        return (later.at - self.at) * 1e-6
