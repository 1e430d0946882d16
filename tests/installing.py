"""Real distributions, installed into a folder on the path the way an installer leaves them."""

import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from rlplug import registry

Install = Callable[..., None]

MANIFEST = """
from rlplug import Component, hookimpl

@hookimpl
def rlplug_components():
    return [{components}]
"""


def manifest(*components: tuple[str, str, str], conf: str = "") -> str:
    """The source of a manifest module; ``conf``: the package of its YAML groups."""
    text = MANIFEST.format(components=", ".join(f"Component{component!r}" for component in components))
    return text + (f"\n@hookimpl\ndef rlplug_conf():\n    return {conf!r}\n" if conf else "")


def install_into(site: Path, distribution: str, module: str, files: Mapping[str, str], version: str = "1.2") -> None:
    """Put a distribution with one entry point of the group ``rlplug`` into a folder."""
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[rlplug]\n{module} = {module}\n")


def install_project(site: Path, project: Path, dist: Path | None = None) -> None:
    """Build the wheel of a project without a network, and unpack it into a folder on the path.

    Args:
        dist: where the wheel is left; None: in the project.
    """
    (wheel,) = WheelBuilder(str(project)).build(directory=str(dist or project / "dist"), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    registry.refresh()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on ``sys.path``, forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
    monkeypatch.undo()
    registry.refresh()


@pytest.fixture
def install(site: Path) -> Install:
    """``install("rlplug-x", "rlplug_x", {"rlplug_x/__init__.py": source}, version="1.2")``."""

    def install(distribution: str, module: str, files: Mapping[str, str], version: str = "1.2") -> None:
        install_into(site, distribution, module, files, version)
        registry.refresh()

    return install
