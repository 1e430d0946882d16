"""A trainer's state, into a trainer that is not quite the same."""

import re
from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlplug import tree
from rlplug.api import Plan
from rlplug.checkpointing.format import Checkpoint, folder_of, write
from rlplug.config import compose, parse
from rlplug.run.build import build
from rlplug.run.callbacks import capture, restore
from rlplug.testing.checks.resume import check_resumes
from rlplug.testing.checks.runs import Case
from rlplug.testing.rank_pool import ranks
from rlplug.types import CheckpointError

SMALL = ["env=cartpole", "logger.only=[]", "model.hidden=[8]", "num_envs=2", "rollout_fragment_length=16"]
SMALL += ["algo.sgd_minibatch_size=8"]


@pytest.fixture
def saved(tmp_path):
    """A trainer after one update, what it captured, and what writes that."""
    with closing(build(compose(SMALL), tmp_path)) as trainer:
        trainer.collect()
        trainer.update()
        snapshot = capture(trainer)
        yield trainer, snapshot, lambda: Checkpoint(write(folder_of(tmp_path, trainer.progress.env_steps), snapshot))


def test_another_kind_of_device_draws_anew_and_says_so(saved, tmp_path):
    before, snapshot, written = saved
    snapshot.trees["rank0"]["context"]["device"] = "cuda"
    snapshot.trees["rank0"]["context"]["generators"] = {
        role: torch.zeros(16, dtype=torch.uint8) for role in before.ctx.generators
    }
    with closing(build(compose(SMALL), tmp_path)) as trainer:
        fresh = {role: generator.get_state() for role, generator in trainer.ctx.generators.items()}
        assert restore(trainer, written()) == ["random numbers: cuda drew them before, and cpu draws others"]
        assert not any(torch.equal(fresh[role], g.get_state()) for role, g in trainer.ctx.generators.items())
        trainer.collect()
        assert trainer.progress.env_steps > before.progress.env_steps


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (["env=acrobot"], "is of another environment: the observation space was Box"),
        (["model.hidden=[9]"], "does not fit what is installed and configured now: .*PPO"),
    ],
    ids=["spaces", "network"],
)
def test_the_state_of_something_else_is_refused(saved, tmp_path, other, words):
    _, _, written = saved
    with closing(build(compose([*SMALL, *other]), tmp_path)) as trainer, pytest.raises(CheckpointError, match=words):
        restore(trainer, written())


@pytest.mark.parametrize(
    ("option", "value"), [("maximize", 0), ("eps", [1e-5]), ("weight_decay", "0"), ("betas", [0.9, "1"])]
)
def test_options_of_an_optimizer_keep_their_types(saved, tmp_path, option, value):
    _, snapshot, written = saved
    found = [leaf for path, leaf in tree.items(snapshot.trees["learner"]) if path[-1] == "param_groups"]
    assert found
    for group in found[0]:
        group[option] = value
    with (
        closing(build(compose(SMALL), tmp_path)) as trainer,
        pytest.raises(CheckpointError, match=re.escape(f"{option} of an optimizer is {value!r}")),
    ):
        restore(trainer, written())


@pytest.mark.parametrize("value", [None, {"eval/return_mean": "x"}, {"eval/return_mean": None}])
@pytest.mark.parametrize("of", ["evaluation", "estimation"])
def test_results_of_a_measurement_are_numbers(saved, tmp_path, of, value):
    _, snapshot, written = saved
    snapshot.trees["learner"][of]["latest"] = value
    with closing(build(compose(SMALL), tmp_path)) as trainer, pytest.raises(CheckpointError, match="not fit"):
        restore(trainer, written())


@pytest.mark.parametrize("value", [3, [3], [{"a": "x"}]])
def test_metrics_of_callbacks_are_numbers(saved, tmp_path, value):
    _, snapshot, written = saved
    snapshot.trees["rank0"]["callbacks"]["metrics"] = value
    with closing(build(compose(SMALL), tmp_path)) as trainer, pytest.raises(CheckpointError, match="not fit"):
        restore(trainer, written())


