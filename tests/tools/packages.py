"""Packages that are broken or hostile, and what commands say of them: one line for each, and no more.

python -m tests.tools.packages 150 [seed]

Every package is a real folder with metadata on the path of a real process, several of them together with a good one.
``plugins``, ``check`` and ``--help`` have to end with the exit code 0, within a minute, without a traceback, without a
control character, with exactly one line for each package that is broken, and without anything executed but manifests. A
package whose YAML file is wrong only when somebody chooses it is chosen, too, and refused in one line.

Left out is what no reader of a manifest survives, since a manifest is code: one that ends the process or its threads.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tests.tools.asking import ESCAPES, LIMIT_S, Answer

TOGETHER = 10  # packages of one folder
HUGE = 3 * 2**30  # bytes of a file that takes none on disk
HEAD = "from rlplug import Component, hookimpl\n"
GOOD = HEAD + "@hookimpl\ndef rlplug_components(): return [Component('env', {name!r}, {target!r})]\n"
CONF = "@hookimpl\ndef rlplug_conf(): return {conf!r}\n"


Kind: TypeAlias = "Callable[[Scene], None]"


@dataclass
class Scene:
    """One package that is being made."""

    site: Path
    number: int
    rng: random.Random
    marker: Path
    """made only if something was executed that must not be"""
    kind: str = ""
    broken: bool = True
    chosen: tuple[str, str] | None = None
    """group and option that have to be refused"""
    info: Path = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.module = f"hostile-{self.number}", f"hostile_{self.number}"
        self.info = self.site / f"{self.module}-1.0.dist-info"
        self.info.mkdir(parents=True)
        self.metadata(f"Metadata-Version: 2.1\nName: {self.name}\nVersion: 1.0\n")
        self.points(f"[rlplug]\n{self.module} = {self.module}\n")
        self.manifest(GOOD.format(name=self.module, target=f"{self.module}.env:Env"))
        self.write("env.py", f"import os\nos.mkdir({str(self.marker)!r})\nclass Env: ...\n")

    def escape(self) -> str:
        return f"{self.rng.choice(ESCAPES[:-1])}rlplug: FORGED"

    def metadata(self, content: str | bytes) -> None:
        put(self.info / "METADATA", content)

    def points(self, content: str | bytes) -> None:
        put(self.info / "entry_points.txt", content)

    def manifest(self, content: str | bytes) -> None:
        self.write("__init__.py", content)

    def components(self, code: str, before: str = "") -> None:
        body = f"{before}\nreturn {code}\n".replace("\n", "\n    ")
        self.manifest(f"{HEAD}import itertools, time\n@hookimpl\ndef rlplug_components():{body}\n")

    def write(self, name: str, content: str | bytes) -> Path:
        return put(self.site / self.module / name, content)

    def conf(self, name: str = "env/x.yaml", content: str | bytes = "name: x\n") -> Path:
        """Declare a folder of YAML groups with one file, which is harmless unless another one is given."""
        good = GOOD.format(name=self.module, target=f"{self.module}.env:Env")
        self.manifest(good + CONF.format(conf=f"{self.module}.conf"))
        return self.write(f"conf/{name}", content)

    def choice(self, content: str | bytes) -> None:
        """A YAML file that is wrong only for those who choose it."""
        group = self.rng.choice(("env", "algo", "experiment", "tuned", "exploration", "logger", "model"))
        self.conf(f"{group}/{self.module}.yaml", content)
        self.broken = False
        self.chosen = (group, self.module)
        if group == "env":  # a component of the same name, which `plugins` imports
            self.write("env.py", "class Env: ...\n")


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    return path


def no_file(path: Path, rng: random.Random) -> None:
    """Put something else than a small file of text in the place of a file."""
    path.unlink(missing_ok=True)
    kind = rng.choice(("pipe", "folder", "zeros", "loop", "huge", "bytes", "utf-16", "terminal"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("zeros", "terminal"):
        path.symlink_to({"zeros": "/dev/zero", "terminal": "/dev/stdin"}[kind])
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(HUGE)
    else:
        path.write_bytes(b"\xff\xfe\x80" + rng.randbytes(99) if kind == "bytes" else "a = b\n".encode("utf-16"))


# ---- what is wrong with a package ------------------------------------------------------------------------------------

RAISED = (
    *("SystemExit('no licence')", "SystemExit(0)", "SystemExit", "KeyboardInterrupt", "KeyboardInterrupt('stop')"),
    *(
        "GeneratorExit",
        "MemoryError",
        "StopIteration(3)",
        "RecursionError",
        "BaseException('x')",
        "OSError(28, 'full')",
    ),
    *("Own('base')", "asyncio.CancelledError()", "ExceptionGroup('several', [ValueError(1)])", "Mute()", "Slow()"),
    *("UnicodeError('\\ud800')", "Long()", "type('Named\\x1b[31m', (Exception,), {})()", "ConfigError('a', 'b')"),
)
CLASSES = """
import asyncio, time
from rlplug import ConfigError
class Own(BaseException): ...
class Mute(Exception):
    def __str__(self): raise KeyboardInterrupt
