"""``loop=episodes``: on-policy algorithms learn from whole episodes of the newest weights."""

import pytest
from torch.testing import assert_close

import rlplug
from rlplug.config import compose
from rlplug.plugins.algo.a2c import A2C
from rlplug.plugins.algo.ppo import PPO
from rlplug.run.build import build
from rlplug.testing import conformance
from rlplug.testing.rank_pool import ranks
from rlplug.types import ConfigError
from tests.plugins.test_maml import assert_close as assert_same
from tests.plugins.test_maml import updated

SMALL = ["env=cartpole", "tuned=none", "hardware=cpu", "logger.only=[]", "eval.every=0", "checkpoint.every=0"]
SMALL += [
    "model.hidden=[8]",
    "num_envs=2",
    "rollout_fragment_length=32",
    "loop=episodes",
    "loop.episodes=3",
    "loop.jobs=1",
]
RUNS = {"ppo": (PPO, ["algo.sgd_minibatch_size=32", "algo.num_sgd_iter=2"]), "a2c": (A2C, [])}


@pytest.mark.parametrize("model", ["mlp", "lstm"])
@pytest.mark.parametrize("algo", RUNS)
def test_every_update_gets_whole_episodes_of_the_newest_weights(algo, model, tmp_path, monkeypatch):
    cls, words = RUNS[algo]
    batches, prepare = [], cls.prepare

    def seen(self, batch):
        batches.append(batch)
        if "logp" in batch:
            valid = batch["valid"]
            assert_close(self.logp(batch)[valid], batch["logp"][valid], rtol=1e-4, atol=1e-5)
        return prepare(self, batch)

    monkeypatch.setattr(cls, "prepare", seen)
    small = [word for word in SMALL if model == "mlp" or not word.startswith("model")]
    lstm = ["model=lstm", "model.hidden=8"] if model == "lstm" else []
    words = [f"algo={algo}", *small, *words, *lstm, "total_steps=300", "compile=off"]
    steps = rlplug.train(words, folder=tmp_path).summary["env_steps"]
    assert len(batches) > 1
    for batch in batches:
        valid = batch["valid"]
        lengths = valid.sum(0)
        assert len(valid) == lengths.max() + 1
        assert lengths.sum() >= 2 * 32
        assert valid.shape[1] % 3 == 0
        assert (valid.cummin(0).values == valid).all()
        assert batch["is_first"][0].all()
        assert batch["is_first"].sum() == valid.shape[1]
        last = (batch["terminated"] | batch["truncated"]).gather(0, lengths.unsqueeze(0) - 1)
        assert last.all()
    assert steps == sum(int(batch["valid"].sum()) for batch in batches)


def test_it_is_a_sound_loop_that_resumes_exactly():
    conformance.check_component("loop", "episodes")


def test_several_jobs_are_one_batch(tmp_path, monkeypatch):
    sizes, prepare = [], A2C.prepare
    monkeypatch.setattr(A2C, "prepare", lambda self, b: sizes.append(b["valid"].shape[1]) or prepare(self, b))
    rlplug.train(["algo=a2c", *SMALL, "loop.jobs=2", "total_steps=100", "compile=off"], folder=tmp_path)
    assert sizes
    assert all(size % 6 == 0 for size in sizes)


def test_two_ranks_make_the_updates_of_one():
    """Several rounds of jobs make a batch, and minibatches are shuffled over all of it."""
    words = ["algo=ppo", *SMALL, *RUNS["ppo"][1], "rollout_fragment_length=128", "loop.jobs=2", "compile=off"]
    alone = updated(None, compose(words).raw)
    for one in ranks(2)(updated, compose([*words, "hardware=2cpu"]).raw):
        assert_same(alone, one, atol=1e-5, rtol=1e-4)


def test_bad_input(tmp_path):
    said = r"^loop: episodes plays whole episodes for algorithms that learn from rollouts, but DQN does not; use loop="
    with pytest.raises(ConfigError, match=said):
        build(compose(["algo=dqn", *SMALL]), tmp_path)
