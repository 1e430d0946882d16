import pytest

from rlplug import compose, registry
from rlplug.checkpointing import installed as required
from rlplug.config.schema import kind_of
from rlplug.distributed.versions import check_same
from rlplug.packages import extra_of
from rlplug.registry.discovery import installed
from rlplug.types import CheckpointError, ConfigError
from tests.installing import Install, install, manifest, site  # noqa: F401  fixtures


def origin(kind: str, name: str) -> dict[str, str]:
    """As the manifest of a run names it."""
    plugin = registry.owner(kind, name)  # type: ignore[arg-type]
    return {"name": name, "distribution": plugin.distribution, "version": plugin.version}


def check_installed(plugins: dict[str, dict[str, str]]) -> list[str]:
    return required.check_installed({key: {"kind": kind_of(key), **one} for key, one in plugins.items()})


def plugin(*components: tuple[str, str, str]) -> dict[str, str]:
    return {"rlplug_x/__init__.py": manifest(*components)}


X = {"name": "x", "distribution": "rlplug-x", "version": "1.2"}


def refusal(plugins: dict[str, dict[str, str]]) -> list[str]:
    with pytest.raises(CheckpointError) as refused:
        check_installed(plugins)
    return str(refused.value).splitlines()


def test_what_is_here_is_fine():
    run = compose(["algo=sac", "env=pendulum", "exploration=[gaussian]", "model@critic_model=mlp"])
    chosen = [run.algo, run.env, run.buffer, run.loop, run.hardware]
    for several in (run.models, run.exploration, run.logger):
        chosen += several.values()
    assert {"critic_model", "exploration.gaussian", "logger.csv"} < {one.key for one in chosen}
    assert check_installed({one.key: origin(one.kind, one.name) for one in chosen}) == []


@pytest.mark.parametrize(
    ("key", "kind"),
    [("algo", "algo"), ("model", "model"), ("critic_model", "model"), ("logger.my_model", "logger"), ("env", "env")],
)
def test_the_kind_of_a_key(key, kind):
    assert kind_of(key) == kind


def test_another_package_that_is_here(install: Install):  # noqa: F811
    install("rlplug-x", "rlplug_x", plugin(("algo", "x", "rlplug_x.no_such_module:X"), ("model", "x", "a:B")))
    assert check_installed({"algo": X, "critic_model": X}) == []


def test_what_is_not_installed_is_named_one_line_each():
    assert refusal({"algo": X, "env": origin("env", "gymnasium"), "critic_model": X, "logger.mine": X}) == [
        "algo: the run used algo 'x' of rlplug-x 1.2, which is not installed: pip install rlplug-x==1.2",
        "critic_model: the run used model 'x' of rlplug-x 1.2, which is not installed: pip install rlplug-x==1.2",
        "logger.mine: the run used logger 'x' of rlplug-x 1.2, which is not installed: pip install rlplug-x==1.2",
    ]


def test_a_distribution_that_has_it_no_longer(install: Install):  # noqa: F811
    install("rlplug-x", "rlplug_x", plugin(("algo", "y", "a:B"), ("model", "x", "a:B")), version="2.0")
    assert refusal({"algo": X}) == [
        "algo: the run used algo 'x' of rlplug-x 1.2, and rlplug-x 2.0 has none of that name: pip install rlplug-x==1.2"
    ]


def test_a_distribution_that_is_no_plugin_any_more(site):  # noqa: F811
    info = site / "rlplug_x-3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlplug-x\nVersion: 3.0\n")
    registry.refresh()
    assert "and rlplug-x 3.0 has none of that name" in refusal({"algo": X})[0]


def test_a_broken_plugin(install: Install):  # noqa: F811
    install("rlplug-x", "rlplug_x", {"rlplug_x/__init__.py": "import no_such_module"})
    assert refusal({"algo": X}) == [
        "algo: the run used algo 'x' of rlplug-x 1.2, and rlplug-x 1.2 is installed but broken"
        " (ModuleNotFoundError: No module named 'no_such_module'); pip install rlplug-x==1.2"
    ]


def test_a_name_that_somebody_else_took(install: Install):  # noqa: F811
    install("rlplug-y", "rlplug_x", plugin(("algo", "x", "a:B")), version="0.1")
    assert refusal({"algo": X}) == [
        "algo: the run used algo 'x' of rlplug-x 1.2, but rlplug-y 0.1 provides that name now:"
        " pip uninstall rlplug-y, and pip install rlplug-x==1.2"
    ]


def test_a_name_that_somebody_else_claims_too(install: Install):  # noqa: F811
    install("rlplug-x", "rlplug_x", plugin(("algo", "x", "a:B")))
    install("rlplug-y", "rlplug_y", {"rlplug_y.py": manifest(("algo", "x", "a:B"))}, version="0.1")
    assert refusal({"algo": X}) == [
        "algo: the run used algo 'x' of rlplug-x 1.2, which rlplug-y 0.1 claims as well: pip uninstall rlplug-y"
    ]


def test_other_versions_are_noted_once(install: Install):  # noqa: F811
    install("rlplug-x", "rlplug_x", plugin(("algo", "x", "a:B"), ("model", "x", "a:B")), version="1.3")
    sac = origin("algo", "sac")
    assert check_installed({"algo": X, "model": X, "env": sac | {"name": "gymnasium"}}) == [
        "rlplug-x was 1.2 then, and is 1.3 now"
    ]
    (note,) = check_installed({"algo": sac | {"version": "0.0.1"}})
    assert note == f"rlplug was 0.0.1 then, and is {sac['version']} now"


def test_another_version_in_another_process():
    here = installed()
    check_same(here, "rank 1")
    missing = {name: version for name, version in here.items() if name != "torch"}
    for there, first in ((here | {"torch": "1.0"}, "1.0"), (missing, "not installed")):
        with pytest.raises(ConfigError, match=rf"^hardware: torch is \S+ for rank 1, on .*, and {first} for the first"):
            check_same(there, "rank 1")
    with pytest.raises(ConfigError, match=r"^hardware: rlplug-x is not installed for rank 1, .* and 1.2 for the first"):
        check_same(here | {"rlplug-x": "1.2"}, "rank 1")


def test_a_missing_module_is_named_with_the_smallest_extra_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    lines = ['torch>=2; extra == "all"', 'wandb>=0.31; extra == "all"', 'wandb>=0.31; extra == "wandb"', "numpy>=2"]
    lines += ['scikit-learn; python_version < "4" and extra == "ml"', "bad line;"]
    monkeypatch.setattr("rlplug.packages.metadata.requires", lambda name: {"x": lines, "y": None}[name])
    assert extra_of("x", "wandb") == "x[wandb]"
    assert extra_of("x", "torch") == "x[all]"
    assert extra_of("x", "scikit_learn") == "x[ml]"
    assert (extra_of("x", "numpy"), extra_of("x", "wan"), extra_of("y", "wandb")) == (None, None, None)
    monkeypatch.undo()
    assert extra_of("no-such-distribution", "wandb") is None
