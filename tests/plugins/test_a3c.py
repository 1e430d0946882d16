"""A3C: whose gradients they are, what is made of them, and what has none. The losses are A2C's (test_a2c.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlplug import tree
from rlplug.config import compose
from rlplug.plugins.algo.a2c import A3C
from rlplug.registry import hookimpl
from rlplug.run.build import build
from rlplug.testing.checks.runs import play
from rlplug.testing.rank_pool import ranks
from rlplug.trainer.learner import RankLearner
from rlplug.trainer.losses import total_loss
from rlplug.types import Batch, ConfigError
from tests.plugins import acting
from tests.plugins.acting import B, T, learner_of, move, segment, weights

SMALL = ("num_envs=4", "rollout_fragment_length=8", "model.hidden=[8]", "algo.lr=0.01", "tuned=none")
RUN = ("algo=a3c", "env=cartpole", *SMALL, "train_batch_size=16", "hardware=cpu", "logger.only=[]", "eval.every=0")


def make(*words: str, size: int = T * B) -> A3C:
    run = {"num_envs": B, "rollout_length": T, "batch_size": size}
    return acting.make(A3C, "a3c", None, words, run, lr=0.01)


def annotated(algorithm: A3C, batch: Batch) -> Batch:
    """As an actor does it, in inference mode."""
    with torch.inference_mode():
        return batch | algorithm.annotate(batch)


# ---- one gradient ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("model=lstm",)], ids=["mlp", "lstm"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_was_computed_elsewhere_makes_the_step_of_the_rows(words, count):
    """Where the weights are the same, of however many segments the queue makes a sample."""
    found = []
    for shipped in (True, False):
        algorithm = make(*words)
        batch = segment(algorithm)
        if shipped:
            segments = (tree.take(batch, np.s_[:, i : i + B // count]) for i in range(0, B, B // count))
            batch = tree.cat([annotated(algorithm, part) for part in segments], 1)
            assert next(tree.leaves(batch["gradients"])).shape[:2] == (1, count)
        losses = algorithm.update(batch, learner_of(algorithm))
        found.append((weights(algorithm), losses.terms | losses.metrics))
    (one, said), (other, expected) = found
    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)  # steps are of 0.1, by gradients near 0 as well
    torch.testing.assert_close(said, expected)
    assert said.keys() == {"policy", "value", "entropy", "mean_entropy", "advantage"}


def test_the_gradient_is_not_of_the_weights_that_are_moved():
    algorithm = make()
    batch = segment(algorithm)
    given = annotated(algorithm, batch)["gradients"]
    move(algorithm)
    start = weights(algorithm)
    learner_of(algorithm).minimize(batch | {"gradients": given}, algorithm)
    rms = algorithm.cfg
    g = torch.cat([x.sum((0, 1)).flatten() for x in given["parameters"].values()]) / batch["valid"].sum()
    g = g * min(1.0, rms.grad_clip / g.norm().item())
    step = 0.01 * g / (((1 - rms.decay) * g * g).sqrt() + rms.epsilon)
    torch.testing.assert_close(weights(algorithm), start - step)


def test_each_gradient_has_its_columns_and_its_step():
    algorithm = make(size=T)
    rows = segment(algorithm)
    batch = annotated(algorithm, rows)
    for column in range(B):
        alone = annotated(algorithm, tree.take(rows, np.s_[:, column : column + 1]))
        torch.testing.assert_close(tree.take(batch["gradients"], np.s_[:, column : column + 1]), alone["gradients"])
    steps = list[Batch]()

    class Listening(RankLearner):
        def minimize(self, batch, who, parts=None, *, diagnostics=True):
            steps.append(batch)
            return super().minimize(batch, who, parts, diagnostics=diagnostics)

    algorithm.update(batch, learner_of(algorithm, cls=Listening))
    assert len(steps) == B
    for column, step in enumerate(steps):
        torch.testing.assert_close(step, tree.take(batch, np.s_[:, column : column + 1]))


def half(fabric, states):
    """One step from what this rank's two columns gave."""
    algorithm = make()
    batch = {key: leaf[:, fabric.global_rank * 2 : fabric.global_rank * 2 + 2] for key, leaf in states.items()}
    batch = annotated(algorithm, batch)
    move(algorithm)
    losses = algorithm.update(batch, learner_of(algorithm, fabric=fabric))
    return weights(algorithm), losses.terms


def test_ranks_add_up_their_gradients():
    algorithm = make()
    batch = segment(algorithm)
    answers = ranks(2)(half, batch)
    batch = annotated(algorithm, batch)
    move(algorithm)
    losses = algorithm.update(batch, learner_of(algorithm))
    for answer in answers:
        torch.testing.assert_close(answer, (weights(algorithm), losses.terms))


