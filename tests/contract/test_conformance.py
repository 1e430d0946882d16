"""Everything that is registered, by whichever distribution, keeps to its contract; the kit notices what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlplug import registry
from rlplug.testing import conformance
from rlplug.types import ConfigError
from tests.contract import toys
from tests.installing import install, site  # noqa: F401  fixtures

PLUGINS = Path(__file__).parent.parent.parent / "plugins"


def long(check: conformance.Check) -> bool:
    """Does it play a module with every algorithm, as the matrix does, or trace another one than these?"""
    if check.what.startswith("compiled"):
        return check.name not in ("dqn", "sac")
    return check.what == "on-algorithms"


def tested_at_home(check: conformance.Check) -> bool:
    """Is it of a package in plugins/, whose own tests, which run with these, have the kit?"""
    return (PLUGINS / registry.owners()[check.kind, check.name][0].distribution).is_dir()


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=pytest.mark.slow if long(check) else ())
        for check in conformance.checks()
        if not tested_at_home(check)
    ],
    ids=str,
)
def test_conformance(check):
    check()


@pytest.fixture
def toy_package(install):  # noqa: F811
    install("rlplug-toys", "rlplug_toys", toys.FILES)


def test_a_sound_algorithm_of_another_package_passes(toy_package):
    assert conformance.accepted("sound") == ["cartpole"]
    conformance.check_component("algo", "sound")
    conformance.check_algorithm("sound", env="mountaincar", overrides=["algo.lr=0.02"])


BROKEN = {
    ("algo", "impure", "pure"): r"forward\(\) changes steps",
    ("algo", "rolling", "pure"): r"draws from the generator ctx\.learner",
    ("algo", "overwriting", "pure"): "changes weight of its batch",
    ("algo", "global", "determinism"): "draw with ctx.randn",
    ("algo", "forgetful", "state"): r"loaded state_dict\(\) acts otherwise in mode 'greedy'",
    ("algo", "secretive", "state"): r"loaded the weights that actor_keys\(\) names acts otherwise",
    ("algo", "unresumable", "resumes"): "resumed run is not the undisturbed one: weights",
    ("algo", "notanumber", "learns"): "the loss term 'policy' is infinite at update 1",
    ("algo", "notanumber", "terms"): "'policy' is not finite on every valid row",
    ("algo", "wide", "terms"): r"'policy' with shape \[9, 2, 1\]",
    ("algo", "leaky", "parts"): r"part 'policy' give a gradient to baseline.weight of part 'baseline'",
    ("algo", "orphan", "parts"): "no optimizer has the parameter scale",
    ("algo", "shared", "parts"): r"policy.weight is in several optimizers \(policy, again\)",
    ("algo", "asleep", "learns"): "part 'baseline' has moved no parameter",
    ("algo", "outside", "act"): "in mode 'random' gives actions outside of Discrete",
    ("algo", "indecisive", "act"): "depends on random numbers",
    ("algo", "local", "ranks"): "something else on four microbatches|something else on rank 0 of two",
    ("algo", "defaulted", "settings"): "option lr has no doc line",
    ("algo", "sparse", "settings"): r"conf/algo/sparse\.yaml lacks decay",
    ("algo", "lax", "settings"): "is an ordinary class",
    ("buffer", "late", "streams"): "not the next ones|no valid row",
    ("buffer", "wasteful", "saves"): r"appends \d+ rows, of which 12 are new",
    ("buffer", "amnesic", "saves"): "after load\\(\\) it samples other",
    ("buffer", "modest", "nbytes"): "count every array",
    ("buffer", "borrowing", "streams"): "is not what was added|every transition of the round once",
    ("model", "sticky", "shapes-sticky"): "the carry is not cleared where is_first",
    ("env", "precise", "episodes-precise"): "'reward' as float64; wanted float32",
    ("loop", "stubborn", "resumes"): "resumed run is not the undisturbed one",
    ("logger", "misspelt", "run"): "unknown hook 'rlplug_loged'",
}


@pytest.mark.parametrize(("kind", "name", "what"), BROKEN, ids=[f"{name}-{what}" for _, name, what in BROKEN])
def test_the_kit_notices(toy_package, kind, name, what):
    (check,) = [c for c in conformance.checks_of(kind, name) if c.what.removesuffix("-cartpole") == what]
    with pytest.raises(Exception, match=BROKEN[kind, name, what]) as caught:
        check()
    assert any(name in note for note in caught.value.__notes__)


def test_the_kit_notices_actions_that_exploration_throws_out_of_bounds(toy_package):
    with pytest.raises(AssertionError, match=r"perturb\(\) gives actions outside of Box"):
        conformance.check_exploration("wild", "sac", "pendulum")
    with pytest.raises(AssertionError, match="ppo on pendulum refuses the exploration wild"):
        conformance.check_exploration("wild", "ppo", "pendulum")


def test_each_toy_is_noticed():
    names = {name for name in toys.ALGORITHMS if name != "sound"} | {name for _, name in toys.OTHERS}
    assert names == {name for _, name, _ in BROKEN} | {"wild"}


def test_what_cannot_be_tried_is_a_check_that_says_why():
    *_, untried = conformance.checks_of("algo", "absent")
    assert untried.what == "can-be-tried"
    with pytest.raises(ConfigError, match="unknown algo 'absent'"):
        untried()


def test_checks_of_one_distribution():
    kinds = {check.kind for check in conformance.checks("rlplug")}
    assert kinds >= {"algo", "buffer", "env", "exploration", "hardware", "logger", "loop", "model"}
    assert conformance.checks("rlplug-absent") == []
    assert {check.name for check in conformance.checks("rlplug", kinds=["loop"])} == {"alternate", "async", "offline"}
