"""A compiled gradient step is the eager one, is made once, and is left where it cannot be made."""

import warnings
from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlplug import tree
from rlplug.compiler import compiler as graphs
from rlplug.compiler.artifact import Artifact
from rlplug.config import compose
from rlplug.distributed.fabric import one_rank
from rlplug.plugins.algo.ppo import PPO
from rlplug.plugins.exploration.icm import ICM
from rlplug.plugins.model.mlp import MLP
from rlplug.run.build import build
from rlplug.testing.checks.algorithms import interpreted
from rlplug.testing.rank_pool import ranks
from rlplug.trainer.learner import RankLearner
from tests.compiler import WORLD
from tests.plugins import test_sac
from tests.trainer.test_learner import close, three_steps

PARTS = ("critic", "actor", "alpha")


def test_forward_backward_and_optimizer_are_one_artifact_that_reads_schedules():
    algorithm = test_sac.make(actor_lr=[[0, 1e-3], [100, 0.0]])
    learner = RankLearner(fabric=one_rank(), ctx=algorithm.ctx, algorithm=algorithm, buffer=None, compile="max")
    batch = algorithm.prepare(test_sac.sample(algorithm))
    actor = [*learner.parts(algorithm)["actor"].params]
    before = [p.detach().clone() for p in actor]
    learner.minimize(batch, algorithm)
    learner.minimize(batch, algorithm)
    assert not any(torch.equal(p, q) for p, q in zip(before, actor, strict=True))
    algorithm.ctx.schedules.refresh(100)
    before = [p.detach().clone() for p in actor]
    learner.minimize(batch, algorithm)
    assert all(torch.equal(p, q) for p, q in zip(before, actor, strict=True)), "the step size reached zero"
    assert learner.steps.compiler.active
    assert [*map(len, learner.steps.compiler._known.values())] == [1]


def test_what_cannot_be_compiled_runs_eagerly_and_says_so():
    class Untraceable(test_sac.SAC):
        def forward(self, batch, parts):
            assert batch["returns"].sum().item() != 0.0
            return super().forward(batch, parts)

    algorithm = test_sac.make()
    algorithm.__class__ = Untraceable
    learner = RankLearner(fabric=one_rank(), ctx=algorithm.ctx, algorithm=algorithm, buffer=None, compile="max")
    with pytest.warns(UserWarning, match="Untraceable could not be compiled"):
        losses = learner.minimize(algorithm.prepare(test_sac.sample(algorithm)), algorithm)
    assert losses.terms.keys() == set(PARTS)
    assert not learner.steps.compiler.active


SEGMENTS = ("rollout_fragment_length=8", "train_batch_size=32")
ALGORITHMS = {
    "ppo": ("algo=ppo", "rollout_fragment_length=8", "algo.sgd_minibatch_size=32", "algo.num_sgd_iter=1"),
    "dqn": ("algo=dqn", "train_batch_size=8", "num_steps_sampled_before_learning_starts=64"),
    "sac": ("algo=sac", "train_batch_size=8", "num_steps_sampled_before_learning_starts=64"),
    "td3": ("algo=td3", "algo.policy_delay=1", "train_batch_size=8", "num_steps_sampled_before_learning_starts=64"),
    "ddpg": ("algo=ddpg", "train_batch_size=8", "num_steps_sampled_before_learning_starts=64"),
    "a2c": ("algo=a2c", "algo.opt_type=adam", "algo.epsilon=1e-8", "rollout_fragment_length=8"),
    "impala": ("algo=impala", "algo.opt_type=adam", "algo.epsilon=1e-8", *SEGMENTS),
    "appo": ("algo=appo", "algo.kl_coeff=0.2", "buffer.num_batches=1", *SEGMENTS),
}
CONTINUOUS = ("sac", "td3", "ddpg")
NOISE = {"dqn": "epsilon_greedy", "td3": "gaussian", "ddpg": "ornstein_uhlenbeck"}
MODELS = {
    "mlp": ("+env.kwargs.observation=vector", "model=mlp", "model.hidden=[8]"),
    "cnn": ("+env.kwargs.observation=image", "model=cnn", "model.hidden=[8]"),
    "multi_input": ("+env.kwargs.observation=dict", "model=multi_input"),
    "lstm": ("+env.kwargs.observation=vector", "model=lstm", "model.hidden=8"),
    "gru": ("+env.kwargs.observation=vector", "model=gru", "model.hidden=8"),
    "attention": ("+env.kwargs.observation=vector", "model=attention", "model.dim=8", "model.memory=3"),
    "icm": ("+env.kwargs.observation=vector", "model=mlp", "model.hidden=[8]", "exploration=[icm]"),
    "rnd": ("+env.kwargs.observation=vector", "model=mlp", "model.hidden=[8]", "exploration=[rnd]"),
}
EAGER = ("lstm", "gru")  # where an episode ends is known when it runs
SEQUENCES = ("algo.sequence_length=6", "algo.burn_in=2", "algo.stride=4")
RECURRENT = {"dqn": SEQUENCES, "sac": ("algo.sequence_length=6",), "td3": SEQUENCES, "ddpg": SEQUENCES}


