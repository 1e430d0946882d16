"""Summary of recorded episodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rlplug import tree
from rlplug.data.recording import Recording
from rlplug.data.source import printable
from rlplug.envs.spaces import in_words
from rlplug.types import Batch, EnvSpec, groups_of

WISHED = {"logp": "behavior log-probabilities, which off-policy estimates need"}
LOOKED_AT = 100_000  # first rows, from which ranges and fractions are computed
MOST_CHOICES = 32


def describe(recording: Recording) -> dict[str, Any]:
    """Return a summary of a dataset, as numbers and text."""
    lengths, returns = recording.lengths, recording.returns
    rows = list[Batch]()
    for number in range(len(lengths)):
        rows.append(recording.episode(number, None, 1))
        if sum(len(one["valid"]) for one in rows) >= LOOKED_AT:
            break
    spec = next((source.spec for source in recording.files if source.spec is not None), None)
    keys, coverage = dict[str, str](), dict[str, str]()
    for group, first in groups_of(rows[0]).items():
        parts = [groups_of(one)[group] for one in rows]
        for path, leaf in tree.items(first):
            name = ".".join(filter(None, (group, *path)))
            keys[name] = f"{leaf.dtype} {[*leaf.shape[1:]]}"
            if path[0] in ("obs", "action") and leaf.dtype != np.bool_:
                acted = [_at(part, path)[one["valid"]] for part, one in zip(parts, rows, strict=True)]
                coverage[name] = _cover(np.concatenate(acted), path[0] == "action")
    return {
        "files": len(recording.files),
        "episodes": len(lengths),
        "steps": int(lengths.sum()),
        "return": _spread(returns),
        "length": _spread(lengths),
        "terminated": _share(np.array([bool(_any(one, "terminated")) for one in rows])),
        "spaces": dict(_spaces(spec)),
        "keys": keys,
        "coverage": coverage,
        "looked_at": len(rows),
        "missing": {key: why for key, why in WISHED.items() if key not in recording.keys},
    }


def table(about: dict[str, Any]) -> str:
    """Format the result of ``describe``."""
    rows = [("files", f"{about['files']:,}"), ("episodes", f"{about['episodes']:,}, {about['steps']:,} steps")]
    rows += [("return", about["return"]), ("length", about["length"]), ("terminated", about["terminated"])]
    rows += [("spaces", "") if about["spaces"] else ("spaces", "the files do not say")]
    rows += [(f"  {name}", text) for name, text in about["spaces"].items()]
    rows += [("keys", ""), *((f"  {name}", text) for name, text in about["keys"].items())]
    rows += [("coverage", f"of {about['looked_at']:,} episodes")]
    rows += [(f"  {name}", text) for name, text in about["coverage"].items()]
    rows += [("missing", f"{key}: {why}") for key, why in about["missing"].items()]
    return "\n".join(printable(f"{name:<14} {text}".rstrip()) for name, text in rows)


def _spaces(spec: EnvSpec | None) -> Iterator[tuple[str, str]]:
    for name, group in () if spec is None else (spec.native_spaces or spec.groups).items():
        yield f"obs of {name}" if len(spec.groups) > 1 else "obs", in_words(group.obs)  # type: ignore[union-attr]
        yield f"action of {name}" if len(spec.groups) > 1 else "action", in_words(group.action)  # type: ignore[union-attr]


def _spread(values: np.ndarray) -> str:
    low, mid, high = np.percentile(values, [10, 50, 90])
    return (
        f"{values.mean():,.2f} ± {values.std():,.2f} (min {values.min():,.2f}, 10 % {low:,.2f}, median {mid:,.2f},"
        f" 90 % {high:,.2f}, max {values.max():,.2f})"
    )


def _cover(values: np.ndarray, is_action: bool) -> str:
    """Describe the values: fractions of discrete choices, or ranges of elements."""
    if values.dtype.kind in "iu" and is_action and values.ndim == 1:
        choices, counts = np.unique(values, return_counts=True)
        if len(choices) <= MOST_CHOICES:
            shares = (f"{choice}: {100 * n / len(values):.1f} %" for choice, n in zip(choices, counts, strict=True))
            return ", ".join(shares)
    flat = values.reshape(len(values), -1).astype(np.float64)
    if not flat.size:
        return "no elements"
    low, high = flat.min(0), flat.max(0)
    if flat.shape[1] > 8:
        return f"from {low.min():.4g} to {high.max():.4g} over {flat.shape[1]} elements"
    ranges = [f"{a:.4g} to {b:.4g}" for a, b in zip(low, high, strict=True)]
    at = (
        f"; {100 * (np.abs(flat) >= 0.999).mean():.1f} % at a bound"
        if is_action and high.max() <= 1 <= -low.min()
        else ""
    )
    return ", ".join(ranges) + at


def _share(ended: np.ndarray) -> str:
    return f"{100 * ended.mean():.1f} % of episodes; the others were truncated"


def _any(rows: Batch, key: str) -> bool:
    return any(bool(part[key].any()) for part in groups_of(rows).values())


def _at(rows: Batch, path: Sequence[str]) -> np.ndarray:
    leaf: Any = rows
    for key in path:
        leaf = leaf[key]
    return leaf
