"""What plugin authors get wrong at first is one error in words, made once: before the run, or by its first rows."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces

from rlplug import hookimpl, tree
from rlplug.api import Loop, Needs, Optim, Plan, Tempo, Window
from rlplug.context import RunContext
from rlplug.contract.members import BASES, DERIVED, Made, check_class, check_env, declared, make, record_misfit, written
from rlplug.envs.rows import actions_misfit
from rlplug.plugins.buffer.replay import Replay
from rlplug.plugins.curriculum.stages import Linear
from rlplug.plugins.estimator.sampling import ImportanceSampling
from rlplug.plugins.loop.alternate import Alternate
from rlplug.registry import KINDS
from rlplug.run import launch
from rlplug.types import ConfigError, EnvSpec
from tests.contract import mistakes
from tests.contract.mistakes import build_run, run
from tests.contract.toys import Sound
from tests.contract.worlds import chosen
from tests.installing import installed

SCHEDULE = {"lr": [[0, 0.1], [100, 0.01]]}
PAIR = "return (a dict with the action, a dict with the carry)"
INIT = "write def __init__(self, cfg: Any, ctx: Context) -> None"
BUILT = {  # found before anything is collected
    "BatchOnly": ".forward takes (self, batch); write def forward(self, batch: Batch, parts: Sequence[str]) -> Losses",
    "ConfigOnly": f".__init__ takes (self, cfg); {INIT}",
    "Swapped": f".__init__ takes (self, ctx, cfg); {INIT}",
    "NoSuper": ".__init__ must call super().__init__() first",
    "NeedsKey": ".needs calls Needs(key=...); did you mean keys? There are: data, gradients, "
    "keys, noise, off_policy, perturbable, raw, recorded, rewards, simulates, window",
    "NeedsWindow": ".needs returned Needs with 'window' for data; expected 'rollout', 'segments', 'windows' or "
    "'episodes'",
    "NeedsText": ".needs returned Needs with 'obs' for keys; expected a valid tuple",
    "AnnotatesNothing": ".annotate returned None; return a dict",
    "BuildsModels": ".__init__ uses ctx.build('models'): there is no such slot; did you mean model? There are: "
    "critic_model, model",
    "Yielding": ".optimizers returned a generator; return a dict of Optim by part name",
    "Spent": ".optimizers gives an optimizer no parameters; self.parameters() can be read only once: call it "
    "for each optimizer",
    "Clipping": ".optimizers calls Optim(clip=...); did you mean grad_clip? There are: every, grad_clip, grad_clip_by, "
    "lr, optimizer",
    "FixedLr": ".optimizers returned Optim with 0.01 for lr; expected Tensor",
    "WideValue": ".act returned value of shape [2, 1]; a row has one number: value.squeeze(-1)",
    "OutOfRange": ".act returned the action 2, which is not in Discrete(2)",
    "FloatAction": ".act returned actions of float32 for Discrete(2); return int64",
    "DrawsThree": ".act uses a draw of 3 rows where 2 environments act; draw one per environment, or shared "
    "numbers with rows=False",
    "ReadsPrevious": ".act reads 'prev_reward', which its rows lack; name it in needs, or let prepare compute it",
    "ReadsInput": ".forward takes (self, x); write def forward(self, x: Any, carry: Batch, is_first: Tensor | None) -> "
    "tuple[Tensor, Batch]",
    "ResetsItself": ".reset takes (self); write def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch",
    "BareGroup": ".spec is EnvSpec of Group; write EnvSpec({'agent': Group(obs, action)})",
    "BareSpaces": ".spec has a box of shape [4] for 'agent'; write EnvSpec({'agent': Group(obs, action)})",
    "Sizes": ".spec has an int for action of 'agent'; use a space of gymnasium.spaces",
    "PerturbsAction": ".perturb takes (self, action); write def perturb(self, out: Batch, step: Batch, carry: Batch) "
    "-> tuple[Batch, Batch]",
    "Initless": f".__init__ is missing; {INIT}",
    "Endless": ".updates is missing; write def updates(self, env_steps: int) -> int",
    "NoLoop": " is not a subclass of Loop; write class NoLoop(Loop)",
    "Threads": ".plan calls Plan(thread=...); did you mean threads? There are: accelerator, actors, devices, "
    "float32_matmul_precision, launcher, max_restarts, microbatches, num_nodes, precision, ray, threads",
    "OnGPU": ".plan returned Plan with 'gpu' for accelerator; expected 'cpu' or 'cuda'",
    "DictPlan": ".plan returned a dict; return Plan",
    "Misspelled": ".rlplug_loged is not a hook; did you mean rlplug_logged? There are: rlplug_checkpoint, "
    "rlplug_collected, rlplug_ended, rlplug_episode, rlplug_evaluated, rlplug_logged, rlplug_played, rlplug_started, "
    "rlplug_updated",
    "MisspelledParameter": ".rlplug_logged takes (self, run, metric, step); write def rlplug_logged(self, run: Run, "
    "metrics: Mapping[str, float], step: int) -> None",
    "Unmarked": ".rlplug_logged is never called; add @hookimpl of rlplug",
    "ActsAlone": f".act returned a dict; {PAIR}",
    "ActsBare": f".act returned (a tensor of shape [2], a dict); {PAIR}",
    "ActsWide": ".act returned actions of shape [2, 1]; return [2]",
    "Actless": ".act is missing; write def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]",
    "PlainNeeds": ".needs is not a classmethod; add @classmethod",
    "NeedsNothing": ".needs returned None; return Needs",
    "Demanding": ".needs names weather, provided neither by the environment nor by rlplug_x:Demanding.act",
    "ListOfOptims": ".optimizers returned a list; return a dict of Optim by part name",
    "BareOptims": ".optimizers returned 'policy' as SGD; wrap it in Optim(...)",
    "BareConfig": ".Config is an ordinary class; add @settings of rlplug.settings",
    "Unscheduled": ".optimizers gives 'all' no lr, but algo.lr is a schedule; "
    "write Optim(..., lr=ctx.schedule(cfg.lr))",
    "Listed": " never calls ctx.schedule(cfg.lr), but algo.lr is a schedule",
    "NoAlgorithm": " is not a subclass of Algorithm; write class NoAlgorithm(Algorithm)",
    "Stateless": ".forward returned a tensor of shape [2, 8]; return (features, a dict with the carry)",
    "NoModel": " is not a subclass of Model; write class NoModel(Model)",
    "Sizeless": ".out_dim is missing; set it in __init__ to the size of the features",
    "Narrow": ".forward returned features of shape [2, 8] for 2 rows; with out_dim=16 they have [2, 16]",
    "Forgotten": ".initial_carry returned nothing; the class declares recurrent =  True",
    "DoubleObs": ".reset returned obs of float64; its space declares float32",
    "HiddenMask": ".reset returned action_mask; name its space in the extras of the spec's EnvSpec",
    "ResetsAsGymnasium": ".reset returned a tuple of 2; return a dict of obs",
    "NoAutoreset": ".autoreset is missing; declare autoreset: AutoresetMode",
    "NoClose": ".close is missing; write def close(self) -> None",
    "Specless": ".spec is missing; declare spec: EnvSpec",
    "PerturbsAlone": f".perturb returned a dict; {PAIR}",
    "PerturbsBare": f".perturb returned (a tensor of shape [2], a dict); {PAIR}",
    "Greedy": ".reads names weather, provided neither by the environment nor by rlplug.plugins.algo.ppo:PPO.act",
    "Deciding": ".reads returned Needs; return a tuple of keys of a row",
    "Unsized": ".nbytes is missing; write def nbytes(self, row: Batch) -> int",
}
RUNNING = {  # found by the first step, or the first update
    "NeedsNoObs": ".forward reads 'obs', which its rows lack; name it in needs, or let prepare compute it",
    "Detached": ".forward returned the term 'policy' without a gradient; compute it without detach() and no_grad()",
    "NumberMetric": ".forward returned the metric 'mean' as a float; metrics are tensors, per row or 0-d",
    "Broadcasting": ".forward compares shapes that broadcast: [9, 2] and [9, 2, 1]",
    "DropsValid": ".prepare returned no valid for the rows [9, 2] of obs; return batch | {...}",
    "WideAdvantage": ".prepare returned advantage of shape [9, 2, 1]; a row has one number: advantage.squeeze(-1)",
    "TensorLoss": ".forward returned a tensor of shape []; return Losses, with a dict of terms",
    "ListedLoss": ".forward returned the term 'policy' as a float; terms are tensors, per row or 0-d",
    "WideLoss": ".forward returned a term of shape [9, 2, 1] for rows [9, 2]",
    "Unprepared": ".prepare returned None; return a dict",
    "SilentUpdate": ".update returned None; return Losses",
    "NoTruncated": ".step returned no truncated; return it for every environment, [2]",
    "StepsAsGymnasium": ".step returned a tuple of 5; return a dict of obs, reward, terminated, truncated",
    "WideReward": ".step returned reward of shape [2, 1]; return [2]",
    "DoubleLater": ".step returned obs of float64; its space declares float32",
    "ShortReward": ".intrinsic_reward returned rewards of shape [8, 2]; "
    "return a reward for every row of the sample, [9, 2]",
    "TellsNothing": ".update returned None; return Losses",
    "NoIndex": ".sample returned no index; return it for every column, [B]",
    "ShortSample": ".sample returned 1 rows; return 2: 1 of the window, and one more",
}
SOUND = {"walk", "storing"}
DOCS = (Path(__file__).parents[2] / "docs" / "mistakes.md").read_text()


package = installed("rlplug-mistakes", "rlplug_mistakes", mistakes.FILES)


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


# ---- signatures: every member of every kind, as its base declares it -------------------------------------------------

SOUND_CLASSES = {
    "algo": Sound,
    "exploration": mistakes.Storing,
    "model": mistakes.Narrow,
    "loop": Alternate,
    "buffer": Replay,
    "hardware": mistakes.Computer,
    "env": mistakes.Walk,
    "logger": mistakes.Logger,
    "curriculum": Linear,
    "estimator": ImportanceSampling,
}


def wrong_ways(kind: str, base: Any) -> dict[str, str]:
    """Return what an author writes in place of a member, by what is wrong with it; parameters follow ``self``."""
    names = [p.name for p in parameters(base)]
    if isinstance(base, property):
        return {"a method": ""}
    ways = {"one more": ", ".join([*names, "more"])}
    if kind == "logger":  # a hook may leave parameters out
        return ways | {"another name": ", ".join([*names[:-1], "other"])}
    ways |= {"one less": ", ".join(names[:-1])} if names else {}
    ways |= {"two swapped": ", ".join([names[1], names[0], *names[2:]])} if len(names) > 1 else {}
    return ways | ({"no class method": ", ".join(names)} if isinstance(base, classmethod) else {})


def parameters(base: Any) -> list[inspect.Parameter]:
    function = getattr(base, "__func__", None) or getattr(base, "fget", base)
    return [*inspect.signature(function).parameters.values()][1:]


EVERY = [
    pytest.param(kind, member, way, id=f"{kind}-{member}-{way.replace(' ', '-')}")
    for kind in KINDS
    for member, base in {**declared(kind), "__init__": vars(Made)["__init__"]}.items()
    for way in wrong_ways("" if member == "__init__" else kind, base)
]


def look_at(kind: str, cls: type[Any]) -> None:
    """Check a class, and what is made of it where another class may make that."""
    check_class(kind, cls)
    if kind == "env":
        check_env(cls(None, RunContext(spec=EnvSpec({}))))


@pytest.mark.parametrize(("kind", "member", "way"), EVERY)
def test_a_signature_is_looked_at(kind, member, way):
    base = vars(Made)["__init__"] if member == "__init__" else declared(kind)[member]
    names = wrong_ways("" if member == "__init__" else kind, base)[way]
    scope: dict[str, Any] = {}
    exec(f"def {member}({', '.join(filter(None, ('self', names)))}): ...", scope)
    function = scope[member]
    if isinstance(base, classmethod) and way != "no class method":
        function = classmethod(function)
    cls = type(
        "Wrong", (SOUND_CLASSES[kind],), {member: hookimpl(function) if member.startswith("rlplug_") else function}
    )
    with pytest.raises(ConfigError) as error:
        look_at(kind, cls)
    taken = f"takes ({', '.join(filter(None, ('self', names)))}); write {written(base)}"
    said = {"a method": "is not a property; add @property", "no class method": "is not a classmethod"}.get(way, taken)
    assert f":Wrong.{member} {said}" in str(error.value)


def test_every_kind_is_looked_at():
    assert {values[0] for values in (param.values for param in EVERY)} == set(KINDS) == SOUND_CLASSES.keys()
    assert {"act", "forward", "observe", "prepare", "values"} <= declared("algo").keys()
    assert {"warm_up", "metrics", "sample"} <= declared("buffer").keys()
    assert not {"parameters", "to", "__call__"} & declared("model").keys()


@pytest.mark.parametrize("kind", ["algo", "exploration", "model", "loop", "hardware"])
def test_a_missing_init_is_no_error_of_python(kind):
    bases = (BASES[kind],) if kind in DERIVED else ()
    own = {"Config": mistakes.Nothing} | {name: vars(SOUND_CLASSES[kind]).get(name) for name in ("needs", "act", "run")}
    with pytest.raises(ConfigError, match=r":Wrong\.__init__ is missing; write def __init__\(self, cfg: Any, ctx: "):
        check_class(kind, type("Wrong", bases, own))


def test_an_environment_may_hand_on_what_is_asked():
    class Outer:
        def __init__(self, env):
            self.env = env

        def __getattr__(self, name):
            return getattr(self.env, name)

    env = mistakes.Walk(None, RunContext(spec=EnvSpec({})))
    assert check_env(Outer(env)) is env.spec
    del env.spec
    with pytest.raises(ConfigError, match=r"Outer\.spec is missing; declare spec: EnvSpec"):
        check_env(Outer(env))


@pytest.mark.parametrize("kind", KINDS)
def test_classes_that_signatures_are_tried_with_have_no_mistake(kind):
    look_at(kind, SOUND_CLASSES[kind])


def test_what_can_be_called_in_that_way_is_no_mistake():
    class Other(Sound):
        def __init__(self, *given, **options):
            super().__init__(*given)

        def act(self, row, state, how="explore", *, temperature=1.0):
            return {}, state

        def prepare(self, *rows):
            return rows[0]

        @torch.no_grad()
        def observe(self, segment, learner, **more): ...

        @staticmethod
        def needs(cfg, spec): ...

        optimizers = functools.partial(dict)

    check_class("algo", Other)
    check_class("loop", type("ByUpdates", (Loop,), {**vars(mistakes.Endless), "unit": "updates"}))  # counts no steps


@pytest.mark.parametrize("kind", ["algo", "exploration", "model"])
@pytest.mark.parametrize("body", ["pass", "self.cfg = cfg", "self.part = torch.nn.Linear(1, 1)", "self.part(1)"])
def test_a_module_without_its_base_is_one_line(kind, body):
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def __init__(self, cfg, ctx): {body}", scope)
    cls = type("Wrong", (SOUND_CLASSES[kind],), {"__init__": scope["__init__"]})
    with pytest.raises(ConfigError, match=r":Wrong\.__init__ must call super\(\)\.__init__\(\) first$"):
        make(cls, None, None)


@pytest.mark.parametrize(
    ("tempo", "said"), [(3, "an int; return Tempo"), (Tempo(in_flight=1.5), "Tempo with 1.5 for in_flight")]
)
def test_a_tempo_of_another_kind_is_refused(tempo, said):
    cls = type("Wrong", (mistakes.Endless,), {"__init__": lambda self, cfg, ctx: setattr(self, "tempo", tempo)})
    with pytest.raises(ConfigError, match=rf":Wrong\.tempo returned {said}"):
        make(cls, None, None)


def test_what_fails_otherwise_keeps_its_error():
    """A helper of an author's own without its base is named; any other error comes as it is."""

    class Helper(torch.nn.Module):
        def __init__(self):
            self.layer = torch.nn.Linear(1, 1)

    def made(body):
        def init(self, cfg, ctx):
            torch.nn.Module.__init__(self)
            body(self)

        return type("Wrong", (Sound,), {"__init__": init})

    with pytest.raises(ConfigError, match=r":.*Helper\.__init__ must call"):
        make(made(lambda self: Helper()), None, None)
    for body, error in (
        (lambda self: {}["obs"], KeyError),
        (lambda self: None.value, AttributeError),
        (lambda self: int("x", y=1), TypeError),
    ):
        with pytest.raises(error):
            make(made(body), None, None)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "action", "said"),
    [
        (spaces.MultiDiscrete([3, 2]), [[2, 2]], "the action 2, which is not in MultiDiscrete([3 2])"),
        (spaces.MultiBinary(2), [[1, -1]], "the action -1, which is not in MultiBinary(2)"),
        (spaces.MultiBinary(2), [[1.0, 0.0]], "actions of float32 for MultiBinary(2); return int64"),
        (spaces.Discrete(2), [-1], "the action -1, which is not in Discrete(2)"),
        (spaces.Box(-1, 1, (1,)), [[1]], "actions of int64 for Box(-1.0, 1.0, (1,), float32); return float32"),
        (spaces.MultiDiscrete([3, 2]), [[2, 1]], None),
        (spaces.MultiBinary(2), [[1, 0]], None),
        (spaces.Box(-1, 1, (1,)), [[9.0]], None),  # it is clipped
    ],
)
def test_actions_are_of_their_space(space, action, said):
    spec = EnvSpec({"agent": mistakes.Group(spaces.Box(-1, 1, (4,)), space)})
    found = actions_misfit(spec, {"action": torch.tensor(action)}, 1)
    assert found == (said and f"returned {said}")


