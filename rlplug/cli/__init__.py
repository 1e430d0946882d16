"""The command line: ``python -m rlplug [verb] ...``; the default verb is ``train``."""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlplug import registry
from rlplug.terminal import outlive_readers
from rlplug.types import ConfigError, RunError, printable

VERBS = ("train", "resume", "watch", "fork", "evaluate", "play", "estimate", "check", "data", "profile", "plugins")
VERBS += ("schema", "new", "runs", "diff", "plot", "report", "export", "push")
"""modules of this package with a function ``main(arguments) -> exit code``"""

PRINT = ("check", "data", "diff", "plugins", "runs", "schema")
"""verbs that only print, and end when the reader of their output ends"""

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
FAILED = 1
BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. With ``--json``, results and refusals are JSON documents on stdout.

    Returns:
        The exit code: 0; 1 for a failed run, 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    failed = refused_in_json if "--json" in arguments else refuse
    warnings.formatwarning = _formatted
    warnings.filterwarnings("error", r"provider=hydra\.searchpath .* is not available")  # Hydra only warns
    try:
        if arguments == ["--version"]:
            print(f"rlplug {version('rlplug')}")
            return 0
        verb = arguments.pop(0) if arguments and _is_word(arguments[0]) else "train"
        if verb not in VERBS:
            from rlplug.cli.meant import no_verb

            raise no_verb(verb, VERBS)
        registry.plugins()  # first, because it hides entry points that would break other libraries
        outlive_readers("stderr", *(() if verb in PRINT else ("stdout",)))
        with loading():
            run = importlib.import_module(f"rlplug.cli.{verb}").main
        if verb in ("train", "resume"):
            arguments = without_verbose(arguments)
        return _printed(run, arguments) if verb in PRINT else run(arguments)
    except (ConfigError, RunError) as error:
        return failed(error)
    except PermissionError as error:
        if error.filename is None:
            raise
        return failed(ConfigError("", f"{error.filename}: {error.strerror}"))
    except KeyboardInterrupt as end:
        return 128 + (end.args[0] if end.args else signal.SIGINT)


@contextmanager
def loading() -> Iterator[None]:
    """Suspend garbage collection, which takes a sixth of the time of imports and finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def tell(line: str) -> None:
    """Print a line for the user on stderr."""
    print(f"rlplug: {printable(line)}", file=sys.stderr)


def say(text: object) -> None:
    """Print a result for the user on stdout; it may include text from packages and files."""
    print(printable(text), flush=True)


def without_json(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments other than ``--json``, and whether it is among them."""
    return [argument for argument in arguments if argument != "--json"], "--json" in arguments


def without_verbose(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ``-v`` as the setting that it stands for."""
    others = [argument for argument in arguments if argument not in ("-v", "--verbose")]
    return others + ["log.level=debug"] * (len(others) < len(arguments))


def printing(as_json: bool) -> AbstractContextManager[Any]:
    """Return a context in which others print to stderr instead of stdout if the result is JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def say_run(folder: Path) -> None:
    """Print the folder and the summary of a run that ended as JSON; with torchrun or srun, only rank 0 prints."""
    if is_first_process():
        say(json.dumps({"folder": str(folder), **json.loads((folder / "summary.json").read_bytes())}))


def is_first_process() -> bool:
    return all(os.environ.get(rank, "0") == "0" for rank in ("RANK", "SLURM_PROCID"))


def refuse(error: ConfigError | RunError) -> int:
    """Print an error, and return its exit code."""
    print("rlplug: " + str(error).replace("\n", "\nrlplug: "), file=sys.stderr)
    return BAD_INPUT if isinstance(error, ConfigError) else FAILED


def refused_in_json(error: ConfigError | RunError) -> int:
    """Print an error as JSON on stdout, and return its exit code.

    The document is ``{"error": {"key": ..., "reason": ..., "suggestion": ...}}``, with ``errors`` if there are several.
    """
    from rlplug.config.errors import single

    found = [error] if isinstance(error, RunError) else single(error)
    parts = [_parts(getattr(one, "key", ""), getattr(one, "message", str(one))) for one in found]
    say(json.dumps({"error": parts[0], **({"errors": parts} if parts[1:] else {})}))
    return BAD_INPUT if isinstance(error, ConfigError) else FAILED


def _parts(key: str, message: str) -> dict[str, str | None]:
    """Split a message into the reason and a suggestion: the nearest name, or what its last clause says to do."""
    meant = re.search(r"did you mean ([^?\n]+)\?", message)
    advice = re.search(r"(?:; |: (?=should ))(?!there are)([^;\n]+)$", message)
    found = meant or advice
    return {"key": key, "reason": message, "suggestion": found[1] if found else None}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format rows as lines with aligned columns."""
    rows = [head, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning; rlplug's own warnings without source location."""
    if filename.startswith(PACKAGE):
        return f"rlplug: {printable(message)}\n"
    return _format(message, category, filename, lineno, line)


_format = warnings.formatwarning


def _printed(run: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Return ``run(arguments)``, or an exit code if the reader of its output (``| head``) closes it."""
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's flush at exit
        return 128 + signal.SIGPIPE


def _is_word(argument: str) -> bool:
    """Return whether an argument is neither a flag (``-m``) nor an override (``algo=sac``, ``+x=1``, ``~x``)."""
    return "=" not in argument and not argument.startswith(("-", "+", "~"))
