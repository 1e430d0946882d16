"""Pages: their environments step as Gymnasium's do, and the policy plays in a browser as ``evaluate`` says."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from rlplug import compose
from rlplug.results import page
from rlplug.results.evaluate import evaluate
from rlplug.results.export import export
from rlplug.run.launch import train
from rlplug.types import ConfigError
from tests.tools.browser import CHROMIUM, look

NODE = shutil.which("node")
RUNTIME = os.environ.get("RLPLUG_TEST_ONNXRUNTIME_WEB")
"""the npm package, a .tgz; without it, the browser has nothing to run a policy with"""
PLAIN = compose(["env=cartpole"]).raw["env"]
ENVS = [
    ("CartPole-v1", {}),
    ("CartPole-v1", {"sutton_barto_reward": True}),
    ("Pendulum-v1", {"g": 9.81}),
    ("MountainCar-v0", {}),
    ("MountainCarContinuous-v0", {}),
    ("Acrobot-v1", {}),
    ("FrozenLake-v1", {"is_slippery": False}),
    ("FrozenLake-v1", {}),
    ("CliffWalking-v1", {}),
]
STEPS = """
const fs = require("fs");
const [about, actions, state] = JSON.parse(fs.readFileSync(0));
const make = new Function(`${fs.readFileSync(process.argv[1])}; return makeEnvironment`)();
const env = make(about);
env.reset(Math.random);
env.state = state;
const rows = [];
for (const [action, uniform] of actions) {
  env.random = () => uniform;
  const [reward, terminated] = env.step(action);
  rows.push([Array.from(env.observe()), reward, terminated]);
}
console.log(JSON.stringify(rows));
"""


class Drawn:
    """Returns a given number where Gymnasium draws a uniform one."""

    def random(self):
        return self.next


@pytest.mark.skipif(NODE is None, reason="needs node")
@pytest.mark.parametrize(("name", "kwargs"), ENVS, ids=str)
def test_environments_step_as_gymnasiums(name, kwargs):
    about = page.environment({**PLAIN, "id": name, "kwargs": kwargs}, ["obs"], 500)
    env = gymnasium.make(name, **kwargs).unwrapped
    env.reset(seed=3)
    env.action_space.seed(3)
    random, grid = np.random.default_rng(3), about["class"] == "Grid"
    start, drawn = (int(env.s) if grid else np.asarray(env.state, np.float64).tolist()), Drawn()
    actions, expected = [], []
    for t in range(150):
        action = int(t // 15 % 3) if name in ("MountainCar-v0", "Acrobot-v1") else env.action_space.sample()
        drawn.next = random.random()
        actions.append([np.asarray(action).tolist(), drawn.next])
        if grid:
            env.np_random = drawn
        obs, reward, terminated, *_ = env.step(action)
        expected.append((np.atleast_1d(obs).astype(np.float32), float(reward), bool(terminated)))
        if terminated:
            break
    script = str(page.ASSETS / "environments.js")
    assert NODE is not None
    given = json.dumps([about, actions, start])
    done = subprocess.run([NODE, "-e", STEPS, script], input=given, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found) == len(expected) > 2
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
        assert ours[1] == pytest.approx(theirs[1], rel=1e-6)
        assert ours[2] is theirs[2]
    assert len({tuple(row[0]) for row in found}) > 1


@pytest.mark.skipif(NODE is None, reason="needs node")
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "Acrobot-v1", "FrozenLake-v1"])
def test_first_states_are_distributed_as_gymnasiums(name):
    script = """
    const about = JSON.parse(require("fs").readFileSync(0));
    const make = new Function(`${require("fs").readFileSync(process.argv[1])}; return makeEnvironment`)();
    const env = make(about), rows = [];
    for (let i = 0; i < 4000; i++) { env.reset(Math.random); rows.push(Array.from(env.observe())); }
    console.log(JSON.stringify(rows));
    """
    about = page.environment({**PLAIN, "id": name}, ["obs"], 500)
    given = [NODE, "-e", script, str(page.ASSETS / "environments.js")]
    done = subprocess.run(given, input=json.dumps(about), capture_output=True, text=True, check=True)
    ours = np.array(json.loads(done.stdout))
    env = gymnasium.make(name).unwrapped
    theirs = np.array([np.atleast_1d(env.reset(seed=i)[0]) for i in range(4000)], np.float64)
    for which in (np.mean, np.std):
        error = 6 * theirs.std(0) / math.sqrt(len(theirs)) + 1e-12
        assert (np.abs(which(ours, 0) - which(theirs, 0)) <= error).all()


@pytest.mark.parametrize(
    ("change", "inputs", "says"),
    [
        ({"id": "Taxi-v4"}, ["obs"], "--format html plays CartPole, .* and not env=Taxi-v4; take onnx"),
        ({"frame_stack": 4}, ["obs"], "env.frame_stack: is not played by --format html; take onnx"),
        ({"name": "minigrid"}, ["obs"], "--format html plays"),
        ({}, ["obs", "action_mask"], "env.mask_key: --format html plays environments without masks"),
    ],
)
def test_environments_that_no_page_plays(change, inputs, says):
    with pytest.raises(ConfigError, match=says):
        page.environment(PLAIN | change, inputs, None)


def test_the_runtime_is_a_package_of_npm(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is no npm package onnxruntime-web: No such file"):
        page.runtime(tmp_path / "missing.tgz")
    (tmp_path / "a.tgz").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="is no npm package onnxruntime-web"):
        page.runtime(tmp_path / "a.tgz")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://127.0.0.1:9/")
    with pytest.raises(ConfigError, match=r"onnxruntime-web-.*tgz cannot be downloaded .*; --runtime <file> takes it"):
        page.runtime()
    registry = tmp_path / "registry" / "onnxruntime-web" / "-"
    registry.mkdir(parents=True)
    name = f"onnxruntime-web-{page.VERSION}.tgz"
    (registry / name).write_bytes(b"forged")
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", (tmp_path / "registry").as_uri())
    with pytest.raises(ConfigError, match="is not the package that was published"):
        page.runtime()
    assert not (tmp_path / "cache").exists()


def test_the_runtime_is_downloaded_once(tmp_path, monkeypatch):
    import base64
    import hashlib

    registry = tmp_path / "registry" / "onnxruntime-web" / "-"
    registry.mkdir(parents=True)
    package = registry / f"onnxruntime-web-{page.VERSION}.tgz"
    with tarfile.open(package, "w:gz") as archive:
        for member in page.MEMBERS:
            (tmp_path / "member").write_text(member)
            archive.add(tmp_path / "member", member)
    digest = hashlib.sha512(package.read_bytes()).digest()
    monkeypatch.setattr(page, "INTEGRITY", base64.b64encode(digest).decode())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", (tmp_path / "registry").as_uri())
    first = page.runtime()
    package.unlink()
    assert page.runtime() == first == tuple(member.encode() for member in page.MEMBERS)


@pytest.mark.slow
@pytest.mark.skipif(RUNTIME is None or CHROMIUM is None, reason="needs RLPLUG_TEST_ONNXRUNTIME_WEB and a browser")
@pytest.mark.parametrize(
    ("words", "episodes"),
    [
        (["algo=ppo", "env=cartpole", "total_steps=8000", "preprocess.normalize_obs=true"], 60),
        (["algo=sac", "env=pendulum", "total_steps=5000"], 60),
        (["algo=ppo", "env=stateless_cartpole", "model=gru", "total_steps=8000"], 60),
        (["algo=dqn", "env=frozenlake", "total_steps=5000"], 400),
    ],
    ids=lambda x: "-".join(x[:2]) if isinstance(x, list) else "",
)
def test_a_policy_plays_in_a_browser_as_evaluated(words, episodes, tmp_path):
    train(compose([*words, "hardware=cpu", "logger=[]", "eval.every=0", "eval.episodes=1"]), tmp_path / "run")
    found = export(tmp_path / "run", "html", runtime=Path(RUNTIME or ""))
    expected = evaluate(tmp_path / "run", [f"eval.episodes={episodes}"])
    returns = look(
        Path(found["folder"]) / "index.html",
        "document.getElementById('result').dataset.returns",
        tmp_path / "profile",
        fragment=f"#episodes={episodes}",
        timeout_s=600,
    )
    returns = np.array(json.loads(returns))
    assert len(returns) == episodes
    mean, std = expected["eval/return_mean"], expected["eval/return_std"]
    print(f"{' '.join(words[:2])}: {returns.mean():.2f} ± {returns.std():.2f} in the browser, {mean:.2f} ± {std:.2f}")
    error = math.sqrt((std**2 + returns.std() ** 2) / episodes)
    assert abs(returns.mean() - mean) <= 3 * error + 1e-9
