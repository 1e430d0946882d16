"""``algo.n_step=[low, high]`` draws a number of rewards for each sample, in every algorithm with n-step targets."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlplug.config import compose
from rlplug.functional import sequences
from rlplug.run.build import build
from rlplug.run.launch import resume, train
from rlplug.testing.comparing import differences_of_runs
from rlplug.types import ConfigError

SMALL = ("model.hidden=[8]", "tuned=none", "hardware=cpu", "logger.only=[]", "eval.every=0", "eval.episodes=1")
REPLAY = ("num_steps_sampled_before_learning_starts=30", "train_batch_size=64", "log.every=1000")
RECURRENT = ("model=lstm", "model.hidden=8", "model.torso.hidden=[8]", "buffer=sequence")
RECURRENT = (*RECURRENT, "algo.sequence_length=4", "algo.stride=2", "algo.burn_in=1", *SMALL[1:])
RUNS = {
    "dqn": ("algo=dqn", "env=cartpole", "algo.hiddens=[8]", *SMALL),
    "dqn, recurrent": ("algo=dqn", "env=cartpole", "algo.hiddens=[8]", *RECURRENT),
    "td3": ("algo=td3", "env=pendulum", *SMALL),
    "sac": ("algo=sac", "env=pendulum", *SMALL),
    "qmix": (
        *("algo=qmix", "env=spread_torch", "env.max_episode_steps=10", "model.hidden=8", "model.torso.hidden=[8]"),
        *SMALL[1:],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_numbers_are_drawn_uniformly_for_each_sample(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: list[torch.Tensor] = []
    limit = sequences.drawn_steps

    def noted(n, valid, draw, lead=1):
        def noting(high, count):
            drawn.append(n[0] + draw(high, count))
            return drawn[-1] - n[0]

        return limit(n, valid, draw and noting, lead)

    monkeypatch.setattr(sequences, "drawn_steps", noted)
    words = [*RUNS[name], *REPLAY, "algo.n_step=[2,4]", "total_steps=100"]
    with closing(build(compose(words), tmp_path)) as trainer:
        if name != "qmix":  # it has whole episodes
            assert trainer.ctx.needs.window.length == 4 + 3 * ("recurrent" in name)
        trainer.loop.run(trainer)
        assert trainer.progress.updates > 1
    assert len(drawn) == trainer.progress.updates
    assert all(len(one) == 64 for one in drawn)
    assert not torch.equal(drawn[0], drawn[1])
    counts = torch.cat(drawn).bincount()
    total = counts.sum().item()
    assert counts.tolist() == [0, 0, *[pytest.approx(total / 3, abs=5 * total**0.5)] * 3]


def test_a_run_with_a_range_resumes_exactly(tmp_path: Path):
    words = [*RUNS["dqn"], *REPLAY, "algo.n_step=[1,5]", "checkpoint.keep_best=0"]
    train(compose([*words, "total_steps=80"]), tmp_path / "one")
    train(compose([*words, "total_steps=50"]), tmp_path / "two")
    resume(tmp_path / "two", ["total_steps=80"], lambda _: None)
    assert differences_of_runs(tmp_path / "one", tmp_path / "two") == []


@pytest.mark.slow
def test_a_compiled_run_draws_the_same(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    words = [*RUNS["dqn"], *REPLAY, "algo.n_step=[1,5]", "total_steps=80"]
    for compiled in ("off", "max"):
        train(compose([*words, f"compile={compiled}"]), tmp_path / compiled)
    assert "could not be compiled" not in capfd.readouterr().err
    found = differences_of_runs(tmp_path / "off", tmp_path / "max")
    assert not [name for name in found if "generators" in name]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[5,1]", "algo.n_step: [5, 1] is no range; the first number should be the smaller one"),
        ("[0,3]", "algo.n_step[0]: 0 is out of range: should be greater than 0"),
        ("[1,2,3]", "algo.n_step: [1, 2, 3] is out of range: should have at most 2 items"),
        ("[2]", "algo.n_step[1]: is missing"),
        ("[1,2.5]", "algo.n_step[1]: 2.5 has the wrong type: should be a valid integer"),
        ("0", "algo.n_step: 0 is out of range: should be greater than 0"),
    ],
)
@pytest.mark.parametrize("name", ["dqn", "qmix"])
def test_refused(name: str, value: str, message: str, tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        build(compose([*RUNS[name], f"algo.n_step={value}"]), tmp_path)
    assert str(refused.value) == message
