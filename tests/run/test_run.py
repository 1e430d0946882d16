"""A whole run, and what it leaves behind."""

import csv
import json
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
import torch
import yaml
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

import rlplug
from rlplug.api import Plan
from rlplug.checkpointing.format import find
from rlplug.config import compose, parse
from rlplug.evaluation.evaluator import Evaluator
from rlplug.functional.returns import episode_metrics
from rlplug.plugins.buffer.replay import Replay
from rlplug.registry import hookimpl
from rlplug.run import checks, launch
from rlplug.run.build import build, resolve
from rlplug.run.launch import resume, train
from rlplug.types import ConfigError, RunError
from tests.loggers.test_wandb_logger import items, read

PPO = ["algo=ppo", "env=cartpole", "tuned=none", "total_steps=3072", "eval.episodes=4", "eval.every=900"]
PPO += ["log.every=1000"]


BRIEF = ["tuned=none", "total_steps=128", "num_envs=2", "rollout_fragment_length=64", "algo.sgd_minibatch_size=64"]
BRIEF += ["eval.every=0"]


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, float]:
    folder = tmp_path_factory.mktemp("run") / "deep" / "run"
    loggers = "logger.only=[tensorboard,wandb]"
    return folder, train(compose([*PPO, loggers]), folder, ["python", "-m", "rlplug", *PPO])


def test_the_folder_says_what_it_was_and_what_came_out(finished):
    folder, score = finished
    raw = yaml.safe_load((folder / "config.yaml").read_text())
    assert parse(raw).algo.cfg == compose(PPO).algo.cfg
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["command"][-1] == "log.every=1000"
    assert manifest["plugins"]["algo"] == {
        "kind": "algo",
        "name": "ppo",
        "distribution": "rlplug",
        "version": metadata.version("rlplug"),
    }
    assert manifest["versions"]["torch"] == torch.__version__
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["eval/return_mean"] == score
    assert summary["updates"] == 3
    assert summary["env_steps"] <= 3072
    assert summary.keys() >= {"eval/return_std", "wall_s", "env_steps_per_s", "startup_s", "episodes"}
    assert not list(folder.glob("*.partial"))


