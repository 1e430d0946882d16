"""Packages that are broken or hostile: one line for each, in bounded time, and every command goes on."""

import importlib.metadata
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlplug import ConfigError, packages, registry
from rlplug.cli import main
from rlplug.registry import discovery
from rlplug.types import RunError, printable
from tests.installing import Install, install_into, manifest
from tests.tools import packages as tool

GOOD = manifest(("env", "moon", "rlplug_moon.env:Moon"))
CONF = GOOD + "\n@hookimpl\ndef rlplug_conf(): return 'rlplug_moon.conf'\n"


@pytest.mark.parametrize(
    ("count", "among"), [(tool.TOGETHER, tool.LIGHT), pytest.param(50, tool.KINDS, marks=pytest.mark.slow)]
)
def test_a_sample_of_packages(count: int, among: dict[str, tool.Kind], tmp_path: Path):
    """More of them: ``python -m tests.tools.packages 150``."""
    seed = random.SystemRandom().randrange(10**6)
    faults, kinds, longest = tool.run(count, seed, tmp_path, among)
    assert not faults, f"seed {seed}: {faults}"
    assert sum(kinds.values()) == count
    assert count < 50 or set(kinds) == set(among)
    assert longest < tool.LIMIT_S


def test_the_tool_sees_what_is_wrong(tmp_path: Path):
    """What it sees in any answer is proved in ``tests/cli/test_lines.py``."""
    (scenes,) = tool.made(tmp_path, 1, 0, {"raises escapes": tool.raises_escapes})
    right = "rlplug: skipping the broken plugin hostile-0 1.0: ValueError: x\n"
    listed = "env  good  good-package  1.0\nbroken: hostile-0 1.0, skipped: x\n"

    def faults(code: int | None = 0, out: str = "", err: str = right, command: str = "--help") -> list[str]:
        return tool.Reply([command], code, out, err, 0.0).faults(scenes)

    assert faults() == faults(out=listed, err="", command="plugins") == []
    assert all([faults(code=None), faults(code=1), faults(err=""), faults(err=right * 2), faults(err=right + "\x1b")])
    assert all(faults(out=part, err="", command="plugins") for part in listed.splitlines())
    scenes[0].marker.mkdir()
    assert faults() == ["something was executed"]


# ---- metadata --------------------------------------------------------------------------------------------------------


def make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**31)


ENTRY_POINTS: dict[str, tuple[str | bytes | Callable[[Path], object], str]] = {
    "no value": ("[rlplug]\nx\n", "'x' has no value"),
    "no value in another group": ("[other]\nx\n[rlplug]\nx = y\n", "'x' has no value"),
    "an empty value": ("[rlplug]\nx =\n", "the value of 'x' is '', not package.module:attribute"),
    "escape sequences": ("[rlplug]\nx = \x1b[31m\n", r"the value of 'x' is '\x1b[31m', not package.module:attribute"),
    "no UTF-8": (b"\xff\xfe", "'utf-8' codec can't decode byte 0xff"),
    "a pipe": (os.mkfifo, "is not a regular file"),
    "a folder": (Path.mkdir, "is not a regular file"),
    "no end": (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
    "a loop": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "huge": (make_huge, "has 2,147,483,648 bytes, and 1,048,576 are the "),
}


def put(path: Path, content: str | bytes | Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("case", ENTRY_POINTS)
def test_entry_points_that_cannot_be_read_are_hidden_from_every_library(case: str, install: Install, site: Path):
    content, cause = ENTRY_POINTS[case]
    install("rlplug-moon", "rlplug_moon", {"rlplug_moon.py": "1 / 0"})
    put(file := site / "rlplug_moon-1.2.dist-info" / "entry_points.txt", content)
    for _ in range(2):
        registry.refresh()
        (broken,) = registry.broken()
        assert str(broken).replace("_", "-") == "rlplug-moon 1.2"
        assert cause in (broken.cause or "")
        assert (broken.cause or "").startswith("entry_points.txt: ")
    assert not importlib.metadata.entry_points(group="other")  # as pydantic and torch ask
    file.rmdir() if file.is_dir() else file.unlink()
    file.write_text("[other]\nx = y\n")
    registry.refresh()
    assert registry.broken() == []
    assert importlib.metadata.entry_points(group="other")


def test_they_are_hidden_from_the_backport_of_importlib_metadata(install: Install, site: Path):
    """Once a library has imported it, it reads the entry points for ``importlib.metadata``, too."""
    backport = pytest.importorskip("importlib_metadata")
    install("rlplug-moon", "rlplug_moon", {"rlplug_moon.py": "1 / 0"})
    put(site / "rlplug_moon-1.2.dist-info" / "entry_points.txt", "[other]\nx\n")
    registry.refresh()
    assert len(registry.broken()) == 1
    for module in (importlib.metadata, backport):
        assert not module.entry_points(group="other")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("Name: rlplug\nVersion: 9\n", "('rlplug', '9') do not match the name and version of 'rlplug_moon-1.2.dist"),
        ("Name: rlplug-moon; rm -rf ~\nVersion: 9\n", "do not match the name and version of"),
        ("Name: rlplug-moon\nVersion: \x1b[31m\n", "do not match the name and version of"),
        (b"Name: rlplug-moon\nVersion: \xff\n", "'utf-8' codec can't decode byte 0xff"),
        (os.mkfifo, "is not a regular file"),
        (Path.mkdir, "is not a regular file"),
        (make_huge, "has 2,147,483,648 bytes"),
    ],
)
def test_metadata_that_cannot_be_believed(content: str | bytes, cause: str, install: Install, site: Path):
    install("rlplug-moon", "rlplug_moon", {"rlplug_moon.py": CONF, "rlplug_moon/conf/config.yaml": "seed: 5\n"})
    put(site / "rlplug_moon-1.2.dist-info" / "METADATA", content)
    registry.refresh()
    (broken,) = registry.broken()
    assert (broken.distribution, broken.version) == ("rlplug_moon", "1.2")  # as its folder is called
    assert cause in (broken.cause or "")
    assert next(plugin.distribution for plugin in registry.plugins() if plugin.conf) == "rlplug"


