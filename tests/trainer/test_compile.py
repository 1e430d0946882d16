"""A compiled gradient step is the eager one, is made once, and is left where it cannot be made."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlplug.config import compose
from rlplug.distributed.fabric import one_rank
from rlplug.plugins.algo.ppo import PPO
from rlplug.plugins.exploration.icm import ICM
from rlplug.plugins.model.mlp import MLP
from rlplug.run.build import build
from rlplug.testing.rank_pool import ranks
from rlplug.trainer import graphs
from rlplug.trainer.artifact import Artifact, interpreted
from rlplug.trainer.learner import RankLearner
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
    assert learner.compile
    assert [*map(len, learner.graphs._artifacts.values())] == [1]


def test_compiled_learner_equals_the_eager_one():
    eager, compiled = test_sac.make(), test_sac.make()
    learners = [
        RankLearner(
            fabric=one_rank(),
            ctx=algorithm.ctx,
            algorithm=algorithm,
            buffer=None,
            compile="max" if algorithm is compiled else "off",
        )
        for algorithm in (eager, compiled)
    ]
    batch = eager.prepare(test_sac.sample(eager))
    for _ in range(3):
        a, b = (learner.minimize(batch, learner.algorithm) for learner in learners)
    assert a.terms.keys() == b.terms.keys()
    for name in a.terms:
        torch.testing.assert_close(a.terms[name], b.terms[name], rtol=1e-4, atol=1e-5)
    for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


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
    assert not learner.compile


WORLD = ("env=cartpole", "env.id=rlplug.testing.worlds:World-v0", "env.vectorization=list", "logger=[]", "num_envs=4")
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
        return found, trainer.learner.compile


@pytest.mark.parametrize(
    ("algo", "model"),
    [
        pytest.param(algo, model, marks=() if (algo, model) == ("ppo", "cnn") else pytest.mark.slow)
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
    if model in ("lstm", "gru") and algo in RECURRENT:
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


def test_one_graph_serves_minibatches_of_every_size():
    """A rollout of 32 rows has one valid row less for every episode that began in it."""
    words = (*WORLD, *ALGORITHMS["ppo"], *MODELS["mlp"], "+env.kwargs.action=discrete", "algo.sgd_minibatch_size=12")
    with interpreted(), closing(build(compose([*words, "compile=max"]), Path())) as trainer:
        ends, sizes = [0], set()
        for _ in range(4):
            trainer.collect()
            trainer.update()
            ends.append(trainer.progress.env_steps)
            sizes.add((ends[-1] - ends[-2]) % 12)
        assert trainer.learner.compile
        assert len(sizes) > 1
        assert [*map(len, trainer.learner.graphs._artifacts.values())] == [
            1,
            1,
            1,
        ]  # acting, values, and gradient steps


@pytest.mark.slow
def test_every_job_of_a_sweep_is_compiled():
    """Hydra runs all jobs in one process."""
    words = (*WORLD, *ALGORITHMS["ppo"], *MODELS["mlp"], "+env.kwargs.action=discrete")
    assert all(weights((*words, f"seed={seed}"), True)[1] for seed in range(10))


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
            if trainer.learner.compile:
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
            assert (trainer.learner.graphs is None) is (compile == "auto" and who is not None)


@pytest.mark.slow
def test_a_run_says_when_it_compiles(monkeypatch, tmp_path, capsys):
    """Not when the machine code lies in the cache."""
    monkeypatch.setattr("torch._inductor.codecache.cache_dir", lambda: str(tmp_path))
    said = []
    for _ in range(2):
        assert (
            Artifact(lambda batch: {"y": batch["x"] + 1.0}, {"x": torch.ones(3)})({"x": torch.zeros(3)})["y"].sum() == 3
        )
        said.append("compiling" in capsys.readouterr().err)
    assert said == [True, False]


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