def test_metrics_stand_at_their_environment_steps(finished):
    folder, score = finished
    rows = table(folder)
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(steps)
    logged = [row for row in rows if row["time/env_steps_per_s"]]
    assert all(float(row["episode/return"]) == float(row["episode/length"]) for row in logged)
    assert {"train/policy", "train/value", "train/kl", "time/collect", "time/update"} <= rows[0].keys()
    evaluated = [row for row in rows if row["eval/return_mean"]]
    assert [int(row["step"]) // 900 for row in evaluated] == [1, 2, 3, 3]
    assert float(evaluated[-1]["eval/return_mean"]) == score


def test_wandb_holds_the_configuration_and_every_metric_at_its_step(finished):
    folder, _ = finished
    written = read(folder)
    (config,) = (record.run.config for record in written if record.HasField("run"))
    assert items(config.update)["algo"]["gamma"] == 0.99
    history = [items(record.history.item) for record in written if record.HasField("history")]
    logged = [(int(row["env_steps"]), row["train/policy"]) for row in history if "train/policy" in row]
    expected = [(int(row["step"]), float(row["train/policy"])) for row in table(folder) if row["train/policy"]]
    assert logged == [(step, pytest.approx(value)) for step, value in expected]
    assert len(logged) >= 2


def test_evaluation_plays_exactly_its_episodes_and_disturbs_nothing(tmp_path):
    trainer = build(compose([*PPO, "logger.only=[]"]), tmp_path)
    before = [generator.get_state() for generator in trainer.ctx.generators.values()], torch.get_rng_state()
    forty = replace(trainer.config.eval, episodes=40)
    evaluator = Evaluator(trainer.policy.env, trainer.algorithm, trainer.ctx, forty)
    first, again, other = (evaluator.play(evaluator.job, number) for number in (0, 0, 1))
    assert first["return"].tolist() == again["return"].tolist() != other["return"].tolist()
    assert len(first["return"]) == 40
    assert episode_metrics(first)["eval/length_mean"] == episode_metrics(first)["eval/return_mean"] > 1
    after = [generator.get_state() for generator in trainer.ctx.generators.values()], torch.get_rng_state()
    learner, actor, *_ = after[0]
    assert torch.equal(before[0][0], learner)
    assert torch.equal(before[0][1], actor)
    assert torch.equal(before[1], after[1])


@dataclass
class Witness:
    """Writes down what a run reports."""

    seen: list[tuple[str, Any]] = field(default_factory=list)

    @hookimpl
    def rlplug_collected(self, run, segment):
        self.seen.append(("collected", run.progress.env_steps))

    @hookimpl
    def rlplug_updated(self, run, losses):
        self.seen.append(("updated", run.progress.updates))


def tempo(overrides: list[str], tmp_path: Path) -> list[tuple[str, Any]]:
    trainer, witness = build(compose([*overrides, "logger.only=[]", "eval.every=0"]), tmp_path), Witness()
    trainer.hooks.register(witness)
    trainer.loop.run(trainer)
    return witness.seen


def test_replay_ratio_is_exact_and_counted_from_the_learning_start(tmp_path):
    small = ["algo=sac", "env=pendulum", "model.hidden=[8]", "num_steps_sampled_before_learning_starts=20"]
    seen = tempo([*small, "total_steps=60", "replay_ratio=0.3"], tmp_path)
    assert sum(kind == "updated" for kind, _ in seen) == 12
    assert seen[seen.index(("updated", 1)) - 1] == ("collected", 24)  # where 0.3 of an update per step make one
    once = tempo([*small, "rollout_fragment_length=10", "total_steps=50", "replay_ratio=null"], tmp_path)
    assert [kind for kind, _ in once] == ["collected"] * 2 + ["collected", "updated"] * 3  # one update a round


def test_a_rollout_is_learnt_from_once(tmp_path):
    kinds = [kind for kind, _ in tempo(["algo=ppo", "tuned=none", "total_steps=2500"], tmp_path)]
    assert kinds[:4] == ["collected", "updated"] * 2
    assert set(kinds[4:]) == {"collected"}  # what is left is less than a round


def test_schedules_follow_the_environment_steps(tmp_path):
    trainer = build(compose(["algo.lr=[[0,1e-3],[4096,0]]", "total_steps=4096", "logger.only=[]"]), tmp_path)
    trainer.collect()
    trainer.update()
    assert float(trainer.algorithm.lr) == pytest.approx(1e-3 * (1 - trainer.progress.env_steps / 4096))


def test_a_round_is_explored_with_the_schedule_of_its_first_step(tmp_path):
    small = [
        "algo=dqn",
        "tuned=none",
        "total_steps=200",
        "num_steps_sampled_before_learning_starts=100",
        "logger.only=[]",
    ]
    trainer = build(
        compose([*small, "exploration.epsilon_greedy.epsilon=[[0,1],[200,0]]", "model.hidden=[8]"]), tmp_path
    )
    begins, seen = [0], []

    class Witness:
        @hookimpl
        def rlplug_collected(self, run, segment):
            begins.append(run.progress.env_steps)
            seen.append(float(trainer.policy.exploration["epsilon_greedy"].epsilon))

    trainer.hooks.register(Witness())
    trainer.loop.run(trainer)
    assert seen == pytest.approx([1 - step / 200 for step in begins[:-1]])


def test_deterministic_runs_use_deterministic_kernels(tmp_path):
    try:
        build(compose(["deterministic=true", "logger.only=[]"]), tmp_path)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_shares_that_do_not_divide_are_refused_with_what_would():
    plan = Plan(accelerator="cpu", devices=2, microbatches=4)
    with pytest.raises(ConfigError, match=r"^train_batch_size: 10 cannot be shared .* use 8 or 16$"):
        resolve(compose(["algo=dqn", "train_batch_size=10"]), plan)
    with pytest.raises(ConfigError, match=r"^train_batch_size: 6 cannot be shared .* use 8$"):
        resolve(compose(["algo=dqn", "train_batch_size=6"]), plan)
    resolve(compose(["algo=dqn", "train_batch_size=256"]), plan)


def test_the_ranks_of_a_machine_share_its_memory(tmp_path, monkeypatch):
    words = ["algo=sac", "env=pendulum", "num_envs=2"]
    with closing(build(compose(words), tmp_path)) as trainer:
        needed = trainer.buffer.nbytes(trainer.collector.spec.row)
    monkeypatch.setattr(checks.psutil, "virtual_memory", lambda: SimpleNamespace(available=0.9 * needed))
    with pytest.raises(
        ConfigError, match=r"^buffer\.capacity: the buffer would need \S+ \S+, but this machine has only"
    ):
        build(compose(words), tmp_path)
    with pytest.raises(ConfigError, match=r"^buffer\.capacity: the buffers of 2 ranks would need"):
        build(compose(words), tmp_path, plan=Plan("cpu", 2))
    on_devices = [*words, "buffer.device=learner"]
    build(compose(on_devices), tmp_path, plan=Plan("cuda", 2)).close()  # in the memory of devices that ranks have
    monkeypatch.setattr(checks.psutil, "virtual_memory", lambda: SimpleNamespace(available=1.5 * needed))
    build(compose(words), tmp_path, plan=Plan("cpu", 2)).close()


def test_a_buffer_on_the_device_has_to_fit_there(tmp_path, monkeypatch):
    """As if there were a device: its memory is asked for where the buffer says that it lies there."""
    monkeypatch.setattr(Replay, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    with pytest.raises(ConfigError, match=r"^buffer\.capacity: the buffer would need .*, but H200 has only 1000 B"):
        build(compose(["algo=sac", "env=pendulum"]), tmp_path)


def test_a_run_makes_its_steps_and_learns_from_whole_rollouts_only(tmp_path):
    train(compose(["tuned=none", "total_steps=3000", "logger.only=[]", "eval.every=0", "eval.episodes=1"]), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 3000 - 8 < summary["env_steps"] <= 3000
    assert summary["updates"] == 2
    assert summary["eval/env_steps"] == summary["env_steps"]


def test_an_episode_without_end_is_evaluated_as_it_stands(tmp_path):
    endless = ["env=gymnasium", "env.id=Pendulum-v1", "env.max_episode_steps=100000", "total_steps=1024"]
    trainer = build(compose([*endless, "logger.only=[]", "eval.episodes=2", "eval.max_episode_steps=100"]), tmp_path)
    evaluator = trainer.reports.evaluation.evaluator
    assert evaluator.play(evaluator.job, 0)["length"].tolist() == [100, 100]
    with pytest.raises(KeyboardInterrupt):
        evaluator.play(evaluator.job, 0, stop=lambda: True)


def test_an_evaluation_whose_environments_fail_too_often_ends(tmp_path):
    """Episodes that broke off are not counted, and others are played instead; not for ever."""
    faulty = ["env.id=rlplug.testing.worlds:FaultyCartPole-v0", "env.restart_failed=true", "eval.episodes=8"]
    with closing(build(compose([*faulty, "+env.kwargs.raises=0.2"]), tmp_path)) as trainer:
        said = r"^the environments of an evaluation failed in \d+ episodes, and ended \d of 8$"
        with pytest.raises(RunError, match=said):
            trainer.reports.evaluation.run(trainer)


def test_a_resumed_run_says_which_libraries_are_others_now(tmp_path):
    train(compose([*BRIEF, "logger.only=[]", "eval.episodes=1"]), tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["versions"]["torch"] = "1.0"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    said = []
    assert rlplug.resume(tmp_path, tell=said.append).score > 0
    assert said[0] == f"torch was 1.0 then, and is {torch.__version__} now"
    assert said[1].startswith(f"{tmp_path} has finished: ")


def also_registers(monkeypatch: pytest.MonkeyPatch, hook: Any) -> None:
    """Let every run register ``hook`` behind its loggers."""
    start = launch.start

    def start_and_register(trainer):
        start(trainer)
        trainer.hooks.register(hook)

    monkeypatch.setattr(launch, "start", start_and_register)


def test_denormal_numbers_count_as_zero_while_a_run_learns(tmp_path, monkeypatch):
    class Sum:
        seen = None

        @hookimpl
        def rlplug_updated(self, run, losses):
            self.seen = (torch.full((100,), 1e-39) * 2).sum().item()

    witness = Sum()
    also_registers(monkeypatch, witness)
    brief = compose([*BRIEF, "eval.episodes=1"])
    train(brief, tmp_path / "1")
    assert witness.seen == 0
    assert (torch.full((100,), 1e-39) * 2).sum() > 0
    try:
        torch.set_flush_denormal(True)
        train(brief, tmp_path / "2")
        assert (torch.full((100,), 1e-39) * 2).sum() == 0, "as it was before"
    finally:
        torch.set_flush_denormal(False)


def test_loggers_hear_of_the_end_although_the_summary_cannot_be_written(tmp_path, monkeypatch):
    class Closing:
        summary = None

        @hookimpl
        def rlplug_started(self, run):
            (run.run_dir / "summary.json").mkdir()

        @hookimpl
        def rlplug_ended(self, run, summary):
            self.summary = summary

    closing = Closing()
    also_registers(monkeypatch, closing)
    config = compose([*BRIEF, "eval.episodes=1"])
    with pytest.raises(RunError, match=r"Is a directory; the last good checkpoint is .*/step_"):
        train(config, tmp_path)
    assert closing.summary["status"] == "finished"


class Opaque(CartPoleVectorEnv):
    """Its state is beyond reach, like that of one written in C++."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.handle = object()


def test_a_run_whose_environments_cannot_be_saved_says_so_and_goes_on(tmp_path):
    gymnasium.register("Opaque-v0", vector_entry_point=Opaque, max_episode_steps=500)
    config = compose(["env=gymnasium", "env.id=Opaque-v0", "total_steps=2048", "logger.only=[]", "eval.episodes=1"])
    train(config, tmp_path)
    lost = "the environments: their state cannot be read, so new episodes begin"
    assert find(tmp_path).manifest["not_restored"] == [lost]
    said = []
    resume(tmp_path, ["total_steps=6144"], said.append)
    (changed, where, how) = said
    assert changed == "total_steps: 2048 -> 6144"
    assert where.startswith("continuing from step 2,04")
    assert how == f"not exactly as it would have continued: {lost}"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 6144 - 8 < summary["env_steps"] <= 6144
    logged = [row for row in table(tmp_path) if row["episode/return"]]
    assert all(float(row["episode/return"]) == float(row["episode/length"]) for row in logged)


HEAVY = ("lightning", "matplotlib", "pandas", "ray", "scipy", "sympy", "torch._dynamo", "torchmetrics", "wandb")
PROGRAM = """
import json, sys
from pathlib import Path
import rlplug
from rlplug.run.launch import resume, train
folder, *words = sys.argv[1:]
train(rlplug.compose(words), Path(folder))
resume(folder, ["total_steps=768"])
print(json.dumps([name for name in {heavy} if name in sys.modules]))
"""


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_run_of_one_process_imports_nothing_that_it_does_not_use(algo: str, tmp_path: Path):
    """Checkpoints and a resumed run included."""
    words = [f"algo={algo}", "env=cartpole", "tuned=none", "hardware=cpu", "total_steps=512", "eval.episodes=1"]
    words += ["logger.only=csv", "rollout_fragment_length=8"] + (
        ["algo.sgd_minibatch_size=32"] if algo == "ppo" else ["num_steps_sampled_before_learning_starts=256"]
    )
    command = [sys.executable, "-c", PROGRAM.format(heavy=HEAVY), str(tmp_path / "run"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_a_command_line_counts_start_up_from_the_start_of_its_process(tmp_path: Path):
    """Between the two moments that are known here: the process is there, and the run's folder is written."""
    words = [
        "algo=ppo",
        "env=cartpole",
        "tuned=none",
        "hardware=cpu",
        "logger.only=[]",
        "total_steps=512",
        "eval.episodes=1",
    ]
    words += ["rollout_fragment_length=8", "algo.sgd_minibatch_size=32", f"hydra.run.dir={tmp_path / 'run'}"]
    before = time.time()
    process = subprocess.Popen([sys.executable, "-m", "rlplug", *words], stderr=subprocess.PIPE, text=True)
    there = time.time()
    _, said = process.communicate()
    assert process.returncode == 0, said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    made = (tmp_path / "run" / "config.yaml").stat().st_mtime
    assert made - there - 0.02 <= summary["startup_s"] <= time.time() - before


@pytest.mark.parametrize("hidden", [10**12, 10**18], ids=["beyond memory", "beyond what can be counted"])
def test_networks_that_are_too_large(hidden, tmp_path):
    match = r"model: its networks are too large, there is no memory for a tensor of .*; make it smaller"
    with pytest.raises(ConfigError, match=match):
        build(compose(["algo=ppo", "env=cartpole", f"model.hidden=[{hidden}]", "hardware=cpu"]), tmp_path)
