"""What the pages say is so: options, hooks, metrics, links, and every command line."""

import ast
import csv
import importlib
import inspect
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlplug
from rlplug import registry, testing
from rlplug.cli import main, without_verbose
from rlplug.cli.arguments import parsed
from rlplug.cli.sweep import check_sweep
from rlplug.cli.sweeper import module
from rlplug.config import parse
from rlplug.config.changes import change, resumed
from rlplug.config.schema import RESUMABLE
from rlplug.registry import Events, Manifest
from rlplug.results.evaluate import ESTIMABLE, EVALUABLE
from tests.installing import Install, install_project

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "plugins").glob("*/README.md")]
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}

PLAYED = (  # of what learns from recordings
    *("loop=alternate", "rollout_fragment_length=1", "replay_ratio=1", "total_steps=600"),
    "num_steps_sampled_before_learning_starts=590",
)
SMALL = Path(testing.__file__).parent / "cartpole.npz"

by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# ---- options and metrics ---------------------------------------------------------------------------------------------


def test_the_drawing_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["architecture", "--check"])
    assert runpy.run_path(str(DOCS / "architecture.py"))["main"]() == 0


def test_every_algorithm_has_a_page():
    pages = dict(re.findall(r"\[(\w+)\]\((\w+\.md)\)", TEXT[DOCS / "options.md"]))
    ours = {name for (kind, name), by in registry.owners().items() if kind == "algo" and by[0].distribution == "rlplug"}
    assert set(pages) == ours
    for page in {*pages.values(), "ddppo.md", "her.md"}:
        equations, _, code = TEXT[DOCS / page].partition("## Equations and pseudo-code\n")[2].partition("```text\n")
        assert "```math\n" in equations, page
        assert "\n## " not in equations, page
        assert code, page


