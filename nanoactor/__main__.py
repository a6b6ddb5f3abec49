"""Run `python -m nanoactor`."""

from nanoactor.cli import main

main()
