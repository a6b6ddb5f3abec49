"""The socket through which the ranks of a tensor-parallel group find each other."""

from __future__ import annotations

import os
import socket


class Rendezvous:
    """A listening socket on the loopback interface, on a port chosen by the kernel.

    The process of rank 0 inherits the socket, as does any process that replaces it. Other hosts
    cannot reach the socket.
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
