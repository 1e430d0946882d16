"""``python -m tests.tools.planted [name ...]``: plant bugs into components, and print which check finds each.

With ``--all`` every check of a component is made, and all that find the bug are printed. It exits with 1 if one is
missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from rlplug import registry
from tests.contract.planted import BUGS, FILES, Bug
from tests.installing import install_into


def found_by(bug: Bug, every: bool = False) -> list[tuple[str, str]]:
    """Return the check that has to find a bug, or all that do, each with the first line of what it says."""
    found = list[tuple[str, str]]()
    for check in bug.checks():
        plain = check.what.rsplit("-", 1)[0] if check.what.endswith(("-cartpole", "-pendulum")) else check.what
        if every or bug.check in (check.what, plain, check.what.partition("-")[0]):
            try:
                check()
            except Exception as error:
                found.append((check.what, (str(error) or type(error).__name__).splitlines()[0]))
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
            found = found_by(bug, options.all)
            missed += [] if found else [bug.name]
            checks = ", ".join(dict.fromkeys(f"`{check}`" for check, _ in found)) or "**nothing**"
            said = found[0][1].replace("|", "\\|")[:160] if found else ""
            what = (bug.cls.__doc__ or "").strip().splitlines()[0]
            print(f"| `{bug.name}` | {what} | {checks} | {said} | {time.process_time() - begin:.1f} |", flush=True)
    print(f"{len(missed)} of {len(BUGS)} missed: {', '.join(missed)}" if missed else "", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
