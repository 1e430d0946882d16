"""``python -m rlplug``, and the console script ``rlplug``."""

import sys

from rlplug.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
