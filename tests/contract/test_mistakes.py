"""What plugin authors get wrong at first is one error in words, made once: before the run, or by its first rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gymnasium import spaces

from rlplug import tree
from rlplug.context import RunContext
from rlplug.run import launch
from rlplug.types import ConfigError, EnvSpec
from tests.contract import mistakes
from tests.contract.mistakes import build_run, run
from tests.contract.worlds import chosen
from tests.installing import install, site  # noqa: F401  fixtures

SCHEDULE = {"lr": [[0, 0.1], [100, 0.01]]}
PAIR = "return (a dict with the action, a dict with the carry)"
BUILT = {  # found before anything is collected
    "ActsAlone": f".act returned a dict; {PAIR}",
    "ActsBare": f".act returned (a tensor of shape [2], a dict); {PAIR}",
    "ActsWide": ".act returned actions of shape [2, 1]; wanted are [2]",
    "Actless": ".act is missing; write def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]",
    "PlainNeeds": ".needs is no classmethod; write @classmethod above it",
    "NeedsNothing": ".needs returned None; return Needs",
    "Demanding": ".needs names weather, which neither the environment gives nor rlplug_x:Demanding.act",
    "ListOfOptims": ".optimizers returned a list; return a dict of Optim, by the names of parts",
    "BareOptims": ".optimizers returned 'policy' as SGD; write Optim(...) around it",
    "BareConfig": ".Config is an ordinary class; write @settings above it, of rlplug.settings",
    "Unscheduled": ".optimizers gives 'all' no lr, and algo.lr is a schedule; "
    "write Optim(..., lr=ctx.schedule(cfg.lr))",
    "Listed": " never calls ctx.schedule(cfg.lr), and algo.lr is a schedule",
    "NoAlgorithm": " is no Algorithm; write class NoAlgorithm(Algorithm), of rlplug.api",
    "Stateless": ".forward returned a tensor of shape [2, 8]; return (features, a dict with the carry)",
    "NoModel": " is no Model; write class NoModel(Model), of rlplug.api",
    "Sizeless": ".out_dim is missing; set it in __init__ to the size of the features",
    "Narrow": ".forward returned features of shape [2, 8] for 2 rows; with out_dim=16 they have [2, 16]",
    "Forgotten": ".initial_carry returned nothing; the class says recurrent = True",
    "DoubleObs": ".reset returned obs of float64; its space says float32",
    "HiddenMask": ".reset returned action_mask; name its space in the extras of the spec's EnvSpec",
    "ResetsAsGymnasium": ".reset returned a tuple of 2; return a dict of obs",
    "NoAutoreset": ".autoreset is missing; declare autoreset: AutoresetMode",
    "NoClose": ".close is missing; write def close(self) -> None",
    "Specless": ".spec is missing; declare spec: EnvSpec",
    "PerturbsAlone": f".perturb returned a dict; {PAIR}",
    "PerturbsBare": f".perturb returned (a tensor of shape [2], a dict); {PAIR}",
    "Greedy": ".needs names weather, which neither the environment gives nor rlplug.plugins.algo.ppo:PPO.act",
    "Deciding": ".needs returned Needs; return a tuple of keys of a row",
    "Unsized": ".nbytes is missing; write def nbytes(self, row: Batch) -> int",
}
RUNNING = {  # found by the first step, or the first update
    "TensorLoss": ".forward returned a tensor of shape []; return Losses, with a dict of terms",
    "ListedLoss": ".forward returned the term 'policy' as a float; terms are tensors, of every row or 0-d",
    "WideLoss": ".forward returned a term of shape [9, 2, 1] for rows [9, 2]",
    "Unprepared": ".prepare returned None; return a dict",
    "SilentUpdate": ".update returned None; return Losses",
    "NoTruncated": ".step returned no truncated; return it for every environment, [2]",
    "StepsAsGymnasium": ".step returned a tuple of 5; return a dict of obs, reward, terminated, truncated",
    "WideReward": ".step returned reward of shape [2, 1]; wanted is [2]",
    "DoubleLater": ".step returned obs of float64; its space says float32",
    "ShortReward": ".intrinsic_reward returned rewards of shape [8, 2]; "
    "wanted is one of every row of the sample, [9, 2]",
    "TellsNothing": ".update returned None; return Losses",
    "NoIndex": ".sample returned no index; return it for every column, [B]",
    "ShortSample": ".sample returned 1 rows; wanted are 2: 1 of the window, and one more",
}
SOUND = {"walk", "storing"}
DOCS = (Path(__file__).parents[2] / "docs" / "mistakes.md").read_text()


@pytest.fixture(autouse=True)
def package(install):  # noqa: F811
    install("rlplug-mistakes", "rlplug_mistakes", mistakes.FILES)


def changes(name):
    return SCHEDULE if name in ("Unscheduled", "Listed") else {}


def said(name):
    """The message of a mistake, as an author of ``rlplug_x`` reads it."""
    text = (BUILT | RUNNING)[name]
    greedy = name == "Greedy"  # of two that ask, it cannot be said which
    return f"{'rlplug.plugins.algo.ppo:PPO.needs or ' * greedy}rlplug_x:{name}{text}"


def as_read(error):
    return str(error.value).replace(f"{mistakes.__name__}:", "rlplug_x:")


@pytest.mark.parametrize("name", BUILT)
def test_a_mistake_is_named_before_the_run(name):
    with pytest.raises(ConfigError) as error:
        build_run(name.lower(), **changes(name))
    assert as_read(error) == said(name)


@pytest.mark.parametrize("name", RUNNING)
def test_a_mistake_is_named_by_the_first_rows(name):
    build_run(name.lower()).close()  # nothing can be known of it yet
    with pytest.raises(ConfigError) as error:
        run(name.lower())
    assert as_read(error) == said(name)


def test_the_table_has_every_mistake():
    assert {name.lower() for name in BUILT | RUNNING} == mistakes.KIND.keys() - SOUND
    missing = [name for name in BUILT | RUNNING if said(name).replace("|", "\\|") not in DOCS]
    assert missing == []


def test_what_has_no_mistake_runs():
    for name in SOUND:
        run(name)


def test_a_run_that_a_mistake_ends(tmp_path):
    """Its folder says so; what ``check`` finds makes none."""
    with pytest.raises(ConfigError, match=r":SilentUpdate\.update returned None; return Losses"):
        launch.train(mistakes.config("silentupdate"), tmp_path / "one", tell=lambda line: None)
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["status"] == "failed"
    with pytest.raises(ConfigError, match=r":ActsAlone\.act returned a dict"):
        launch.train(mistakes.config("actsalone"), tmp_path / "two", tell=lambda line: None)
    assert not (tmp_path / "two").exists()


def test_nothing_of_a_check_remains():
    trainer = build_run("walk")
    watched = (trainer.algorithm, trainer.buffer, *trainer.policy.exploration.values())
    before = [vars(who).keys() for who in watched]
    trainer.collect()
    player = trainer.collector.player
    assert player._step.__func__ is not type(player)._first_step
    trainer.update()
    assert "update" not in vars(trainer.learner)
    assert [vars(who).keys() for who in watched] == before
    assert not {"act", "update", "forward", "prepare", "sample"} & {key for who in watched for key in vars(who)}
    trainer.close()


def test_a_module_that_needs_a_key_gets_it_stored():
    """``Storing`` reads what PPO keeps nothing of."""
    trainer = build_run("storing")
    assert "value" not in trainer.config.algo.needs(trainer.resolved.spec).keys
    assert "is_first" in trainer.ctx.needs.keys
    trainer.close()


def test_a_model_is_tried_without_a_trace():
    """No draw is used up, and running statistics stay."""

    class Noisy(mistakes.Stateless):
        def __init__(self, cfg, ctx):
            super().__init__(cfg, ctx)
            self.ctx, self.norm, self.frozen = ctx, torch.nn.BatchNorm1d(8), torch.nn.BatchNorm1d(8).eval()

        def forward(self, x, carry, is_first):
            noise = self.ctx.randn(*x.shape[:-1], 8) + torch.randn(8)
            return self.norm(self.linear(x) + noise), carry

    def made(tried):
        torch.manual_seed(0)
        ctx = RunContext(spec=EnvSpec({}), slots={"model": chosen(Noisy, kind="model" if tried else "other")})
        model = ctx.build("model", spaces.Box(-1, 1, (4,)))
        modes = [model.training, model.norm.training, model.frozen.training]
        return [*model.state_dict().values(), torch.randn(3), ctx.randn(3)], modes

    plain, tried = made(False), made(True)
    assert all(map(torch.equal, plain[0], tried[0]))
    assert plain[1] == tried[1] == [True, True, False]


def test_members_and_copies_are_watched_as_themselves():
    import copy

    from rlplug.contract import watched

    class Who:
        def __init__(self, x):
            self.x = x

        def give(self):
            return self.x

    one = Who(1)
    with watched(one, give=lambda x: None if x == 1 else f"gave {x}"):
        other = copy.deepcopy(one)
        other.x = 2
        assert one.give() == 1
        with pytest.raises(ConfigError, match=r"Who\.give gave 2"):
            other.give()
    assert vars(one) == {"x": 1}


def test_dicts_and_groups_of_observations_are_compared():
    from rlplug.contract import check_rows

    class Env(mistakes.Walk):
        def __init__(self, space):
            super().__init__(None, type("Ctx", (), {"env_ids": range(2)}))
            self.spec = EnvSpec({"agent": mistakes.Group(space, spaces.Discrete(2))})

    env = Env(spaces.Dict({"a": spaces.Box(0, 255, (2,), "uint8"), "b": spaces.Discrete(3)}))
    good = {"obs": {"a": torch.zeros(2, 2, dtype=torch.uint8), "b": torch.zeros(2, dtype=torch.long)}}
    assert check_rows(env, "reset", good, 2) is good
    for wrong, text in (
        ({"a": good["obs"]["a"]}, r"obs with the keys 'a'; its space has 'a', 'b'"),
        (tree.map(torch.Tensor.float, good["obs"]), r"obs\['a'\] of float32; its space says uint8"),
        (good["obs"] | {"b": 3}, r"obs\['b'\] as an int; its space says \[2\]"),
        (3, r"obs with an int; its space has 'a', 'b'"),
    ):
        with pytest.raises(ConfigError, match=text):
            check_rows(env, "reset", {"obs": wrong}, 2)
