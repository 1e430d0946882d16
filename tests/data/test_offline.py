"""Runs that learn from recorded episodes: what they read, how they go on, and what they refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from rlplug import testing
from rlplug.cli import main
from rlplug.config import compose
from rlplug.data import parquet
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.envs.spaces import single_agent
from rlplug.run.build import build
from rlplug.run.launch import resume, train
from rlplug.testing.comparing import differences_of_runs
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError, RunError
from tests.data.episodes import as_hdf5, as_lines, as_npz, as_table, plain, write_parquet

ENV = gymnasium.make("CartPole-v1")
SPEC = single_agent(ENV.observation_space, ENV.action_space, 500)
QUIET = ("env=cartpole", "hardware=cpu", "logger=[]", "tuned=none", "model.hidden=[8]", "eval.every=0")
QUIET = (*QUIET, "eval.episodes=1")
SMALL = Path(testing.__file__).parent / "cartpole.npz"  # 12 episodes, 206 steps
BC = ("algo=bc", *QUIET, f"data.path={SMALL}", "total_steps=6", "log.every=1", "train_batch_size=3")
ALL = ("algo=dqn", *QUIET, f"data.path={SMALL}", "algo.hiddens=[8]", "train_batch_size=8")
DQN = (*ALL, "loop=offline", "exploration=[]")


def run(words, updates: int | None = None):
    trainer = build(compose([*words, *([] if updates is None else [f"total_steps={updates}"])]), Path())
    trainer.reports.report = lambda trainer: None
    trainer.loop.run(trainer)
    trainer.close()
    return trainer


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fragment", [1, 7, 1000])
@pytest.mark.parametrize("words", [BC, DQN], ids=["episodes", "windows"])
def test_one_pass_is_read_before_the_first_update(words, fragment):
    trainer = run([*words, f"rollout_fragment_length={fragment}"], 3)
    assert (trainer.progress.env_steps, trainer.progress.updates) == (206, 3)
    assert len(trainer.buffer) == (12 if words is BC else 206)
    assert len(trainer.episodes.drain()) == 12


def test_it_reads_on_while_it_learns():
    """100 steps at first, then one for every half an update; again and again."""
    words = [*DQN, "loop.stream=true", "num_steps_sampled_before_learning_starts=100", "replay_ratio=0.5"]
    trainer = run([*words, "rollout_fragment_length=2", "buffer.capacity=120"], 200)
    assert trainer.progress.updates == 200
    assert 100 + 2 * 199 <= trainer.progress.env_steps <= 100 + 2 * 199 + 2
    assert len(trainer.buffer) <= 120


@pytest.mark.parametrize(
    "words",
    [("algo=impala",), ("algo=appo",), ("algo=appo", "loop=async", "loop.in_flight=1", "loop.broadcast_interval=1")],
    ids=["impala", "appo", "async"],
)
def test_segments_of_a_recording_are_read_pass_after_pass(tmp_path, words):
    """120 steps of 8 episodes; what a sample gives away is no matter of passes."""
    some = [plain(15, i) | {"obs": np.ones((16, 4), np.float32), "logp": np.zeros(16, np.float32)} for i in range(8)]
    path = write_parquet(tmp_path / "a.parquet", some, SPEC)
    own = [*words, *QUIET, *([] if len(words) > 1 else ["loop=alternate", "loop.in_flight=1"]), "exploration=[]"]
    trainer = run([*own, f"data.path={path}", "num_envs=2", "rollout_fragment_length=10", "train_batch_size=20"], 600)
    assert 560 < trainer.progress.env_steps <= 600
    assert trainer.progress.updates >= 28


def test_a_recording_that_is_used_up_ends_no_run_without_a_word(monkeypatch):
    words = [*(word for word in DQN if word != "loop=offline"), "rollout_fragment_length=4"]
    words += ["num_steps_sampled_before_learning_starts=20"]
    monkeypatch.setattr("rlplug.plugins.loop.alternate.Alternate.one_pass", True)
    with pytest.raises(ConfigError, match=r"^total_steps: 208 is more than the 206 steps .* use 206 or less$"):
        run(words, 208)
    trainer = run(words, 206)
    assert trainer.progress.env_steps == 206
    with pytest.raises(RunError, match=r"^the dataset is used up: .* read all of its 206 steps$"):
        trainer.collect()


def test_normalizers_see_every_row_once():
    """All of them count before the first update, though nobody acts in between."""
    trainer = run([*BC, "preprocess.normalize_obs=true"], 1)
    moments = trainer.policy.normalizer.obs["obs"]
    data = np.load(SMALL)["observations"]
    np.testing.assert_allclose(moments.mean, data.mean(0), atol=1e-5)
    np.testing.assert_allclose(1 / moments.scale() ** 2, data.var(0), rtol=1e-3)


def test_a_recurrent_model_learns_from_whole_episodes():
    words = [word for word in BC if not word.startswith("model.")]
    trainer = run([*words, "model=lstm", "model.hidden=8", "algo.sgd_minibatch_size=32"], 3)
    assert trainer.progress.updates == 3


def test_what_is_larger_than_memory_is_streamed(tmp_path, monkeypatch):
    """Of twenty row groups no more than two are in memory at a time."""
    monkeypatch.setattr(parquet, "GROUP", 300)
    rng = np.random.default_rng(0)
    episodes = [plain(10, i) | {"obs": rng.standard_normal((11, 4), np.float32)} for i in range(40)]
    path = write_parquet(tmp_path / "a.parquet", episodes, SPEC)
    words = [word for word in DQN if not word.startswith("data.")]
    words += [f"data.path={path}", "loop.stream=true", "replay_ratio=0.1", "buffer.capacity=50"]
    trainer = run([*words, "rollout_fragment_length=5"], 20)
    recording = trainer.collector.player.recording
    assert len(recording.files[0].chunks) >= 20
    assert trainer.progress.env_steps > 190
    assert len(recording._kept) == 2


LIMITED = """
import re, resource, sys
from pathlib import Path
import pyarrow.parquet
from rlplug.config import compose
from rlplug.run.build import build

