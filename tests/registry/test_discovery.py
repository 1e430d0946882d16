import sys
from pathlib import Path

import pytest

from rlplug import ConfigError, registry
from rlplug.config import composed, option_names
from tests.installing import Install, manifest

MOON = manifest(("env", "moon", "rlplug_moon.env:Moon"))
MOON_ENV = "class Moon:\n    pass\n"

HOOK = "from rlplug import Component, hookimpl\nimport itertools\n@hookimpl\ndef rlplug_"
COMPONENTS = HOOK + "components(): return "
ENDLESS = "(Component('algo', f'x{i}', 'a:B') for i in itertools.count())"
SILENT = "class Own(Exception):\n    def __str__(self): raise SystemExit\nraise Own"
BROKEN = {
    "missing import": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "syntax error": ("def f(:", "SyntaxError"),
    "raises": ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    "exits": ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
    "ends at once": ("raise SystemExit", "SystemExit"),
    "interrupts": ("raise KeyboardInterrupt('stop')", "KeyboardInterrupt: stop"),
    "raises a base exception": ("class Own(BaseException): pass\nraise Own('x')", "Own: x"),
    "raises what cannot be shown": (SILENT, "an error that cannot be shown"),
    "raises escape sequences": ("raise ValueError('\x1b[31mred\x9b2J\u202e')", r"ValueError: \x1b[31mred\x9b2J\u202e"),
    "raises a book": ("raise ValueError('x' * 10**6)", "ValueError: xxx"),
    "a name that is no text": (manifest(("algo", 5, "a:B")), "TypeError: component 5: kind, name, target and"),
    "a name that cannot be typed": (manifest(("algo", "a b", "a:B")), "algo 'a b': a name has letters, digits and _"),
    "words that are no tuple": (
        COMPONENTS + "[Component('algo', 'x', 'a:B', itertools.repeat('x'))]",
        "TypeError: component 'x': kind, name, target and the tuple tried_with must be strings",
    ),
    "a component that was never made": (COMPONENTS + "[object.__new__(Component)]", "AttributeError"),
    "components without an end": (
        COMPONENTS + ENDLESS,
        "ValueError: rlplug_components gives more than 10,000 components",
    ),
    "no hook": ("x = 1", "implements neither rlplug_components nor rlplug_conf"),
    "unknown hook": (HOOK + "component(): return []", "PluginValidationError: unknown hook 'rlplug_component'"),
    "hook with another signature": (HOOK + "components(registry): return []", "PluginValidationError"),
    "hook that raises": (COMPONENTS + "1 / 0", "ZeroDivisionError"),
    "no component": (COMPONENTS + "['sac']", "TypeError: rlplug_components gives 'sac', which is not a Component"),
    "no list": (COMPONENTS + "3", "TypeError"),
    "no such kind": (manifest(("agent", "x", "a:B")), "ValueError: component 'x': kind 'agent' is none of algo, model"),
    "malformed target": (manifest(("algo", "x", "a.B")), "target 'a.B' is not 'package.module:Class'"),
    "twice": (manifest(("algo", "x", "a:B"), ("algo", "x", "a:C")), "rlplug_components names algo 'x' twice"),
    "no conf folder": (
        HOOK + "conf(): return 'rlplug_broken.conf'",
        "FileNotFoundError: rlplug_conf names 'rlplug_broken.conf', which has no folder of YAML groups",
    ),
}


def test_the_built_ins_enter_by_the_same_door():
    first = registry.plugins()[0]
    assert first.distribution == "rlplug"
    assert first.cause is None
    assert first.conf is not None
    assert (first.conf / "config.yaml").is_file()
    assert {"ppo", "sac"} <= set(registry.names("algo"))
    assert registry.owner("algo", "sac") == first


