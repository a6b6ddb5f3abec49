"""The command line: `nanoactor generate | chat | serve | doctor`."""

from nanoactor.cli.main import main

__all__ = ["main"]
