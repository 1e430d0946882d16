"""``python -m tests.tools.planted [name ...]``: plant bugs into components, and print which check finds each.

With ``--all`` every check of a component is made, and all that find the bug are printed. It exits with 1 if one is
missed.
"""

import argparse
import sys
import tempfile
import textwrap
import time
import warnings
from pathlib import Path

import torch

from rlplug import registry
from rlplug.types import ConfigError
from tests.contract.planted import BUGS, FILES, Bug
from tests.installing import install_into


def found_by(bug: Bug, every: bool = False) -> list[tuple[str, str]]:
    """Return the failures ``(check, message)`` of the check that has to find a bug, or of all checks.

    They are AssertionErrors of the kit, and ConfigErrors by which rlplug refuses what a component returns. A bug that
    crashes, or never ends, was not found by a check.

    Raises:
        Exception: a check crashed or reached its time limit, and ``every`` is false.
    """
    found = list[tuple[str, str]]()
    for check in bug.checks():
        if every or f"{check.what}-".startswith(f"{bug.check}-"):
            try:
                check()
            except (AssertionError, ConfigError) as error:
                found.append((check.what, " ".join(str(error).split())))
            except Exception:
                if not every:
                    raise
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.planted", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="*")
    parser.add_argument("--all", action="store_true", help="every check that finds it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    missed = list[str]()
    with tempfile.TemporaryDirectory() as site:
        install_into(Path(site), "rlplug-planted", "rlplug_planted", FILES)
        sys.path.insert(0, site)
        registry.refresh()
        print("| component | the bug | found by | which says | CPU s |\n|---|---|---|---|---|")
        for bug in BUGS:
            if options.name and bug.name not in options.name:
                continue
            begin = time.process_time()
            found, said = list[tuple[str, str]](), ""
            try:
                found = found_by(bug, options.all)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            missed += [] if any(bug.says in words for _, words in found) else [bug.name]
            checks = ", ".join(dict.fromkeys(f"`{check}`" for check, _ in found)) or "**nothing**"
            said = textwrap.shorten(found[0][1] if found else said, 160, placeholder=" ...").replace("|", "\\|")
            what = (bug.cls.__doc__ or "").strip().splitlines()[0]
            print(f"| `{bug.name}` | {what} | {checks} | {said} | {time.process_time() - begin:.1f} |", flush=True)
    print(f"{len(missed)} of {len(BUGS)} missed: {', '.join(missed)}" if missed else "", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