@pytest.mark.parametrize(
    ("algo", "overrides"),
    [
        ("a2c", ["env=cartpole", "total_steps=2048"]),
        ("apex_dqn", ["env=cartpole", "total_steps=4096", "num_steps_sampled_before_learning_starts=2048"]),
        ("appo", ["env=cartpole", "total_steps=4096", "algo.kl_coeff=0.2", "loop.max_staleness=9"]),
        ("bc", ["env=cartpole", f"data.path={SMALL}", "total_steps=256", "train_batch_size=1"]),
        ("cql", ["env=pendulum", *PLAYED, "algo.num_actions=1"]),
        ("ddpg", ["env=pendulum", "total_steps=600", "num_steps_sampled_before_learning_starts=590"]),
        ("dqn", ["env=cartpole", "total_steps=600", "num_steps_sampled_before_learning_starts=500"]),
        ("impala", ["env=cartpole", "total_steps=2048", "loop.max_staleness=9", "algo.entropy_coeff=0.01"]),
        ("iql", ["env=cartpole", f"data.path={SMALL}", "total_steps=256", "train_batch_size=8"]),
        ("marwil", ["env=cartpole", f"data.path={SMALL}", "total_steps=256", "train_batch_size=1"]),
        ("ppo", ["env=cartpole", "total_steps=2048", "algo.kl_coeff=0.2", "algo.entropy_coeff=0.01"]),
        ("sac", ["env=pendulum", "total_steps=600", "num_steps_sampled_before_learning_starts=590"]),
    ],
)
def test_every_metric_is_explained(algo: str, overrides: list[str], tmp_path: Path):
    budget = ["log.every=256", "eval.every=512", "eval.episodes=2", "logger.only=[]", "model.hidden=[8]"]
    rlplug.train([f"algo={algo}", *overrides, *budget, f"hydra.run.dir={tmp_path}"])
    with (tmp_path / "metrics.csv").open() as file:
        columns = set(next(csv.reader(file))) - {"step"}
    pages = ("apex", "dqn", "guide") if algo == "apex_dqn" else (algo, "guide")  # which refers to DQN's
    cells = re.findall(r"^\| ([^|]+) \|", "".join(TEXT[DOCS / f"{page}.md"] for page in pages), re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`(.+?)`", cell)}
    assert columns <= names
    assert {name for name in names if name.startswith("train/") and not name.endswith("...")} <= columns


# ---- the house -------------------------------------------------------------------------------------------------------


def test_a_wrong_drawing_is_found_and_a_few_lines_more_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "architecture.md"
    fresh = TEXT[DOCS / "architecture.md"]
    main = runpy.run_path(str(DOCS / "architecture.py"))["main"]
    monkeypatch.setitem(main.__globals__, "PAGE", page)
    monkeypatch.setitem(main.__globals__, "PICTURE", Path(shutil.copy(DOCS / "img" / "architecture.svg", tmp_path)))
    monkeypatch.setattr(sys, "argv", ["architecture", "--check"])
    (lines,) = re.findall(r"^\| `nn` .* \| ([\d,]+) \|", fresh, re.MULTILINE)
    more = int(lines.replace(",", "")) + 20
    page.write_text(fresh.replace(f"| {lines} |", f"| {more:,} |"), encoding="utf-8")
    assert main() == 0
    page.write_text(fresh.replace("`tree`, `types` |", "`types` |"), encoding="utf-8")
    assert (main(), "architecture.md" in capsys.readouterr().out) == (1, True)


def test_every_station_of_the_walk_exists():
    stations = re.findall(r"^\| \d \| \[`(.+?)`\]\(\1\) \| `(.+?)` \|", TEXT[ROOT / "CONTRIBUTING.md"], re.MULTILINE)
    assert len(stations) == 8
    for path, name in stations:
        body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        for part in name.split("."):
            (node,) = [node for node in body if getattr(node, "name", "") == part]
            body = getattr(node, "body", [])


def test_every_path_in_the_pages_for_contributors_exists():
    text = TEXT[ROOT / "CONTRIBUTING.md"] + TEXT[DOCS / "architecture.md"]
    for path in re.findall(r"`((?:rlplug|conf|tests|docs|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


# ---- hooks -----------------------------------------------------------------------------------------------------------


def hooks() -> dict[str, str]:
    """Signatures, as a reader sees them."""
    found = {}
    for cls in (Manifest, Events):
        for name, function in vars(cls).items():
            if name.startswith("rlplug_"):
                signature = inspect.signature(function)
                parameters = [p for p in signature.parameters.values() if p.name != "self"]
                found[name] = name + str(signature.replace(parameters=parameters)).replace("'", "")
    return found


def test_every_hook_is_documented_with_its_signature():
    sections = dict(re.findall(r"^### (\w+)\n\n    (.+)$", TEXT[DOCS / "hooks.md"], re.MULTILINE))
    assert len(sections) > 5
    assert sections == hooks()


def files(text: str) -> dict[str, str]:
    """The code blocks that begin with a file's name."""
    return dict(re.findall(r"```\w+\n# (\S+\.(?:py|yaml))\n(.*?)```", text, re.DOTALL))


def write(folder: Path, contents: dict[str, str]) -> None:
    for path, text in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def test_the_environment_in_the_docs_can_be_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, files(TEXT[DOCS / "custom_env.md"]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    small = [
        "total_steps=1024",
        "eval.episodes=2",
        "model.hidden=[8]",
        "logger=[]",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    assert -200 < rlplug.train(["algo=ppo", "env=target", "hydra.searchpath=[file://conf]", *small]) < 0


def test_the_first_run_in_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder = "runs/ppo-cartpole/2030-01-02_03-04-05-s1"
    small = ["total_steps=1024", "eval.episodes=2", "model.hidden=[8]", "logger=[]", f"hydra.run.dir={folder}"]
    rlplug.train(["algo=ppo", "env=cartpole", "seed=1", *small])
    (code,) = re.findall(r"```python\n(.*?)```", TEXT[DOCS / "first_run.md"], re.DOTALL)
    names = dict[str, Any]()
    exec(code, names)
    assert names["done"]


def test_the_callbacks_in_the_docs_work(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = files(TEXT[DOCS / "hooks.md"])
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path, {"mymodule.py": package.pop("mymodule.py")})
    assert set(package) == {"rlplug_best/__init__.py", "rlplug_best/callback.py", "rlplug_best/conf/logger/best.yaml"}
    install("rlplug-best", "rlplug_best", package)
    short = ["algo=ppo", "total_steps=1024", "eval.episodes=1", "model.hidden=[8]", "logger.only=[best]"]
    own = "callbacks=[{entry_point: mymodule:Falls, kwargs: {limit: -1.0}}]"
    rlplug.train([*short, "logger.best.file=policy.pt", own, f"hydra.run.dir={tmp_path / 'run'}"])
    assert "episode/left" in (tmp_path / "run" / "metrics.csv").read_text()
    assert (tmp_path / "run" / "policy.pt").stat().st_size > 0
    assert "best" in yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["logger"]


def test_an_algorithm_ships_a_preset_as_the_docs_say(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "algo", "mine"]) == 0
    package = files(TEXT[DOCS / "models.md"])
    assert set(package) == {"rlplug_mine/conf/model/mine_mlp.yaml", "rlplug_mine/conf/algo/mine.yaml"}
    for path, text in package.items():
        (tmp_path / "rlplug-mine" / path).parent.mkdir(exist_ok=True)
        (tmp_path / "rlplug-mine" / path).write_text(text)
    install_project(site, tmp_path / "rlplug-mine")
    assert rlplug.compose(["algo=mine"]).models["model"].cfg.hidden == [400, 300]
    assert rlplug.compose(["algo=mine", "model=mlp"]).models["model"].cfg.hidden == [64, 64]
    assert rlplug.compose(["algo=sac", "env=pendulum", "model=mine_mlp"]).models["model"].cfg.hidden == [400, 300]


# ---- links -----------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@by_name
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXT[page]):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} does not exist"
        assert file.is_relative_to(ROOT), f"{target} leaves the repository"
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), f"there is no heading #{anchor}"