config = compose(sys.argv[2:])
held = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + int(sys.argv[1]),) * 2)
trainer = build(config, Path())
trainer.reports.report = lambda trainer: None
trainer.loop.run(trainer)
print(trainer.progress.env_steps)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other kernels limit no mappings")
def test_four_times_what_the_kernel_lets_a_run_take_is_streamed(tmp_path):
    """All of it is read; into memory it does not go, which shows that the limit is one."""
    limit, width, length, rng = 40 * 2**20, 512, 500, np.random.default_rng(0)
    spec = single_agent(gymnasium.spaces.Box(-np.inf, np.inf, (width,)), ENV.action_space, length)
    files = 4 * limit // (4 * width * length) // 2 + 1
    for number in range(files):
        some = [plain(length, i) | {"obs": rng.standard_normal((length + 1, width), np.float32)} for i in range(2)]
        write_parquet(tmp_path / f"{number}.parquet", some, spec)
    steps = files * 2 * length

    def under_the_limit(*words: str) -> subprocess.CompletedProcess[str]:
        own = [word for word in DQN if not word.startswith(("data.", "env="))]
        own += ["env=recorded", f"env.path={tmp_path}", f"data.path={tmp_path}", "total_steps=100", *words]
        command = [sys.executable, "-c", LIMITED, str(limit), *own]
        env = os.environ | {"MIMALLOC_ARENA_RESERVE": "0"}  # Arrow maps a GiB before it needs it, which counts
        return subprocess.run(command, env=env, capture_output=True, text=True)

    streamed = under_the_limit("loop.stream=true", "buffer.capacity=2000", f"replay_ratio={99 / steps}")
    assert streamed.returncode == 0, streamed.stderr
    assert int(streamed.stdout) >= steps
    held = under_the_limit("loop.stream=false", f"buffer.capacity={2 * steps}")
    assert "allocate memory" in held.stderr or "MemoryError" in held.stderr


