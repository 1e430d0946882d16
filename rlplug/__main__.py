"""``python -m rlplug``, and the console script ``rlplug``."""

import os
import sys

from rlplug import cli

__all__ = ["main"]


def main() -> int:
    """Be the console script: as ``python -m rlplug``, which finds modules of the current folder."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    return cli.main()


if __name__ == "__main__":
    sys.exit(cli.main())