class Slow(BaseException):
    def __str__(self): time.sleep(10**9)
class Long(Exception):
    def __str__(self): return "x" * 10**8
"""


def raises_escapes(scene: Scene) -> None:
    kind = scene.rng.choice(("ValueError", "SystemExit", "ImportError", "KeyboardInterrupt"))
    scene.manifest(f"raise {kind}({scene.escape() + chr(10) + scene.escape()!r})\n")


WAITS = (
    *("time.sleep(10**9)", "[0 for _ in iter(int, 1)]", "input()", "open(PIPE)", "threading.Event().wait()"),
    *("two = threading.Lock(); two.acquire(); two.acquire()", "subprocess.run(['sleep', '1000'])"),
    *("re.match('(a+)+$', 'a' * 50 + 'b')", "os.read(os.pipe()[0], 1)", "signal.pause()"),
    *("socket.create_server(('localhost', 0)).accept()", "select.select([], [], [])", "queue.Queue().get()"),
)


def waits(scene: Scene, wait: str = "") -> None:
    os.mkfifo(pipe := scene.site / f"{scene.module}.pipe")
    modules = "import os, queue, re, select, signal, socket, subprocess, sys, threading, time"
    scene.manifest(f"{modules}\nPIPE = {str(pipe)!r}\n{wait or scene.rng.choice(WAITS)}\n")


WRONG_COMPONENTS = (
    *("'env', 5, 'a:B'", "'env', None, 'a:B'", "'env', b'x', 'a:B'", "'env', '', 'a:B'", "'env', 'a b', 'a:B'"),
    *("'env', '\\x1b[31mx', 'a:B'", "'env', '../../x', 'a:B'", "'env', 'x' * 10**6, 'a:B'", "'env', [], 'a:B'"),
    *("[], 'x', 'a:B'", "'env', 'x', 5", "'env', 'x', 'ab'", "'env', 'x', 'a:B', 5", "'env', 'x\\n', 'a:B'"),
    *("'env', 'x', 'a:B', itertools.repeat('y')", "'env', 'x', 'a:B', ('y', 5)", "'nope\\x1b[31m', 'x', 'a:B'"),
    *("'env', type('S', (str,), {})('x'), 'a:B'", "'env', 'x', 'a\\x1b[31m'"),
)
COMPONENTS = (
    *(f"[Component({one})]" for one in WRONG_COMPONENTS),
    *("[object.__new__(Component)]", "[type('C', (Component,), {})('env', 'x', 'a:B')]", "5", "'env'", "{'env': 'x'}"),
    *("(Component('env', f'x{i}', 'a:B') for i in itertools.count())", "[['env']]", "iter(int, 1)", "[Component]"),
    *("type('L', (list,), {'__iter__': 5})([1])", "[Component('env', 'x', 'a:B')] * 2", "(1 / 0 for _ in 'x')"),
)


HOOK = "from rlplug import hookimpl\n@hookimpl"
MANIFESTS = (
    *(
        "",
        "x = 1",
        "def f(:",
        "\x00",
        "import no_such_module",
        "import hostile_nowhere.\x1b",
        "# coding: nope\n",
        "raise",
    ),
    *(HOOK + "\ndef rlplug_component(): return []", "import sys; sys.modules[__name__] = 5", "(" * 3000),
    *(HOOK + "\ndef rlplug_components(a, b): return []", "import sys; del sys.modules[__name__]"),
    *(HOOK + "\nasync def rlplug_components(): return []", "def __getattr__(name): 1 / 0", "def f():\n\t  1\n\t 2"),
    *(HOOK + "(hookwrapper=True)\ndef rlplug_components(): return []", "x = " + "-" * 100_000 + "1"),
    "def __dir__(): return [5]\n__getattr__ = None\n__path__ = 5",
)


POINTS = (
    *(
        "x\n",
        "x =\n",
        "= x\n",
        "x = a b c\n",
        "x = \x1b[31m\n",
        "\x1b]0;owned\x07\n",
        "x = :x\n",
        "x = ..\n",
        "x = 5\n",
    ),
    *("x = {0}:nope\n", "x = {0}.nope:x.y\n", "x = os:getcwd\n", "x = {0} :\n", "x = {0}:__doc__.nope\n"),
    *("x = {0}\n\x00\n", "x = " + "a." * 9999),
)


def points(scene: Scene) -> None:
    begin = scene.rng.choice(("[rlplug]\n",) * 9 + ("[other]\nx\n[rlplug]\n{0} = {0}\n",))
    scene.points((begin + scene.rng.choice(POINTS)).format(scene.module))


METADATA = (
    *("Name: {1}\nVersion: 1.0\n", "Name: rlplug\nVersion: 9\n", "Name: {0}{1}\nVersion: 1\n", "Name:\nVersion:\n"),
    *("Name: {0}\nVersion: {1}\n", "Name: {0}\nVersion: 1 2 3\n", "Name: {0}; rm -rf x\nVersion: 1\n"),
    *("Name: torch\nVersion: 1\n", "Name: {0}\nVersion: " + "1" * 10**5 + "\n", "Name: {0}\n {1}\nVersion: 1\n"),
    "Name: =?utf-8?q?=1B[31m?=\nVersion: 1\n",
)


NAMES = (
    "5",
    "'\\x1b[31m'",
    "'.conf'",
    "'..'",
    "'os'",
    "'/'",
    "'nope.conf'",
    "'x' * 10**6",
    "object()",
    "['conf']",
    "b''",
)


def conf_elsewhere(scene: Scene) -> None:
    """A folder of YAML groups that leads to the whole disk."""
    folder = scene.conf().parent.parent
    shutil.rmtree(folder)
    folder.symlink_to("/")


def conf_of_many(scene: Scene) -> None:
    folder = scene.conf().parent
    for number in range(10_001):
        (folder / f"{number}.txt").touch()


def yaml_named(scene: Scene) -> None:
    first, second = (scene.rng.choice(ESCAPES[:-1]) for _ in range(2))
    scene.conf(f"{scene.rng.choice(('env', f'e{first}'))}/x{second}.yaml")


def doubled(deep: int, wide: int) -> list[str]:
    """Lines of YAML that stand for ``wide ** deep`` values."""
    levels = [f"a0: &a0 [{', '.join('x' * wide)}]"]
    return [*levels, *(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * wide)}]" for i in range(deep))]


def bomb(scene: Scene) -> None:
    wide, deep = scene.rng.choice(((9, 9), (2, 40), (30, 5)))
    mapping = [f"a0: &a0 {{{', '.join(f'k{i}: 1' for i in range(wide))}}}"]
    mapping += [f"a{i + 1}: &a{i + 1} {{{', '.join(f'k{j}: *a{i}' for j in range(wide))}}}" for i in range(deep)]
    kinds = (doubled(deep, wide), mapping, ["a: &a [*a, *a]"], ["a: &a {b: *a}"], ["&a [*a]"])
    scene.conf(content="\n".join(scene.rng.choice(kinds)) + "\n")


WRONG = (
    *("[" * 5000, "- " * 5000 + "x", "{a: " * 3000, "a: [", "\x00", "5", "[1, 2]", "%", "name: x\n---\nname: y"),
    *("name: !!python/object/apply:os.mkdir [MARKER]", "name: !!python/name:os.mkdir", "name: [x]", "name: \x1b[31m"),
    *('name: "\\e[31mrlplug"', "? [a]\n: b", "name: ${oc.env:HOME}", "defaults: 5", "defaults: [nope]", "name: ${"),
    *("defaults: [{nope: x}]", "_target_: os.mkdir\npath: MARKER", "a: ${a}", "name: ${oc.create:x}", "name: 1e999"),
    *("a: &a [x]\nb: *a\n", "hydra: {run: {dir: MARKER}}", "# @package _global_\nhydra: {job: {chdir: true}}"),
    *("# @package \x1b[31m\nname: x", "# @package a..b\nname: x"),
)


def yaml_content(scene: Scene) -> None:
    scene.choice(scene.rng.choice(WRONG).replace("MARKER", str(scene.marker)))


def yaml_of_hydra(scene: Scene) -> None:
    """Files that would take the place of Hydra's or of rlplug's own."""
    names = ["hydra/config.yaml", "hydra/job_logging/default.yaml", "hydra/launcher/basic.yaml", "hydra/output/x.yaml"]
    name = scene.rng.choice([*names, "config.yaml", "tuned/none.yaml"])
    content = f"hydra: {{run: {{dir: {scene.marker}}}}}\nname: !!python/object/apply:os.mkdir [{scene.marker}]\n"
    scene.conf(name, content)
    scene.broken = name in names


ONCE_MORE = "try:\n    time.sleep(10**9)\nexcept BaseException:\n    time.sleep(10**9)"
ENDLESS = ("time.sleep(10**9)", "[x for x in itertools.repeat(1) if not x]")


WAITING: dict[str, Kind] = {
    "waits": waits,
    "waits once more": lambda scene: waits(scene, ONCE_MORE),
    "waits in a hook": lambda scene: scene.components(scene.rng.choice(ENDLESS)),
}
LIGHT: dict[str, Kind] = {
    "raises": lambda scene: scene.manifest(f"{CLASSES}\nraise {scene.rng.choice(RAISED)}\n"),
    "raises in a hook": lambda scene: scene.components("[]", f"{CLASSES}\nraise {scene.rng.choice(RAISED)}"),
    "raises escapes": raises_escapes,
    "components": lambda scene: scene.components(scene.rng.choice(COMPONENTS)),
    "more components": lambda scene: scene.components(scene.rng.choice(COMPONENTS)),
    "manifests": lambda scene: scene.manifest(scene.rng.choice(MANIFESTS)),
    "more manifests": lambda scene: scene.manifest(scene.rng.choice(MANIFESTS)),
    "manifest no file": lambda scene: no_file(scene.site / scene.module / "__init__.py", scene.rng),
    "points": points,
    "more points": points,
    "points no file": lambda scene: no_file(scene.info / "entry_points.txt", scene.rng),
    "metadata": lambda scene: scene.metadata(scene.rng.choice(METADATA).format(scene.name, scene.escape())),
    "metadata no file": lambda scene: no_file(scene.info / "METADATA", scene.rng),
    "conf name": lambda scene: scene.manifest(
        f"{HEAD}@hookimpl\ndef rlplug_conf(): return {scene.rng.choice(NAMES)}\n"
    ),
    "yaml no file": lambda scene: no_file(scene.conf(), scene.rng),
    "more yaml no file": lambda scene: no_file(scene.conf(), scene.rng),
    "conf elsewhere": conf_elsewhere,
    "yaml named": yaml_named,
    "bomb": bomb,
    "yaml of hydra": yaml_of_hydra,
}
"""what takes no second, and is refused when packages are read"""
KINDS = {
    **LIGHT,
    **WAITING,
    "conf of many": conf_of_many,
    "yaml content": yaml_content,
    "more yaml content": yaml_content,
}


# ---- what is said of it ----------------------------------------------------------------------------------------------


@dataclass
class Reply:
    command: list[str]
    code: int | None  # None: it took too long
    out: str
    err: str
    seconds: float

    def faults(self, scenes: list[Scene]) -> list[str]:
        """Return what is wrong with a reply, a line each."""
        chosen = "hostile" in self.command[-1]
        whole = Answer("", self.code, self.out + self.err, self.seconds)
        fault = whole.fault((0, 2) if chosen else (0,), most=10**6, longest=10**9)
        found = [fault] if fault else []
        if self.code is None:
            return found
        for scene in scenes:
            who = rf"({scene.module}|{scene.name})\b"
            said = sum(bool(re.search(f"skipping .* {who}", line)) for line in self.err.splitlines())
            if self.command[0] != "plugins" and said != scene.broken:
                found.append(f"{scene.name} has {said} lines instead of {int(scene.broken)}")
            told = sum(bool(re.match(f"broken: {who} ", line)) for line in self.out.splitlines())
            if self.command == ["plugins"] and told != scene.broken:
                found.append(f"{scene.name} is listed {told} times as broken instead of {int(scene.broken)}")
        own = [line for line in self.err.splitlines() if " skipping " not in line and " is not used: " not in line]
        if self.code == 2 and not (1 <= len(own) <= 3 and all(line.startswith("rlplug: ") for line in own)):
            found.append(f"{len(own)} lines on what is wrong: {own[:5]}")
        if self.command == ["plugins"] and not re.search(r"^env +good +good-package +1\.0$", self.out, re.MULTILINE):
            found.append("the good package is missing")
        if any(scene.marker.exists() for scene in scenes):
            found.append("something was executed")
        return found


def reply(site: Path, command: list[str]) -> Reply:
    """Run a command in a process of its own, with a folder of packages on its path."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH", str(Path.cwd()))])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    begin, silent = time.monotonic(), os.pipe()  # an input that never ends
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        streams = {"stdin": silent[0], "stdout": out, "stderr": err}
        line = [sys.executable, "-m", "rlplug", *command]
        process = subprocess.Popen(line, cwd=folder, env=environment, start_new_session=True, **streams)  # type: ignore[call-overload]
        try:
            code: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        with suppress(ProcessLookupError):  # what packages started as well
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for end in silent:
            os.close(end)
        texts = [file.seek(0) or file.read().decode(errors="replace") for file in (out, err)]
    return Reply(command, code, *texts, time.monotonic() - begin)


