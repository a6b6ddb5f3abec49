"""The command line: `nanoactor generate | chat`."""

from nanoactor.cli.main import main

__all__ = ["main"]
