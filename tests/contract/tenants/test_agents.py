"""Agents: two groups in a replay, masks and rewards of every agent, and what the kit reports of environments."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest
import torch
from gymnasium.spaces import MultiBinary

from rlplug import tree
from rlplug.agent import load
from rlplug.checkpointing.format import find
from rlplug.cli import main
from rlplug.config import compose
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.envs.spec_json import from_json
from rlplug.registry import hookimpl
from rlplug.results.evaluate import evaluate
from rlplug.run.build import build
from rlplug.testing import conformance
from rlplug.types import ConfigError
from tests.contract.tenants.agents import FILES
from tests.contract.tenants.teams import Columns, MaskedSignals, Signals
from tests.installing import installed

QUIET = ("hardware=cpu", "logger.only=[]", "eval.every=0")
SIGNALS = (
    *("algo=independent_dqn", "env=signals", *QUIET, "eval.episodes=4", "model.hidden=[16]", "algo.algo.hiddens=[16]"),
    "num_envs=2",
    *(
        "buffer.capacity=512",
        "num_steps_sampled_before_learning_starts=64",
        "checkpoint.every=100",
        "total_steps=320",
        "log.every=200",
    ),
)


teams = installed("rlplug-teams", "rlplug_teams", FILES)


def summary(run) -> dict:
    return json.loads((run / "summary.json").read_text())


def test_two_groups_in_a_replay(tmp_path):
    trainer = build(compose([*SIGNALS]), tmp_path)
    trainer.loop.run(trainer)
    batch = trainer.buffer.sample()
    scouts, base = batch["scouts"], batch["base"]
    assert {key: (*leaf.shape,) for key, leaf in scouts.items()} == {
        **dict.fromkeys(("action", "reward", "terminated", "truncated", "alive", "agent_is_first"), (2, 32, 2)),
        "obs": (2, 32, 2, 5),
    }
    assert base["obs"].shape == (2, 32, 3)
    assert base["action"].shape == base["alive"].shape == batch["valid"].shape == (2, 32)
    assert not {"reward", "obs", "action"} & batch.keys()
    steps, episodes = trainer.progress.env_steps, trainer.episodes.drain()
    assert 318 < steps <= 320
    assert len(episodes) > 10
    for total, length, _, scouted, paid in episodes:
        assert scouted == paid / 2  # the base is paid for both scouts
        assert total == pytest.approx((2 * scouted + paid) / 3)
        assert 1 <= length <= 6
    trainer.close()


@pytest.mark.parametrize("env", ["carts", "signals"])
def test_what_agents_are_rewarded_for_beside_reaches_the_learner(tmp_path, monkeypatch, env):
    """Every agent its own, of one group and of several; what the buffer keeps stays as it was."""
    words = ("algo=independent", f"env={env}", *QUIET)
    trainer = build(compose([*words, "exploration=[novelty]", "exploration.novelty.scale=2"]), tmp_path)
    while not trainer.ready():
        trainer.collect()
    samples, seen, sample, prepare = [], [], trainer.buffer.sample, trainer.algorithm.prepare
    monkeypatch.setattr(trainer.buffer, "sample", lambda: samples.append(sample()) or samples[-1])
    monkeypatch.setattr(trainer.algorithm, "prepare", lambda batch: seen.append(batch) or prepare(batch))
    losses, raw = trainer.update(), samples[0]
    bonuses = []
    for name in ("scouts", "base") if env == "signals" else ("",):
        before, after = (batch[name] if name else batch for batch in (raw, seen[0]))
        changed = 2 * (before["obs"][1:] - before["obs"][:-1]).abs().sum(-1) * before["alive"][:-1]
        torch.testing.assert_close(after["reward"][:-1], before["reward"][:-1] + changed)
        torch.testing.assert_close(after["reward_int"][:-1], changed)
        assert "reward_int" not in before
        bonuses.append(changed[raw["valid"][:-1]].flatten())
    torch.testing.assert_close(losses.metrics["novelty/reward"], torch.cat(bonuses).mean())
    assert torch.cat(bonuses).any()
    trainer.close()


# ---- bad input -------------------------------------------------------------------------------------------------------

CARTS, SIGNAL = r"carts \(cart0, cart1\)", r"scouts \(north, south\); base \(one agent\)"
REFUSED = {
    "ppo": (("algo=ppo", "env=carts"), "env", rf"has the agents {CARTS}.* supports one agent"),
    "dqn": (("algo=dqn", "env=carts", "exploration=[]"), "env", CARTS),
    "sac": (("algo=sac", "env=signals"), "env", SIGNAL),
    "reinforce": (("algo=reinforce", "env=carts"), "env", CARTS),
    "qmix": (("algo=qmix", "env=signals"), "env", "one group of agents"),
    "exploration": (
        ("algo=independent_dqn", "env=carts", "exploration=parameter_noise"),
        "exploration.parameter_noise",
        "the weights of one agent, but the environment has several",
    ),
    "reward": (
        ("algo=independent", "env=carts", "preprocess.normalize_reward=true"),
        "preprocess.normalize_reward",
        "",
    ),
    "obs": ((*SIGNALS, "preprocess.normalize_obs=true"), "preprocess.normalize_obs", "scouts, base"),
    "masks of groups": (
        ("algo=blind", "env=masked_signals"),
        "env",
        "blind does not support action masks; use an algorithm that does",
    ),
    "video": (("algo=independent", "env=carts", "eval.record=1"), "eval.record", ""),
    "nested value": (("algo=independent", "env=carts", "algo.algo.gamma=2"), "algo.algo.gamma", "out of range"),
    "nested key": (("algo=independent", "env=carts", "+algo.algo.gama=1"), "algo.algo.gama", "did you mean"),
    "nested name": (("algo=independent", "env=carts", "algo.algo.name=pop"), "algo.algo.name", "ppo"),
    "nested cross": (
        ("algo=independent", "env=carts", "algo.algo.sgd_minibatch_size=9999"),
        "algo.algo.sgd_minibatch_size",
        "9999 is more than",
    ),
    "nested spaces": (
        ("algo=independent_dqn", "env=carts", "algo.algo.num_atoms=3", "algo.algo.v_max=-20"),
        "algo.algo.v_max",
        "",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_anything_starts(tmp_path, what):
    words, key, said = REFUSED[what]
    with pytest.raises(ConfigError) as caught:
        build(compose([*words, *QUIET]), tmp_path / "run").close()
    assert caught.value.key == key
    assert re.search(said, str(caught.value))
    assert not (tmp_path / "run").exists()


def test_masks_of_groups_are_heeded_and_declared(tmp_path, monkeypatch):
    """A child sees those of its agent; the environment takes no forbidden action; a checkpoint knows their space."""
    run = tmp_path / "run"
    words = ("algo=independent", "env=masked_signals", *QUIET, "total_steps=2048", "eval.episodes=2")
    assert main([*words, f"hydra.run.dir={run}", f"record.path={tmp_path / 'data'}"]) == 0
    assert from_json(find(run).manifest["spec"]).groups["scouts"].extras == {"action_mask": MultiBinary(3)}
    recording = Recording([str(tmp_path / "data")], Reading())
    assert recording.episode(0, None, 1)["scouts"]["action_mask"].shape[1:] == (2, 3)

    def undeclared(self, cfg, ctx):
        masked(self, cfg, ctx)
        self.spec = Signals(cfg, ctx).spec

    masked = MaskedSignals.__init__
    monkeypatch.setattr(MaskedSignals, "__init__", undeclared)
    said = r"MaskedSignals.reset returned action_mask; name its space in the extras of the spec's Group\('scouts'\)$"
    with pytest.raises(ConfigError, match=said):
        build(compose(["algo=blind", "env=masked_signals", *QUIET]), tmp_path)


def test_policies_of_several_agents_are_logged_loaded_and_evaluated(tmp_path):
    run = tmp_path / "run"
    assert main([*SIGNALS, f"hydra.run.dir={run}"]) == 0
    assert load(run).spec.has_agents
    assert evaluate(run, ["eval.episodes=3"])["episodes"] == 3
    described = {
        key: origin["name"] for key, origin in json.loads((run / "manifest.json").read_text())["plugins"].items()
    }
    assert described["algo.algo"] == "dqn"
    with (run / "metrics.csv").open() as file:
        returns = [row for row in csv.DictReader(file) if row["episode/return"]]
    assert returns
    assert all(row["episode/return/scouts"] and row["episode/return/base"] for row in returns)


def test_observations_of_agents_are_normalized_alike(tmp_path):
    """Every agent that is alive counts once, in the moments that all agents are normalized by."""
    words = ("algo=independent", "env=carts", *QUIET, "preprocess.normalize_obs=true", "total_steps=2048")
    trainer = build(compose([*words]), tmp_path)
    rows = []
    trainer.hooks.register(Watching(rows))
    trainer.loop.run(trainer)
    moments = trainer.policy.normalizer.obs["obs"]
    moments.commit()
    seen = torch.cat(rows).double()
    assert 1000 < len(seen) < 2 * trainer.progress.env_steps
    torch.testing.assert_close(moments.mean.double(), seen.mean(0), atol=1e-5, rtol=1e-4)
    trainer.close()


class Watching:
    def __init__(self, rows):
        self.rows = rows

    @hookimpl
    def rlplug_collected(self, run, segment):
        batch = segment.batch
        self.rows.append(batch["obs"][batch["valid"].unsqueeze(-1) & batch["alive"]].clone())


# ---- the conformance kit ---------------------------------------------------------------------------------------------


WRONG = {
    "zombie": (
        lambda row: {"alive": row["alive"] | row.get("terminated", False)},
        "an agent is terminated or truncated, and alive in the next row",
    ),
    "vanishing": (
        lambda row: {"alive": row["alive"] & [True, False]},
        "that was not alive is terminated|is not alive any more, but was not",
    ),
    "dead again": (
        lambda row: {"terminated": row["terminated"] | ~row["alive"] & [True, False]} if "terminated" in row else {},
        "that was not alive is terminated",
    ),
    "without agents": (
        lambda row: {"reward": row["reward"].sum(1)} if "reward" in row else {},
        r"'reward' with shape \(3,\); expected \(3, 2\)",
    ),
    "without alive": (lambda row: {"alive": None}, "a row lacks 'alive'"),
    "outside": (lambda row: {"obs": row["obs"][:, :1]}, r"obs has shape \(3, 1, 4\); expected \(3, 2, 4\)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_environment_that_breaks_the_contract_is_reported(monkeypatch, wrong):
    change, said = WRONG[wrong]

    def changed(method):
        def call(self, *args):
            row = tree.map(np.copy, method(self, *args))
            return {key: leaf for key, leaf in (row | change(row)).items() if leaf is not None}

        return call

    monkeypatch.setattr(Columns, "step", changed(Columns.step))
    if wrong != "vanishing":
        monkeypatch.setattr(Columns, "reset", changed(Columns.reset))
    with pytest.raises(AssertionError, match=said):
        conformance.check_component("env", "carts")