# ---- in a run --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [("loop.in_flight=1",), ("loop.in_flight=3",), ("loop.broadcast_interval=3",)], ids=lambda words: words[0]
)
def test_gradients_are_of_the_weights_of_their_version(words):
    trainer, other = (build(compose([*RUN, *words, "preprocess.scale_reward=0.1"]), Path()) for _ in range(2))
    algorithm, kept, old = trainer.algorithm, {}, 0
    for _ in range(6):
        kept[trainer.progress.updates] = {name: x.clone() for name, x in algorithm.state_dict().items()}
        trainer.collect("explore")
        ((segment, version),) = vars(trainer.buffer)["segments"]._kept.values()
        other.algorithm.load_state_dict(kept[version])
        scaled = segment | {"reward": 0.1 * segment["reward"]}
        for i in range(2):  # each of two environments
            rows = tree.take({key: x for key, x in scaled.items() if key != "gradients"}, np.s_[:, 2 * i : 2 * i + 2])
            total = total_loss(other.algorithm.forward(rows, ()), rows["valid"], None, other.algorithm, mean=False)
            gradients = torch.autograd.grad(total.loss, list(other.algorithm.parameters()))
            expected = dict(zip(kept[version], gradients, strict=True))
            torch.testing.assert_close(tree.take(segment["gradients"]["parameters"], np.s_[0, i]), expected)
        old += trainer.progress.updates - version
        while trainer.ready():
            trainer.update()
            kept[trainer.progress.updates] = {name: x.clone() for name, x in algorithm.state_dict().items()}
    assert trainer.progress.updates == 6
    assert (old > 0) == (words != ("loop.in_flight=1",))
    trainer.close()
    other.close()


def test_without_delay_it_is_a2c():
    """A gradient of all environments, applied before the next segment is played."""
    found = {}
    for name, more in {
        "a3c": ["loop.in_flight=1", "train_batch_size=32", "algo.grad_clip=0.5"],
        "a2c": ["algo.lambda_=1.0"],
    }.items():
        common = [word for word in RUN if "batch_size" not in word or name == "a3c"]
        trainer = build(compose([*common, f"algo={name}", *more]), Path())
        play(trainer, 5)
        found[name] = trainer.algorithm.state_dict(), trainer.progress.env_steps
        trainer.close()
    torch.testing.assert_close(*found.values(), rtol=1e-3, atol=1e-5)


class Count:
    gradients = 0

    @hookimpl
    def rlplug_collected(self, run, segment):
        if len(segment.batch["valid"]) > run.ctx.rollout_length:
            self.gradients += next(tree.leaves(segment.batch["gradients"])).shape[1]


def test_a_step_for_every_gradient():
    """But for the last segment's, which is shorter than the others: its few rows would make poor ones."""
    trainer, seen = build(compose([*RUN, "total_steps=1000"]), Path()), Count()
    trainer.hooks.register(seen)
    trainer.loop.run(trainer)
    optimizer = trainer.learner.parts(trainer.algorithm)["policy"]
    assert optimizer.calls == seen.gradients == 2 * trainer.progress.updates >= 960 // 16
    assert 997 <= trainer.progress.env_steps <= 1000
    assert trainer.buffer.metrics() == {"dropped_segments": 0}
    assert not trainer.ready()
    trainer.close()


# ---- what has no gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["buffer=replay"], "buffer: replay gives windows of older data, but a3c learns from segments in order; use "),
        (["buffer=rollout"], "buffer: rollout gives the last round, but a3c learns from segments in order; use "),
        (["buffer=circular"], "buffer: circular gives segments several times, but a3c does not correct for older"),
        (["buffer.replay_proportion=1.0"], "buffer.replay_proportion: replays data of older policies, which the"),
        (["loop=alternate"], "loop: alternate waits for all actors, but A3C applies the gradients of each; use loop=a"),
        (["hardware.microbatches=2"], "hardware.microbatches: applies to gradients of the learner"),
        (["hardware.precision=bf16-mixed"], "hardware.precision: applies to gradients of the learner"),
        (
            ["exploration=[icm]"],
            "exploration.icm: rewards rows that the learner samples, but a3c computes gradients in ",
        ),
        (["train_batch_size=20"], "train_batch_size: 20 transitions are not whole rollouts of 8"),
        (["train_batch_size=24"], "train_batch_size: 24 transitions are not whole rollouts of 8"),
        (["train_batch_size=12"], "4 environments of a process; use 8 or 16 or 32"),
    ],
)
def test_refusals(words, message):
    with pytest.raises(ConfigError) as error:
        build(compose([*RUN, *words]), Path())
    assert message in str(error.value)
    assert "\n" not in str(error.value)
