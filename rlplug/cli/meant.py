"""Suggestions for verbs and flags of command lines written for other programs."""

from __future__ import annotations

from collections.abc import Iterable

from rlplug.registry.discovery import unknown
from rlplug.types import ConfigError

VERBS = {
    "test": "evaluate runs episodes: evaluate <run folder>",
    "eval": "evaluate runs episodes: evaluate <run folder>",
    "enjoy": "play shows a run in a window: play <run folder>",
    "render": "play shows a run in a window: play <run folder>",
    "video": "evaluate --record writes a video: evaluate <run folder> --record; eval.record=1 one of every evaluation",
    "tail": "watch shows a run that another process trains: watch <run folder>",
    "attach": "watch shows a run that another process trains: watch <run folder>",
    "continue": "resume continues a run: resume <run folder>",
    "list": "plugins lists what is installed: plugins [kind [name]]; runs lists runs",
    "branch": "fork continues from a checkpoint with other settings: fork <run folder>@<step> key=value",
    "ls": "runs lists runs: runs [filters]",
    "compare": "diff compares two runs, and report any number of them: report <runs>",
    "help": "see --help",
    "version": "see --version",
    "sweep": "-m sweeps over values: -m algo=ppo,sac seed=1,2,3",
    "tune": "-m sweeps over values: -m algo.lr=1e-3,3e-4",
    "run": "training needs no verb: algo=ppo env=cartpole",
}
"""verbs of other programs, and their equivalents"""

VERBOSE = "-v prints every row of metrics and every checkpoint"
FLAGS = {
    "dry_run": "check shows what would run, without training: check algo=ppo env=cartpole",
    "n": "check shows what would run, without training: check algo=ppo env=cartpole",
    "list": VERBS["list"],
    "l": VERBS["list"],
    "vv": VERBOSE,
    "debug": f"{VERBOSE}; --cfg job shows every setting",
    "quiet": "log.level=warning prints only problems",
    "q": "log.level=warning prints only problems",
    "config": "--cfg job shows every setting; settings are written key=value",
    "resume": VERBS["continue"],
    "play": VERBS["enjoy"],
    "render": VERBS["enjoy"],
    "help_all": "see --help",
}
"""flags of other programs, without dashes, and their equivalents"""


def no_verb(verb: str, verbs: Iterable[str]) -> ConfigError:
    """Return the error for a verb that is not one of ``verbs``."""
    said = VERBS.get(verb.lower()) or f"{unknown(verb, verbs)}. Settings are written key=value"
    return ConfigError("", f"unknown verb {verb!r}; {said}")


def no_flag(argument: str, others: str = "") -> ConfigError:
    """Return the error for an unknown flag, with its equivalent or the setting of that name.

    Args:
        others: hint if neither is known.
    """
    from rlplug.config.composition import compose
    from rlplug.config.errors import elsewhere, value_at
    from rlplug.config.explain import chosen_as

    flag, _, value = argument.partition("=")
    name = flag.lstrip("-").lower().replace("-", "_")
    if name in FLAGS:
        return ConfigError("", f"there is no flag {flag}: {FLAGS[name]}")
    raw = compose().raw
    settings = [name] if value_at(raw, name) is not None else elsewhere(raw, name) or chosen_as(name, raw)
    if settings and len(name) > 1:
        written = [word if "=" in word else f"{word}={value or '<value>'}" for word in settings]
        return ConfigError("", f"there is no flag {flag}: settings are written {' or '.join(written)}")
    return ConfigError(
        "", f"there is no flag {flag}; {others or 'settings are written key=value, and --help lists flags'}"
    )
