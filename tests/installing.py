"""Real distributions, installed into a folder on the path the way an installer leaves them."""

import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


@contextmanager
def on_path(folder: Path) -> Iterator[Path]:
    """Put a folder on ``sys.path``, and forget afterwards what was imported from it."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]
    registry.refresh()


def installed(distribution: str, module: str, files: Mapping[str, str], autouse: bool = True) -> Any:
    """Return a fixture that installs a distribution once, for the tests of a module: all is searched again for each."""

    @pytest.fixture(scope="module", autouse=autouse)
    def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        with on_path(tmp_path_factory.mktemp("installed") / "site") as folder:
            install_into(folder, distribution, module, files)
            registry.refresh()
            yield folder

    return there


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A folder on ``sys.path``, forgotten afterwards."""
    with on_path(tmp_path / "site") as folder:
        yield folder


@pytest.fixture
def install(site: Path) -> Install:
    """``install("rlplug-x", "rlplug_x", {"rlplug_x/__init__.py": source}, version="1.2")``."""

    def install(distribution: str, module: str, files: Mapping[str, str], version: str = "1.2") -> None:
        install_into(site, distribution, module, files, version)
        registry.refresh()

    return install