# ---- YAML ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("env/x.yaml", os.mkfifo, "conf/env/x.yaml: is not a regular file"),
        ("env/x.yaml", Path.mkdir, "conf/env/x.yaml: is not a regular file"),
        ("env/x.yaml", lambda path: path.symlink_to("/dev/zero"), "conf/env/x.yaml: is not a regular file"),
        ("env/x.yaml", make_huge, "conf/env/x.yaml: has 2,147,483,648 bytes"),
        ("env/x.yaml", b"\xff", "conf/env/x.yaml: 'utf-8' codec can't decode byte 0xff"),
        ("env/x.yaml", "\n".join(tool.doubled(9, 9)), "conf/env/x.yaml: stands for more than 100,000 values"),
        ("env/x.yaml", "\n".join(tool.doubled(200, 2)), "conf/env/x.yaml: stands for more than 100,000 values"),
        ("env/x.yaml", "a: &a [*a]\n", "conf/env/x.yaml: stands for more than 100,000 values"),
        ("env/x.yaml", "a: &a {b: *a}\n", "conf/env/x.yaml: stands for more than 100,000 values"),
        ("env/\x1b[31m.yaml", "a: b\n", r"conf/env/\x1b[31m.yaml: its name cannot be printed"),
        ("env/a\nb.yaml", "a: b\n", r"conf/env/a b.yaml: its name cannot be printed"),
        ("hydra/config.yaml", "a: b\n", "conf/hydra/config.yaml: the group is Hydra's own"),
        ("hydra/launcher/basic.yaml", "a: b\n", "conf/hydra/launcher/basic.yaml: the group is Hydra's own"),
        ("env/x.yaml", "a: &a [1, 2]\nb: *a\nc: {<<: &d {e: 1}}\n", None),
        ("env/x.yaml", "[" * 5000, None),  # whoever chooses it is told
    ],
)
def test_a_yaml_file_that_no_command_could_read(
    name: str, content: str | Callable[[Path], object], cause: str | None, install: Install, site: Path
):
    install_into(site, "rlplug-moon", "rlplug_moon", {"rlplug_moon/__init__.py": CONF, "rlplug_moon/conf/x": ""})
    (path := site / "rlplug_moon" / "conf" / name).parent.mkdir(parents=True)
    put(path, content)
    registry.refresh()
    causes = [plugin.cause for plugin in registry.broken()]
    assert causes == ([] if cause is None else [causes[0]])
    assert (cause or "") in (causes or [""])[0]
    assert (registry.preset("env", "x") is not None) == (cause is None)


def test_a_folder_that_leads_to_the_whole_disk(install: Install, site: Path):
    install_into(site, "rlplug-moon", "rlplug_moon", {"rlplug_moon/__init__.py": CONF})
    (site / "rlplug_moon" / "conf").symlink_to("/")
    registry.refresh()
    (cause,) = [broken.cause or "" for broken in registry.broken()]
    assert cause.startswith("ValueError: ")
    assert len(cause) <= packages.LONGEST


def test_a_manifest_that_is_too_large_is_not_imported(install: Install, site: Path):
    install("rlplug-moon", "rlplug_moon", {"rlplug_moon/__init__.py": "", "rlplug_moon/inside.py": CONF})
    make_huge(site / "rlplug_moon" / "inside.py")
    (site / "rlplug_moon-1.2.dist-info" / "entry_points.txt").write_text("[rlplug]\nx = rlplug_moon.inside\n")
    registry.refresh()
    (broken,) = registry.broken()
    assert broken.cause == "ValueError: has 2,147,483,648 bytes, and 1,048,576 are the limit"


BARE = "type('Thing', (), {})"
TARGETS = {
    "None": "it is not a class",
    "5": "it is not a class",
    "len": "it is not a class",
    BARE: "",
    "type('Thing', (), {'Config': None})": "",
    "type('Thing', (), {'Config': type('Config', (), {})})": "",
    "__import__('nowhere')": "No module named 'nowhere'",
}