def test_a_schedule_that_is_acted_by_stands_where_it_stood():
    noise = "exploration.gaussian.std=[[0,0.1],[100,0.01]]"  # moved by updates, and read before the next one
    early = "num_steps_sampled_before_learning_starts=20"
    check_resumes(Case("sac", "pendulum"), "exploration=[gaussian]", noise, early, "model.hidden=[8]", updates=50)


def test_rollouts_that_were_played_ahead_resume():
    """Two rounds are ordered at a time, with weights that serve for three: what was played ahead is saved."""
    ahead = ("loop.in_flight=2", "loop.broadcast_interval=3", "rollout_fragment_length=4")
    early = "num_steps_sampled_before_learning_starts=20"
    check_resumes(Case("sac", "pendulum"), *ahead, early, "model.hidden=[8]", updates=50)


def test_stacks_of_images_and_priorities_resume():
    pytest.importorskip("ale_py")
    pytest.importorskip("lz4")
    words = ["buffer=prioritized", "buffer.capacity=500", "buffer.compress=lz4", "algo.n_step=3"]
    early = ["num_steps_sampled_before_learning_starts=20", "train_batch_size=8"]
    tiny = ["model=nature_cnn", "model.hidden=[8]", "env.vectorization=list"]
    check_resumes(Case("dqn", "pong"), *words, *early, *tiny, updates=20)


def test_capturing_changes_nothing_and_shares_no_memory(saved):
    trainer, snapshot, _ = saved
    again = capture(trainer)
    weights = {name: leaf.clone() for name, leaf in snapshot.trees["weights"]["algorithm"].items()}
    assert all(torch.equal(leaf, weights[name]) for name, leaf in again.trees["weights"]["algorithm"].items())
    trainer.collect()
    trainer.update()
    assert all(torch.equal(leaf, weights[name]) for name, leaf in snapshot.trees["weights"]["algorithm"].items())
    moved = trainer.algorithm.state_dict()
    assert not all(torch.equal(leaf, weights[name]) for name, leaf in moved.items())


def through_a_checkpoint(fabric, raw, folder):
    """Discounted returns of this rank's environments, before and after."""
    plan, path = Plan("cpu", fabric.world_size), folder_of(Path(folder), 1)
    with closing(build(parse(raw), Path(folder), fabric, plan)) as before:
        before.collect()
        write(path, capture(before))
    with closing(build(parse(raw), Path(folder), fabric, plan)) as after:
        restore(after, Checkpoint(path))
    return before.policy.normalizer.returns, after.policy.normalizer.returns


def test_every_rank_goes_on_with_the_returns_of_its_own_environments(tmp_path):
    words = ["env=pendulum", "preprocess.normalize_reward=true", *SMALL[1:3], "num_envs=4"]
    answers = ranks(2)(through_a_checkpoint, compose([*words, *SMALL[4:]]).raw, str(tmp_path))
    assert all(torch.equal(before, after) for before, after in answers)
    assert not torch.equal(answers[0][0], answers[1][0])


def names_of(fabric, raw, folder):
    """The name of the run, and of the files that this rank writes down."""
    with closing(build(parse(raw), Path(folder), fabric, Plan("cpu", fabric.world_size))) as trainer:
        return trainer.reports.identity, trainer.reports.recorder.files.name


def test_the_ranks_of_a_run_write_files_of_one_name(tmp_path):
    """So that a run that is continued by the name in its checkpoint deletes what each rank wrote after it."""
    words = [*SMALL, f"record.path={tmp_path / 'data'}"]
    (first, one), (second, other) = ranks(2)(names_of, compose(words).raw, str(tmp_path))
    assert first == second
    assert (one, other) == (f"{first[:12]}-0", f"{first[:12]}-1")
