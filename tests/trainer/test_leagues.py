"""Loops that play jobs and learn from them with minibatches: two ranks make the gradient steps of one."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from rlplug import tree
from rlplug.api import Job
from rlplug.buffer.episodes import OF_EPISODE
from rlplug.config import compose, parse
from rlplug.run.build import build
from rlplug.testing.rank_pool import ranks
from rlplug.types import RunError

WORDS = (
    *("algo=ppo", "env=gymnasium", "env.id=tests.contract.tenants.asynchronous:Numbered-v0", "logger.only=[]"),
    *("model.hidden=[8]", "rollout_fragment_length=16", "algo.sgd_minibatch_size=16", "algo.num_sgd_iter=2"),
)
SAMPLES = 2  # rounds, each with an update


def learned(fabric: Any, raw: Any, jobs: int, mine: bool) -> Any:
    """Play, learn, and return weights, gradient steps, minibatches of a loop's own, and what was counted."""
    trainer: Any = build(parse(raw), Path(), fabric)
    steps, own = 0, []
    after = trainer.algorithm.after_step

    def counted(*args: Any) -> None:
        nonlocal steps
        steps += 1
        after(*args)

    trainer.algorithm.after_step = counted
    with closing(trainer):
        for number in range(SAMPLES):
            ordered = [Job(jobs * number + i, episodes=2) for i in range(jobs)]
            played = [batch for _, batch in trainer.play(ordered, mine=mine)]
            batch = tree.cat([{k: x for k, x in part.items() if k not in OF_EPISODE} for part in played], 1)
            trainer.update(batch)
            own.append([len(part["reward"]) for part in trainer.learner.minibatches(batch, 16, "row")])
        trainer.report()
        return trainer.algorithm.state_dict(), steps, own, vars(trainer.progress)


@pytest.mark.parametrize("num_envs", [2, 3], ids=["each rank collects", "the first rank collects"])
@pytest.mark.parametrize(("jobs", "mine"), [(8, True), (8, False), (5, True), (5, False)])
def test_two_ranks_learn_as_one(jobs, mine, num_envs):
    """8 or 5 jobs of two episodes of 7 steps: 7 or 4 minibatches, twice in each update."""
    words = [*WORDS, f"num_envs={num_envs}"]
    alone, steps, own, progress = learned(None, compose(words).raw, jobs, mine)
    assert steps == SAMPLES * 2 * round(jobs * 14 / 16)
    both = ranks(2)(learned, compose([*words, "hardware=2cpu"]).raw, jobs, mine)
    assert [answer[1] for answer in both] == [steps, steps]
    for weights, _, _, counted in both:
        assert counted == progress
        for name, x in alone.items():
            torch.testing.assert_close(weights[name], x, atol=1e-5, rtol=1e-4)
    for once, *parts in zip(own, *(answer[2] for answer in both), strict=True):
        assert [sum(sizes) for sizes in zip(*parts, strict=True)] == once


def too_few(fabric: Any, raw: Any) -> str:
    with closing(build(parse(raw), Path(), fabric)) as trainer, pytest.raises(RunError) as refused:
        list(trainer.play([Job(0)], mine=True))
    return str(refused.value)


def test_a_rank_without_a_job_of_its_own_is_refused():
    answers = ranks(2)(too_few, compose([*WORDS, "num_envs=2", "hardware=2cpu"]).raw)
    assert answers == ["mine=True: 1 jobs for 2 ranks; add jobs, so that each has one"] * 2
