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
        words: with which the component is tried.
        quick: whether it is found within a second or two.
    """

    cls: type[Any]
    kind: Kind
    base: str
    check: str
    words: tuple[str, ...] = ()
    quick: bool = False

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


def algo(cls: type[Any], base: str, check: str, quick: bool = False) -> Bug:
    return Bug(cls, "algo", base, check, quick=quick)


BUGS = [
    algo(values.DqnBootstrapsAfterTheEnd, "dqn", "probe-ends", True),
    algo(values.PpoBootstrapsAfterTheEnd, "ppo", "probe-ends"),
    algo(values.SacSwapsEnds, "sac", "probe-ends"),
    algo(values.DqnEndsAtTruncation, "dqn", "probe-ends"),
    algo(values.PpoEndsAtTruncation, "ppo", "probe-ends", True),
    algo(values.MarwilEndsAtTruncation, "marwil", "probe-ends"),
    algo(values.A2cLeaksAcrossEpisodes, "a2c", "probe-ends"),
    algo(values.PpoLearnsFromFinalRows, "ppo", "probe-ends"),
    algo(values.DqnBootstrapsFromAnotherColumn, "dqn", "probe-absorbing"),
    algo(values.DqnDiscountsTheFirstReward, "dqn", "probe-delayed", True),
    algo(values.SacDiscountsOnceLess, "sac", "probe-delayed"),
    algo(values.PpoShiftsRewards, "ppo", "probe-delayed", True),
    algo(values.PpoForgetsGamma, "ppo", "probe-absorbing"),
    algo(values.IqlForgetsToBootstrap, "iql", "probe-absorbing"),
    algo(values.A2cClipsRewards, "a2c", "probe-delayed"),
    algo(values.DqnGradientsIntoTheTarget, "dqn", "probe-split", True),
    algo(values.DqnNeverMovesTheTarget, "dqn", "probe-absorbing"),
    algo(values.DqnCopiesTheWrongWay, "dqn", "probe-absorbing"),
    algo(values.PpoAscends, "ppo", "probe-bandit"),
    algo(values.PpoInvertsTheRatio, "ppo", "probe-bandit"),
    algo(values.PpoNeverLearnsValues, "ppo", "terms", True),
    algo(values.DdpgFollowsTheWrongSign, "ddpg", "probe-target"),
    algo(values.DdpgTrainsTheCriticByThePolicy, "ddpg", "parts", True),
    algo(values.SacForgetsThePolicy, "sac", "learns"),
    algo(values.BcImitatesTheNextAction, "bc", "probe-masked"),
    algo(values.DqnJudgesTheWrongAction, "dqn", "probe-bandit"),
    algo(values.LinUcbKeepsRewards, "linucb", "probe-bandit"),
    algo(values.DqnForgetsImportanceWeights, "dqn", "probe-rare", True),
    algo(values.ImpalaForgetsImportanceWeights, "impala", "probe-stale", True),
    algo(values.DqnActsOutsideTheMask, "dqn", "probe-masked", True),
    algo(values.DqnBootstrapsOutsideTheMask, "dqn", "probe-masked"),
    algo(values.DqnTakesTheMaskOfAnotherRow, "dqn", "probe-masked"),
    algo(values.DqnKeepsItsStateAtReset, "dqn", "probe-cue"),
    algo(values.PpoForgetsItsState, "ppo", "probe-cue"),
    algo(values.DqnLearnsWithoutItsState, "dqn", "probe-cue"),
    algo(manners.PpoFreezesTheClip, "ppo", "schedules", True),
    algo(manners.SacFreezesItsStep, "sac", "schedules"),
    algo(manners.LinUcbFreezesItsWidth, "linucb", "schedules", True),
    Bug(manners.FrozenEpsilon, "exploration", "epsilon_greedy", "schedules", ("algo=dqn",)),
    algo(manners.DqnScalesRewardsInPlace, "dqn", "rows-stay", True),
    algo(manners.PpoPopsRows, "ppo", "rows-stay"),
    algo(manners.A2cShiftsObservationsInPlace, "a2c", "rows-stay"),
    algo(manners.PpoHasALambda, "ppo", "pickles", True),
    algo(manners.PpoDropsItsWeights, "ppo", "pickles"),
    algo(manners.SacDrawsFromTorch, "sac", "determinism"),
    algo(manners.DqnSharesOneDraw, "dqn", "act"),
    algo(manners.A2cCentersRewards, "a2c", "resumes"),
    algo(manners.DqnCountsSteps, "dqn", "resumes"),
    algo(manners.PpoNormsTheBatch, "ppo", "pure"),
    Bug(manners.Weightless, "buffer", "prioritized", "probe-rare", ("algo=dqn",)),
    Bug(manners.DrawsFromNumpy, "buffer", "replay", "saves"),
    Bug(manners.MixesEnds, "buffer", "replay", "probe-ends", ("algo=dqn",)),
    Bug(manners.ShiftsRewards, "buffer", "replay", "streams"),
    Bug(manners.IgnoresItsSeed, "env", "", "episodes"),
    Bug(manners.CountsAfterTheEnd, "env", "", "episodes"),
    Bug(manners.WritesIntoActions, "env", "", "episodes"),
    Bug(manners.LeavesItsSpace, "env", "", "episodes"),
    Bug(manners.NeverEnds, "env", "", "episodes"),
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
