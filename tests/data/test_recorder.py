"""What a run writes down: every episode that ended, once, whatever happens to the run."""

import json
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from rlplug import tree
from rlplug.api import Job
from rlplug.checkpointing.atomic import PARTIAL
from rlplug.cli import main
from rlplug.config import compose, parse
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.results.evaluate import evaluate
from rlplug.run.build import build
from rlplug.run.launch import resume, train
from rlplug.testing.rank_pool import ranks
from rlplug.trainer.trainer import Trainer
from rlplug.types import Batch
from tests.tools.kill import Process, warm_up

QUIET = ("hardware=cpu", "logger.only=[]", "tuned=none", "model.hidden=[8]", "eval.every=0", "eval.episodes=1")
PPO = ("algo=ppo", *QUIET, "num_envs=3", "rollout_fragment_length=16", "algo.sgd_minibatch_size=16")
WORLD = ("env=gymnasium", "env.id=rlplug.testing.worlds:World-v0")
ENVS = {
    "vector": ("env=cartpole",),
    "masks": ("env=masked_cartpole",),
    "same step": (*WORLD, "env.vectorization=list"),
    "dict": (*WORLD, "+env.kwargs.observation=dict", "model=multi_input"),
    "box": (*WORLD, "+env.kwargs.action=box"),
}


def start(folder: Path, *words: str, steps: int = 480) -> Path:
    run = folder / "run"
    train(compose([*PPO, f"total_steps={steps}", f"record.path={folder / 'data'}", *words]), run)
    return run


def episodes(path: Path) -> list[Batch]:
    found = Recording([str(path)], Reading())
    return [found.episode(i, None, 1) for i in range(len(found.lengths))]


def fingerprints(path: Path) -> list[tuple[bytes, ...]]:
    return sorted(tuple(leaf.tobytes() for leaf in tree.leaves(rows)) for rows in episodes(path))


@pytest.mark.parametrize(("env", "form"), [*((env, "parquet") for env in ENVS), ("masks", "json"), ("dict", "json")])
def test_episodes_are_those_that_were_collected(env, form, tmp_path):
    """As many as the run counted, each of them whole, with what the policy thought of its actions."""
    words = [word for word in PPO if env != "dict" or not word.startswith("model.")]
    more = [*ENVS[env], "total_steps=192", f"record.path={tmp_path / 'data'}", f"record.format={form}"]
    train(compose([*words, *more]), tmp_path / "run")
    found = episodes(tmp_path / "data")
    assert len(found) > 3
    assert sum(len(rows["valid"]) - 1 for rows in found) <= 192
    for rows in found:
        steps = len(rows["valid"]) - 1
        assert rows["valid"].tolist() == [True] * steps + [False]
        assert rows["is_first"].tolist() == [True] + [False] * steps
        assert (rows["terminated"] | rows["truncated"]).tolist() == [False] * (steps - 1) + [True, False]
        assert {"obs", "action", "reward", "logp"} <= rows.keys()
        assert (rows["logp"][:-1] < 0).all() or env == "box"
        if env == "masks":
            allowed = np.take_along_axis(rows["action_mask"][:-1], rows["action"][:-1, None], 1)
            assert allowed.all()


@pytest.mark.parametrize("hardware", ["cpu", pytest.param("2cpu", marks=pytest.mark.slow)])
def test_lines_of_several_runs_are_one_set_for_rllib(hardware, tmp_path):
    """Its readers put lines together by ``eps_id``, and its estimators divide by ``action_prob``."""
    words = [f"hardware={hardware}", "num_envs=4", "env=cartpole", "record.format=json", "record.max_file_size=4000"]
    for number in range(2):
        data = f"record.path={tmp_path / 'data'}"
        train(compose([*PPO, "total_steps=512", *words, data, f"seed={number}"]), tmp_path / str(number))
    lines = [json.loads(line) for path in (tmp_path / "data").glob("*.json") for line in path.read_text().splitlines()]
    assert len(lines) == len(episodes(tmp_path / "data")) > 20
    assert len({*(number for line in lines for number in line["eps_id"])}) == len(lines)
    for line in lines:
        assert len({*line["eps_id"]}) == 1
        assert max(line["eps_id"]) < 2**62
        np.testing.assert_allclose(line["action_prob"], np.exp(line["action_logp"]))


