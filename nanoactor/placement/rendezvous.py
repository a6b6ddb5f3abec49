"""The socket on which the ranks of a tensor-parallel group find each other."""

from __future__ import annotations

import os
import socket


class Rendezvous:
    """A listening socket on the loopback interface, on a port chosen by the kernel.

    Rank 0 inherits it, as does a process that replaces rank 0. Other hosts cannot reach it.
    """

    def __init__(self, ranks: int) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(ranks)
            self.port: int = listener.getsockname()[1]
            self.descriptor = listener.detach()

    def close(self) -> None:
        """Close this process's copy of the socket. Further calls have no effect."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