def test_recorded_columns_beside_played_ones():
    """Half of a replay is recorded, and half is what the policy does; both have their own rows."""
    words = [*ALL]
    more = ["num_envs=3", "data.envs=1", "data.shuffle=false", "rollout_fragment_length=5", "replay_ratio=0.1"]
    trainer = run([*words, *more, "num_steps_sampled_before_learning_starts=60", "exploration=epsilon_greedy"], 300)
    assert trainer.progress.env_steps <= 300
    assert trainer.progress.updates > 15
    (ring,) = trainer.buffer.rings
    recorded = np.load(SMALL)["observations"][:50]
    kept = ring._leaves["obs"][:100, 0][ring.valid[:100, 0]]
    np.testing.assert_array_equal(kept[:50], recorded)
    assert not np.array_equal(ring._leaves["obs"][:50, 1], ring._leaves["obs"][:50, 2])


# ---- going on -------------------------------------------------------------------------------------------------------

RESUMED = {  # of every algorithm, the conformance kit resumes a run
    "streaming": (
        *(*DQN, "total_steps=60", "loop.stream=true", "replay_ratio=0.5", "rollout_fragment_length=2"),
        *("num_steps_sampled_before_learning_starts=40", "buffer.capacity=120", "num_envs=2"),
    ),
    "mixed": (
        *(*ALL, "total_steps=400", "num_envs=2", "data.envs=1", "rollout_fragment_length=5", "replay_ratio=0.1"),
        *("exploration=epsilon_greedy", "num_steps_sampled_before_learning_starts=40"),
    ),
    "normalized": (*BC, "total_steps=30", "preprocess.normalize_obs=true", "preprocess.normalize_reward=true"),
}


@pytest.mark.parametrize("words", RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_is_the_undisturbed_one(words, tmp_path, monkeypatch):
    words = [*words, "checkpoint.every=7", "checkpoint.keep_last=9", "log.every=5"]
    update, count = Trainer.update, iter(range(99))
    train(compose(words), tmp_path / "whole", tell=lambda line: None)

    def broken(self, batch=None):
        if next(count) == 18:
            raise RuntimeError("as if killed")
        return update(self, batch)

    monkeypatch.setattr(Trainer, "update", broken)
    with pytest.raises(RuntimeError):
        train(compose(words), tmp_path / "broken", tell=lambda line: None)
    monkeypatch.setattr(Trainer, "update", update)
    resume(tmp_path / "broken", tell=lambda line: None)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "broken") == []


def test_without_an_environment_nothing_is_evaluated(tmp_path, capsys):
    """The spaces are those that the files say."""
    rows = [plain(10, i) | {"obs": np.zeros((11, 4), np.float32)} for i in range(4)]
    path, run = write_parquet(tmp_path / "a.parquet", rows, SPEC), tmp_path / "run"
    words = [word for word in BC if not word.startswith(("data.", "env=", "eval."))]
    words += ["env=recorded", f"env.path={path}", f"data.path={path}", f"hydra.run.dir={run}"]
    assert main([*words, "eval.every=2"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["updates"], "eval/return_mean" in summary) == ("finished", 6, False)
    assert main(["resume", str(run)]) == 0
    assert "has finished: 6 updates, no evaluation" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"env: recorded has only a dataset: set data.path=<files>"):
        build(compose(["algo=ppo", "env=recorded", f"env.path={path}", "hardware=cpu", "logger=[]"]), Path())


# ---- what is refused ------------------------------------------------------------------------------------------------

