"""Final scores of groups of runs, by environment and over several environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlplug.results.groups import Group
from rlplug.results.statistics import Scores, profile, profile_band, scaled

THRESHOLDS = 101  # of a performance profile


@dataclass(frozen=True)
class Contest:
    """Groups whose final scores can be compared.

    Attributes:
        name: the environment, or what the scores are scaled by.
        members: the index of each method's groups, one for each task.
        methods: their labels.
        scores: of each method, an array ``[R]`` for each task.
    """

    name: str
    members: Sequence[Sequence[int]]
    methods: Sequence[str]
    scores: Sequence[Scores]

    def profiles(self) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        """Return thresholds ``[K]``, and the performance profile ``[K]`` and its band ``[2, K]`` of each method."""
        whole = np.concatenate([task for scores in self.scores for task in scores])
        margin = 0.02 * (whole.max() - whole.min()) or 1.0
        thresholds = np.linspace(whole.min() - margin, whole.max() + margin, THRESHOLDS)
        return thresholds, [(profile(x, thresholds), profile_band(x, thresholds)) for x in self.scores]


def final_scores(group: Group, metric: str) -> np.ndarray:
    """Return a metric at the end of each finished run that has it, ``[R]``."""
    scores = [run.last(metric) for run in group.runs if run.state == "finished"]
    return np.array([score for score in scores if score is not None])


def contests(groups: Sequence[Group], metric: str) -> list[Contest]:
    """Return a contest for each environment, and one over all of them if several have the same methods.

    Groups without a finished run take no part. Over several environments, scores are scaled to [0, 1] by the worst and
    the best run of each.
    """
    scores = [final_scores(group, metric) for group in groups]
    found: list[Contest] = []
    by_env: dict[str, dict[str, int]] = {}
    for env in dict.fromkeys(group.env for group in groups):
        own = {group.method: i for i, group in enumerate(groups) if group.env == env and len(scores[i])}
        if own:
            by_env[env] = own
            found.append(Contest(env, [[i] for i in own.values()], [*own], [[scores[i]] for i in own.values()]))
    shared = [method for method in next(iter(by_env.values()), {}) if all(method in own for own in by_env.values())]
    if len(by_env) > 1 and len(shared) > 1:
        members = [[own[method] for own in by_env.values()] for method in shared]
        together = scaled([[scores[i] for i in of] for of in members])
        found.append(Contest(f"all {len(by_env)} environments", members, shared, together))
    return found