def weights(words, compile):
    """What everything that learns holds after one update, and whether it was compiled to the end."""
    with closing(build(compose([*words, f"compile={compile}"]), Path())) as trainer:
        while not trainer.ready() or trainer.progress.env_steps < 64:
            trainer.collect("random" if trainer.ctx.learning_starts else "explore")
        trainer.update()
        modules = {"algorithm": trainer.algorithm} | trainer.policy.exploration
        found = {f"{name}.{key}": p.detach().clone() for name, x in modules.items() for key, p in x.named_parameters()}
        return found, trainer.learner.steps.compiler.active


@pytest.mark.parametrize(
    ("algo", "model"),
    [
        pytest.param(algo, model, marks=() if (algo, model) == ("ppo", "mlp") else pytest.mark.slow)
        for algo in ALGORITHMS
        for model in MODELS
    ],
)
def test_one_compiled_step_is_the_eager_one(algo, model):
    words = (
        *WORLD,
        *ALGORITHMS[algo],
        *MODELS[model],
        f"+env.kwargs.action={'box' if algo in CONTINUOUS else 'discrete'}",
    )
    if model in (*EAGER, "attention") and algo in RECURRENT:
        words = (*words, "buffer=sequence", *RECURRENT[algo])
    if algo in NOISE and model in ("icm", "rnd"):
        words = (*words, f"exploration=[{NOISE[algo]},{model}]")
    (eager, _), (compiled, still) = weights(words, "off"), weights(words, "max")
    assert still is (model not in EAGER)
    lr = 1e-3
    away = torch.cat([(eager[key] - compiled[key]).abs().flatten() for key in eager]) / lr
    worst = float(away.max())
    print(f"{algo} {model}: largest difference of a step, in steps: {worst:.1e}{'' if still else ', runs eagerly'}")
    assert worst < 0.5
    assert (away > 0.005).float().mean() < 1e-3  # Adam divides by a gradient's size; one close to zero is all rounding


@pytest.mark.slow
def test_a_compiled_step_of_a_world_model_is_the_eager_one():
    words = ("algo=dreamerv3", "env=cartpole", "tuned=none", "logger.only=[]", "model.size=1m", "algo.batch_length=2")
    words += ("train_batch_size=2", "algo.imagination_length=1", "num_steps_sampled_before_learning_starts=64")
    words += ("algo.warmup=0", "algo.epsilon=1e-8")  # by default, rounding a gradient of 0 makes a whole step
    (eager, _), (compiled, still) = weights(words, "off"), weights(words, "max")
    assert still
    away = torch.cat([(eager[key] - compiled[key]).abs().flatten() for key in eager]) / 4e-5
    assert (away > 0.005).float().mean() < 1e-3


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_one_graph_serves_minibatches_of_every_size(model):
    """A rollout of 32 rows has one valid row less for every episode that began in it."""
    words = (*WORLD, *ALGORITHMS["ppo"], *MODELS[model], "+env.kwargs.action=discrete", "algo.sgd_minibatch_size=12")
    with interpreted(), closing(build(compose([*words, "compile=max"]), Path())) as trainer:
        ends, sizes = [0], set()
        for _ in range(4):
            trainer.collect()
            trainer.update()
            ends.append(trainer.progress.env_steps)
            sizes.add((ends[-1] - ends[-2]) % 12)
        assert trainer.learner.steps.compiler.active
        assert len(sizes) > 1
        assert [*map(len, trainer.learner.steps.compiler._known.values())] == [
            1,
            1,
            1,
        ]  # acting, values, and gradient steps


def test_a_part_that_is_due_less_often_leaves_the_steps_of_others_alone():
    """TD3's critic moves alone, and with the policy: in two graphs, which share the state of its optimizer."""
    words = ("algo=td3", "env=pendulum", "tuned=none", "logger.only=[]", "model.hidden=[16]", "algo.policy_delay=2")
    words = (*words, "num_steps_sampled_before_learning_starts=40", "train_batch_size=32", "num_envs=1")
    found = []
    for compile in ("off", "max"):
        with interpreted(), closing(build(compose([*words, f"compile={compile}"]), Path())) as trainer:
            while trainer.progress.updates < 12:
                trainer.collect()
                if trainer.ready():
                    trainer.update()
            parts = trainer.learner.parts(trainer.algorithm)
            states = {name: part.optim.optimizer.state.values() for name, part in parts.items()}
            found.append([p.detach().clone() for p in trainer.algorithm.parameters()])
            assert {float(state["step"]) for state in states["critic"]} == {12.0}
            assert {float(state["step"]) for state in states["actor"]} == {6.0}
    for p, q in zip(*found, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-4)


