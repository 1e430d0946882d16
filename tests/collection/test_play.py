"""Jobs: whole episodes that depend on the run's seed and the job's number alone, and leave nothing behind."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete

from rlplug import tree
from rlplug.api import Job
from rlplug.checkpointing.serialize import encode
from rlplug.collection.episodes import EpisodeStats
from rlplug.collection.play import share_of
from rlplug.collection.stepping import make_shard
from rlplug.config import compose, parse
from rlplug.evaluation.evaluator import EVALUATION
from rlplug.run.build import build
from rlplug.run.callbacks import capture
from rlplug.testing.checks.runs import flat
from rlplug.testing.rank_pool import ranks
from rlplug.types import ConfigError, RunError

SMALL = ("algo=ppo", "num_envs=2", "model.hidden=[8]", "rollout_fragment_length=16", "algo.sgd_minibatch_size=16")
NUMBERED = (*SMALL, "env=gymnasium", "env.id=tests.contract.tenants.asynchronous:Numbered-v0", "logger.only=[]")
POLE = (*SMALL, "env=cartpole", "logger.only=[]")
NORMAL = ("preprocess.normalize_obs=true", "preprocess.normalize_reward=true")
WORLD = (*SMALL, "env=gymnasium", "env.id=rlplug.testing.worlds:World-v0", "logger.only=[]")
KINDS = {
    "list": (*POLE, "env.vectorization=list"),
    "native": (*POLE, "env.vectorization=native"),
    "same step": (*WORLD, "env.vectorization=native"),
}
NO_TASKS = "^env: job 3 has a task, but this environment has none; use another$"


def made(*words: str) -> Any:
    return build(compose([*words]), Path())


def played(trainer: Any, *jobs: Job, weights=None):
    return [batch for _, batch in trainer.play(jobs, weights)]


def equal(a, b) -> bool:
    a, b = flat(a), flat(b)
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)


def test_a_job_gives_whole_episodes_side_by_side():
    with closing(made(*NUMBERED)) as trainer:
        (batch,) = played(trainer, Job(3, episodes=40))
    rows = torch.arange(8)[:, None].expand(8, 40)
    assert torch.equal(batch["obs"][..., 0], rows.float())  # an episode has seven steps and eight observations
    assert torch.equal(batch["valid"], rows < 7)
    assert torch.equal(batch["terminated"], rows == 6)
    assert torch.equal(batch["is_first"], rows == 0)
    assert torch.equal(batch["reward"], (rows < 7).float())
    assert not batch["truncated"].any()
    assert batch["return"].tolist() == batch["length"].tolist() == [7] * 40
    assert {"action", "logp", "dist"} <= batch.keys()


@pytest.mark.parametrize("words", KINDS.values(), ids=KINDS)
def test_shorter_episodes_repeat_their_final_row(words):
    with closing(made(*words)) as trainer:
        (batch,) = played(trainer, Job(0, episodes=5, mode="random"))
    lengths = batch["length"].tolist()
    assert len(set(lengths)) > 1
    assert batch["valid"].sum(0).tolist() == lengths
    torch.testing.assert_close((batch["reward"] * batch["valid"]).double().sum(0), batch["return"])
    for column, length in enumerate(lengths):
        rest = batch["obs"][length:, column]
        assert torch.equal(rest, rest[:1].expand_as(rest))
        assert (batch["terminated"] | batch["truncated"])[:, column].nonzero().tolist() == [[length - 1]]
        assert not torch.equal(batch["obs"][length, column], batch["obs"][length - 1, column])


@pytest.mark.parametrize(
    ("words", "most"),
    [
        *[(words, 5) for words in KINDS.values()],
        *[((*SMALL, "env=pendulum", "env.max_episode_steps=100000", "logger.only=[]"), most) for most in (32, 40)],
    ],
    ids=[*KINDS, "endless, to the end of a segment", "endless"],
)
def test_a_job_ends_its_episodes_after_their_most_steps(words, most):
    """33 episodes, so that a column has to play another one."""
    with closing(made(*words)) as trainer:
        (batch,) = played(trainer, Job(0, episodes=33, max_steps=most, mode="random"))
    assert batch["length"].max() == most
    assert batch["length"].shape == (33,)
    first = batch["obs"][0]
    assert len({tuple(obs.tolist()) for obs in first}) == 33  # every episode has a beginning of its own
    assert batch["is_first"].sum(0).tolist() == [1] * 33
    for column, length in enumerate(batch["length"].tolist()):
        ends = batch["truncated"][:, column] | batch["terminated"][:, column]
        assert ends.nonzero().tolist() == [[length - 1]]
        assert length <= most


def test_a_job_does_not_depend_on_what_was_played_before():
    jobs = [Job(k, episodes=2, mode=mode) for k, mode in enumerate(("explore", "greedy", "random"))]
    with closing(made(*POLE)) as first, closing(made(*POLE)) as second:
        forward = played(first, *jobs)
        first.collect()
        backward = [*reversed(played(second, *reversed(jobs)))]
        again = played(first, *jobs)
        other = played(first, Job(7, episodes=2))
    for a, b, c in zip(forward, backward, again, strict=True):
        assert equal(a, b)
        assert equal(a, c)
    assert not torch.equal(other[0]["obs"][0], forward[0]["obs"][0])


NOISY = (
    *("algo=sac", "env=pendulum", "num_envs=2", "model.hidden=[8]", "train_batch_size=16", "logger.only=[]"),
    *("exploration=[parameter_noise]", "num_steps_sampled_before_learning_starts=20"),
)


@pytest.mark.parametrize("words", [(*NUMBERED, "env.vectorization=list"), NOISY], ids=["ppo", "parameter noise"])
def test_nothing_of_a_job_enters_a_checkpoint(words):
    """But that it was counted."""
    with closing(made(*words)) as trainer:
        trainer.collect()
        before = [capture(trainer) for _ in range(2)]
        batches = played(trainer, Job(0, episodes=3, max_steps=50), Job(1, max_steps=50))
        steps, after = sum(int(batch["length"].sum()) for batch in batches), capture(trainer)
        assert trainer.progress.env_steps == before[0].manifest["env_steps"] + steps
    for trees in (before[0].trees, before[1].trees, after.trees):
        trees["learner"].pop("progress")
        trees["rank0"]["episodes"].pop("finished")
    assert encode(before[0].trees) == encode(before[1].trees) == encode(after.trees)


def test_a_job_plays_with_weights_of_its_own():
    with closing(made(*POLE)) as trainer:
        state = {key: x.clone() for key, x in trainer.algorithm.state_dict().items()}
        (name,) = (key for key in state if key.startswith("net.policy.") and key.endswith("bias"))

        def head(push: float):
            return {name: torch.tensor([-push, push])}

        weights = {"left": head(-1e3), "right": {name.removeprefix("net.policy."): np.array([-1e3, 1e3], np.float32)}}
        left, right, own = played(
            trainer, Job(0, {"": "left"}), Job(1, {"net.policy": "right"}), Job(2, episodes=9), weights=weights
        )
        assert not left["action"][left["valid"]].any()
        assert right["action"][right["valid"]].all()
        assert own["action"].any()
        assert not own["action"][own["valid"]].all()
        assert equal(trainer.algorithm.state_dict(), state)
        with pytest.raises(ValueError, match=r"^job 4 plays with the weights 'up'; available: 'left', 'right'$"):
            played(trainer, Job(4, {"": "up"}), weights=weights)
        with pytest.raises(
            ValueError, match=r"^job 5 plays with 'net\.policy\.nothing', which PPO.actor_keys\(\) does not name$"
        ):
            played(trainer, Job(5, {"net.policy": "odd"}), weights={"odd": {"nothing": torch.zeros(1)}})
        trainer.algorithm.candidate_weights = lambda candidate: head(float(candidate["push"]))
        up, down = played(
            trainer, *(Job(6 + (push < 0), candidate={"push": torch.tensor(push)}) for push in (1e3, -1e3))
        )
        assert up["action"][up["valid"]].all()
        assert not down["action"][down["valid"]].any()
        assert equal(trainer.algorithm.state_dict(), state)


def test_jobs_are_counted_and_observed_but_not_stored():
    with closing(made(*NUMBERED, *NORMAL)) as trainer:
        played(trainer, Job(0, episodes=3), Job(1, mode="greedy"))
        moments, rewards = trainer.policy.normalizer.obs["obs"], trainer.policy.normalizer.reward
        assert trainer.progress.env_steps == 28
        assert trainer.episodes.drain() == [(7.0, 7, -1)] * 4
        assert moments.seen.tolist()[:2] == [28, 3]  # of the steps 0 to 6 of four episodes
        assert rewards.seen[0] == 28
        assert trainer.policy.normalizer.returns.tolist() == [0, 0]
        assert not trainer.ready()
        trainer.report()
        trainer.collect()
        assert trainer.progress.env_steps == 28 + trainer.collector.spec.row["obs"].shape[0] * 16 - 4


def test_no_job_is_played_while_rollouts_are_in_flight():
    with closing(made(*NOISY, "loop.in_flight=2")) as trainer:
        trainer.collect()
        with pytest.raises(RunError, match=r"^1 rollouts are in flight"):
            list(trainer.play([Job(0)]))


def on_a_rank(fabric, raw):
    """Jobs that do not divide by the ranks, between two rounds."""
    trainer: Any = build(parse(raw), Path(), fabric)
    with closing(trainer):
        trainer.collect()
        batches = played(trainer, *(Job(k, episodes=1 + k, mode="explore") for k in range(3)))
        trainer.reports.log.log(trainer)
        trainer.collect()
        moments = trainer.policy.normalizer.state_dict()
        moments.pop("returns")
        return batches, vars(trainer.progress), moments


@pytest.mark.parametrize("num_envs", [2, 3], ids=["each rank collects", "the first rank collects"])
def test_two_ranks_share_jobs_out_and_all_have_the_results(num_envs):
    raw = compose([*POLE, "hardware=2cpu", *NORMAL, f"num_envs={num_envs}"]).raw
    (first, progress, moments), (second, same, alike) = ranks(2)(on_a_rank, raw)
    assert progress == same
    assert progress["episodes"] >= 6
    assert equal(moments, alike)
    for a, b in zip(first, second, strict=True):
        assert equal(a, b)
    alone = compose([*POLE, *NORMAL, f"num_envs={num_envs}"])
    with closing(build(alone, Path())) as trainer:
        trainer.collect()
        whole = played(trainer, *(Job(k, episodes=1 + k, mode="explore") for k in range(3)))
    for a, b in zip(first, whole, strict=True):
        assert a["length"].tolist() == b["length"].tolist()
        torch.testing.assert_close(a["obs"], b["obs"])


@pytest.mark.parametrize(("words", "episodes"), [(POLE, 40), (NOISY, 3)], ids=["cartpole", "pendulum"])
def test_an_evaluation_is_what_segments_of_its_columns_sum_up_to(words, episodes):
    """To the last bit: 32 columns at most, each with a quota, and sums segment by segment."""
    with closing(made(*words, f"eval.episodes={episodes}")) as trainer:
        evaluator = trainer.reports.evaluation.evaluator
        entropy, columns = np.random.SeedSequence([trainer.ctx.seed, EVALUATION, 11]), min(episodes, 32)
        policy, seeds = (evaluator.begin(), trainer.algorithm, trainer.ctx), entropy.generate_state(columns).tolist()
        collector = make_shard(*policy, evaluator.shard, seeds, keys=(), normalize=trainer.policy.normalize)
        left, counted, found = np.bincount(np.arange(episodes) % columns), EpisodeStats(columns), []
        while left.any():
            counted.add(collector.collect(32, "greedy"))
            for total, length, column in counted.drain():
                if left[column]:
                    left[column] -= 1
                    found.append((total, length))
        played = evaluator.play(evaluator.job, 11)
        assert list(zip(played["return"].tolist(), played["length"].tolist(), strict=True)) == found


def test_a_task_is_refused_where_there_are_none():
    """Also where the environment would pass over it."""
    with closing(made(*NUMBERED)) as trainer, pytest.raises(ConfigError, match=NO_TASKS):
        played(trainer, Job(0), Job(3, task=1.0))


def test_tasks_are_those_of_every_column():
    with closing(made(*NUMBERED)) as trainer:
        given = []
        jobs = trainer.collector.jobs
        make, jobs.ctx.spec = jobs.make, replace(jobs.ctx.spec, extras={"task": Discrete(2)})

        def spied(shard):
            env = make(shard)
            reset = env.reset
            env.reset = lambda seeds, tasks=None: given.append(tasks) or reset(seeds)
            return env

        jobs.make = spied
        played(trainer, Job(0, task={"goal": torch.tensor([1.0, 2.0])}, episodes=3))
    (tasks,) = given
    assert tree.map(lambda x: x.tolist(), tasks) == {"goal": [[1.0, 2.0]] * 3}


@pytest.mark.parametrize("episodes", [1, 31, 33, 65, 2**63 - 1])
def test_a_jobs_episodes_are_divided_among_its_columns(episodes):
    shard, each = share_of(Job(0, episodes=episodes), "eval")
    assert len(each) == shard.num_envs == min(episodes, 32)
    assert sum(each.tolist()) == episodes
    assert max(each) - min(each) <= 1
