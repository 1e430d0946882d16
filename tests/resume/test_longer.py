"""A finished run that is given more steps goes on as if it had been meant so from the start, and learns in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlplug.checkpointing.atomic import delete
from rlplug.checkpointing.format import Checkpoint, checkpoints, find
from rlplug.config import compose
from rlplug.run.launch import resume, train
from rlplug.testing.comparing import differences_of_runs
from rlplug.types import ConfigError
from tests.tools.kill import Process, warm_up

COMMON = [
    *("model.hidden=[8]", "tuned=none", "checkpoint.keep_best=0", "checkpoint.keep_last=99", "log.every=37"),
    *("eval.every=90", "eval.episodes=1", "hardware=cpu", "logger.only=[]"),
]
SAC = [
    *("algo=sac", "env=pendulum", "buffer.capacity=200", "train_batch_size=8", "checkpoint.every=110"),
    *("num_steps_sampled_before_learning_starts=50", *COMMON),
]
PPO = [
    *("algo=ppo", "env=cartpole", "num_envs=2", "rollout_fragment_length=16", "algo.sgd_minibatch_size=16"),
    *("algo.num_sgd_iter=1", "checkpoint.every=64", *COMMON),
]
TO_ZERO = "[[0,0.01],[${total_steps},0]]"
STRETCH = "schedules=stretch"


def silently(run: Path, *overrides: str) -> float | None:
    return resume(run, overrides, tell=lambda _: None)


def weights(run: Path) -> dict[str, Any]:
    return Checkpoint(find(run).path).tree("weights")["algorithm"]


def config(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose step size has fallen to 0."""
    folder = tmp_path_factory.mktemp("ppo") / "run"
    more = [f"algo.lr={TO_ZERO}", f"algo.entropy_coeff={TO_ZERO}", "algo.vf_loss_coeff=[[0,1],[64,0.5]]"]
    train(compose([*PPO, *more, "total_steps=128"]), folder)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def test_a_run_in_three_parts_is_one_run(tmp_path: Path):
    train(compose([*SAC, "total_steps=500"]), tmp_path / "one")
    train(compose([*SAC, "total_steps=200"]), tmp_path / "three")
    for total in (333, 500):
        assert silently(tmp_path / "three", f"total_steps={total}") is not None
    assert differences_of_runs(tmp_path / "one", tmp_path / "three") == []