@pytest.mark.parametrize(
    ("kind", "target"), [*((kind, BARE) for kind in registry.KINDS), *(("algo", target) for target in TARGETS)]
)
def test_what_is_no_component_is_refused_in_one_line(
    kind: registry.Kind, target: str, install: Install, capsys: pytest.CaptureFixture[str]
):
    several = kind in ("exploration", "logger")
    conf = "\n@hookimpl\ndef rlplug_conf(): return 'rlplug_moon.conf'\n"
    files = {
        "rlplug_moon/__init__.py": manifest((kind, "moon", "rlplug_moon.thing:Thing")) + conf,
        "rlplug_moon/thing.py": f"Thing = {target}\n",
        f"rlplug_moon/conf/{kind}/moon.yaml": f"# @package {kind}.moon\n" * several + "name: moon\n",
    }
    install("rlplug-moon", "rlplug_moon", files)
    lines = [["plugins", kind, "moon"]]
    if target == BARE:  # to compose takes longer
        lines.append(["check", f"{kind}=[moon]" if several else f"{kind}=moon"])
    for words in lines:
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("rlplug: ")
        assert "moon" in line
        assert TARGETS[target] in line


# ---- time ------------------------------------------------------------------------------------------------------------


def fail_slowly() -> None:
    class SlowError(Exception):
        def __str__(self) -> str:
            time.sleep(1000)
            return ""

    raise SlowError


TOO_LONG = "TimeoutError: takes longer than 0.2 s"


@pytest.mark.parametrize(
    ("wait", "said"),
    [
        (lambda: time.sleep(1000), TOO_LONG),
        (lambda: [0 for _ in iter(int, 1)], TOO_LONG),
        (lambda: os.read(os.pipe()[0], 1), TOO_LONG),
        (lambda: threading.Event().wait(), TOO_LONG),
        (fail_slowly, "an error that cannot be shown"),
    ],
)
def test_what_takes_too_long_is_ended(wait: Callable[[], object], said: str):
    assert packages.guarded(0.2, "x", wait) == said


def test_handlers_and_timers_are_as_they_were():
    fired: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: fired.append(number))
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1000)
        assert packages.guarded(5, "x", lambda: "fine") == "fine"
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 900 < left <= 1000
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        packages.guarded(5, "x", lambda: time.sleep(0.3))
        deadline = time.monotonic() + 60
        while not fired and time.monotonic() < deadline:
            time.sleep(0.01)
        assert fired == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert signal.getsignal(signal.SIGINT) is interrupt


def test_ctrl_c_ends_the_program_and_not_the_package():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without one
    try:
        with pytest.raises(KeyboardInterrupt):
            packages.guarded(60, "x", lambda: os.kill(os.getpid(), signal.SIGINT) or time.sleep(60))
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_reads_without_a_time_limit():
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(packages.guarded(0.05, "x", lambda: time.sleep(0.2) or 3)))
    thread.start()
    thread.join()
    assert found == [3]


def test_all_packages_together_have_one_limit(install: Install, site: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(discovery, "LIMIT_S", 6.0)
    monkeypatch.setattr(discovery, "LEAST_S", 0.75)  # enough for the others, also on a busy machine
    for i in range(3):
        install_into(site, f"slow-{i}", f"slow_{i}", {f"slow_{i}.py": "import time\ntime.sleep(1000)"})
    install("rlplug-moon", "rlplug_moon", {"rlplug_moon.py": GOOD})
    limits = [float((plugin.cause or "").split()[-2]) for plugin in registry.broken()]
    assert len(limits) == 3
    assert sum(limits) < 6.6
    assert "moon" in registry.names("env")


def test_code_that_does_not_end_ends_the_program_with_a_line(site: Path):
    endless = "import time\nwhile True:\n    try:\n        time.sleep(1000)\n    except BaseException:\n        pass\n"
    install_into(site, "rlplug-moon", "rlplug_moon", {"rlplug_moon.py": endless})
    code = "from rlplug.registry import discovery, plugins\ndiscovery.LIMIT_S = 0.2\nplugins()\nprint('no end')"
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", str(Path.cwd()))])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "rlplug: rlplug-moon 1.2 does not end: uninstall it\n"


# ---- what is printed -------------------------------------------------------------------------------------------------


def test_what_would_steer_a_terminal_is_written_out():
    escapes = "a\x1b[31m\x07\x9b\x7f\r\t\u202e\u2028\ud800\x00"
    assert printable(escapes) == r"a\x1b[31m\x07\x9b\x7f\r\t\u202e\u2028\ud800\x00"
    assert printable("名前 é 🙂\nline") == "名前 é 🙂\nline"
    assert str(ConfigError("a\x1b", "b\x1b\nc")) == "a\\x1b: b\\x1b\nc"
    assert str(RunError("a\x1b")) == "a\\x1b"
