"""Runs from Python: objects of a script, results, and sessions."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

import rlplug
from rlplug import hookimpl, script
from rlplug.checkpointing.format import checkpoints
from rlplug.cli.arguments import run_first
from rlplug.testing.comparing import differences_of_runs
from rlplug.types import ConfigError, RunError

SMALL: Any = {
    "algo": {"name": "ppo", "sgd_minibatch_size": 32, "num_sgd_iter": 1},
    "tuned": "none",
    "num_envs": 2,
    "rollout_fragment_length": 16,
    "total_steps": 128,
    "eval": {"episodes": 1, "every": 0},
    "log": {"every": 32},
    "checkpoint.every": 0,
    "logger.only": [],
    "hardware": "cpu",
    "compile": "off",
}


class Mine(CartPoleEnv):
    def __init__(self, gravity: float = 9.8, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.gravity = gravity


class Net(torch.nn.Module):
    def __init__(self, space: Any, size: int = 8) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(space.shape[0], size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Count:
    """A callback without ``state`` and ``load``: its attributes are its state."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.seen = dict[str, int]()

    def note(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    @hookimpl
    def rlplug_episode(self, run: Any, episode: Any) -> dict[str, float]:
        assert len(episode["obs"]) == episode["length"] + 1
        assert episode["reward"].sum() == episode["return"] == episode["length"]
        self.lengths.append(episode["length"])
        return {"odd": episode["length"] % 2}

    @hookimpl
    def rlplug_collected(self, segment: Any) -> None:
        self.note("segment")

    @hookimpl
    def rlplug_updated(self, losses: Any) -> None:
        self.note("update")

    @hookimpl
    def rlplug_evaluated(self, metrics: Any) -> None:
        self.note("evaluation")

    @hookimpl
    def rlplug_checkpoint(self, path: str) -> None:
        self.note("checkpoint")


class Lengths(Count):
    """Does not count checkpoints: a checkpoint does not count itself."""

    def note(self, what: str) -> None:
        if what != "checkpoint":
            super().note(what)


def weights(folder: Path) -> bytes:
    return sorted(folder.glob("checkpoints/step_*"))[-1].joinpath("weights.pt").read_bytes()


def width(result: rlplug.Result) -> int:
    net: Any = result.agent.algorithm.net
    return net.torso.net.layer.out_features


def config(folder: Path) -> str:
    return (folder / "config.yaml").read_text()


# ---- train -----------------------------------------------------------------------------------------------------------


def test_overrides_keywords_and_a_composed_configuration_are_the_same_run(tmp_path):
    words = ["algo=ppo", "algo.sgd_minibatch_size=32", "algo.num_sgd_iter=1", "tuned=none", "num_envs=2"]
    words += ["rollout_fragment_length=16", "total_steps=128", "eval.episodes=1", "eval.every=0", "log.every=32"]
    words += ["checkpoint.every=0", "logger.only=[]", "hardware=cpu", "compile=off"]
    results = [
        rlplug.train(words, folder=tmp_path / "a"),
        rlplug.train(folder=tmp_path / "b", **SMALL),
        rlplug.train(rlplug.compose(words), folder=tmp_path / "c"),
        rlplug.train(words[:3], folder=tmp_path / "d", **{k: v for k, v in SMALL.items() if k != "algo"}),
    ]
    assert len({weights(result.folder) for result in results}) == 1
    assert len({config(result.folder) for result in results}) == 1
    first = results[0]
    assert float(first) == first.score == first.summary["eval/return_mean"] == results[1]
    assert first.agent.act(np.zeros(4, np.float32)) in (0, 1)
    assert pickle.loads(pickle.dumps(first)).folder == first.folder


def test_metrics_are_a_data_frame(tmp_path, monkeypatch):
    result = rlplug.Result(1.0, tmp_path)
    (tmp_path / "metrics.csv").write_text("step,episode/return\n32,5.0\n64,\n")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        ImportError, match=r"metrics needs pandas: pip install pandas; the numbers are in .*metrics\.csv"
    ):
        _ = result.metrics
    monkeypatch.undo()
    pytest.importorskip("pandas")
    assert result.metrics["episode/return"].dropna().tolist() == [5.0]