def test_a_component_is_imported_when_it_is_loaded(install: Install):
    install("rlplug-moon", "rlplug_moon", {"rlplug_moon/__init__.py": MOON, "rlplug_moon/env.py": MOON_ENV})
    assert "moon" in registry.names("env")
    assert registry.owner("env", "moon").components["env", "moon"].target == "rlplug_moon.env:Moon"
    assert str(registry.owner("env", "moon")) == "rlplug-moon 1.2"
    assert "rlplug_moon.env" not in sys.modules
    assert registry.load("env", "moon").__name__ == "Moon"


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_reported_and_skipped(case: str, install: Install, capsys: pytest.CaptureFixture[str]):
    source, cause = BROKEN[case]
    before = registry.owners()
    install("rlplug-broken", "rlplug_broken", {"rlplug_broken/__init__.py": source}, version="0.3")
    (broken,) = registry.broken()
    assert (broken.distribution, broken.version, broken.components, broken.conf) == ("rlplug-broken", "0.3", {}, None)
    assert cause in (broken.cause or "")
    assert registry.owners() == before

    registry.warn_broken()
    registry.warn_broken()
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line == f"rlplug: skipping the broken plugin rlplug-broken 0.3: {broken.cause}"


def test_an_entry_point_without_its_module_is_broken(install: Install):
    install("rlplug-gone", "rlplug_gone", {})
    (broken,) = registry.broken()
    assert broken.cause == "ModuleNotFoundError: No module named 'rlplug_gone'"


def test_a_distribution_without_metadata_does_not_stop_the_others(install: Install, site: Path):
    install("rlplug-moon", "rlplug_moon", {"rlplug_moon.py": "1 / 0"})
    (site / "rlplug_moon-1.2.dist-info" / "METADATA").unlink()
    registry.refresh()
    (broken,) = registry.broken()
    assert str(broken) == "rlplug_moon 1.2"
    assert "ppo" in registry.names("algo")


def test_a_clash_is_an_error_only_for_the_name_that_clashes_until_a_distribution_is_chosen(install: Install):
    install("rlplug-moon", "rlplug_moon", {"rlplug_moon/__init__.py": MOON, "rlplug_moon/env.py": MOON_ENV})
    both = manifest(("env", "moon", "rlplug_luna:Luna"), ("env", "mare", "rlplug_luna:Mare"), ("algo", "sac", "a:B"))
    install("luna", "rlplug_luna", {"rlplug_luna.py": both + "class Luna: ...\nclass Mare: ...\n"}, version="2")
    assert registry.load("env", "mare").__name__ == "Mare"
    assert registry.broken() == []
    for ask in (registry.load, registry.owner):
        with pytest.raises(ConfigError) as error:
            ask("env", "moon")
        assert str(error.value) == (
            "env.name: env 'moon' is claimed by luna 2 and rlplug-moon 1.2; "
            "choose with env.name=luna/moon or env.name=rlplug-moon/moon"
        )
    with pytest.raises(ConfigError, match=r"algo 'sac' is claimed by rlplug .* and luna 2"):
        registry.owner("algo", "sac")
    assert registry.load("env", "rlplug-moon/moon").__name__ == "Moon"
    assert registry.load("env", "luna/moon").__name__ == "Luna"
    assert str(registry.owner("env", "luna/moon")) == "luna 2"
    assert registry.tried_with("env", "luna/moon") == ()
    with pytest.raises(ConfigError) as error:
        registry.load("env", "terra/moon")
    assert str(error.value) == "env.name: terra has no env 'moon'; it exists in luna 2 and rlplug-moon 1.2"