@pytest.mark.parametrize("by", ["value", "norm", "global_norm"])
@pytest.mark.parametrize("limit", [1e-4, 1e4])
def test_a_gradient_is_compiled_whether_it_is_clipped_or_not(by, limit):
    words = (*WORLD, *ALGORITHMS["dqn"], *MODELS["mlp"], "+env.kwargs.action=discrete", f"algo.grad_clip={limit}")
    with interpreted(), warnings.catch_warnings(action="error", category=UserWarning):
        assert weights((*words, f"algo.grad_clip_by={by}"), "max")[1]


def test_rows_of_one_number_do_not_decide_for_those_of_another():
    """A rank's share of the first minibatch may be one row, for which the tracer takes other operations."""
    words = (*WORLD, *ALGORITHMS["ppo"], *MODELS["mlp"], "+env.kwargs.action=discrete")
    found = []
    for compile in ("off", "max"):
        with interpreted(), closing(build(compose([*words, f"compile={compile}"]), Path())) as trainer:
            trainer.collect()
            with torch.no_grad():
                batch = trainer.algorithm.prepare(trainer.learner.sample()[0])
            rows = next(trainer.learner.minibatches(batch, 24, "row"))
            losses = [trainer.learner.minimize(tree.take(rows, slice(n)), trainer.algorithm) for n in (1, 24, 12)]
            found.append([torch.stack([*x.terms.values()]) for x in losses])
    torch.testing.assert_close(*found)


def untraceable(where):
    """Return PPO with ICM, of which one cannot be traced."""

    def forward(self, batch, parts):
        assert next(tree.leaves(batch)).sum().item() != 1234.0
        return type(self).__mro__[1].forward(self, batch, parts)

    words = (*WORLD, *ALGORITHMS["ppo"], *MODELS["icm"], "+env.kwargs.action=discrete", "compile=max")
    trainer = build(compose([*words]), Path())
    who = trainer.algorithm if where == "algorithm" else trainer.policy.exploration["icm"]
    who.__class__ = type(who.__class__.__name__, (who.__class__,), {"forward": forward})
    return trainer


def test_a_resumed_run_goes_on_eagerly_where_compiling_had_failed():
    with interpreted(), closing(untraceable("icm")) as trainer:
        trainer.collect()
        with pytest.warns(UserWarning, match="a gradient step of ICM could not be compiled; it runs eagerly"):
            trainer.update()
        assert not trainer.learner.steps.compiler.active
        state = trainer.state()
    with closing(untraceable("icm")) as trainer:
        trainer.load(state)
        assert not trainer.learner.steps.compiler.active


def test_a_step_that_fell_back_to_eager_has_the_numbers_of_a_graph():
    """Ranks add them up together, and only one of them may have fallen back."""
    found = []
    for where in ("icm", "algorithm"):  # of the one that comes later, the algorithm has a graph
        with interpreted(), closing(untraceable(where)) as trainer, warnings.catch_warnings(action="ignore"):
            trainer.collect()
            with torch.no_grad():
                batch = trainer.algorithm.prepare(trainer.learner.sample()[0])
            rows = next(trainer.learner.minibatches(batch, 32, "row"))
            found.append(trainer.learner.minimize(rows, trainer.algorithm, diagnostics=False).metrics.keys())
            assert trainer.learner.steps.compiler.active is (where == "icm")
    assert found[0] == found[1]


@pytest.mark.slow
def test_ranks_and_microbatches_are_compiled():
    eager = three_steps(one_rank(), "team")
    close(eager, three_steps(one_rank(), "team", microbatches=4, compile="max"), atol=1e-5)
    for rank in ranks(2)(three_steps, "team", 1, False, "max"):
        close(eager, rank, atol=1e-5)


def decided(monkeypatch, total_steps, state=None):
    """Return the update with which ``compile=auto`` compiles, and the trainer's state after it; None: none of eight."""
    monkeypatch.setattr(graphs, "DECIDES_AFTER", 16)
    monkeypatch.setattr(graphs, "PAYS", 100)
    words = (*WORLD, *ALGORITHMS["ppo"], *MODELS["mlp"], "+env.kwargs.action=discrete", "algo.sgd_minibatch_size=8")
    line = compose([*words, "compile=auto", f"total_steps={total_steps}"])
    with interpreted(), closing(build(line, Path())) as trainer:
        if state:
            trainer.learner.load(state["learner"])
            vars(trainer.progress).update(state["progress"])
        for _ in range(8):
            trainer.collect()
            trainer.update()
            if trainer.learner.steps.compiler.active:
                return trainer.progress.updates, trainer.state()
        return None, trainer.state()


