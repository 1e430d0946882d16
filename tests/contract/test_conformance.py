"""Everything that is registered, by whichever distribution, keeps to its contract; the kit notices what does not."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from rlplug import registry
from rlplug.testing import conformance
from rlplug.testing.checks import kept, resume
from rlplug.testing.checks.runs import Case
from rlplug.testing.limits import IMPORTED, UNGUARDED
from rlplug.types import ConfigError
from tests.contract import toys
from tests.installing import install, installed, site  # noqa: F401  fixtures

PLUGINS = Path(__file__).parent.parent.parent / "plugins"


QUICK = {
    "bc": "probe-cue",
    "dqn": "probe-ends probe-masked probe-rare",
    "impala": "probe-stale",
    "iql": "probe-ends",
    "linucb": "probe-bandit",
    "ppo": "probe-delayed probe-bandit probe-target",
    "sac": "probe-absorbing",
    "td3": "probe-split",
}
"""probes of one algorithm of each family, for every run of the tests; all others take minutes together"""


VARIED = "acrobot blackjack cartpole dmc_cartpole_swingup fetchreach frozenlake hopper lunarlander masked_cartpole "
VARIED += "minigrid_empty_5x5 minigrid_fetch_5x5 pendulum pong taxi"
"""presets of each kind of vector, space and simulator; all have quicker tests in tests/envs/test_presets.py"""


def long(check: conformance.Check) -> bool:
    """Does it play a module with every algorithm or resume a run, as the matrix does, train several times or export
    on a further environment, trace another algorithm than these, train on another probe than the quick ones, play one
    preset more of a kind, or build one of many?"""
    what, _, env = check.what.rpartition("-")
    if check.kind == "algo" and what in ("resumes", "determinism", "schedules", "ranks", "export"):
        return what == "resumes" or env != conformance.accepted(check.name)[0]
    if check.what.startswith("compiled"):
        return check.name not in ("dqn", "sac")
    if check.what.startswith("probe-"):
        return check.what not in QUICK.get(check.name, "").split()
    if check.kind == "env" and check.what.startswith("episodes-") and check.name in ("gymnasium", "dm_control"):
        return env not in VARIED.split()
    return check.what.startswith("on-") or check.what == "composes"


ELSEWHERE = {plugin.distribution for plugin in registry.plugins() if not (PLUGINS / plugin.distribution).is_dir()}
"""all but the packages in plugins/, whose own tests, which run with these, have the kit"""
OWN = [pair for pair, plugins in registry.owners().items() if ELSEWHERE & {plugin.distribution for plugin in plugins}]


def hold(checks: Iterable[conformance.Check]) -> None:
    """Make every check, and raise what any of them found."""
    found = list[Exception]()
    for check in checks:
        try:
            check()
        except Exception as error:
            found.append(error)
    if found:
        raise ExceptionGroup("of the checks of the kit", found)


@pytest.mark.parametrize("longer", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "long"])
@pytest.mark.parametrize(("kind", "name"), OWN)
def test_conformance(kind, name, longer):
    """Which checks there are follows from runs that are composed: listing them is a part of the test."""
    every = conformance.checks_of(kind, name)
    assert every
    hold(check for check in every if long(check) == longer)


@pytest.mark.slow
@pytest.mark.parametrize("distribution", sorted(ELSEWHERE))
def test_presets_compose(distribution):
    hold(check for check in conformance.checks(distribution) if check.what == "composes")


toy_package = installed("rlplug-toys", "rlplug_toys", toys.FILES, autouse=False)


@pytest.mark.parametrize("longer", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "long"])
def test_a_sound_algorithm_of_another_package_passes(toy_package, longer):
    assert conformance.accepted("sound") == ["cartpole"]
    if longer:
        conformance.check_algorithm("sound", env="mountaincar", overrides=["algo.lr=0.02"])
    else:
        every = conformance.checks_of("algo", "sound", env="mountaincar", overrides=["algo.lr=0.02"])
        hold(check for check in every if not check.what.startswith(("compiled", "probe-")))


BROKEN = {
    "algo impure pure": r"forward\(\) changes steps",
    "algo rolling pure": r"draws from the generator ctx\.learner",
    "algo overwriting pure": "changes weight of its batch",
    "algo global determinism": "draw with ctx.randn",
    "algo forgetful state": r"loaded state_dict\(\) acts differently in mode 'greedy' \(action\); on self, and "
    r"not in state_dict\(\), is shift: keep what act\(\) reads in parameters and registered buffers",
    "algo deaf state": r"^load_state_dict\(\) does not restore steps, policy.weight, .* of state_dict\(\)\n",
    "algo hoarding learns": r"^Hoarding\.last shares the memory of a segment, which the collector overwrites: keep a "
    r"\.clone\(\)\n",
    "algo dropping pure": r"^forward\(\) draws from the generator torch: policy\.0 \(Dropout\) drops random "
    r"values, so ranks, repeats and resumed runs differ: remove it\n",
    "algo normed pure": r"^forward\(\) gives the term 'policy' of a row a different value when the batch has "
    r"other rows: policy\.0 \(BatchNorm1d\) mixes the rows of a batch: use LayerNorm\n",
    "algo relative pure": r"^forward\(\) gives the term 'policy' of a row a different value when the batch has "
    r"other rows: look for a mean, a maximum or a normalization over the batch\n",
    "algo herding act": r"^act\(\) gives an environment a different action when the batch has other rows: look for",
    "algo secretive state": r"loaded the weights that actor_keys\(\) names acts differently",
    "algo unresumable resumes": r"^a resumed run differs from the undisturbed one: Unresumable\.calls differs: it "
    r"is 4 in an undisturbed run, and 2 in one that was resumed, since a checkpoint holds what state_dict\(\) "
    "does; after 4 updates the runs differ in weights",
    "algo patient resumes": r"^a resumed run differs from the undisturbed one: Patient\.calls differs: it is 4 in "
    r"an undisturbed run, and 2 in one that was resumed, since a checkpoint holds what state_dict\(\) does\. Keep",
    "algo notanumber learns": "the loss term 'policy' is infinite at update 1",
    "algo notanumber terms": "'policy' is not finite on every valid row",
    "algo wide terms": r"'policy' with shape \[9, 2, 1\]",
    "algo leaky parts": "part 'policy' give a gradient to baseline.weight of part 'baseline'",
    "algo orphan parts": "no optimizer has the parameter scale",
    "algo twofold parts": r"policy.weight is in several optimizers \(policy, again\)",
    "algo asleep learns": "part 'baseline' changed no parameter",
    "algo outside act": r"Outside\.act returned the action [23], which is not in Discrete\(2\)",
    "algo indecisive act": "depends on random numbers",
    "algo habitual act": r"^act\(\) in mode 'random' depends on the weights: choose uniformly",
    "algo local ranks": "one update on four microbatches|one update on rank 0 of two",
    "algo defaulted settings": "option lr has no doc line",
    "algo sparse settings": r"conf/algo/sparse\.yaml lacks decay",
    "algo lax settings": "is an ordinary class",
    "buffer late streams": "not by the next rows|no valid row",
    "buffer wasteful saves": r"appends \d+ rows, of which 12 are new",
    "buffer amnesic saves": r"after load\(\) it samples different",
    "buffer modest nbytes": "count every array",
    "buffer blank saves": r"^load\(\) does nothing: save\(\) then equals that of a new buffer\n",
    "buffer borrowing streams": r"^add\(\) keeps the memory of a segment, which the collector overwrites: keep a "
    r"copy, \.clone\(\)\n",
    "exploration tally on-sound": r"^a resumed run differs from the undisturbed one: Tally\.calls\.all differs: "
    "it is 4",
    "exploration lopsided ranks": "^one update on rank 0 of two differs from one on one rank in "
    r"exploration\.lopsided\.level \(by .*merge statistics with learner\.reduce",
    "exploration unhearing on-sound": "^a resumed run differs from the undisturbed one: "
    r"exploration\.unhearing\.level of the checkpoint was not restored: do load\(\) and load_state_dict\(\) "
    r"restore all of it\?\n",
    "model hazy shapes-hazy": r"^a vector: two calls on the same rows give different features: drop \(Dropout\) "
    "drops random values",
    "model social shapes-social": r"^a vector: forward\(\) gives a row different features when the batch has "
    "other rows",
    "env rigid episodes-rigid": r"^load\(\) does nothing: state\(\) is unchanged\n",
    "model sticky shapes-sticky": "the carry is not cleared where is_first",
    "env precise episodes-precise": "'reward' as float64; expected float32",
    "loop stubborn resumes": "resumed run differs from the undisturbed one",
    "logger misspelt run": r"rlplug_loged is not a hook; did you mean rlplug_logged\?",
}


@pytest.mark.parametrize("toy", BROKEN)
def test_the_kit_notices(toy_package, toy):
    kind, name, what = toy.split()
    words = ["algo=sound"] if kind == "exploration" else []
    every = conformance.checks_of(kind, name, overrides=words)
    (check,) = [c for c in every if c.what.removesuffix("-cartpole") == what]
    with pytest.raises(Exception, match=BROKEN[toy]) as caught:
        check()
    notes = "\n".join(caught.value.__notes__)
    assert f"conformance of {kind} {name!r}: {check.what}" in notes
    if kind == "algo" and what != "settings":
        assert f"tried with algo={name} env=cartpole" in notes
    if what.startswith("on-"):
        assert "tried with algo=sound env=cartpole" in notes


def test_the_kit_notices_actions_that_exploration_throws_out_of_bounds(toy_package):
    with pytest.raises(AssertionError, match=r"perturb\(\) gives actions outside of Box"):
        conformance.check_exploration("wild", "sac", "pendulum")
    with pytest.raises(AssertionError, match="ppo on pendulum refuses the exploration wild"):
        conformance.check_exploration("wild", "ppo", "pendulum")


def test_each_toy_is_noticed():
    names = {name for name in toys.ALGORITHMS if name != "sound"} | {name for _, name in toys.OTHERS}
    assert names == {toy.split()[1] for toy in BROKEN} | {"wild", "endless"}


def test_what_a_run_does_shows_a_patient_counter_too_late(toy_package, monkeypatch):
    """Without a look at ``self``, two updates more than a checkpoint's are the same; 50 are not."""
    monkeypatch.setattr(resume, "lost", lambda undisturbed, resumed: "")
    case = Case("patient", "cartpole", ("total_steps=1000",))
    resume.check_resumes(case)
    with pytest.raises(AssertionError, match="from the undisturbed one: weights"):
        resume.check_resumes(case, updates=30)


