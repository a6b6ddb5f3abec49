"""The socket on which the ranks of a tensor-parallel group meet."""

from __future__ import annotations

import os
import socket


class Rendezvous:
    """A socket that listens on the loopback interface only, on a port chosen by the kernel.

    Rank 0 and its replacements inherit it; it is unreachable from other hosts.
    """

    def __init__(self, ranks: int) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(ranks)
            self.port: int = listener.getsockname()[1]
            self.descriptor = listener.detach()

    def close(self) -> None:
        """Close this process's copy of the socket; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
