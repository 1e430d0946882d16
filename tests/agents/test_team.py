"""Trained policies of environments with agents, outside of a run."""

from __future__ import annotations

import numpy as np
import pytest

from rlplug import load
from rlplug.cli import main
from tests.contract.tenants.agents import FILES
from tests.installing import installed

SMALL = (
    "tuned=none",
    "hardware=cpu",
    "logger.only=[]",
    "eval.every=0",
    "eval.episodes=2",
    "num_envs=2",
    "rollout_fragment_length=8",
)


teams = installed("rlplug-teams", "rlplug_teams", FILES)


def trained(tmp_path, *words):
    words = (*words, *SMALL, "total_steps=16", f"hydra.run.dir={tmp_path / 'run'}")
    assert main([*words]) == 0
    return load(tmp_path / "run")


def test_groups_act_alone_and_in_batches(tmp_path):
    team = trained(
        tmp_path,
        "algo=shared",
        "env=masked_signals",
        "model=lstm",
        "algo.algo.sgd_minibatch_size=8",
        "algo.algo.max_seq_len=4",
    )
    rng = np.random.default_rng(0)
    rows = [
        {"scouts": rng.uniform(size=(3, 2, 5)).astype(np.float32), "base": rng.uniform(size=(3, 3)).astype(np.float32)}
        for _ in range(4)
    ]
    scouts = np.array([[False, True, True], [True, True, True]])
    masks = {"scouts": np.stack([scouts] * 3), "base": np.ones((3, 4), np.bool_)}
    together = [team.act(row, action_mask=masks) for row in rows]
    assert together[0]["scouts"].shape == (3, 2)
    assert together[0]["base"].shape == (3,)
    assert not any((actions["scouts"][:, 0] == 0).any() for actions in together)
    for env in range(3):  # with a memory of its own
        team.reset()
        for row, actions in zip(rows, together, strict=True):
            alone = team.act(
                {name: obs[env] for name, obs in row.items()}, action_mask={name: x[env] for name, x in masks.items()}
            )
            assert alone["scouts"].tolist() == actions["scouts"][env].tolist()
            assert alone["base"] == actions["base"][env]
    team.reset()
    with pytest.raises(ValueError, match="trained with action masks"):
        team.act(rows[0])
    with pytest.raises(ValueError, match="groups to observations: scouts, base"):
        team.act(rows[0]["scouts"])
    with pytest.raises(ValueError, match="action_mask should map each group to its array, but 'base' is missing"):
        team.act(rows[0], action_mask={"scouts": masks["scouts"]})
    with pytest.raises(ValueError, match=r"action_mask\['base'\] should be \[4\] or \[3, 4\], got \[3, 1\]"):
        team.act(rows[0], action_mask=masks | {"base": np.ones((3, 1), np.bool_)})
    with pytest.raises(ValueError, match="alive should map each group to its array, but 'scouts' is missing"):
        team.act(rows[0], action_mask=masks, alive={"scout": True})
    team.reset()
    with pytest.raises(ValueError, match="observation"):
        team.act({"scouts": rows[0]["scouts"][0, :1], "base": rows[0]["base"][0]}, action_mask=masks)


def test_one_group_and_no_export(tmp_path, capsys):
    team = trained(tmp_path, "algo=mappo", "env=two_carts")
    obs = np.zeros((2, 4), np.float32)
    assert team.act({"carts": obs})["carts"].shape == (2,)
    assert team.act({"carts": obs}, "explore", alive={"carts": np.array([True, False])})["carts"].shape == (2,)
    assert main(["export", str(tmp_path / "run"), "--format", "onnx"]) == 2
    said = capsys.readouterr().err
    assert "several agents" in said
    assert len(said.strip().splitlines()) == 1