def test_a_file_that_another_package_has_before_is_a_warning(install: Install, capsys: pytest.CaptureFixture[str]):
    conf = "\n@hookimpl\ndef rlplug_conf(): return 'rlplug_moon.conf'\n"
    files = {"rlplug_moon/__init__.py": MOON + conf, "rlplug_moon/conf/env/cartpole.yaml": "name: moon\n"}
    install("rlplug-moon", "rlplug_moon", files)
    registry.warn_broken()
    registry.warn_broken()
    (line,) = capsys.readouterr().err.splitlines()
    here = registry.plugins()[0]
    assert line == (
        "rlplug: conf/env/cartpole.yaml of rlplug-moon 1.2 is not used: "
        f"there is conf/env/cartpole.yaml of {here}; rename it"
    )
    assert registry.preset("env", "cartpole").plugin == here


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ConfigError) as error:
        registry.owner("algo", "saac")
    assert error.value.key == "algo.name"
    assert "unknown algo 'saac'; did you mean sac? There are: " in str(error.value)
    assert str(error.value).endswith("There are: " + ", ".join(registry.names("algo")))


def test_an_unknown_name_may_be_that_of_a_broken_plugin(install: Install):
    install("rlplug-broken", "rlplug_broken", {"rlplug_broken.py": "import no_such_module"})
    with pytest.raises(ConfigError, match=r"unknown algo 'moon'.*broken: rlplug-broken 1.2 \(ModuleNotFoundError"):
        registry.owner("algo", "moon")


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ({}, "No module named 'rlplug_moon.env'"),
        ({"rlplug_moon/env.py": "x = 1"}, "has no attribute 'Moon'"),
        ({"rlplug_moon/env.py": "1 / 0"}, "ZeroDivisionError"),
    ],
)
def test_a_component_that_cannot_be_imported_names_its_distribution(
    files: dict[str, str], cause: str, install: Install
):
    install("rlplug-moon", "rlplug_moon", {"rlplug_moon/__init__.py": MOON, **files})
    with pytest.raises(ConfigError, match=r"env\.name: rlplug_moon\.env:Moon of rlplug-moon 1\.2") as error:
        registry.load("env", "moon")
    assert cause in str(error.value)


@pytest.mark.parametrize(
    ("package", "folder"),
    [
        ("named.conf", "named/conf"),  # the folder itself, without an __init__.py
        ("wheel", "wheel/conf"),
        ("checkout", "conf"),
    ],
)
def test_where_a_package_keeps_its_yaml(package: str, folder: str, site: Path):
    (site / folder).mkdir(parents=True)
    top = site / package.partition(".")[0]
    top.mkdir(exist_ok=True)
    (top / "__init__.py").touch()
    assert registry.conf_folder(package) == site / folder


@pytest.mark.parametrize("package", ["no_such_package", "rlplug.types", "json"])
def test_a_package_without_yaml_is_refused(package: str):
    with pytest.raises(FileNotFoundError, match="no folder of YAML groups"):
        registry.conf_folder(package)


FILES = {
    "rlplug_moon/__init__.py": manifest(("env", "moon", "rlplug_moon.env:Moon"))
    + "\n@hookimpl\ndef rlplug_conf():\n    return 'rlplug_moon.conf'\n",
    "rlplug_moon/conf/env/moon.yaml": "name: moon\ngravity: 1.62\n",
    "rlplug_moon/conf/config.yaml": "seed: 666\n",
    "rlplug_moon/conf/craft/lander.yaml": "# @package _global_\nnum_envs: 5\n",
}


PLAIN = manifest(("env", "moon", "rlplug_moon.env:Moon")) + "\n@hookimpl\ndef rlplug_conf():\n    "


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


@pytest.mark.parametrize("name", ["b''", "''", "5"])
def test_a_package_of_options_has_a_name(name: str, install: Install):
    install("rlplug-moon", "rlplug_moon", FILES | {"rlplug_moon/__init__.py": f"{PLAIN}return {name}\n"})
    assert [plugin.distribution for plugin in registry.broken()] == ["rlplug-moon"]


def test_a_broken_plugin_brings_no_options_and_is_named(install: Install):
    install("rlplug-moon", "rlplug_moon", {**FILES, "rlplug_moon/__init__.py": "import no_such_module"})
    with pytest.raises(ConfigError, match=r"env: unknown option 'moon'.*broken: rlplug-moon 1.2 \(ModuleNotFound"):
        composed(["env=moon"])
