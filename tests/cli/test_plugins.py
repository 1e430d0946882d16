import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from rlplug.cli import main
from rlplug.cli.options import Option, options
from rlplug.settings import PositiveFloat, PositiveInt, Scheduled, UnitFloat, option, settings
from tests.installing import Install, install_into, manifest


def test_every_component_is_listed_with_its_distribution(install: Install, capsys: pytest.CaptureFixture[str]):
    install("rlplug-moon", "rlplug_moon", {"rlplug_moon.py": manifest(("env", "moon", "rlplug_moon.env:Moon"))})
    assert main(["plugins"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["KIND", "NAME", "DISTRIBUTION", "VERSION"]
    assert ["env", "moon", "rlplug-moon", "1.2"] in rows
    assert ["algo", "sac", "rlplug", "0.1.0"] in rows


def test_one_kind(capsys: pytest.CaptureFixture[str]):
    assert main(["plugins", "algo"]) == 0
    words = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line}
    assert words == {"KIND", "algo", "PRESET"}


def test_presets_are_listed_with_who_brought_them(install: Install, capsys: pytest.CaptureFixture[str]):
    conf = "from rlplug import hookimpl\n@hookimpl\ndef rlplug_conf(): return 'rlplug_moon.conf'\n"
    files = {"env/far": "name: gymnasium\nid: Far-v0\n", "experiment/fly": "# @package _global_\nseed: 3\n"}
    files |= {"env/cartpole": "name: gymnasium\n"}
    files = {f"rlplug_moon/conf/{name}.yaml": text for name, text in files.items()}
    install("rlplug-moon", "rlplug_moon", {"rlplug_moon/__init__.py": conf, **files})
    assert main(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    assert ["env", "far", "rlplug-moon", "1.2"] in rows
    assert ["experiment", "fly", "rlplug-moon", "1.2"] in rows
    assert ["env", "cartpole", "rlplug", "0.1.0"] in rows
    assert ["tuned", "dqn_cartpole", "rlplug", "0.1.0"] in rows
    assert rows.count(["env", "gymnasium", "rlplug", "0.1.0"]) == 1
    (shadowed,) = [line for line in lines if line.startswith("shadowed: ")]
    assert "conf/env/cartpole.yaml of rlplug-moon 1.2 is not used: there is" in shadowed
    assert main(["plugins", "experiment", "fly"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "experiment fly: conf/experiment/fly.yaml of rlplug-moon 1.2",
        "seed=3",
    ]


def test_a_preset(capsys: pytest.CaptureFixture[str]):
    assert main(["plugins", "env", "cartpole"]) == 0
    head, _, first, *_ = capsys.readouterr().out.splitlines()
    component, file = head.split("; ")
    assert component == "env cartpole: rlplug.plugins.env.gymnasium:Gymnasium, of rlplug 0.1.0"
    assert file == "conf/env/cartpole.yaml of rlplug 0.1.0"
    assert first.split()[:3] == ["id", "str", "CartPole-v1"]


def test_settings_of_a_pair(capsys: pytest.CaptureFixture[str]):
    assert main(["plugins", "experiment", "rainbow_cartpole"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "experiment rainbow_cartpole: conf/experiment/rainbow_cartpole.yaml of rlplug 0.1.0"
    assert {"algo=dqn", "buffer=prioritized", "algo.n_step=3"} < set(lines)
    assert main(["plugins", "tuned", "dqn_cartpol"]) == 2
    assert "unknown tuned 'dqn_cartpol'; did you mean dqn_cartpole?" in capsys.readouterr().err


def test_broken_and_clashing_plugins_are_listed(install: Install, capsys: pytest.CaptureFixture[str]):
    moon = manifest(("env", "moon", "x:Moon"))
    install("rlplug-moon", "rlplug_moon", {"rlplug_moon.py": moon})
    install("rlplug-luna", "rlplug_luna", {"rlplug_luna.py": moon}, version="2")
    install("rlplug-broken", "rlplug_broken", {"rlplug_broken.py": "import no_such_module"}, version="3")
    assert main(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "clash: env 'moon' is claimed by rlplug-luna 2 and rlplug-moon 1.2; choose rlplug-luna/moon or rlplug-moon/moon"
        in lines
    )
    assert "broken: rlplug-broken 3, skipped: ModuleNotFoundError: No module named 'no_such_module'" in lines


def test_the_options_of_a_component(capsys: pytest.CaptureFixture[str]):
    assert main(["plugins", "algo", "sac"]) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head == "algo sac: rlplug.plugins.algo.sac:SAC, of rlplug 0.1.0"
    assert columns.split() == ["OPTION", "TYPE", "DEFAULT", "RANGE"]
    (gamma,) = [row for row in rows if row.startswith("gamma ")]
    assert gamma.split()[:7] == ["gamma", "float", "0.99", ">=", "0,", "<=", "1"]
    assert gamma.endswith(".")


def test_a_yaml_of_another_name_gives_the_defaults(capsys: pytest.CaptureFixture[str]):
    assert main(["plugins", "hardware", "gpu"]) == 0
    assert any(line.split()[:3] == ["threads", "int", "1"] for line in capsys.readouterr().out.splitlines())


def test_listing_imports_no_torch(tmp_path: Path):
    code = (
        "import sys; from rlplug.cli import main; assert main(['plugins']) == 0; "
        "assert main(['plugins', 'algo']) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)


def test_a_broken_and_two_clashing_plugins_do_not_stop_the_program(tmp_path: Path):
    site, work = tmp_path / "site", tmp_path / "work"
    site.mkdir()
    work.mkdir()
    conf = "\n@hookimpl\ndef rlplug_conf(): return 'rlplug_{}.conf'\n"
    for name in ("moon", "luna"):
        files = {
            f"rlplug_{name}/__init__.py": manifest(("model", "crater", f"rlplug_{name}:M")) + conf.format(name),
            f"rlplug_{name}/conf/model/crater.yaml": "name: crater\n",
        }
        install_into(site, f"rlplug-{name}", f"rlplug_{name}", files)
    install_into(site, "rlplug-broken", "rlplug_broken", {"rlplug_broken.py": "import no_such_module"})

    def rlplug(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(site)}
        command = [sys.executable, "-m", "rlplug", *arguments]
        return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)

    warning = "rlplug: skipping the broken plugin rlplug-broken 1.2: ModuleNotFoundError: No module named"
    fine = rlplug("check", "algo=ppo")
    assert fine.returncode == 0
    assert fine.stderr.startswith(warning)
    clash = rlplug("algo=ppo", "model=crater")
    assert clash.returncode == 2
    first, shadowed, second = clash.stderr.splitlines()
    assert first.startswith(warning)
    assert shadowed.startswith("rlplug: conf/model/crater.yaml of rlplug-moon 1.2 is not used")
    assert second.startswith("rlplug: model.name: model 'crater' is claimed by rlplug-luna 1.2 and rlplug-moon 1.2")
    assert list(work.iterdir()) == []


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
    listing = subprocess.Popen(
        [sys.executable, "-u", "-m", "rlplug", "plugins"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    listing.stdout.close()
    assert listing.stderr.read() == ""
    assert listing.wait() == 128 + signal.SIGPIPE
