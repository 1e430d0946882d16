import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from rlplug import registry
from rlplug.cli import main
from rlplug.cli.options import Option, options
from rlplug.settings import PositiveFloat, PositiveInt, Scheduled, UnitFloat, option, settings
from tests.installing import Install, install_into, manifest


def test_one_kind(capsys: pytest.CaptureFixture[str]):
    assert main(["plugins", "algo"]) == 0
    words = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line}
    assert words == {"KIND", "algo", "PRESET"}


def test_components_and_presets_are_listed_with_who_brought_them(install: Install, capsys: pytest.CaptureFixture[str]):
    files = {"env/far": "name: gymnasium\nid: Far-v0\n", "experiment/fly": "# @package _global_\nseed: 3\n"}
    files |= {"env/cartpole": "name: gymnasium\n"}
    files = {f"rlplug_moon/conf/{name}.yaml": text for name, text in files.items()}
    moon = manifest(("env", "moon", "rlplug_moon.env:Moon"), conf="rlplug_moon.conf")
    install("rlplug-moon", "rlplug_moon", {"rlplug_moon/__init__.py": moon, **files})
    assert main(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    assert rows[0] == ["KIND", "NAME", "DISTRIBUTION", "VERSION"]
    for kind, name in (("env", "moon"), ("env", "far"), ("experiment", "fly")):
        assert [kind, name, "rlplug-moon", "1.2"] in rows
    for kind, name in (("algo", "sac"), ("env", "cartpole"), ("tuned", "dqn_cartpole")):
        assert [kind, name, "rlplug", "0.1.0"] in rows
    assert rows.count(["env", "gymnasium", "rlplug", "0.1.0"]) == 1
    (shadowed,) = [line for line in lines if line.startswith("shadowed: ")]
    assert "conf/env/cartpole.yaml of rlplug-moon 1.2 is not used: there is" in shadowed
    assert main(["plugins", "experiment", "fly"]) == 0
    said = ["experiment fly: conf/experiment/fly.yaml of rlplug-moon 1.2", "seed=3"]
    assert capsys.readouterr().out.splitlines() == said


def test_a_preset(capsys: pytest.CaptureFixture[str]):
    assert main(["plugins", "env", "cartpole"]) == 0
    head, _, first, *_ = capsys.readouterr().out.splitlines()
    component, file = head.split("; ")
    assert component == "env cartpole: rlplug.plugins.env.gymnasium:Gymnasium, of rlplug 0.1.0"
    assert file == "conf/env/cartpole.yaml of rlplug 0.1.0"
    assert first.split()[:5] == ["id", "str", "or", "null", "CartPole-v1"]


def test_settings_of_a_pair(capsys: pytest.CaptureFixture[str]):
    assert main(["plugins", "experiment", "rainbow_cartpole"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "experiment rainbow_cartpole: conf/experiment/rainbow_cartpole.yaml of rlplug 0.1.0"
    assert {"algo=dqn", "buffer=prioritized", "algo.n_step=3"} < set(lines)
    assert main(["plugins", "tuned", "dqn_cartpol"]) == 2
    assert "unknown tuned 'dqn_cartpol'; did you mean dqn_cartpole?" in capsys.readouterr().err


def test_broken_and_clashing_plugins_are_listed_and_do_not_stop_the_program(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name in ("moon", "luna"):
        files = {
            f"rlplug_{name}/__init__.py": manifest(("model", "crater", f"rlplug_{name}:M"), conf=f"rlplug_{name}.conf"),
            f"rlplug_{name}/conf/model/crater.yaml": "name: crater\n",
        }
        install_into(site, f"rlplug-{name}", f"rlplug_{name}", files)
    install_into(site, "rlplug-broken", "rlplug_broken", {"rlplug_broken.py": "import no_such_module"})
    registry.refresh()
    assert main(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    claim = "model 'crater' is claimed by rlplug-luna 1.2 and rlplug-moon 1.2"
    assert f"clash: {claim}; choose rlplug-luna/crater or rlplug-moon/crater" in lines
    assert "broken: rlplug-broken 1.2, skipped: ModuleNotFoundError: No module named 'no_such_module'" in lines

    warning = "rlplug: skipping the broken plugin rlplug-broken 1.2: ModuleNotFoundError: No module named"
    assert main(["check", "algo=ppo"]) == 0
    assert capsys.readouterr().err.startswith(warning)
    registry.refresh()
    assert main(["algo=ppo", "model=crater"]) == 2
    first, shadowed, second = capsys.readouterr().err.splitlines()
    assert first.startswith(warning)
    assert shadowed.startswith("rlplug: conf/model/crater.yaml of rlplug-moon 1.2 is not used")
    assert second.startswith(f"rlplug: model.name: {claim}")
    assert list(tmp_path.iterdir()) == [site]


def test_the_options_of_a_component(capsys: pytest.CaptureFixture[str]):
    assert main(["plugins", "algo", "sac"]) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head == "algo sac: rlplug.plugins.algo.sac:SAC, of rlplug 0.1.0"
    assert columns.split() == ["OPTION", "TYPE", "DEFAULT", "RANGE"]
    (gamma,) = [row for row in rows if row.startswith("gamma ")]
    assert gamma.split()[:7] == ["gamma", "float", "0.99", ">=", "0,", "<=", "1"]
    assert gamma.endswith(".")
    assert main(["plugins", "hardware", "gpu"]) == 0  # a YAML file of another name than its component
    assert any(line.split()[:3] == ["threads", "int", "1"] for line in capsys.readouterr().out.splitlines())


def test_the_table_of_options():
    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        lr: Scheduled[PositiveFloat] = option("Step size.")
        size: PositiveInt | None = option("Size.")
        act: Literal["relu", "tanh"] = option("Nonlinearity.")
        hidden: list[PositiveInt] = option("Layers.")

    assert options(Config, {"gamma": 0.9, "lr": 1e-3, "size": None, "act": "tanh", "hidden": [64]}) == [
        Option("gamma", "float", "0.9", ">= 0, <= 1", "Discount factor."),
        Option("lr", "float or schedule", "0.001", "> 0", "Step size."),
        Option("size", "int or null", "null", "> 0", "Size."),
        Option("act", "'relu' or 'tanh'", "tanh", "", "Nonlinearity."),
        Option("hidden", "list[int]", "[64]", "> 0", "Layers."),
    ]


def test_nobody_reads_any_more():
    command = [sys.executable, "-u", "-m", "rlplug", "plugins"]
    listing = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    listing.stdout.close()
    assert listing.stderr.read() == ""
    assert listing.wait() == 128 + signal.SIGPIPE