REFUSED = {
    "lr": ([*PPO, f"algo.lr={TO_ZERO}"], ["algo.lr: is 0 from step 64 on"]),
    "one of two": ([*SAC, f"algo.actor_lr={TO_ZERO}", "algo.critic_lr=[[0,0.01],[64,1e-5]]"], ["algo.actor_lr: is 0 "]),
    "both": ([*SAC, f"algo.actor_lr={TO_ZERO}", f"algo.critic_lr={TO_ZERO}"], ["algo.actor_lr: ", "algo.critic_lr: "]),
    "of a module": ([*PPO, "exploration=[icm]", f"exploration.icm.lr={TO_ZERO}"], ["exploration.icm.lr: is 0 "]),
    "long before": ([*PPO, "algo.lr=[[0,0.01],[32,0]]"], ["algo.lr: is 0 from step 32 on"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_learn_nothing_is_refused(case: str, tmp_path: Path):
    overrides, messages = REFUSED[case]
    train(compose([*overrides, "total_steps=64"]), tmp_path / "run")
    before = (tmp_path / "run" / "manifest.json").read_bytes()
    with pytest.raises(ConfigError) as refused:
        silently(tmp_path / "run", "total_steps=128")
    found = sorted(str(refused.value).splitlines())
    assert [line.startswith(message) for line, message in zip(found, messages, strict=True)] == [True] * len(messages)
    assert (tmp_path / "run" / "manifest.json").read_bytes() == before


def test_the_refusal_names_both_ways(run: Path):
    said = (
        r"^algo\.lr: is 0 from step 128 on, so nothing is learned up to 300; add schedules=stretch, or set a "
        r"step size to continue with: algo\.lr=0\.001$"
    )
    with pytest.raises(ConfigError, match=said):
        silently(run, "total_steps=300")
    with pytest.raises(ConfigError, match=said):  # given, and no other
        silently(run, "total_steps=300", "algo.lr=[[0,0.01],[128,0]]")
    with pytest.raises(ConfigError, match=r"^schedules: 'shrink' is none of the options: should be 'stretch'$"):
        silently(run, "total_steps=300", "schedules=shrink")
    with pytest.raises(ConfigError, match=r"^algo\.gamma: cannot be changed: it changes what is learned"):
        silently(run, "total_steps=300", STRETCH, "algo.gamma=0.5")
    with pytest.raises(ConfigError, match=r"^algo\.lr: -1 is out of range"):
        silently(run, "total_steps=300", STRETCH, "algo.lr=-1")


WAYS = {
    STRETCH: {"algo.lr": [[0, 0.01], [256, 0]], "algo.entropy_coeff": [[0, 0.01], [256, 0]]},
    "algo.lr=0.001": {"algo.lr": 0.001},
}


@pytest.mark.parametrize("way", WAYS)
def test_both_ways_learn_and_stay(way: str, run: Path):
    before, told = weights(run), list[str]()
    resume(run, ["total_steps=256", way], tell=told.append)
    after = weights(run)
    assert [name for name in before if torch.equal(before[name], after[name])] == ["kl_coeff"]  # a buffer
    (noted,) = json.loads((run / "manifest.json").read_text())["resumed"]
    assert {key: value["to"] for key, value in noted["changed"].items() if key != "total_steps"} == WAYS[way]
    for key, value in WAYS[way].items():
        assert any(line.startswith(f"{key}: [") and line.endswith(f" -> {value}") for line in told), told
        assert config(run)["algo"][key.partition(".")[2]] == value
    assert config(run)["algo"]["vf_loss_coeff"] == [[0, 1], [64, 0.5]]  # which did not end with the run
    stays = [line for line in told if " stays at " in line]
    assert len(stays) == (way != STRETCH)
    assert all(line.startswith("algo.entropy_coeff stays at 0, where its schedule ended; ") for line in stays)

    (run / "summary.json").unlink()  # as if it had been killed after its last step
    silently(run)
    silently(run, "total_steps=256", way)  # the same command again
    assert config(run)["algo"]["lr"] == WAYS[way]["algo.lr"]
    if way == STRETCH:
        with pytest.raises(ConfigError, match=r"^algo\.lr: is 0 from step 256 on"):
            silently(run, "total_steps=512")


def test_there_has_to_be_something_to_stretch(run: Path):
    silently(run, "total_steps=256", "algo.lr=0.001", "algo.entropy_coeff=0")
    with pytest.raises(ConfigError, match=r"^schedules: none ends at total_steps=256; leave out schedules=stretch$"):
        silently(run, "total_steps=512", STRETCH)


@pytest.mark.parametrize("way", WAYS)
def test_an_extended_run_that_is_killed_goes_on_exactly(way: str, run: Path, tmp_path: Path):
    early, late = (Path(shutil.copytree(run, tmp_path / name, symlinks=True)) for name in ("early", "late"))
    silently(run, "total_steps=512", way)

    silently(early, "total_steps=512", way)  # killed before it has written a checkpoint
    for path in checkpoints(early):
        if Checkpoint(path).steps > 128:
            delete(path)
    (early / "summary.json").unlink()
    silently(early)
    assert differences_of_runs(run, early) == []

    warm_up(PPO)
    process = Process(late, changed=["total_steps=512", way])
    process.wait(lambda: Checkpoint(checkpoints(late)[0]).steps > 128)
    process.kill()
    silently(late)
    assert differences_of_runs(run, late) == []


def test_what_config_yaml_says_by_hand_is_refused_as_before(run: Path):
    raw = config(run)
    raw["algo"]["lr"] = 0.5
    (run / "config.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(
        ConfigError, match=r"^algo\.lr: was \[\[0, 0\.01\], \[128, 0\]\], and is 0\.5 in config\.yaml now"
    ):
        silently(run, "total_steps=256")
