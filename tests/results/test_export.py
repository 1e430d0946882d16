"""Exports: what they compute without rlplug, what their manifests say, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import nn

from rlplug import compose, load
from rlplug.cli import main
from rlplug.envs.spaces import execute
from rlplug.results import export as module
from rlplug.results.export import FILES, LIMIT, export, exported, replayed, write
from rlplug.results.export_policy import Policy, _Native
from rlplug.results.export_record import Record, record
from rlplug.run.launch import train
from rlplug.testing.checks.matrix import Cell
from rlplug.testing.checks.runs import play
from rlplug.types import ConfigError, RunError

TINY = ("hardware=cpu", "logger=[]", "eval.every=0", "eval.episodes=1", "tuned=none")
PPO = (*TINY, "algo=ppo", "num_envs=2", "total_steps=128", "rollout_fragment_length=64", "algo.sgd_minibatch_size=64")
CELLS = (
    Cell("ppo", "dict", "multi_discrete+mask", recurrence="lstm", normalization="all"),
    Cell("ppo", "vector", "discrete+mask", normalization="all"),
    Cell("sac", "vector", "box", normalization="all"),
    Cell("ppo", "tuple", "multi_binary", recurrence="gru"),
    Cell("dqn", "image", "discrete"),
    Cell("dreamerv3", "vector", "multi_discrete"),  # its carry has choices, too
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "ppo"
    train(
        compose([*PPO, "env=cartpole", "model=gru", "algo.vf_share_layers=true", "preprocess.normalize_obs=true"]),
        folder,
    )
    return folder


def trained(cell):
    """A run after an update."""
    trainer = cell.build()
    play(trainer, 1)
    return trainer, Policy(trainer.algorithm, trainer.ctx, trainer.learner.normalizer)


def played(trainer, policy, steps):
    env, ctx = trainer.config.env, trainer.ctx
    return record(policy, ctx, lambda shard: env.build(ctx.derive(shard=shard)), steps)


@pytest.mark.parametrize("cells", [CELLS[:1], pytest.param(CELLS[1:], marks=pytest.mark.slow)], ids=["quick", "long"])
def test_exports_replay_what_was_recorded(cells, tmp_path):
    """All of them in one process without rlplug. The kit exports every algorithm and model, but not as ONNX."""
    recorded, outputs = dict[Path, Record](), dict[Path, list[str]]()
    for number, cell in enumerate(cells):
        trainer, policy = trained(cell)
        program, steps = exported(policy), played(trainer, policy, 100)
        for format in ("onnx", "torch"):
            path = tmp_path / f"{number}-{FILES[format]}"
            write(program, policy, path)
            recorded[path], outputs[path] = steps, [x.name for x in policy.outputs]
        if cell.recurrence == "lstm":
            assert "value" in trainer.algorithm.initial_carry(1)  # the critic has one of its own, which stays at home
            assert [name for name in outputs[path] if "carry" in name] == [f"next_carry.policy.{x}" for x in "hc"]
            assert not [name for name in program.state_dict if "value" in name]
        if cell == cells[0]:  # normalization is in the export: with another, the replay differs
            wrong = tmp_path / "wrong.pt2"
            with torch.no_grad():
                for moments in trainer.learner.normalizer.obs.values():
                    moments.mean += 1.0
            write(exported(policy), policy, wrong)
        trainer.close()
    found = replayed(recorded)
    assert ["onnxruntime" in of["runtime"] for of in found] == [True, False] * len(cells)
    for of, path in zip(found, recorded, strict=True):
        assert of["largest_difference"] <= LIMIT, path.name
        assert {*of["by_output"]} == {*outputs[path]}
        assert (of["steps"], of["limit"]) == (100, LIMIT)
    with pytest.raises(RunError, match=r"wrong.pt2 differs from the policy by .* in '.*', in 100 steps; at most"):
        replayed({wrong: recorded[tmp_path / f"0-{FILES['torch']}"]})


def test_a_folder_with_policy_and_manifest(run, capfd):
    assert main(["export", str(run), "--steps", "50"]) == 0
    assert "replayed    50 steps of " in capfd.readouterr().out
    (folder,) = (run / "exports").glob("onnx-*")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "policy.onnx"]
    assert manifest["files"] == {"policy.onnx": (folder / "policy.onnx").stat().st_size}
    session = onnxruntime.InferenceSession(folder / "policy.onnx")
    for name, of in (("inputs", session.get_inputs()), ("outputs", session.get_outputs())):
        assert [(x["name"], x["shape"][1:]) for x in manifest[name]] == [(x.name, x.shape[1:]) for x in of]
    assert [x["name"] for x in manifest["inputs"]] == ["obs", "is_first", "carry.policy.h"]
    assert [x["name"] for x in manifest["outputs"]] == ["action", "next_carry.policy.h", "scores"]
    assert manifest["outputs"][0]["meaning"] == "action as the environment takes it, in its units: Discrete(2)"
    assert (manifest["algo"], manifest["env"]["id"]) == ("ppo", "CartPole-v1")
    assert folder.name == f"onnx-{manifest['env_steps']}"
    assert 0 < manifest["env_steps"] <= 128
    assert 0 <= manifest["replay"]["largest_difference"] <= 1e-5
    assert manifest["replay"]["episodes"] > 1

    # several environments at once act as load().act does, also where an episode ends
    agent = load(run)
    carry = np.zeros((3, *manifest["inputs"][2]["shape"][1:]), np.float32)
    first, random = np.ones(3, np.bool_), np.random.default_rng(0)
    for t in range(10):
        obs = random.normal(size=(3, 4)).astype(np.float32)
        action, carry, _ = session.run(None, {"obs": obs, "is_first": first, "carry.policy.h": carry})
        np.testing.assert_array_equal(action, agent.act(obs))
        first = np.array([False, t == 4, False])
        agent.reset(ended=first)


def test_an_export_is_replaced_and_torch_loads_in_a_bare_process(run, tmp_path):
    to = tmp_path / "there"
    for _ in range(2):
        found = export(run, "torch", to, steps=20)
    assert found["folder"] == str(to)
    script = (
        "import sys, torch; module = torch.export.load(sys.argv[1]).module();"
        "out = module({'obs': torch.zeros(5, 4), 'is_first': torch.ones(5, dtype=torch.bool),"
        " 'carry.policy.h': torch.zeros(5, int(sys.argv[2]))});"
        "assert 'rlplug' not in sys.modules; print(*out['action'].shape)"
    )
    width = found["inputs"][2]["shape"][1]
    command = [sys.executable, "-I", "-c", script, str(to / "policy.pt2"), str(width)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "5\n"
    weights = torch.export.load(to / "policy.pt2").state_dict
    assert not [name for name in weights if "value" in name]  # the critic stays at home


@pytest.mark.parametrize(
    "space",
    [
        Box(-2.0, 3.0, (2,), np.float32),
        Box(np.array([-1.0, -np.inf]), np.array([5.0, np.inf]), dtype=np.float64),
        Box(-np.inf, np.inf, (2,), np.float32),
        Discrete(3, start=-1),
        MultiDiscrete([3, 2], start=[1, 5]),
        MultiBinary(2),
    ],
    ids=str,
)
def test_actions_are_the_environments(space):
    inside = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32) * 2
    if not isinstance(space, Box):
        inside = np.abs(inside.round()).astype(np.int64)[:, 0 if isinstance(space, Discrete) else slice(None)]
    ours, expected = _Native(space)(torch.from_numpy(inside)).numpy(), execute(space)(inside)
    assert ours.dtype == expected.dtype
    np.testing.assert_allclose(ours, expected, rtol=1e-7)


def test_observations_that_count_from_another_number(tmp_path):
    """The environment's own numbers are the inputs."""
    trainer, policy = trained(Cell("ppo", "discrete", "discrete"))
    policy.starts = {"obs": 3}
    recorded = played(trainer, policy, 30)
    assert recorded.inputs["obs"].min() >= 3
    path = tmp_path / "policy.pt2"
    write(exported(policy), policy, path)
    assert replayed({path: recorded})[0]["largest_difference"] <= LIMIT
    trainer.close()


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--format", "tflite"], "--format tflite: one of onnx, torch, html"),
        (["--steps", "0"], "--steps 0: at least 1"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'; see rlplug export --help"),
        (["--fast"], "unrecognized arguments: --fast; see rlplug export --help"),
        (["seed=1"], "seed: cannot be changed: an export may change env only"),
        (["env=pendulum"], "env: is not what the policy was trained on: "),
    ],
)
def test_wrong_command_lines(run, words, says, capfd):
    assert main(["export", str(run), *words]) == 2
    printed = capfd.readouterr().err
    assert f"rlplug: {says}" in printed
    assert len(printed.splitlines()) == 1


