"""Tests reuse Hydra's composition of a command line's choices, and nothing can be told from it."""

from __future__ import annotations

import pytest
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from omegaconf import OmegaConf

from rlplug.config import compose, origins
from tests import composing
from tests.golden.cases import overrides
from tests.installing import install, manifest, site  # noqa: F401  fixtures

LINES = {name: overrides(name) for name in ("ppo_cartpole_recurrent", "dqn_cartpole_rainbow", "lints_linear_bandit")}
LINES |= {
    "values before choices": ["algo.gamma=0.5", "algo=sac", "num_envs=3", "env=pendulum", "model.hidden=[8]"],
    "added and taken out": ["+env.kwargs.x=1", "env=gymnasium", "env.id=a:B-v0", "~algo.kl_stop"],
    "of modules": ["exploration=[icm]", "exploration.icm.lr=[[0,1e-3],[${total_steps},0]]", "algo=ppo"],
    "a node, and a value before it": ["algo.lr=1", "algo={lr: 2}"],
    "hydra's own": ["hydra.run.dir=x", "algo.gamma=0.9"],
    "a sweep": ["algo.gamma=0.9,0.8"],
    "no such key": ["algo.gama=1"],
    "no such option": ["algo=sax", "algo.gamma=1"],
    "no value": ["model.hidden=[8"],
}


def said(make, words):
    """What was composed, or Hydra's error."""
    try:
        config = make(words)
    except Exception as error:
        return type(error), str(error)
    plain = OmegaConf.to_container(config, resolve=False)
    hydra = plain.pop("hydra")
    return plain, [*plain], hydra["overrides"], hydra["runtime"]["choices"], config._get_flag("struct")


@pytest.mark.parametrize("line", LINES)
def test_it_is_what_hydra_composes(line, monkeypatch):
    reused = [said(origins.loaded, LINES[line]) for _ in range(2)]  # the second time from what was kept
    monkeypatch.setattr(FileConfigSource, "load_config", composing.read)
    assert reused == [said(composing.composed, LINES[line])] * 2


def test_a_changed_file_is_read_again(install, site):  # noqa: F811
    files = {
        "mine/__init__.py": manifest(("algo", "mine", "tests.contract.toys:Sound"))
        + "\n@hookimpl\ndef rlplug_conf():\n    return 'mine'\n",
        "mine/conf/algo/mine.yaml": "# @package _global_\nalgo:\n  name: mine\n  lr: 0.5\n",
    }
    install("mine", "mine", files)
    assert compose(["algo=mine", "seed=1"]).algo.cfg.lr == 0.5
    file = site / "mine" / "conf" / "algo" / "mine.yaml"
    file.write_text(files["mine/conf/algo/mine.yaml"].replace("0.5", "0.25"))
    assert compose(["algo=mine", "seed=1"]).algo.cfg.lr == 0.25
