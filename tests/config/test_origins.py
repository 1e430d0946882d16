"""A mistake in a package's YAML names its file and distribution; one on the command line does not."""

import pytest

from rlplug import compose
from rlplug.cli import main
from rlplug.config import choose
from rlplug.types import ConfigError
from tests.installing import Install, install, installed, manifest, site  # noqa: F401  fixtures

COMPONENTS = manifest(
    ("algo", "mine", "tests.contract.toys:Sound"),
    ("algo", "bare", "tests.contract.toys:Sound"),
    ("exploration", "wild", "tests.contract.toys:Wild"),
    ("model", "sticky", "tests.contract.toys:Sticky"),
)
HEAD = "defaults:\n  - override /buffer: rollout\nreplay_ratio: null\n"
ALGO = "algo:\n  name: mine\n  lr: 0.1\n"
FILES = {
    "algo/mine": f"# @package _global_\n{HEAD}algo:\n  name: mine\n  lr: -1\n",
    "algo/less": f"# @package _global_\n{HEAD}algo:\n  name: mine\n",
    "algo/more": f"# @package _global_\n{HEAD}{ALGO}  lrr: 1\n",
    "algo/both": f"# @package _global_\n{HEAD}num_envs: 0\n{ALGO}  lrr: 1\n",
    "algo/headless": HEAD + ALGO,
    "algo/plain": "algo:\n  name: mine\n  lr: 0.1\n",
    "algo/sized": f"# @package _global_\n{HEAD}model:\n  hidden: [7]\n{ALGO}",
    "algo/deep": f"# @package _global_\n{HEAD}model:\n  layers: 7\n{ALGO}",
    "algo/asks": f"# @package _global_\n{HEAD.replace('rollout', 'rolout')}{ALGO}",
    "algo/garbled": f"# @package _global_\n{HEAD}algo:\n  name: mine\n lr: 0.1\n",
    "exploration/wild": "name: wild\n",
    "tuned/less_pendulum": "algo:\n  lr: 1\n",
    "model/sticky": "name: sticky\nsize: 8\n",
}
OF = "of rlplug-mine 1.2"
SAID = {
    ("algo=mine",): f"algo.lr: -1 is out of range: should be greater than 0; it is set in conf/algo/mine.yaml {OF}",
    ("algo=mine", "algo.lr=-2"): "algo.lr: -2 is out of range: should be greater than 0",
    ("algo=less",): f"algo.lr: is missing in conf/algo/less.yaml {OF}",
    ("algo=more",): "algo.lrr: unknown key; did you mean algo.lr? There are: lr; "
    f"it is set in conf/algo/more.yaml {OF}",
    ("algo=both",): f"num_envs: 0 is out of range: should be greater than 0; it is set in conf/algo/both.yaml {OF}\n"
    f"algo.lrr: unknown key; did you mean algo.lr? There are: lr; it is set in conf/algo/both.yaml {OF}",
    ("algo=headless",): f"algo: conf/algo/headless.yaml {OF} lacks its first line: # @package _global_",
    ("algo=plain", "algo.lr=1"): f"algo: conf/algo/plain.yaml {OF} lacks its first line: # @package _global_",
    ("exploration=[wild]",): f"exploration: conf/exploration/wild.yaml {OF} lacks its first line: "
    "# @package exploration.wild",
    ("algo=less", "env=pendulum", "algo.lr=1"): f"tuned: conf/tuned/less_pendulum.yaml {OF} lacks its first line: "
    "# @package _global_",
    ("algo=sized", "model=lstm"): "model.hidden: [7] has the wrong type: should be a valid integer; "
    f"conf/algo/sized.yaml {OF} sets it for another model; set it: model.hidden=<value>",
    ("algo=sized", "model=sticky"): "model.hidden: unknown key; there are: size; "
    f"conf/algo/sized.yaml {OF} sets it for another model; leave it out: ~model.hidden",
    ("algo=sized", "model.hidden=3"): "model.hidden: 3 has the wrong type: should be a valid list",
}


MANIFEST = COMPONENTS + "\n@hookimpl\ndef rlplug_conf(): return 'rlplug_mine.conf'\n"
PRESETS = {f"rlplug_mine/conf/{name}.yaml": text for name, text in FILES.items()}
package = installed("rlplug-mine", "rlplug_mine", {"rlplug_mine/__init__.py": MANIFEST, **PRESETS})


@pytest.mark.parametrize("words", SAID, ids=" ".join)
def test_whose_mistake_it_is(words: tuple[str, ...]):
    with pytest.raises(ConfigError) as error:
        compose(words)
    assert str(error.value) == SAID[words]


@pytest.mark.parametrize(
    ("words", "start", "end"),
    [
        (
            "algo=asks",
            "buffer: unknown option 'rolout'; did you mean rollout?",
            f"conf/algo/asks.yaml {OF} selects it",
        ),
        ("buffer=rolout", "buffer: unknown option 'rolout'; did you mean rollout?", "rollout, sequence"),
        ("algo=bare", "algo: rlplug-mine 1.2 has no conf/algo/bare.yaml to select its algo 'bare'", ""),
        ("algo=garbled", f"conf/algo/garbled.yaml {OF} is not valid YAML: expected <block end>", "line 7, column 2"),
    ],
)
def test_a_file_that_cannot_be_composed(words: str, start: str, end: str):
    with pytest.raises(ConfigError) as error:
        compose([words])
    assert str(error.value).startswith(start)
    assert str(error.value).endswith(end)


def test_the_ways_out_are_ways_out():
    assert compose(["algo=sized", "model=lstm", "model.hidden=5"]).models["model"].cfg.hidden == 5
    assert compose(["algo=sized", "model=sticky", "~model.hidden"]).models["model"].cfg.size == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("algo mine", SAID["algo=mine",]),
        ("algo less", SAID["algo=less",]),
        ("algo more", SAID["algo=more",]),
        ("algo headless", SAID["algo=headless",]),
        ("exploration wild", SAID["exploration=[wild]",]),
        ("algo bare", f"{OF[3:]} has no YAML file that selects its algo 'bare'; add conf/algo/bare.yaml, "
         "with `name: bare` and every option"),
    ],
)  # fmt: skip
def test_plugins_checks_what_it_shows(words: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plugins", *words.split()]) == 2
    assert capsys.readouterr().err == f"rlplug: {said}\n"


def test_a_distribution_chooses_in_a_clash(install: Install):  # noqa: F811
    install("luna", "luna", {"luna.py": manifest(("model", "sticky", "tests.contract.mistakes:Narrow"))}, "2")
    with pytest.raises(ConfigError) as error:
        compose(["model=sticky"])
    assert str(error.value) == (
        "model.name: model 'sticky' is claimed by luna 2 and rlplug-mine 1.2; "
        "choose with model.name=luna/sticky or model.name=rlplug-mine/sticky"
    )
    assert compose(["model=sticky", "model.name=rlplug-mine/sticky"]).models["model"].cls.__name__ == "Sticky"
    assert choose("model", "model", {"name": "luna/sticky"}).cls.__name__ == "Narrow"