def test_a_folder_that_is_no_run_or_no_export(run, tmp_path, capfd):
    assert main(["export", str(tmp_path)]) == 2
    assert main(["export"]) == 2
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["export", str(run), "--to", str(tmp_path)]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[1] == "rlplug: export takes a run folder or a checkpoint first; see rlplug export --help"
    assert lines[2] == f"rlplug: --to {tmp_path}: it is there, and holds no export; choose another folder"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_missing_packages_are_one_line_before_anything(run, monkeypatch, tmp_path):
    monkeypatch.setattr("rlplug.results.onnx.find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(ConfigError, match=r"needs onnxscript: pip install 'rlplug\[export\]'"):
        export(run, "onnx", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_above_the_limit_nothing_is_written(run, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "LIMIT", 0.0)
    monkeypatch.setattr(replayed, "__defaults__", (-1.0,))
    with pytest.raises(RunError, match="nothing was written"):
        export(run, "torch", tmp_path / "x", steps=10)
    assert list(tmp_path.iterdir()) == []


class Decomposes(nn.Module):
    """Computes scores that ONNX has no operator for."""

    def forward(self, x):
        return torch.linalg.svd(x[:, :, None] * x[:, None, :])[1]


class Reads(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


class Measures(nn.Module):
    def forward(self, x):
        return x * torch.ones(len(x), 1)


class Leaves(nn.Module):
    def forward(self, x):
        return torch.from_numpy(np.tanh(x.numpy()))


@pytest.mark.parametrize(
    ("layer", "format", "says"),
    [
        (Decomposes(), "onnx", r"to ONNX: ONNX has no operator for aten\.\w*svd\w*; take --format torch, or another"),
        (Reads(), "torch", r"test_export\.py, line \d+, `return x if x.sum\(\).item\(\) > 0 else -x`"),
        (Measures(), "torch", r"fixes the size of the batch, as len\(x\) does; take x.shape\[0\]"),
        (Leaves(), "torch", r"test_export\.py, line \d+, `return torch.from_numpy\(np.tanh\(x.numpy\(\)\)\)`"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_what_cannot_be_exported_names_the_operation(layer, format, says, tmp_path):
    trainer = Cell("ppo", "vector", "box").build()
    policy = Policy(trainer.algorithm, trainer.ctx, layer)
    with pytest.raises(ConfigError, match=says) as caught:
        write(exported(policy), policy, tmp_path / FILES[format])
    assert str(caught.value).startswith("the policy cannot be exported")
    assert "\n" not in str(caught.value)
    trainer.close()


def test_a_policy_that_plans_with_a_simulator_is_refused(tmp_path):
    words = ["algo=alphazero", "env=knapsack", "tuned=none", "num_envs=2", "rollout_fragment_length=4"]
    words += [
        "total_steps=8",
        "replay_ratio=0.5",
        "algo.num_simulations=2",
        "eval.episodes=2",
        "logger=[]",
        "hardware=cpu",
    ]
    train(compose(words), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"^algo: the policy plans with a simulator .*; act in Python with "):
        export(tmp_path / "run")
    assert not (tmp_path / "run" / "exports").exists()
    with pytest.raises(ConfigError, match=r"config\.yaml/x cannot be written$"):
        export(tmp_path / "run", to=tmp_path / "run" / "config.yaml" / "x")
