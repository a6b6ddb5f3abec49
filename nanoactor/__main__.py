"""Entry point of the command `nanoactor` and of `python -m nanoactor`."""

import sys

from nanoactor import check_platform
from nanoactor.errors import UnsupportedPlatform


def main() -> None:
    """Run the command-line interface. On an unsupported platform, print the reason and exit with
    status 1."""
    try:
        check_platform()
    except UnsupportedPlatform as error:
        sys.exit(f"nanoactor: {error}")
    from nanoactor.cli import main as run

    run()


if __name__ == "__main__":
    main()
