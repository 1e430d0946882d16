"""Curves of runs, and their pictures."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from rlplug.cli import main
from rlplug.results import plot
from rlplug.results.curves import Curve, chosen_metrics, curve, drawn, smoothed, thinned, with_metrics
from rlplug.results.find import find
from rlplug.results.groups import grouped
from rlplug.results.record import read
from rlplug.types import ConfigError
from tests.results.conftest import Make

Capture = pytest.CaptureFixture[str]
SVG = "{http://www.w3.org/2000/svg}"


def texts(path: Path) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.parse(path).iter(f"{SVG}text")]


# ---- curves ---------------------------------------------------------------------------------------------------------


def test_runs_with_the_same_steps_keep_them(make: Make):
    for i in range(2):
        make(f"runs/r{i}", {"a": [1, 2, 6 + 2 * i]}, seed=i)
    (group,) = grouped(find([], [], pytest.fail))
    found = curve("x", group.runs, "a", 1, pytest.fail)
    assert found.steps.tolist() == [10, 20, 30]
    assert found.mean.tolist() == [1, 2, 7]
    assert found.band is not None
    assert found.band.tolist() == [[1, 2, 6], [1, 2, 8]]


def test_runs_with_other_steps_are_interpolated_where_all_of_them_are(make: Make):
    make("runs/r0", {"a": [0, 10, 20]}, seed=0)  # steps 10, 20, 30
    (make("runs/r1", {"a": [0]}, seed=1) / "metrics.csv").write_text("step,a\n15,5\n40,30\n")
    (group,) = grouped(find([], [], pytest.fail))
    lines: list[str] = []
    found = curve("a2c", group.runs, "a", 1, lines.append)
    assert (found.steps[0], found.steps[-1]) == (15, 30)
    assert found.values == pytest.approx(np.stack([found.steps - 10] * 2))
    assert lines == ["a2c: runs/r0 (finished) ends at 30, and so does the mean of its group"]


def test_one_run_has_no_band():
    assert Curve("x", np.arange(3), np.ones((1, 3))).band is None


def test_smoothing_by_hand():
    assert smoothed(np.array([2.0, 4.0, 9.0, 2.0]), 1).tolist() == [2, 4, 9, 2]
    assert smoothed(np.array([2.0, 4.0, 9.0, 2.0]), 3).tolist() == [2, 3, 5, 5]


def test_a_long_curve_is_thinned():
    steps = np.arange(1000.0)
    found = thinned(Curve("x", steps, np.stack([2 * steps])), 100)
    assert (len(found.steps), found.steps[-1]) == (100, 999)
    assert found.values[0] == pytest.approx(2 * found.steps)


def test_which_metric_is_drawn(make: Make):
    both = read(make("a", {"episode/return": [1, 2], "eval/return_mean": [3, 4], "train/x": [1, 1]}))
    once = read(make("b", {"episode/return": [1, 2]}))
    (b := Path("b2")).mkdir()
    for name in ("config.yaml", "manifest.json"):
        (b / name).write_text((Path("a") / name).read_text())
    (b / "metrics.csv").write_text("step,episode/return,eval/return_mean\n10,1,\n20,2,5\n")
    assert chosen_metrics([both], []) == ["eval/return_mean"]
    assert chosen_metrics([both, once], []) == ["episode/return"]
    assert chosen_metrics([both, read(b)], []) == ["episode/return"]  # one evaluation is no curve
    assert chosen_metrics([both], ["train/x", "episode/return", "train/x"]) == ["train/x", "episode/return"]


def test_runs_without_a_common_metric_are_refused(make: Make):
    a, b = read(make("a", {"train/x": [1]})), read(make("b", {"train/y": [1]}))
    with pytest.raises(ConfigError, match=r"^the runs have no metric in common: a has train/x, and b has train/y$"):
        chosen_metrics([a, b], [])
    with pytest.raises(
        ConfigError, match=r"^--metric: the runs have no return in common; name another metric: train/x$"
    ):
        chosen_metrics([a], [])
    with pytest.raises(ConfigError, match=r"^--metric: no run has logged 'train/z'; did you mean train/x"):
        chosen_metrics([a], ["train/z"])
    c = read(make("c", {"train/x": [1], "train/y": [2]}))
    with pytest.raises(ConfigError, match=r"^--metric: 1 of 2 runs has logged 'train/y', and a is not among them; "):
        chosen_metrics([a, c], ["train/y"])
    d = make("d", {"train/x": [1]})
    (d / "metrics.csv").write_text("step,train/x\n")
    with pytest.raises(ConfigError, match=r"^d has no metrics in its metrics.csv yet$"):
        chosen_metrics([a, read(d)], [])
    told: list[str] = []
    assert with_metrics([a, read(d)], told.append) == [a]
    assert told == ["d has no metrics yet; it is left out"]
    assert with_metrics([read(d)], told.append) == [read(d)]


@pytest.mark.parametrize("words", [["plot", "--out", "x.svg"], ["report", "--out", "x.html"]])
def test_a_run_that_has_just_begun_is_left_out(make: Make, capsys: Capture, words: list[str]):
    make("runs/a", {"episode/return": [1, 2]})
    (make("runs/b", {"episode/return": [1]}, seed=1) / "metrics.csv").write_text("step,episode/return\n")
    assert main([*words, "runs"]) == 0
    assert "runs/b has no metrics yet; it is left out" in capsys.readouterr().err


def test_steps_of_two_kinds_are_refused(make: Make):
    a, b = read(make("a", {"episode/return": [1, 2]})), make("b", {"episode/return": [1, 2]}, status=None)
    manifest = json.loads((b / "manifest.json").read_text())
    assert manifest["unit"] == "env_steps"
    (b / "manifest.json").write_text(json.dumps(manifest | {"unit": "updates"}))
    b = read(b)
    assert (a.unit, b.unit) == ("env_steps", "updates")
    del manifest["unit"]  # a run of an earlier version
    (b.path / "manifest.json").write_text(json.dumps(manifest))
    assert read(b.path).unit == "env_steps"
    (b.path / "summary.json").write_text('{"status": "finished", "eval/updates": 20, "updates": 20}')
    assert (read(b.path).unit, read(b.path).steps) == ("updates", 20)
    said = "^a counts environment steps, and b counts updates: there is no common axis$"
    with pytest.raises(ConfigError, match=said):
        chosen_metrics([a, b], [])


def test_curves_are_labeled_by_what_there_are_several_of(make: Make):
    for i in range(2):
        make(f"runs/r{i}", {"episode/return": [1, 2], "eval/return_mean": [1, 2]}, algo__gamma=0.9 + i / 100)
    groups, both = grouped(find([], [], pytest.fail)), ["episode/return", "eval/return_mean"]
    assert [one.label for one in drawn(groups, both[:1], 1, pytest.fail)] == ["a2c gamma=0.9", "a2c gamma=0.91"]
    assert [one.label for one in drawn(groups[:1], both, 1, pytest.fail)] == ["training return", "evaluation return"]
    labels = [one.label for one in drawn(groups, both, 1, pytest.fail)]
    assert labels[:2] == ["a2c gamma=0.9, training return", "a2c gamma=0.9, evaluation return"]


# ---- pictures -------------------------------------------------------------------------------------------------------


def test_a_sweep_is_drawn_as_png_and_svg(here: Path, capsys: Capture):
    assert main(["plot", "runs/sweep"]) == 0
    assert capsys.readouterr().out.split() == ["curves.png", "curves.svg"]
    found = texts(here / "curves.svg")
    assert {"environment steps", "evaluation return", "a2c", "dqn", "CartPole-v1, 2 runs each"} <= {*found}
    with Image.open(here / "curves.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert picture.size[0] == round(3.3 * 300)
        grey = np.asarray(picture.convert("L"))
    assert (grey < 120).sum() > 2000  # lines and text that are dark in grey, too
    before = (here / "curves.svg").read_bytes()
    assert main(["plot", "runs/sweep"]) == 0
    assert (here / "curves.svg").read_bytes() == before  # the same curves are the same file


def test_curves_differ_in_their_lines_not_only_in_color(here: Path):
    assert main(["plot", "runs", "--out", "x.svg"]) == 0
    svg = (here / "x.svg").read_text()
    means = [style for style in re.findall(r'style="(fill: none; stroke[^"]+)"', svg) if "stroke-width: 1.2" in style]
    dashes = [found[1] if (found := re.search(r"stroke-dasharray: ([^;]+)", style)) else "" for style in means]
    colors = [found[1] for style in means if (found := re.search(r"stroke: (#\w+)", style))]
    assert sorted(map(len, (set(colors), set(dashes)))) == [2, 2]
    pairs = {(plot.COLORS[i % len(plot.COLORS)], plot.LINES[i % len(plot.LINES)]) for i in range(30)}
    assert len(pairs) == 30


def test_what_others_have_reached_is_drawn_with_its_label(here: Path):
    (here / "peer.csv").write_text("step,return\n80,5\n320,15\n")
    words = ["--compare", "others, 1M steps=25", "--compare=peer=peer.csv", "--smooth", "2", "--width", "6.5"]
    assert main(["plot", "runs", "algo=dqn", *words, "--title=mine", "--metric", "episode/return", "--out", "x"]) == 0
    assert {"others, 1M steps", "peer", "mine", "dqn", "training return"} <= {*texts(here / "x.svg")}
    with Image.open(here / "x.png") as picture:
        assert picture.size[0] == round(6.5 * 300)


def test_a_picture_is_as_wide_as_it_should_be_and_nothing_is_cut(here: Path):
    """With long labels, too: whatever is drawn lies inside."""
    curves = [Curve(f"{'a long label ' * 2 * (i + 1)}{i}", np.arange(3.0), np.ones((1, 3)) * i) for i in range(9)]
    figure = plot.draw(curves, "environment steps", "evaluation return", "a title", levels={"a level": 3.0})
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    width, height = figure.get_size_inches()
    assert width == pytest.approx(3.3)
    box = figure.get_tightbbox()
    assert box.x0 >= -0.02
    assert box.y0 >= -0.02
    assert box.x1 <= width + 0.02
    assert box.y1 <= height + 0.02


BAD = {
    "plot": "plot takes run folders, or folders of runs; see rlplug plot --help",
    "plot runs --metric": "--metric: is given without a value; see rlplug plot --help",
    "plot runs --metric nope": "--metric: no run has logged 'nope'; there are: ",
    "plot runs --metrics a": "plot takes no flag --metrics; did you mean --metric? There are: ",
    "plot runs -m a": "plot takes no flag -m; there are: --compare, ",
    "plot runs --out x.gif": "--out: x.gif should end in one of .png, .svg, .pdf",
    "plot runs --out nowhere/x": "--out: nowhere is no folder; make it first",
    "plot runs --out runs.svg": "--out: runs.svg is a folder; name a file",
    "plot runs --out a --out b": "--out: is given twice",
    "plot runs --width wide": "--width: 'wide' is not a number",
    "plot runs --width 0": "--width: 0 is out of range: should be 1 to 40 inches",
    "plot runs --width nan": "--width: nan is out of range: should be 1 to 40 inches",
    "plot runs --smooth 0": "--smooth: 0 is out of range: should be at least 1",
    "plot runs --smooth 1.5": "--smooth: '1.5' is not a whole number",
    "plot runs --compare x": "--compare: 'x' is not LABEL=VALUE, or LABEL=FILE with a CSV file of ",
    "plot runs --compare x=nowhere.csv": "--compare: 'x=nowhere.csv' is not LABEL=VALUE, or LABEL=FILE ",
    "plot runs --compare x=nan": "--compare: 'x=nan' is not LABEL=VALUE, or LABEL=FILE ",
    "plot runs/sweep/sweep.csv": "runs/sweep/sweep.csv is a file, not a run folder; did you mean runs/sweep?",
    "plot empty": "empty holds no run",
    "plot nowhere": "nowhere does not exist",
    "report": "report takes run folders, or folders of runs; see rlplug report --help",
    "report runs --out page.pdf": "--out: page.pdf should end in .html",
    "report runs --metric train/nope": "--metric: no run has logged 'train/nope'; ",
    "report empty": "empty holds no run",
    "report runs --width 3": "report takes no flag --width; ",
    "runs nowhere": "nowhere does not exist",
    "runs --long": "runs takes no flag --long; see rlplug runs --help",
    "runs algo=sac": "none of 4 runs matches algo=sac",
    "diff runs": "diff takes two runs, not 1; see rlplug diff --help",
    "diff runs runs": "runs holds 4 runs: runs/sweep/algo=",
    "diff empty empty": "empty holds no run",
    "diff a b --long": "diff takes no flag --long; see rlplug diff --help",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input(line: str, here: Path, capsys: Capture):
    for folder in ("empty", "runs.svg"):
        (here / folder).mkdir()
    before = {*here.rglob("*")}
    assert main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"rlplug: {BAD[line]}")
    assert printed.err.count("\n") == 1
    assert {*here.rglob("*")} == before  # nothing is written


def test_without_matplotlib_a_line_says_what_to_install(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", "runs"]) == 2
    assert capsys.readouterr().err == "rlplug: plots are drawn by matplotlib: pip install 'rlplug[plots]'\n"


def test_a_damaged_file_of_metrics_is_drawn_as_far_as_it_is_whole(here: Path, capsys: Capture):
    file = here / "runs/sweep/algo=dqn,seed=2/metrics.csv"
    file.write_bytes(file.read_bytes() + b"garbage\n9999")
    assert main(["plot", "runs"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"rlplug: runs/sweep/algo=dqn,seed=2/metrics.csv: 2 of \d+ rows are damaged and left out, first line \d+", line
    )
