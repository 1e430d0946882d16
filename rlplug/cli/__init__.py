"""The command line: ``python -m rlplug [verb] ...``. Without a verb it trains."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

from rlplug.registry import unknown
from rlplug.types import ConfigError

VERBS = ("train", "check", "plugins")
"""each is a module of this package with a function ``main(arguments) -> exit code``"""

BAD_INPUT = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code is 0, 2 for bad input, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments == ["--version"]:
            print(f"rlplug {version('rlplug')}")
            return 0
        verb = arguments.pop(0) if arguments and _is_word(arguments[0]) else "train"
        if verb not in VERBS:
            raise ConfigError("", f"unknown verb {verb!r}; {unknown(verb, VERBS)}. Settings are written key=value")
        return importlib.import_module(f"rlplug.cli.{verb}").main(arguments)
    except ConfigError as error:
        return refuse(error)
    except KeyboardInterrupt:
        return INTERRUPTED


def refuse(error: ConfigError) -> int:
    """Print what is wrong with the input, and return the exit code for it."""
    print("rlplug: " + str(error).replace("\n", "\nrlplug: "), file=sys.stderr)
    return BAD_INPUT


def _is_word(argument: str) -> bool:
    """Neither a flag (``-m``) nor an override (``algo=sac``, ``+x=1``, ``~x``)."""
    return "=" not in argument and not argument.startswith(("-", "+", "~"))