PPO, APPO = (("algo=" + name, *QUIET, f"data.path={SMALL}") for name in ("ppo", "appo"))
REFUSED = [
    ((*ALL, "exploration=[]", "data.envs=1"), "data.envs: 1 of num_envs=1 leave no real environment"),
    ((*DQN, "num_envs=2", "data.envs=1"), "data.envs: loop=offline only reads datasets; use null"),
    (("algo=bc", *QUIET), "data.path: loop=offline learns from recorded episodes: set data.path"),
    (PPO, "data.path: ppo learns only from data that it collects itself, not from a dataset"),
    (
        ("algo=td3_bc", *QUIET, f"data.path={SMALL}"),
        "Discrete(2); use algo=bc or discrete_cql or iql or marwil, which learn from datasets",
    ),
    (
        ("algo=dqn", *QUIET, "env=pendulum", f"data.path={SMALL}"),
        "use algo=bc or cql or iql or marwil or td3_bc, which learn from datasets",
    ),
    ((*PPO, "loop=offline"), "loop: offline learns from other policies"),
    ((*DQN, "exploration=epsilon_greedy"), "exploration.epsilon_greedy: changes actions, but data.path"),
    (
        ("algo=marwil", *BC[1:], "algo.beta=0", "exploration=[rnd]"),
        "exploration.rnd: rewards rows that the learner samples, but marwil uses no rewards; leave it out",
    ),
    ((*DQN, "hardware.actors.count=1"), "hardware.actors.count: actors collect, but data.path collects nothing; use 0"),
    ((*DQN, "record.path=here"), "record.path: records collected episodes, but data.path collects nothing"),
    ((*DQN, "loop=async"), "loop.in_flight: applies to collection, but data.path collects nothing; use loop=offline"),
    (
        (*DQN, "loop=async", "num_envs=2", "data.envs=1"),
        "loop.in_flight: applies to collection, but data.path is recorded; use loop=alternate",
    ),
    ((*DQN, "buffer.capacity=100"), "buffer.capacity: 100 rows do not hold the 218 rows of the dataset"),
    ((*DQN, "env=acrobot"), "has observations of shape [4], but env has"),
    (
        (*APPO, "loop=offline", "loop.stream=true"),
        "has no key 'logp', which the algorithm needs; it has action, is_first, obs",
    ),
    (
        (*APPO, "loop=offline"),
        "loop.stream: false reads the dataset before training, but segments are used in the order they arrive; ",
    ),
    ((*DQN, "data.weights=[1,2]"), "data.weights: 2 weights for 1 paths"),
    ((*DQN, "data.weights=[0]"), "data.weights[0]: 0 is out of range"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_does_not_go_together_is_refused(words, said):
    with pytest.raises(ConfigError) as refused:
        build(compose(words), Path()).close()
    assert said in str(refused.value)


# ---- what is in it --------------------------------------------------------------------------------------------------


def test_what_is_in_it(capsys):
    assert main(["data", str(SMALL)]) == 0
    printed = capsys.readouterr().out
    for said in ("12, 206 steps", "17.17", "terminated", "58.3 % of episodes", "float32 [4]", "missing        logp"):
        assert said in printed
    assert main(["data", str(SMALL), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["episodes"], about["steps"]) == (12, 206)
    assert about["coverage"]["action"].startswith("0: ")


@pytest.mark.parametrize("words", [[], ["--fast"], ["nowhere"]])
def test_data_of_nothing(words, capsys):
    assert main(["data", *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_was_left_out_is_told(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", obs=torch.zeros(4, 2), actions=np.zeros(4), rewards=np.ones(4), dones=[0, 1, 0, 0])
    assert main(["data", str(tmp_path)]) == 0
    assert "2, 3 steps" in capsys.readouterr().out


# ---- numbers that are not finite ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["observations", "rewards"])
@pytest.mark.parametrize("write", [as_npz, as_hdf5, as_table, as_lines])
def test_numbers_that_are_not_finite_are_named(write, key, tmp_path, capsys):
    """By file and row; ``rlplug data`` leaves their episode out, says so, and fails."""
    columns = {name: leaf[:40].copy() for name, leaf in np.load(SMALL).items() if not name.startswith("next")}
    columns |= {"terminals": np.isin(np.arange(40), (9, 29, 39)), "timeouts": np.zeros(40, bool)}
    columns[key] = columns[key].astype(np.float64)
    columns[key][12] = np.nan if key == "rewards" else np.inf
    path = write(tmp_path, columns)
    lines = write is as_lines  # of 10 rows each
    where = "line 2" if lines else "the episode of rows 10 to 29,"
    said = f"{'an observation' if key == 'observations' else 'a reward'} that is not a finite number, in row "
    with pytest.raises(ConfigError, match=rf"{path}, {where} cannot be read: has {said}"):
        Recording([str(path)], Reading(SPEC))
    code, printed = main(["data", str(path)]), capsys.readouterr()
    assert "nan" not in printed.out
    assert f"{where} is left out: has {said}" in printed.err
    assert (code, f"{30 if lines else 20} steps" in printed.out) == (1, True)


def test_a_run_is_refused_before_it_starts(tmp_path, capsys):
    columns = dict(np.load(SMALL)) | {"rewards": np.full(206, np.nan)}
    words = [word for word in BC if not word.startswith("data.")]
    assert main([*words, f"data.path={as_npz(tmp_path, columns)}", f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "run").exists()
