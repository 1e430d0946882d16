"""``python -m rlplug.testing.probes [algorithm ...] [--only probe,probe]``: exact and learned values, as a table.

It exits with 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

import torch

from rlplug import registry
from rlplug.testing.probes import PROBES, Found, Kind, Probe, kind_of, learn


def exact(probe: Probe, kind: Kind) -> tuple[str, str]:
    """Format the exact values and the optimal actions of a probe."""
    best: Mapping[int, float] = probe.target if kind == "box" and probe.target else probe.best
    return _pairs(probe.values), _pairs(best)


def _pairs(numbers: Mapping[int, float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers.values())


def learned(found: Found, probe: Probe, kind: Kind) -> tuple[str, str]:
    """Format the learned values and actions, in the order of ``exact``; actions of two choices are 0 and 1."""
    whole = kind == "discrete" or not probe.target
    did = [{float(x > 0) for x in xs} if kind == "box" and whole else set(xs) for xs in found.actions.values()]
    actions = [" or ".join(f"{x:.0f}" if whole else f"{x:.2f}" for x in sorted(xs)) for xs in did]
    return ", ".join(f"{value:.2f}" for value in found.values.values()), ", ".join(actions)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rlplug.testing.probes", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("algorithm", nargs="*")
    parser.add_argument("--only", default=",".join(PROBES), help="probes, with commas")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    print("| probe | algorithm | actions | exact values | learned values | best actions | chosen | steps | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|")
    wrong = list[str]()
    for name in options.only.split(","):
        probe = PROBES[name]
        for algorithm in options.algorithm or registry.names("algo"):
            if (kind := kind_of(algorithm, probe)) is None:
                continue
            begin = time.process_time()
            found = learn(algorithm, probe, kind)
            (values, best), (value, chosen) = exact(probe, kind), learned(found, probe, kind)
            cells = [f"`{name}`", f"`{algorithm}`", kind, values if value else "", value, best, chosen]
            took = f"{time.process_time() - begin:.1f}"
            print(f"| {' | '.join([*cells, f'{found.steps:,}', took])} |", flush=True)
            wrong += [f"{algorithm} on {name}: {said}" for said in found.wrong]
    print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