@pytest.mark.parametrize("what", ["function", "class", "object", "registered"])
def test_an_environment_of_the_script(tmp_path, what):
    envs = {
        "function": lambda: gym.wrappers.TimeLimit(Mine(gravity=5.0), 20),
        "class": Mine,
        "object": Mine(gravity=5.0),
        "registered": gym.make("CartPole-v1"),
    }
    given = {} if what != "class" else {"env.max_episode_steps": 30}
    result = rlplug.train(env=envs[what], folder=tmp_path / "run", **SMALL | given)
    assert result.summary["status"] == "finished"
    assert f"entry_point: {'tests.test_session:Mine' if what == 'class' else 'rlplug.script:'}" in config(result.folder)
    manifest = json.loads((result.folder / "manifest.json").read_text())
    assert len(manifest["script"]) == (what != "class")
    assert what != "function" or "function" in next(iter(manifest["script"].values()))


def test_networks_wrappers_and_callbacks_of_the_script(tmp_path, monkeypatch):
    class Scaled(gym.RewardWrapper[Any, Any]):
        def __init__(self, env: Any, scale: float = 2.0) -> None:
            super().__init__(env)
            self.scale = scale

        def reward(self, reward: Any) -> float:
            return float(reward) * self.scale

    class Own(Net):
        pass

    scaled = [{"entry_point": Scaled, "kwargs": {"scale": 3}}, Scaled]
    model = {"entry_point": Own, "kwargs": {"size": 4}}
    result = rlplug.train(env={"name": "cartpole", "wrappers": scaled}, model=model, folder=tmp_path / "run", **SMALL)
    assert result.summary["eval/return_mean"] == 6 * result.summary["eval/length_mean"]
    assert width(result) == 4
    other = rlplug.train(model=Net, folder=tmp_path / "other", **SMALL)
    assert width(other) == 8
    assert "entry_point: tests.test_session:Net" in config(other.folder)
    monkeypatch.setattr(script, "_objects", {})  # as in another process
    with pytest.raises(ConfigError, match=r"^model.entry_point: .* is not known here; pass it from Python"):
        rlplug.evaluate(result.folder)
    assert rlplug.evaluate(result.folder, env="cartpole", model=Own)["eval/return_mean"] > 0


def test_a_callback_gets_every_event_and_its_metrics_are_logged(tmp_path):
    count = Count()
    result = rlplug.train(callbacks=[count], folder=tmp_path / "run", **SMALL)
    assert count.seen["segment"] >= 4
    assert count.seen.items() >= {"update": 4, "evaluation": 1, "checkpoint": 1}.items()
    assert len(count.lengths) == result.summary["episodes"]
    assert len(columns(result.folder, "episode/odd")[0]) >= 2


def test_one_callback_needs_no_list(tmp_path):
    count = Count()
    rlplug.train(callbacks=count, folder=tmp_path / "run", **SMALL)
    assert count.seen["update"] == 4
    assert rlplug.compose(["callbacks=tests.test_session:Count"]).callbacks == ["tests.test_session:Count"]


def test_a_finished_run_is_evaluated_and_resumed_with_keywords(tmp_path):
    result = rlplug.train(folder=tmp_path / "run", **SMALL)
    assert rlplug.resume(result.folder) == result  # its stored score
    found = rlplug.evaluate(result.folder, eval={"episodes": 3}, seed=7)
    assert (found["episodes"], found["seed"]) == (3, 7)
    assert found == rlplug.evaluate(result.folder, ["eval.episodes=3", "seed=7"])
    assert found != rlplug.evaluate(result.folder, ["eval.episodes=3", "seed=7"], mode="random")
    (newest,) = checkpoints(result.folder)
    steps = found["env_steps"]
    assert run_first("evaluate", [f"{result.folder}@{steps}", "seed=7"]) == (newest, ["seed=7"])
    with pytest.raises(ConfigError, match=rf"has no checkpoint of step 3; it has {steps}\."):
        run_first("evaluate", [f"{result.folder}@3"])
    with pytest.raises(ConfigError, match=rf"^init_from: .* has no checkpoint of step 3; it has {steps}$"):
        rlplug.train(folder=tmp_path / "other", init_from=f"{result.folder}@3", **SMALL)
    assert rlplug.resume(result.folder, total_steps=256).summary["env_steps"] > 192
    with rlplug.Session.resume(result.folder, total_steps=320) as run:
        run.step()