def good(site: Path) -> None:
    put(site / "good_package" / "__init__.py", GOOD.format(name="good", target="good_package.env:Env"))
    put(site / "good_package-1.0.dist-info" / "METADATA", "Metadata-Version: 2.1\nName: good-package\nVersion: 1.0\n")
    put(site / "good_package-1.0.dist-info" / "entry_points.txt", "[rlplug]\ngood = good_package\n")


def made(work: Path, count: int, seed: int, among: dict[str, Kind] = KINDS) -> list[list[Scene]]:
    """Make ``count`` packages, in folders of a few; each kind of package once before any comes again."""
    rng = random.Random(seed)
    kinds = [kind for _ in range(0, count, len(among)) for kind in rng.sample(sorted(among), len(among))][:count]
    sites: list[list[Scene]] = []
    for number, kind in enumerate(kinds):
        if number % TOGETHER == 0:
            sites.append([])
            good(work / f"site{len(sites)}")
        own, marker = random.Random(f"{seed} {number}"), work / f"marker{number}"
        scene = Scene(work / f"site{len(sites)}", number, own, marker, kind)
        among[kind](scene)
        sites[-1].append(scene)
    return sites


def run(count: int, seed: int, work: Path, among: dict[str, Kind] = KINDS) -> tuple[list[str], Counter[str], float]:
    """Return what is wrong with answers, how many packages there were of each kind, and the longest time."""
    faults: list[str] = []
    kinds: Counter[str] = Counter()
    longest = 0.0
    for scenes in made(work, count, seed, among):
        commands = [["plugins"], ["check", "algo=ppo", "env=cartpole"], ["--help"]]
        for group, option in [scene.chosen for scene in scenes if scene.chosen]:
            value = f"[{option}]" if group in ("exploration", "logger") else option
            commands += [["plugins", group, option], ["check", "algo=ppo", "env=cartpole", f"{group}={value}"]]
        for command in commands:
            answer = reply(scenes[0].site, command)
            longest = max(longest, answer.seconds)
            for fault in answer.faults(scenes):
                kind = [scene.kind for scene in scenes if scene.name in fault]
                faults.append(f"{scenes[0].site.name}, {' '.join(command)}: {fault} {kind}\n{answer.err[-3000:]}")
        kinds.update(scene.kind for scene in scenes)
    return faults, kinds, longest


def main(count: int, seed: int) -> int:
    work = Path(tempfile.mkdtemp(prefix="rlplug-packages-"))
    faults, kinds, longest = run(count, seed, work)
    for fault in faults:
        print(f"--- {fault}")
    print(", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items())))
    print(f"{sum(kinds.values())} packages, seed {seed}: {len(faults)} faults; the slowest took {longest:.1f} s")
    if not faults:
        shutil.rmtree(work)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(10**6)))
