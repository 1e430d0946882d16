"""One wording for every name that does not exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(name: str, known: Iterable[str], parent: str = "") -> str:
    """The nearest match, as a full key below ``parent``, and what there is.

    >>> unknown("sca", ["sac", "ppo"])
    'did you mean sac? There are: ppo, sac'
    """
    names = sorted(set(known))
    if not names:
        return "there are none"
    listed = ", ".join(names)
    nearest = get_close_matches(name, names, n=1, cutoff=0.5)
    if not nearest:
        return f"there are: {listed}"
    return f"did you mean {parent and parent + '.'}{nearest[0]}? There are: {listed}"
