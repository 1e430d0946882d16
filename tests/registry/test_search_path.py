import pytest

from rlplug.config import composed, option_names
from rlplug.types import ConfigError
from tests.installing import Install, manifest

FILES = {
    "rlplug_moon/__init__.py": manifest(("env", "moon", "rlplug_moon.env:Moon"))
    + "\n@hookimpl\ndef rlplug_conf():\n    return 'rlplug_moon.conf'\n",
    "rlplug_moon/conf/env/moon.yaml": "name: moon\ngravity: 1.62\n",
    "rlplug_moon/conf/config.yaml": "seed: 666\n",
    "rlplug_moon/conf/craft/lander.yaml": "# @package _global_\nnum_envs: 5\n",
}


def test_options_of_a_third_party_are_hydras_options(install: Install):
    assert "moon" not in option_names("env")
    install("rlplug-moon", "rlplug_moon", FILES)
    assert {"moon", "cartpole"} <= set(option_names("env"))
    config = composed(["env=moon", "env.gravity=2", "+craft=lander"])
    assert config.env == {"name": "moon", "gravity": 2}
    assert config.num_envs == 5


def test_nobody_replaces_the_primary_config(install: Install):
    install("a-first-in-the-alphabet", "rlplug_moon", FILES)
    assert composed().seed == 0


def test_a_broken_plugin_brings_no_options_and_is_named(install: Install):
    install("rlplug-moon", "rlplug_moon", {**FILES, "rlplug_moon/__init__.py": "import no_such_module"})
    with pytest.raises(ConfigError, match=r"env: unknown option 'moon'.*broken: rlplug-moon 1.2 \(ModuleNotFound"):
        composed(["env=moon"])