def test_several_ranks_get_the_objects(tmp_path):
    class Local(Count):
        pass

    options = SMALL | {"hardware": "2cpu", "total_steps": 64}
    rlplug.train(env=lambda: Mine(), model=type("Local", (Net,), {}), callbacks=[Local()], folder=tmp_path, **options)
    assert "episode/odd" in (tmp_path / "metrics.csv").read_text()


def test_values_and_distributions_of_observations(tmp_path):
    agent = rlplug.train(folder=tmp_path / "ppo", **SMALL).agent
    one, two = np.zeros(4, np.float32), np.ones((2, 4), np.float32)
    rows = torch.from_numpy(np.stack([one, *two]))
    algorithm: Any = agent.algorithm
    with torch.no_grad():
        dist, values = algorithm.net({"obs": rows}, {})
    assert agent.value(one) == pytest.approx(values[0].item())
    assert agent.value(two) == pytest.approx(values[1:].numpy())
    assert torch.allclose(agent.distribution(one).params, dist.params[0])
    found = agent.distribution(two)
    assert torch.allclose(found.logp(torch.tensor([0, 1])), dist.logp(torch.tensor([0, 0, 1]))[1:])
    assert found.mode().tolist() == agent.act(two).tolist()
    with pytest.raises(ValueError, match="PPO computes no values of all actions; see value"):
        agent.q(one)
    off = {"num_steps_sampled_before_learning_starts": 32, "total_steps": 64, "buffer.capacity": 64, "num_envs": 1}
    words: Any = {key: value for key, value in SMALL.items() if key != "algo"} | off
    agent = rlplug.train(algo="dqn", folder=tmp_path / "dqn", **words).agent
    assert agent.q(two).shape == (2, 2)
    assert agent.q(one).max() == pytest.approx(agent.value(one))
    assert agent.q(one).argmax() == agent.act(one)
    assert agent.distribution(two).params.exp().argmax(-1).tolist() == agent.act(two).tolist()
    agent = rlplug.train(
        algo={"name": "dqn", "temperature": 2.0}, exploration=[], folder=tmp_path / "soft", **words
    ).agent
    assert torch.allclose(agent.distribution(two).params.exp(), torch.from_numpy(agent.q(two) / 2.0).softmax(-1))


class Stateful:
    """A callback with a state of its own; its file is no part of it."""

    def __init__(self) -> None:
        self.seen, self.file = 0, open(os.devnull)  # noqa: SIM115

    @hookimpl
    def rlplug_updated(self, losses: Any) -> None:
        self.seen += 1

    def state(self) -> dict[str, int]:
        return {"updates": self.seen}

    def load(self, state: dict[str, int]) -> None:
        self.seen = state["updates"]


def test_a_callback_saves_its_own_state(tmp_path):
    with rlplug.Session(callbacks=[Stateful], folder=tmp_path / "run", **SMALL) as run:
        run.step()
        run.step()
    resumed = Stateful()
    with rlplug.Session.resume(tmp_path / "run") as run:
        (own,) = [one for one in run._trainer.hooks.get_plugins() if isinstance(one, Stateful)]  # type: ignore[union-attr]
        assert own.seen == 2 > resumed.seen


# ---- sessions --------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
import rlplug
from tests.test_session import SMALL, Lengths

def main(folder, kill):
    new = lambda: rlplug.Session(callbacks=[Lengths], folder=folder, **SMALL)
    with rlplug.Session.resume(folder) if kill < 0 else new() as run:
        while not run.done:
            run.step()
            if run.updates == 2:
                run.save()
            if run.updates >= kill > 0:
                os.kill(os.getpid(), signal.SIGKILL)