def test_what_is_looked_for_on_self():
    class Helper:
        __slots__ = ("count",)

        def __init__(self):
            self.count = 3

    module = torch.nn.Linear(2, 1)
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("unsaved", torch.zeros(1), persistent=False)
    module.tables, module.helper, module.hidden = {"x": [1]}, Helper(), [torch.nn.Linear(1, 1), module.weight]
    module.dice, module.ids, module.same = np.random.default_rng(0), {2, 1}, module
    module.counter = itertools.count(3)
    found = dict(kept.attributes(module))
    assert found["tables.x.0"] == 1
    assert found["helper.count"] == 3
    assert found["counter"] == "count(3)"
    assert {"unsaved", "hidden.0.weight", "dice", "ids"} <= found.keys()
    assert not {"weight", "saved", "hidden.1"} & found.keys()


def test_a_check_that_never_ends_says_where_it_was(toy_package):
    (check,) = [c for c in conformance.checks_of("algo", "endless", limit_s=3.0) if c.what == "act-cartpole"]
    Case("endless", "cartpole").build().close()  # so that it is in act() when time is up, on a slow machine too
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(
        TimeoutError, match=r"not finish within 3 s, in .*toys\.py:\d+ \(act\); raise limit_s"
    ) as caught:
        check()
    assert caught.value.__notes__[-2:] == [
        "tried with algo=endless env=cartpole",
        "conformance of algo 'endless': act-cartpole",
    ]
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]) == (before, 0.0)