def test_auto_compiles_a_long_run_and_not_a_short_one(monkeypatch):
    """An update is three or four gradient steps of 32 environment steps."""
    assert decided(monkeypatch, 400)[0] is None
    update, state = decided(monkeypatch, 1600)
    assert update
    assert decided(monkeypatch, 400, state)[0] == update + 1  # a resumed run does what it did


@pytest.mark.parametrize("who", [None, PPO, MLP, ICM], ids=["all say so", "algorithm", "model", "exploration"])
def test_auto_leaves_alone_what_does_not_say_itself_that_it_can_be_traced(monkeypatch, who):
    if who is not None:
        monkeypatch.delattr(who, "traceable")
        monkeypatch.setattr(who.__base__, "traceable", True)  # inherited, which does not count
    words = (*WORLD, *ALGORITHMS["ppo"], *MODELS["icm"], "+env.kwargs.action=discrete")
    for compile in ("auto", "max"):
        with closing(build(compose([*words, f"compile={compile}"]), Path())) as trainer:
            assert (trainer.learner.steps.compiler.wanted is False) is (compile == "auto" and who is not None)


@pytest.mark.slow
def test_a_run_says_when_it_compiles(monkeypatch, tmp_path, capsys):
    """Not when the machine code lies in the cache; of a deterministic run it is another one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    said = []
    for deterministic in (False, False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            artifact = Artifact(lambda batch: {"y": batch["x"] + 1.0}, {"x": torch.ones(3)})
        finally:
            torch.use_deterministic_algorithms(False)
        assert artifact({"x": torch.zeros(3)})["y"].sum() == 3
        said.append("compiling" in capsys.readouterr().err)
    assert said == [True, False, True]


def test_what_is_closed_over_may_be_returned_as_it_is():
    level = torch.ones(3)
    with interpreted():
        same = Artifact(lambda batch: {"level": level, "x": batch["x"]}, {"x": torch.ones(2)})
    level += 1.0
    assert torch.equal(same({"x": torch.zeros(2)})["level"], torch.full((3,), 2.0))


@pytest.mark.parametrize(
    ("function", "lengths", "others"),
    [
        (lambda b: {"y": b["x"] * float(len(b["x"]))}, (4, 4), (6, 6)),
        (lambda b: {"y": sum(b["x"][i] for i in range(len(b["x"])))}, (3, 3), (5, 5)),
        (lambda b: {"y": b["x"] + (1.0 if len(b["x"]) < 10 else 2.0)}, (4, 4), (12, 12)),
        (lambda b: {"y": b["x"] + b["z"]}, (4, 4), (4, 1)),
        (lambda b: {"y": b["x"] + b["z"]}, (1, 4), (4, 4)),
        (lambda b: {"y": b["x"][:-1] + b["z"]}, (5, 4), (9, 5)),
    ],
    ids=["number", "loop", "branch", "equal lengths", "one row", "one more"],
)
def test_an_artifact_serves_other_lengths_only_where_its_function_would_do_the_same(function, lengths, others):
    def batch(lengths):
        return {key: torch.arange(float(n)) for key, n in zip("xz", lengths, strict=True)}

    with interpreted():
        artifact = Artifact(function, batch(lengths), varies=True)
    assert torch.equal(artifact(batch(lengths))["y"], function(batch(lengths))["y"])
    assert artifact(batch(others)) is None


def test_what_is_closed_over_may_be_read_first():
    weight, bias = torch.ones(3, 2), torch.ones(2)
    with interpreted():
        layer = Artifact(lambda batch: {"y": torch.addmm(bias, batch["x"], weight)}, {"x": torch.ones(5, 3)})
    bias += 1.0
    assert torch.equal(layer({"x": torch.ones(5, 3)})["y"], torch.full((5, 2), 5.0))


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.ones(2, 4)},
        {"x": torch.ones(2, 3).double()},
        {"y": torch.ones(2, 3)},
        {"x": {"x": torch.ones(2, 3)}},
    ],
    ids=["shape", "dtype", "key", "nesting"],
)
def test_an_artifact_serves_batches_like_its_example_alone(other):
    with interpreted():
        twice = Artifact(lambda batch: {"y": 2.0 * batch["x"]}, {"x": torch.ones(5, 3)}, varies=True)
    assert torch.equal(twice({"x": torch.ones(2, 3)})["y"], torch.full((2, 3), 2.0))
    assert twice(other) is None