main(sys.argv[1], int(sys.argv[2]))
"""


def play(folder: Path, kill: int) -> int:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    return subprocess.run([sys.executable, "-c", SCRIPT, str(folder), str(kill)], env=environ, check=False).returncode


def test_a_session_killed_and_resumed_equals_an_undisturbed_one(tmp_path):
    assert play(tmp_path / "a", 0) == 0
    assert play(tmp_path / "b", 3) == -signal.SIGKILL
    assert not (tmp_path / "b" / "summary.json").exists()
    assert play(tmp_path / "b", -1) == 0
    assert differences_of_runs(tmp_path / "a", tmp_path / "b") == []
    rlplug.train(callbacks=[Lengths], folder=tmp_path / "c", **SMALL)
    assert weights(tmp_path / "a") == weights(tmp_path / "c")


def step_too_often(folder):
    with rlplug.Session(folder=folder, **SMALL) as run:
        while True:
            run.step()


def test_a_session_is_driven_left_and_resumed(tmp_path):
    with rlplug.Session(folder=tmp_path / "run", **SMALL) as run:
        assert run.step().keys() <= run.metrics.keys()
        run.step()
        assert (run.updates, run.done) == (2, False)
        steps = run.env_steps
        found = run.evaluate()
        assert found["eval/return_mean"] == float(run.result) == run.metrics["eval/return_mean"]
        assert run.save().name == f"step_{steps:012d}"
    assert run.result.summary["status"] == "interrupted"
    with rlplug.Session.resume(run.folder) as run:
        assert run.env_steps == steps
        while not run.done:
            run.step()
        with pytest.raises(RunError, match="the run is done"):
            run.step()
    assert run.result.summary["status"] == "finished"
    with pytest.raises(RunError, match="the run is done"):
        step_too_often(tmp_path / "more")
    assert json.loads((tmp_path / "more" / "summary.json").read_text())["status"] == "finished"
    assert weights(tmp_path / "more") == weights(run.folder)
    rlplug.train(folder=tmp_path / "whole", **SMALL)
    assert weights(run.folder) == weights(tmp_path / "whole")


class Breaks(Mine):
    def step(self, action: Any) -> Any:
        raise RuntimeError("broken")


def test_a_session_ends_at_a_limit_or_with_an_error(tmp_path):
    with rlplug.Session(folder=tmp_path / "a", stop={"updates": 2}, **SMALL) as run:
        while not run.done:
            run.step()
    assert run.result.summary["updates"] == 2
    assert run.result.summary["stopped"].startswith("updates reached 2")
    for use in (run.step, run.evaluate, run.save):
        with pytest.raises(RunError, match=r"the session has ended with its block; .*Session.resume\('.*a'\)"):
            use()
    left = rlplug.Session(folder=tmp_path / "b", **SMALL)
    with pytest.raises(ZeroDivisionError), left:  # noqa: PT012
        left.step()
        left.step()
        1 / 0  # noqa: B018
    assert left.result.summary["status"] == "interrupted"
    with rlplug.Session.resume(left.folder) as run:
        assert run.env_steps == left.env_steps > 0
    failing = rlplug.Session(env=lambda: Breaks(), folder=tmp_path / "c", **SMALL)
    with (
        pytest.raises(RunError, match=r"(?s)broken.*begin again with: rlplug.resume\('.*c', ...\) with the script"),
        failing,
    ):
        failing.step()
    assert failing.result.summary["status"] == "failed"


# ---- bad input -------------------------------------------------------------------------------------------------------


class Unsent(Mine):
    def __reduce__(self) -> Any:
        raise TypeError("it holds a socket")


class Half(Count):
    def state(self) -> dict[str, int]:
        return {}


class File(Count):
    def __init__(self) -> None:
        super().__init__()
        self.file = open(os.devnull)  # noqa: SIM115


@pytest.mark.parametrize(
    ("given", "key", "said"),
    [
        ({"env": Unsent()}, "env", r"Unsent cannot be copied .*it holds a socket\); pass what makes it: env=lambda"),
        ({"env": 3}, "env", r"is 3; pass a name, a class, a function or an environment"),
        ({"env": Net}, "env.entry_point", r"tests.test_session:Net cannot be made|takes no|missing"),
        ({"model": torch.nn.Linear(2, 2)}, "model", r"is an object of class Linear; pass the class, model=MyNet"),
        ({"model": Mine}, "model.entry_point", r"is no torch.nn.Module"),
        ({"callbacks": ["nowhere:Mine"]}, "callbacks[0]", r"the module 'nowhere' cannot be imported"),
        ({"callbacks": [Net]}, "callbacks[0]", r"missing"),
        ({"callbacks": [object()]}, "callbacks[0]", r"object implements no hook"),
        ({"callbacks": [Half()]}, "callbacks[0]", r"Half has state\(\) but no load\(\); define"),
        ({"callbacks": [File()]}, "callbacks[0]", r"File: file \(TextIOWrapper\) cannot be saved in a checkpoint"),
        ({"callbacks": [{"path": "a:B"}]}, "callbacks[0]", r"should be module:name, or \{entry_point"),
        ({"total_stps": 3}, "total_stps", r"did you mean total_steps"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(tmp_path, given, key, said):
    with pytest.raises(ConfigError, match=said) as error:
        rlplug.train(folder=tmp_path / "run", **SMALL | given)
    assert error.value.key == key
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_sent_or_combined_is_refused(tmp_path):
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"lambda.* cannot be sent to the run's other processes: TypeError"):
        rlplug.train(env=lambda: Mine(9.8 if lock else 0.0), folder=tmp_path / "a", **SMALL | {"hardware": "2cpu"})
    with pytest.raises(ConfigError, match=r"^hardware: has 2 ranks, .* a session needs one: devices=1"):
        rlplug.Session(folder=tmp_path / "a", **SMALL | {"hardware": "2cpu"})
    with pytest.raises(ConfigError, match=r"^algo: is given with a composed configuration; pass it to compose"):
        rlplug.train(rlplug.compose([]), algo="ppo")
    for config, what in (("algo=ppo", "one string"), ({"algo": "ppo"}, "a mapping")):
        with pytest.raises(ConfigError, match=rf"^the configuration is {what}; write train\(algo='ppo'\)"):
            rlplug.train(config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^env: is a vector of environments; pass one environment, and num_envs="):
        rlplug.train(env=gym.make_vec("CartPole-v1", 2), folder=tmp_path / "a", **SMALL)
    assert not (tmp_path / "a").exists()
    with pytest.raises(RunError, match="the session is not open"):
        rlplug.Session(folder=tmp_path / "a", **SMALL).step()


def test_a_run_with_objects_is_resumed_with_them(tmp_path, monkeypatch):
    result = rlplug.train(env=lambda: Mine(), callbacks=[Count()], folder=tmp_path / "run", **SMALL)
    monkeypatch.setattr(script, "_objects", {})  # as in another process
    with pytest.raises(
        ConfigError,
        match=r"lambda\w* is defined in the script that started the run.*pass it from Python, .* rlplug\.resume",
    ):
        rlplug.resume(result.folder, ["total_steps=256"])
    with pytest.raises(ConfigError, match=r"^model: the run has no object of a script, and 1 given"):
        rlplug.load(result.folder, model=Net)
    counted = Count()
    before = result.summary["episodes"]
    more = rlplug.resume(result.folder, ["total_steps=256"], env=lambda: Mine(), callbacks=[counted])
    assert more is not None
    assert len(counted.lengths) == more.summary["episodes"] > before


# ---- an environment's own metrics ------------------------------------------------------------------------------------


class Scored(Mine):
    """Reports a metric at every step and one at the end of an episode."""

    def reset(self, **options: Any) -> Any:
        self.steps = 0
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        self.steps += 1
        own = {"half": self.steps % 2} | ({"steps": np.int64(self.steps)} if terminated else {})
        return obs, reward, terminated, truncated, info | {"metrics": own}


def columns(folder: Path, *names: str) -> list[list[float]]:
    head, *rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    return [[float(row[head.index(name)]) for row in rows if row[head.index(name)]] for name in names]


@pytest.mark.parametrize("vectorization", ["list", "subprocess"])
def test_what_an_environment_reports_is_averaged_per_episode(tmp_path, vectorization):
    env = {"name": "gymnasium", "entry_point": Scored, "vectorization": vectorization}
    with rlplug.Session(env=env, folder=tmp_path / "run", **SMALL) as run:
        while run.env_steps < 96:
            run.step()
    with rlplug.Session.resume(tmp_path / "run") as run:
        while not run.done:
            run.step()
    steps, lengths, halves = columns(tmp_path / "run", "episode/steps", "episode/length", "episode/half")
    assert steps == pytest.approx(lengths)
    assert len(steps) >= 2
    assert all(0.5 <= half <= 0.6 for half in halves)


@pytest.mark.slow
def test_actors_get_the_objects_and_return_metrics(tmp_path):
    class Local(Scored):
        pass

    env = {"name": "gymnasium", "entry_point": Local}
    options = SMALL | {"hardware.actors.count": 2, "hardware.actors.num_cpus": 0, "log.every": 64}
    rlplug.train(env=env, model=type("Own", (Net,), {}), folder=tmp_path / "run", **options)
    steps, lengths = columns(tmp_path / "run", "episode/steps", "episode/length")
    assert steps == pytest.approx(lengths)
    assert len(steps) >= 1


def test_metrics_over_ranks(tmp_path):
    env = {"name": "gymnasium", "entry_point": Scored}
    rlplug.train(env=env, folder=tmp_path / "run", **SMALL | {"hardware": "2cpu", "log.every": 64})
    steps, lengths = columns(tmp_path / "run", "episode/steps", "episode/length")
    assert steps == pytest.approx(lengths)


def test_a_window_averages_the_last_episodes_also_after_a_resume(tmp_path):
    count, options = (
        Count(),
        SMALL | {"num_envs": 1, "rollout_fragment_length": 32, "total_steps": 256, "log.window": 3, "log.every": 32},
    )
    env = {"name": "gymnasium", "entry_point": Scored}
    rlplug.train(env=env, callbacks=[count], folder=tmp_path / "run", **options)
    names = ("episode/length", "episode/steps", "episode/return", "episode/odd")
    lengths, steps, returns, odd = whole = columns(tmp_path / "run", *names)
    assert len(count.lengths) >= 6
    assert lengths[-1] == pytest.approx(np.mean(count.lengths[-3:]))
    assert odd[-1] == pytest.approx(np.mean([n % 2 for n in count.lengths[-3:]]))
    assert steps == lengths == returns
    with rlplug.Session(env=env, callbacks=[Count()], folder=tmp_path / "left", **options) as run:
        while run.env_steps < 128:
            run.step()
    with rlplug.Session.resume(tmp_path / "left") as run:
        while not run.done:
            run.step()
    assert columns(tmp_path / "left", *names) == whole


class Wrong(Mine):
    def __init__(self, metrics: Any) -> None:
        super().__init__()
        self.metrics = metrics

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"metrics": self.metrics}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (3, r"info\['metrics'\] is int; it should map names to numbers"),
        (
            {"coins": 1, "return/red": 2},
            r"info\['metrics'\] has 'return/red', which rlplug logs itself; use another name",
        ),
    ],
)
def test_wrong_metrics_end_the_run(tmp_path, metrics, said):
    with pytest.raises(RunError, match=said):
        rlplug.train(env=lambda: Wrong(metrics), folder=tmp_path / "run", **SMALL)


class Length(Count):
    @hookimpl
    def rlplug_episode(self, run: Any, episode: Any) -> dict[str, float]:
        return {"length": 0.0}


class Word(Count):
    @hookimpl
    def rlplug_episode(self, run: Any, episode: Any) -> dict[str, Any]:
        return {"odd": "yes"}


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (Length, "rlplug_episode returned 'length', which rlplug logs itself; use another name"),
        (Word, "rlplug_episode of a callback returned odd='yes', which is not a number"),
    ],
)
def test_wrong_metrics_of_a_callback_end_the_run(tmp_path, callback, said):
    with pytest.raises(RunError, match=said):
        rlplug.train(callbacks=[callback()], folder=tmp_path / "run", **SMALL)
