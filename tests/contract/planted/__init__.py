"""Bugs that authors make, planted into built-in components: the conformance kit's own test.

Each is a class in ``values`` or ``manners``; ``BUGS`` says which component it replaces and which check has to find it.
The small components of ``tests.contract.toys`` are planted bugs, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplug.plugins import rlplug_components
from rlplug.registry import Component, Kind
from rlplug.testing.conformance import Check, checks_of
from tests.contract.planted import manners, values

CONF = Path(__file__).parents[3] / "conf"


@dataclass(frozen=True)
class Bug:
    """A planted bug.

    Args:
        base: the option whose YAML it takes over; empty: it has a name only.
        check: the check that finds it, without the environment.
        says: a part of what the check says.
        words: with which the component is tried.
    """

    cls: type[Any]
    kind: Kind
    base: str
    check: str
    says: str
    words: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.cls.__name__).lower()

    @property
    def yaml(self) -> str:
        if not self.base:
            return f"name: {self.name}\n"
        text = (CONF / self.kind / f"{self.base}.yaml").read_text()
        text = re.sub(rf"^( *)name: {self.base}\b.*$", rf"\1name: {self.name}", text, count=1, flags=re.MULTILINE)
        return text.replace(f"@package exploration.{self.base}", f"@package exploration.{self.name}")

    def checks(self) -> list[Check]:
        """Return the kit's checks of the component, those that look at little first."""
        return checks_of(self.kind, self.name, overrides=self.words)


def algo(cls: type[Any], base: str, check: str, says: str) -> Bug:
    return Bug(cls, "algo", base, check, says)