def test_an_earlier_alarm_stays(toy_package):
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *of: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        conformance.Check("algo", "x", "waits", lambda: time.sleep(0.1), limit_s=10.0)()
        signal.setitimer(signal.ITIMER_REAL, 50.0)
        conformance.Check("algo", "x", "waits", lambda: None, limit_s=10.0)()
        assert 40.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert rung == [1]


def test_a_process_that_imports_the_script_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(SystemExit) as caught:
        conformance.Check("algo", "x", "ranks", lambda: None)()
    assert caught.value.code == IMPORTED
    assert capsys.readouterr().err == f"rlplug: {UNGUARDED}\n"


@pytest.mark.slow
def test_a_script_without_a_guard(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from rlplug.testing import conformance\n"
        "from rlplug.testing.rank_pool import ranks\n"
        "conformance.Check('algo', 'x', 'ranks', lambda: ranks(2)(print))()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    *_, cause, words, note = done.stderr.splitlines()
    assert (cause, words) == ("RuntimeError: rank 0 of 2 failed:", UNGUARDED)
    assert note == "conformance of algo 'x': ranks"
    assert "bootstrapping" not in done.stderr


# ---- one component ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_buffer_a_model_and_an_environment_are_checked_in_one_call():
    conformance.check_buffer("rollout", overrides=["algo=a2c"])
    conformance.check_model("mlp", overrides=["algo=a2c", "model.hidden=[8]"])
    conformance.check_env("gymnasium", env="frozenlake", overrides=["algo=a2c"])


def test_what_they_find_names_the_run(toy_package):
    with pytest.raises(AssertionError, match=r"no algorithm that was tried runs with it: algo=dqn env=cartpole") as it:
        conformance.check_buffer("rollout", overrides=["algo=dqn"])
    assert it.value.__notes__ == ["conformance of buffer 'rollout': in-a-run"]
    with pytest.raises(AssertionError, match="the batch has other rows"):
        conformance.check_model("social")
    with pytest.raises(AssertionError, match="as float64"):
        conformance.check_env("precise")
    with pytest.raises(AssertionError, match="count every array"):
        conformance.check_buffer("modest", overrides=["algo=dqn", "buffer.capacity=60"])


EXPERIMENT = "# @package _global_\ndefaults:\n  - override /algo: {}\n  - override /buffer: {}\n"
PRESETS = {
    "conf/tuned/dqn_cartpole_torch.yaml": "# @package _global_\nalgo:\n  lr: 0.001\n",
    "conf/tuned/a2c_pendulum_torch.yaml": "# @package _global_\nalgo:\n  no_such_option: 0.1\n",
    "conf/tuned/nobody_cartpole.yaml": "# @package _global_\nseed: 1\n",
    "conf/experiment/good.yaml": EXPERIMENT.format("a2c", "rollout"),
    "conf/experiment/bad.yaml": EXPERIMENT.format("dqn", "rollout"),
    "conf/model/mlp8.yaml": "defaults: [mlp, _self_]\nhidden: [8]\n",
    "conf/env/slowpole.yaml": "defaults: [cartpole, _self_]\nmax_episode_steps: 20\n",
}
MANIFEST = """
from rlplug import hookimpl

@hookimpl
def rlplug_conf():
    return "rlplug_presets"
"""


def test_presets_of_a_package(install):  # noqa: F811
    files = {f"rlplug_presets/{name}": text for name, text in PRESETS.items()}
    install("rlplug-presets", "rlplug_presets", {"rlplug_presets/__init__.py": MANIFEST, **files})
    found = {str(check): check for check in conformance.checks("rlplug_presets")}
    assert len(found) == len(PRESETS)
    for name in ("tuned-dqn_cartpole_torch", "experiment-good", "model-mlp8"):
        found[f"{name}-composes"]()
    with pytest.raises(ConfigError, match="no_such_option") as caught:
        found["tuned-a2c_pendulum_torch-composes"]()
    assert caught.value.__notes__[0] == "tried with algo=a2c env=pendulum_torch"
    with pytest.raises(AssertionError, match=r"nobody_cartpole\.yaml matches no pair: name it <algo>_<env>"):
        found["tuned-nobody_cartpole-composes"]()
    with pytest.raises(ConfigError, match="rollout"):
        found["experiment-bad-composes"]()
    assert {str(check) for check in conformance.checks("rlplug-presets", kinds=["experiment"])} == {
        "experiment-good-composes",
        "experiment-bad-composes",
    }


def test_what_is_not_installed_has_no_checks(toy_package, install):  # noqa: F811
    said = r"^no plugin of 'rlplug-tuys' is installed: pip install -e <its folder>; did you mean rlplug-toys\?"
    with pytest.raises(ConfigError, match=said):
        conformance.checks("rlplug-tuys")
    with pytest.raises(ConfigError, match=r"^numpy \S+ is installed, but has no entry point: write \[project\.entry-"):
        conformance.checks("numpy")
    install("rlplug-broken", "rlplug_broken", {"rlplug_broken.py": "import no_such_module"})
    with pytest.raises(ConfigError, match=r"^the plugin rlplug-broken 1\.2 is broken: ModuleNotFoundError"):
        conformance.checks("rlplug-broken")


def test_what_cannot_be_tried_is_a_check_that_says_why():
    *_, untried = conformance.checks_of("algo", "absent")
    assert untried.what == "can-be-tried"
    with pytest.raises(ConfigError, match="unknown algo 'absent'"):
        untried()


def test_checks_of_one_distribution():
    kinds = {check.kind for check in conformance.checks("rlplug")}
    assert kinds >= {
        "algo",
        "buffer",
        "env",
        "exploration",
        "hardware",
        "logger",
        "loop",
        "model",
        "curriculum",
        "estimator",
    }
    assert {check.name for check in conformance.checks("rlplug", kinds=["loop"])} == {
        "alternate",
        "async",
        "episodes",
        "meta",
        "offline",
        "population",
    }