def test_what_a_page_says_of_tests_is_so():
    rows = re.findall(r"^\| (.+) \| (yes|partly|no) \| (.*) \|$", TEXT[DOCS / "coverage.md"], re.MULTILINE)
    assert len(rows) > 100
    for row, state, tests in rows:
        named = re.findall(r"\[`[\w.]+::(\w+)`\]\((\S+?)\)", tests)
        assert named or state != "yes", row
        for name, target in named:
            assert re.search(rf"^def {name}\(", (DOCS / target).read_text(encoding="utf-8"), re.MULTILINE), name


# ---- command lines ---------------------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """Arguments of every ``python -m rlplug ...`` in a page, in code blocks and in code."""
    lines = re.findall(r"^    (?!\$ )(.*python -m rlplug.*)$", text, re.MULTILINE)
    lines += re.findall(r"`(python -m rlplug[^`\n]*)`", text)
    calls = [line.partition("python -m rlplug")[2].partition("#")[0].strip() for line in lines]
    calls = [re.sub(r"<run[^>]*>", "a/run", call) for call in calls]
    return [shlex.split(call) for call in dict.fromkeys(calls) if not re.search(r"<.+>|^-sc|\.\.\.", call)]


MAY = {"resume": RESUMABLE, "evaluate": EVALUABLE, "estimate": ESTIMABLE}
"""what a verb may change of a run"""
RIGHT = set[tuple[str, ...]]()
"""commands of pages that were seen before"""


@by_name
def test_commands_are_right(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    """Only a page with a package of its own gets a folder to install it in: then all presets are searched again."""
    found = commands(TEXT[page])
    monkeypatch.chdir(tmp_path)
    write(tmp_path, files(TEXT[page]))
    if page == DOCS / "hooks.md":
        request.getfixturevalue("install")("rlplug-best", "rlplug_best", files(TEXT[page]))
    if page.is_relative_to(DOCS / "examples"):
        install_project(request.getfixturevalue("site"), page.parent, tmp_path)
    for arguments in map(without_verbose, found):
        if tuple(arguments) in RIGHT and arguments[:1] != ["new"]:
            continue
        RIGHT.add(tuple(arguments))
        if arguments[:1] == ["new"]:
            assert main(arguments) == 0
            install_project(request.getfixturevalue("site"), tmp_path / f"rlplug-{arguments[2]}")
        elif arguments[:1] in (["plugins"], ["schema"]):
            assert main(arguments) == 0
        elif arguments and arguments[0].startswith(".testing."):
            monkeypatch.setattr(sys, "argv", [arguments[0], "--help"])
            with pytest.raises(SystemExit, match=r"^0$"):
                runpy.run_module(f"rlplug{arguments[0]}", run_name="__main__")
            rlplug.compose([argument for argument in arguments[1:] if "=" in argument])
        elif arguments[:1] in (["data"], ["runs"], ["diff"], ["watch"], ["play"], ["export"], ["push"]):
            continue
        elif arguments[:1] == ["fork"]:
            raw = rlplug.compose(["algo=dqn"]).raw
            parse(change(raw, arguments[2:], list(raw), ""))
        elif arguments[:1] in (["plot"], ["report"]):
            parsed(arguments[0], arguments[1:], importlib.import_module(f"rlplug.cli.{arguments[0]}").FLAGS)
        elif arguments and arguments[0] in MAY:
            arguments = [
                argument for argument in arguments if not re.match(r"--explore|--random|--record|against[.=]", argument)
            ]
            raw, verb, words = rlplug.compose(["algo=sac"]).raw, arguments[0], arguments[2:]
            if verb == "resume" and "algo.lr=1e-4" in words:  # of an algorithm with one step size
                raw = rlplug.compose(["algo=dqn"]).raw
            parse(resumed(raw, words) if verb == "resume" else change(raw, words, MAY[verb], ""))
        elif "-m" in arguments:
            own = module(arguments)
            (own.prepared if own else check_sweep)(arguments[1:])
        elif arguments[:1] == ["check"] and "--json" in arguments:
            assert main(arguments) == 0
        elif any(argument.startswith("--") for argument in arguments):  # Hydra prints, and sets up logging
            subprocess.run([sys.executable, "-m", "rlplug", *arguments], check=True, capture_output=True, cwd=ROOT)
        else:
            rlplug.compose(arguments[1:] if arguments[:1] in (["check"], ["profile"]) else arguments)


def test_the_quoted_mistakes_are_refused_in_these_words(capsys: pytest.CaptureFixture[str]):
    quoted = re.findall(r"^    \$ python -m rlplug (.+)\n    (rlplug: .+)$", "\n".join(TEXT.values()), re.MULTILINE)
    assert len(quoted) >= 2
    for command, message in quoted:
        assert main(shlex.split(command)) == 2
        assert capsys.readouterr().err.startswith(message)
