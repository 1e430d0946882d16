"""The page about runs: it needs nothing else, and holds the figures of the runs."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplug.cli import main
from rlplug.results import details
from rlplug.results.listing import number
from rlplug.results.record import read
from tests.results.conftest import Make
from tests.tools.browser import CHROMIUM, browser

Capture = pytest.CaptureFixture[str]
FETCHING = {"src", "href", "srcset", "poster", "action", "data", "background", "xlink:href"}
VOID = {"meta", "input", "img", "br", "path"}


class Page(HTMLParser):
    """Reads a page: its tags in order, attributes that could fetch something, texts by tag, tables as rows of texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.tables: list[list[list[str]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        self.fetched += [(name, value or "") for name, value in attrs if name in FETCHING]
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in {*self.open}:
            self.texts[tag][-1] += data
        if {"th", "td"} & {*self.open}:
            self.tables[-1][-1][-1] += data

    @property
    def data(self) -> Any:
        return json.loads(next(text for text in self.texts["script"] if text.startswith("{")))


def report(*words: str) -> Page:
    assert main(["report", *words]) == 0
    page = Page(Path("report.html").read_text())
    assert page.open == []
    return page


def flat(node: Any) -> Iterator[Any]:
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from flat(inner)
    if not isinstance(node, dict | list):
        yield node


def test_a_page_needs_no_other_file_and_no_network(here: Path, capsys: Capture):
    page = report("runs/sweep")
    assert capsys.readouterr().out == "report.html\n"
    assert page.fetched == []
    assert {tag for tag, _ in page.attributes} & {"link", "iframe", "object", "embed", "base", "img"} == set()
    (policy,) = [given["content"] for tag, given in page.attributes if given.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert {word for word in re.findall(r"[\w'-]+:?", policy) if word.endswith(":")} == {"data:"}
    text = (here / "report.html").read_text().replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?://|//[\w-]+\.|@import|url\(|fetch\(|XMLHttpRequest|import\(|WebSocket", text)


def test_curves_tables_and_commands_are_those_of_the_runs(here: Path):
    page = report("runs/sweep")
    data = page.data
    assert data["groups"] == ["a2c", "dqn"]
    assert data["x"] == "environment steps"
    series = data["metrics"]["eval/return_mean"]["series"]
    for i, algo in enumerate(data["groups"]):
        runs = [read(Path(f"runs/sweep/algo={algo},seed={seed}")) for seed in (1, 2)]
        steps = series[i]["x"]
        curves = np.stack([np.interp(steps, *run.metrics["eval/return_mean"]) for run in runs])
        assert series[i]["group"] == i
        assert 3 <= len(steps) <= 8
        assert series[i]["mean"] == pytest.approx(curves.mean(0).tolist(), rel=1e-4)
        assert series[i]["low"] == pytest.approx(curves.min(0).tolist(), rel=1e-4)
        assert np.array(series[i]["runs"]) == pytest.approx(curves, rel=1e-4)
        scores = [run.last("eval/return_mean") or 0.0 for run in runs]
        row = next(row for row in page.tables[0] if row[0] == algo)
        assert row[1:3] == ["2", number(np.mean(scores))]
        assert row[3] == f"{number(min(scores))} to {number(max(scores))}"
    assert "train/q" in data["metrics"]
    assert [one["group"] for one in data["metrics"]["train/q"]["series"]] == [1]  # a2c has none
    (profile,) = data["profiles"]
    assert [(one["mean"][0], one["mean"][-1]) for one in profile["series"]] == [(1, 0), (1, 0)]
    assert ["algo.name", "a2c", "dqn"] in page.tables[2]
    commands = page.texts["pre"]
    assert len(commands) == 4
    assert all(command.startswith("python -m rlplug train algo=") for command in commands)
    assert len({*commands}) == 4
    assert any(row[0] == "torch" for table in page.tables for row in table)


def test_texts_from_files_cannot_become_parts_of_the_page(make: Make):
    folder = make("runs/<b>&", {"eval/return_mean": [1, 2], "train/</script><b>": [1, 2]}, score=2, seed=1)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["command"] = ["python", "</pre><script>alert(1)</script>"]
    manifest["versions"]["torch"] = "<img src=http://x>"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace("CartPole-v1", '"<i>\\"x"'))
    page = report("runs", "--title", "<u>")
    assert {tag for tag, _ in page.attributes} & {"b", "i", "u", "img"} == set()
    assert len(page.texts["script"]) == 2
    assert page.fetched == []
    assert page.texts["title"] == ["<u>"]
    assert page.data["envs"] == ['<i>"x']
    assert "train/</script><b>" in page.data["metrics"]


def test_several_environments_are_compared_one_by_one_and_together(make: Make):
    scores = {"CartPole-v1": ((100, 300), (200, 500)), "Acrobot-v1": ((-500, -400), (-300, -100))}
    for env, by_gamma in scores.items():
        for gamma, two in zip((0.9, 0.99), by_gamma, strict=True):
            for seed, score in enumerate(two):
                name = f"runs/{env}-{gamma}-{seed}"
                make(name, {"eval/return_mean": [0, score]}, score=score, seed=seed, env__id=env, algo__gamma=gamma)
    page = report("runs")
    captions = page.texts["caption"]
    together = "all 2 environments, each scaled by its worst and best run"
    assert captions[:3] == ["Acrobot-v1", "CartPole-v1", together]
    assert [row[:3] for row in page.tables[2][1:]] == [["a2c gamma=0.9", "4", "0.12"], ["a2c gamma=0.99", "4", "0.75"]]
    improvements = page.tables[3:6]
    assert improvements[1][2][1].startswith("0.75 [")  # 200 and 500 against 100 and 300
    assert improvements[2][2][1].startswith("0.88 [")
    assert [len(profile["series"]) for profile in page.data["profiles"]] == [2, 2, 2]


def test_runs_that_have_not_finished_are_drawn_and_have_no_final_score(make: Make):
    make("runs/r0", {"eval/return_mean": [1, 2]}, score=2, seed=1)
    make("runs/r1", {"eval/return_mean": [1, 9]}, status=None, seed=2)
    make("runs/r2", {"eval/return_mean": [1, 9]}, status="failed", seed=2, algo__gamma=0.9)
    page = report("runs")
    assert [row[:3] for row in page.tables[0][1:]] == [["a2c gamma=0.99", "1", "2.00"]]
    text = Path("report.html").read_text()
    assert "2 of 3 runs have not finished, and are left out: r1 (killed), r2 (failed)." in text
    assert "No run of a2c gamma=0.9 has finished." in text
    assert [len(one["mean"]) for one in page.data["metrics"]["eval/return_mean"]["series"]] == [2, 2]


def test_no_finished_run_is_a_page_without_final_scores(make: Make):
    make("runs/r0", {"eval/return_mean": [1, 2]}, status=None, seed=1)
    page = report("runs")
    assert page.data["profiles"] == []
    assert page.texts["h2"] == [
        "Curves",
        "Final scores",
        "Machine and versions",
        "Runs, and the commands that repeat them",
    ]


def test_the_last_video_is_embedded_or_linked_if_it_is_large(make: Make, monkeypatch: pytest.MonkeyPatch):
    for i, name in enumerate(("step_2.gif", "step_2.mp4", "step 3.gif")):
        videos = make(f"runs/r{i}", {"eval/return_mean": [1, 2]}, score=2, seed=i) / "videos"
        videos.mkdir()
        (videos / name).write_bytes(b"GIF89a" * (1 + 99 * (i == 2)))
        (videos / "step_1.gif").write_bytes(b"GIF89a")
    monkeypatch.setattr(details, "EMBEDDED", 100)
    page = report("runs")
    assert [value[:30] for _, value in page.fetched] == [
        "data:image/gif;base64,R0lGODlh",
        "data:video/mp4;base64,R0lGODlh",
        "data:image/gif;base64,R0lGODlh",
    ]
    shutil.move("runs/r2/videos/step 3.gif", "runs/r2/videos/step_3.gif")
    (Path("pages")).mkdir()
    assert main(["report", "runs", "--out", "pages/a.html"]) == 0
    page = Page(Path("pages/a.html").read_text())
    assert page.fetched[2] == ("href", "../runs/r2/videos/step_3.gif")
    monkeypatch.setattr(details, "ALL_EMBEDDED", 7)
    assert [name for name, _ in report("runs").fetched] == ["src", "href", "href"]


def test_a_resumed_run_names_what_was_changed(make: Make):
    folder = make("runs/r0", {"eval/return_mean": [1, 2]}, score=2)
    manifest = json.loads((folder / "manifest.json").read_text())
    changed = {"total_steps": {"from": 320, "to": 640}, "logger": {"from": None, "to": {}}}
    manifest |= {"resumed": [{"env_steps": 320, "changed": changed}], "command": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    texts = report("runs").texts["p"]
    assert "resumed at environment step 320 with total_steps=640 logger={}" in texts
    assert "It was started from Python; its config.yaml has every setting." in texts


@pytest.mark.parametrize("key", ["resumed", "git", "hardware", "versions", "plugins", "command"])
@pytest.mark.parametrize("value", [None, 3, [3], {"x": 3}, "x"])
def test_odd_manifests_are_no_crash(key: str, value: Any, make: Make):
    folder = make("runs/r0", {"eval/return_mean": [1, 2]}, score=2)
    manifest = json.loads((folder / "manifest.json").read_text()) | {key: value}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert main(["report", "runs"]) == 0
    assert main(["diff", "runs/r0", "runs/r0"]) == 0


WIDTHS, SCHEMES = (360, 800, 1400), ("light", "dark")
SHOWN = """(() => {
  const chart = document.querySelector("svg[role=img]"), box = chart && chart.getBoundingClientRect();
  const paper = getComputedStyle(document.body).backgroundColor, over = document.documentElement.scrollWidth;
  return chart && chart.querySelector("path") && box.width === chart.parentElement.clientWidth
    ? {x: box.x, y: box.y, width: box.width, height: box.height, paper, over} : null;
})()"""
TIP = "(() => { const tip = document.querySelector('.tip'); return tip.hidden ? null : tip.innerText; })()"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")
def test_a_browser_shows_the_page_offline_at_any_width(here: Path):
    """The mouse shows the values at a step; nothing is wider than the window, and nothing is wrong on the console."""
    data = report("runs/sweep").data
    series = data["metrics"]["eval/return_mean"]["series"]

    async def shown() -> None:
        papers = set()
        async with browser(here / "profile") as tab:
            for width, scheme in ((width, scheme) for width in WIDTHS for scheme in SCHEMES):
                await tab.resize(width, scheme)
                await tab.open(here / "report.html")
                chart = await tab.value(SHOWN)
                await tab.point(chart["x"] + chart["width"] / 2, chart["y"] + chart["height"] / 2)
                head, *values = (await tab.value(TIP)).splitlines()
                step = float(head.removeprefix("environment steps: ").replace(",", ""))
                for group, line, one in zip(data["groups"], values, series, strict=True):
                    nearest = min(range(len(one["x"])), key=lambda i: abs(one["x"][i] - step))
                    name, mean, low, high = re.fullmatch(r"(.+): (.+) \[(.+), (.+)\]", line.strip()).groups()
                    assert name == group
                    found = [float(x.replace(",", "")) for x in (mean, low, high)]
                    assert found == pytest.approx([one[key][nearest] for key in ("mean", "low", "high")], rel=1e-3)
                await tab.screenshot(here / f"{width}-{scheme}.png")
                await tab.point(1, 1)
                assert await tab.value("document.querySelector('.tip').hidden || null")
                assert chart["over"] <= width
                papers.add((scheme, chart["paper"]))
                assert tab.said == []
        assert len(papers) == len({paper for _, paper in papers}) == 2

    asyncio.run(shown())