def test_numbers_of_a_row_may_have_an_axis_of_agents():
    group = mistakes.Group(spaces.Box(-1, 1, (4,)), spaces.Discrete(2), ("one",))
    out = {"action": torch.zeros(3, 1, dtype=torch.long), "value": torch.zeros(3, 1)}
    assert actions_misfit(EnvSpec({"team": group}), out, 3) is None
    out["value"] = torch.zeros(3, 1, 1)
    assert actions_misfit(EnvSpec({"team": group}), out, 3) == (
        "returned value of shape [3, 1, 1]; a row has one number: value.squeeze(-1)"
    )


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (lambda: Needs(1.5), "Needs with 1.5 for window; expected Window"),
        (lambda: Window(1.5), "Window with 1.5 for length; expected a valid integer"),
        (lambda: Needs(keys=("obs", 3)), "Needs with a tuple of 2 for keys; expected a valid string"),
        (lambda: Needs(off_policy="yes"), "Needs with 'yes' for off_policy; expected a valid boolean"),
        (lambda: Plan(devices="2"), "Plan with '2' for devices; expected a valid integer"),
        (lambda: Plan(launcher="slurm"), "Plan with 'slurm' for launcher; expected 'processes' or 'ray'"),
        (lambda: Plan(actors=4), "Plan with 4 for actors; expected a dictionary or an instance of Actors"),
        (lambda: Optim(None), "Optim with None for optimizer; expected Optimizer"),
    ],
)
def test_values_of_records_are_of_their_types(record, said):
    made = record()
    assert str(record_misfit(made, type(made))).startswith(f"returned {said}")


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

    from rlplug.contract.results import watched

    class Who:
        def __init__(self, x):
            self.x = x

        def give(self):
            return self.x

    one = Who(1)
    with watched((one, {"give": lambda x: None if x == 1 else f"gave {x}"})):
        other = copy.deepcopy(one)
        other.x = 2
        assert one.give() == 1
        with pytest.raises(ConfigError, match=r"Who\.give gave 2"):
            other.give()
    assert vars(one) == {"x": 1}


def test_dicts_and_groups_of_observations_are_compared():
    from rlplug.contract.results import check_rows

    class Env(mistakes.Walk):
        def __init__(self, space):
            super().__init__(None, type("Ctx", (), {"env_ids": range(2)}))
            self.spec = EnvSpec({"agent": mistakes.Group(space, spaces.Discrete(2))})

    env = Env(spaces.Dict({"a": spaces.Box(0, 255, (2,), "uint8"), "b": spaces.Discrete(3)}))
    good = {"obs": {"a": torch.zeros(2, 2, dtype=torch.uint8), "b": torch.zeros(2, dtype=torch.long)}}
    assert check_rows(env, "reset", good, 2) is good
    for wrong, text in (
        ({"a": good["obs"]["a"]}, r"obs with the keys 'a'; its space has 'a', 'b'"),
        (tree.map(torch.Tensor.float, good["obs"]), r"obs\['a'\] of float32; its space declares uint8"),
        (good["obs"] | {"b": 3}, r"obs\['b'\] as an int; its space declares \[2\]"),
        (3, r"obs with an int; its space has 'a', 'b'"),
    ):
        with pytest.raises(ConfigError, match=text):
            check_rows(env, "reset", {"obs": wrong}, 2)