def test_what_is_recorded_does_not_change_what_is_learned(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train(compose([*PPO, "env=cartpole", "total_steps=480"]), one)
    train(compose([*PPO, "env=cartpole", "total_steps=480", f"record.path={tmp_path / 'data'}"]), two)
    scores = [json.loads((run / "summary.json").read_text())["eval/return_mean"] for run in (one, two)]
    assert scores[0] == scores[1]


ES = ("algo=es", "env=cartpole", *QUIET, "total_steps=800", "checkpoint.every=200", "algo.episodes_per_batch=4")
ES += ("algo.eval_prob=0.0", "model.hidden=[4]")
ROUNDS = {  # how a run collects, its words, and the round after which it is stopped
    "collect": ((*PPO, "env=cartpole", "total_steps=480", "checkpoint.every=96", "record.max_file_size=2000"), 6),
    "play": ((*ES, "record.max_file_size=3000"), 3),
}


@pytest.mark.parametrize("method", ROUNDS)
def test_a_resumed_run_loses_and_doubles_nothing(method, tmp_path, monkeypatch):
    """It is stopped behind its last checkpoint: files that it wrote since are written again; also those of jobs."""
    words, last = ROUNDS[method]
    train(compose([*words, f"record.path={tmp_path / 'whole'}"]), tmp_path / "one")
    assert len([*(tmp_path / "whole").iterdir()]) > 3
    if method == "play":
        summary, rows = json.loads((tmp_path / "one" / "summary.json").read_text()), episodes(tmp_path / "whole")
        assert sum(int(one["valid"].sum()) for one in rows) == summary["env_steps"] >= 800
        assert len(rows) == 4 * summary["updates"]
        assert {"obs", "action", "reward"} <= rows[0].keys()
    plain, rounds = getattr(Trainer, method), iter(range(100))

    def broken(self, *args, **kwargs):
        found = plain(self, *args, **kwargs)
        if next(rounds) == last:
            raise RuntimeError("as if killed")
        return found

    monkeypatch.setattr(Trainer, method, broken)
    with pytest.raises(RuntimeError):
        train(compose([*words, f"record.path={tmp_path / 'broken'}"]), tmp_path / "two")
    monkeypatch.setattr(Trainer, method, plain)
    resume(tmp_path / "two", tell=lambda line: None)
    assert fingerprints(tmp_path / "broken") == fingerprints(tmp_path / "whole")


JOBS = [Job(i, episodes=1 + i, mode=mode) for i, mode in enumerate(("explore", "greedy", "random"))]


def played(fabric, raw):
    """Play jobs between two rounds, write down what was played, and return what jobs gave."""
    with closing(build(parse(raw), Path(), fabric)) as trainer:
        trainer.hooks.hook.rlplug_started(run=trainer)
        trainer.collect()
        batches = [batch for _, batch in trainer.play(JOBS)]
        trainer.collect()
        if (recorder := trainer.reports.recorder) is not None:
            recorder.state()
        return batches


@pytest.mark.parametrize(
    ("env", "num_envs"), [("vector", None), ("box", None), ("masks", None), ("box", 2), ("masks", 3)]
)
def test_episodes_of_jobs_are_recorded(env, num_envs, tmp_path):
    """Once each, beside those of rounds, with what a run records: also where the algorithm needs nothing of it."""
    words = [*PPO, *ENVS[env], f"record.path={tmp_path}", "rollout_fragment_length=12"]
    words += [] if num_envs is None else [f"num_envs={num_envs}", "hardware=2cpu"]
    raw = compose(words).raw
    batches = played(None, raw) if num_envs is None else ranks(2)(played, raw)[0]
    found = {rows["reward"].tobytes() + rows["obs"].tobytes(): rows for rows in episodes(tmp_path)}
    count = 0
    for batch in batches:
        for b, length in enumerate(batch["length"].tolist()):
            rows = tree.map(lambda x, b=b, n=length: x[: n + 1, b].numpy(), {k: batch[k] for k in ("reward", "obs")})
            written = found.pop(rows["reward"].tobytes() + rows["obs"].tobytes())
            for key in ("action", "terminated", "truncated", "valid", "is_first", "logp"):
                if key in batch and key in written:
                    np.testing.assert_array_equal(written[key], batch[key][: length + 1, b].numpy())
            assert "action" in written
            count += 1
    assert count == 6
    assert len(episodes(tmp_path)) == len(found) + 6


def test_a_longer_run_appends(tmp_path):
    run = start(tmp_path, "env=cartpole", steps=240)
    before = fingerprints(tmp_path / "data")
    resume(run, ["total_steps=480"], tell=lambda line: None)
    after = fingerprints(tmp_path / "data")
    assert {*before} < {*after}
    assert len({*after}) == len(after) > len(before) + 3
    assert len([*(tmp_path / "data").iterdir()]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [(), ("hardware=2cpu", "num_envs=4", "algo.sgd_minibatch_size=32")], ids=["one process", "two ranks"]
)
def test_killed_while_it_writes(words, tmp_path):
    """SIGKILL while a file is written leaves whole ones; resumed, a run has written what an undisturbed one writes."""
    words = [*PPO, "env=cartpole", "checkpoint.every=96", "record.max_file_size=2000", "total_steps=9600", *words]
    warm_up(words)
    data, kills = tmp_path / "data", 0

    def written_since(when: float) -> bool:
        """Return whether a file is being written, and not left by an earlier kill."""
        with suppress(FileNotFoundError):
            return any(path.stat().st_mtime > when for path in data.glob(f"*{PARTIAL}"))
        return False

    Process(tmp_path / "whole", [*words, f"record.path={tmp_path / 'undisturbed'}"]).wait()
    overrides = [*words, f"record.path={data}"]
    while kills < 5:
        began, process = time.time(), Process(tmp_path / "broken", overrides)
        assert process.wait(lambda: len([*data.glob("*.parquet")]) >= 12 * kills and written_since(began))  # noqa: B023
        process.kill()
        kills, overrides = kills + 1, None
        if [*data.glob("*.parquet")]:
            episodes(data)
    Process(tmp_path / "broken").wait()
    assert fingerprints(data) == fingerprints(tmp_path / "undisturbed")


@pytest.mark.parametrize("mode", ["greedy", "explore", "random"])
def test_evaluations_are_recorded(mode, tmp_path):
    run = start(tmp_path, "env=cartpole")
    found = evaluate(run, ["eval.episodes=5", f"record.path={tmp_path / 'eval'}"], tell=print, mode=mode)
    rows = episodes(tmp_path / "eval")
    assert len(rows) == 5
    assert np.mean([one["reward"].sum() for one in rows]) == found["eval/return_mean"]
    assert ("logp" in rows[0]) == (mode != "greedy")
    again = fingerprints(tmp_path / "eval")
    evaluate(run, ["eval.episodes=5", f"record.path={tmp_path / 'eval'}"], tell=print, mode=mode)
    assert fingerprints(tmp_path / "eval") == again  # the same episodes, once


def test_an_evaluation_of_a_run_that_recorded_records_only_if_asked(tmp_path):
    run = start(tmp_path, "env=cartpole")
    before = sorted(path.name for path in (tmp_path / "data").iterdir())
    evaluate(run, ["eval.episodes=5"], tell=print)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == before
    evaluate(run, ["eval.episodes=5", f"record={{path: {tmp_path / 'data'}}}"], tell=print)
    assert len([*(tmp_path / "data").iterdir()]) > len(before)


@pytest.mark.parametrize("word", ["eval.episodes=2", "record.format=json", "env.max_episode_steps=9"])
def test_evaluations_of_other_settings_are_recorded_beside_each_other(word, tmp_path):
    run = start(tmp_path, "env=cartpole")
    words, more = ["eval.episodes=5", f"record.path={tmp_path / 'eval'}"], 2 if word == "eval.episodes=2" else 5
    evaluate(run, words, tell=print)
    first = fingerprints(tmp_path / "eval")
    for _ in range(2):  # the second time its own file alone is replaced
        evaluate(run, [*words, word], tell=print)
        both = fingerprints(tmp_path / "eval")
        assert len(both) == 5 + more
        assert {*first} <= {*both}


def test_an_evaluation_that_is_killed_leaves_what_was_recorded_before(tmp_path, monkeypatch):
    run = start(tmp_path, "env=cartpole")
    words = ["eval.episodes=5", f"record.path={tmp_path / 'eval'}", "record.max_file_size=1000"]
    evaluate(run, words, tell=print)
    first, names = fingerprints(tmp_path / "eval"), sorted((tmp_path / "eval").iterdir())
    assert len(names) > 1
    left = names[0].with_name(names[0].name.replace("000000", "000009"))
    left.write_bytes(names[0].read_bytes())  # of an evaluation that wrote more files
    with monkeypatch.context() as patch:
        patch.setattr("pyarrow.parquet.ParquetWriter.write_table", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            evaluate(run, words, tell=print)
    assert sorted((tmp_path / "eval").iterdir()) == [*names, left]
    evaluate(run, words, tell=print)
    assert sorted((tmp_path / "eval").iterdir()) == names
    assert fingerprints(tmp_path / "eval") == first


def test_data_of_soft_actor_critic_says_how_likely_its_actions_were(tmp_path):
    """Random ones, too, which it plays first; with noise on top nobody knows."""
    words = ["algo=sac", "env=pendulum", *QUIET, "total_steps=420", "num_steps_sampled_before_learning_starts=210"]
    words += ["train_batch_size=8", "replay_ratio=0.05"]
    train(compose([*words, f"record.path={tmp_path / 'plain'}"]), tmp_path / "one")
    first, second = episodes(tmp_path / "plain")
    np.testing.assert_allclose(first["logp"][:-1], -np.log(2.0), rtol=1e-6)
    assert np.isfinite(second["logp"]).all()
    assert len({*second["logp"].tolist()}) > 100
    train(compose([*words, "exploration=gaussian", f"record.path={tmp_path / 'noisy'}"]), tmp_path / "two")
    assert "logp" not in episodes(tmp_path / "noisy")[0]


@pytest.mark.parametrize(("form", "package"), [("parquet", "pyarrow"), ("json", "lz4")])
def test_a_package_that_is_missing_is_named_before_anything_starts(form, package, tmp_path, monkeypatch, capsys):
    for module in (package, f"{package}.frame"):
        monkeypatch.setitem(sys.modules, module, None)
    words = [*PPO, "env=cartpole", "total_steps=48", f"record.path={tmp_path / 'data'}", f"record.format={form}"]
    assert main([*words, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert f"needs {package}, which is not installed: pip install 'rlplug[data]'" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    words = [
        *PPO,
        "env=cartpole",
        "total_steps=48",
        f"record.path={tmp_path / 'file'}",
        f"hydra.run.dir={tmp_path / 'r'}",
    ]
    assert main(words) == 1
    assert f"record.path: {tmp_path / 'file'} cannot be written" in capsys.readouterr().err