BUGS = [
    algo(values.DqnBootstrapsAfterTheEnd, "dqn", "probe-ends", "bootstraps from the row after a termination"),
    algo(values.PpoBootstrapsAfterTheEnd, "ppo", "probe-ends", "bootstraps from the row after a termination"),
    algo(values.SacSwapsEnds, "sac", "probe-ends", "bootstraps from the row after a termination"),
    algo(values.DqnEndsAtTruncation, "dqn", "probe-ends", "treats a truncation as a termination"),
    algo(values.PpoEndsAtTruncation, "ppo", "probe-ends", "the value of state 1 is 1."),
    algo(values.MarwilEndsAtTruncation, "marwil", "probe-ends", "the value of state 1 is 1."),
    algo(values.A2cLeaksAcrossEpisodes, "a2c", "probe-ends", "but 10 is exact"),
    algo(values.PpoLearnsFromFinalRows, "ppo", "probe-ends", "but 10 is exact"),
    algo(values.DqnBootstrapsFromAnotherColumn, "dqn", "probe-absorbing", "but 0 is exact"),
    algo(values.DqnDiscountsTheFirstReward, "dqn", "probe-delayed", "discounts the first reward too"),
    algo(values.SacDiscountsOnceLess, "sac", "probe-delayed", "but 1 is exact"),
    algo(values.PpoShiftsRewards, "ppo", "probe-delayed", "discounts the first reward too"),
    algo(values.PpoForgetsGamma, "ppo", "probe-absorbing", "but 10 is exact"),
    algo(values.IqlForgetsToBootstrap, "iql", "probe-absorbing", "it does not bootstrap"),
    algo(values.A2cClipsRewards, "a2c", "probe-delayed", "in state 0 it chooses [0.0], but 1 is best"),
    algo(values.DqnGradientsIntoTheTarget, "dqn", "probe-split", "a gradient through the target"),
    algo(values.DqnNeverMovesTheTarget, "dqn", "probe-absorbing", "but 10 is exact"),
    algo(values.DqnCopiesTheWrongWay, "dqn", "probe-absorbing", "but 10 is exact"),
    algo(values.PpoAscends, "ppo", "probe-bandit", "in state 1 it chooses [0.0], but 2 is best"),
    algo(values.PpoInvertsTheRatio, "ppo", "probe-bandit", "in state 1 it chooses [0.0], but 2 is best"),
    algo(values.DdpgFollowsTheWrongSign, "ddpg", "probe-target", "in state 0 it chooses [-1.0], but 0.5 is best"),
    algo(values.BcImitatesTheNextAction, "bc", "probe-bandit", "in state 1 it chooses [0.0], but 2 is best"),
    algo(values.DqnJudgesTheWrongAction, "dqn", "probe-bandit", "the mean over all arms"),
    algo(values.LinUcbKeepsRewards, "linucb", "probe-bandit", "in state 0 it chooses [2.0], but 0 is best"),
    algo(values.DqnForgetsImportanceWeights, "dqn", "probe-rare", "the mean of rows sampled by priority"),
    algo(values.ImpalaForgetsImportanceWeights, "impala", "probe-stale", "that of the policy that acted"),
    algo(values.DqnActsOutsideTheMask, "dqn", "probe-masked", "in state 0 it chooses [2.0], but 0 is best"),
    algo(values.DqnBootstrapsOutsideTheMask, "dqn", "probe-masked", "but -7.8 is exact"),
    algo(values.DqnTakesTheMaskOfAnotherRow, "dqn", "probe-masked", "but -7.8 is exact"),
    algo(values.DqnKeepsItsStateAtReset, "dqn", "probe-cue", "in state 4 it chooses ["),
    algo(values.PpoForgetsItsState, "ppo", "probe-cue", "in state 5 it chooses [0.0], but 1 is best"),
    algo(values.DqnLearnsWithoutItsState, "dqn", "probe-cue", "in state 5 it chooses [0.0], but 1 is best"),
    algo(manners.PpoFreezesTheClip, "ppo", "schedules", "a schedule of clip_param"),
    algo(manners.SacFreezesItsStep, "sac", "schedules", "algo.actor_lr is a schedule"),
    algo(manners.LinUcbFreezesItsWidth, "linucb", "schedules", "a schedule of alpha"),
    Bug(manners.FrozenEpsilon, "exploration", "epsilon_greedy", "schedules", "a schedule of epsilon", ("algo=dqn",)),
    algo(manners.DqnScalesRewardsInPlace, "dqn", "rows-stay", "prepare() changes reward"),
    algo(manners.PpoPopsRows, "ppo", "rows-stay", "prepare() changes reward"),
    algo(manners.A2cShiftsObservationsInPlace, "a2c", "rows-stay", "act() changes obs"),
    algo(manners.PpoHasALambda, "ppo", "pickles", "it cannot be pickled"),
    algo(manners.PpoDropsItsWeights, "ppo", "pickles", "a pickled copy acts differently"),
    algo(manners.SacDrawsFromTorch, "sac", "determinism", "when other code uses the global generators"),
    algo(manners.DqnSharesOneDraw, "dqn", "act", "a different action when the batch has other rows"),
    algo(manners.DqnReturnsAMean, "dqn", "ranks", "on four microbatches differs from one on one rank"),
    Bug(
        manners.EpsilonOutsideTheMask,
        "exploration",
        "epsilon_greedy",
        "on-dqn",
        "perturb() takes forbidden actions",
        ("algo=dqn", "env=masked_cartpole"),
    ),
    Bug(
        manners.GaussianInPlace,
        "exploration",
        "gaussian",
        "on-ddpg",
        "perturb() writes into action",
        ("algo=ddpg", "env=pendulum"),
    ),
    Bug(
        manners.GaussianFromNumpy,
        "exploration",
        "gaussian",
        "on-ddpg",
        "a resumed run differs from the undisturbed one",
        ("algo=ddpg", "env=pendulum"),
    ),
    Bug(manners.DeafToPriorities, "buffer", "prioritized", "priorities", "does feedback() apply the priority?"),
    Bug(manners.Weightless, "buffer", "prioritized", "probe-rare", "but 1 is exact", ("algo=dqn",)),
    Bug(manners.DrawsFromNumpy, "buffer", "replay", "saves", "after load() it samples different obs"),
    Bug(manners.MixesEnds, "buffer", "replay", "probe-ends", "treats a truncation as a termination", ("algo=dqn",)),
    Bug(manners.ShiftsRewards, "buffer", "replay", "streams", "'reward' of a sampled row is not what was added"),
    Bug(manners.IgnoresItsSeed, "env", "", "episodes", "give different rows"),
    Bug(manners.CountsAfterTheEnd, "env", "", "episodes", "the step that resets an ended column gives a reward"),
    Bug(manners.WritesIntoActions, "env", "", "episodes", "step() changes the array of actions"),
    Bug(manners.LeavesItsSpace, "env", "", "episodes", "obs is outside of Box"),
    Bug(manners.NeverEnds, "env", "", "episodes", "an episode exceeds 500 steps"),
]


def components() -> list[Component]:
    tried = {(x.kind, x.name): x.tried_with for x in rlplug_components()}
    return [
        Component(bug.kind, bug.name, f"{bug.cls.__module__}:{bug.cls.__name__}", tried.get((bug.kind, bug.base), ()))
        for bug in BUGS
    ]


MANIFEST = """
from rlplug import hookimpl
from tests.contract.planted import components as planted

@hookimpl
def rlplug_components():
    return planted()

@hookimpl
def rlplug_conf():
    return "rlplug_planted"
"""
FILES = {"rlplug_planted/__init__.py": MANIFEST}
FILES |= {f"rlplug_planted/conf/{bug.kind}/{bug.name}.yaml": bug.yaml for bug in BUGS}
