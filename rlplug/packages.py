"""Read the declarations of installed packages in bounded time and memory, whatever their files contain.

A manifest is code that runs with the user's rights. The limits stop broken or slow code; they are not a sandbox.
"""

from __future__ import annotations

import importlib
import itertools
import os
import platform
import re
import signal
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from email.parser import HeaderParser
from functools import wraps
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rlplug.types import printable

LIBRARIES = ("rlplug", "torch", "lightning", "gymnasium", "numpy", "hydra-core", "omegaconf")

MOST_BYTES = 2**20  # per file
MOST_FILES = 10_000  # per folder of YAML groups
MOST_NODES = 100_000  # per YAML file, with expanded aliases
PATIENCE = 3  # seconds for code to stop after its time limit
LONGEST = 300  # characters in a cause
T = TypeVar("T")
_hidden = set[str]()


class Package(NamedTuple):
    """An installed distribution with entry points of a group, or with unreadable entry points."""

    distribution: str
    version: str
    points: tuple[metadata.EntryPoint, ...]
    cause: str | None = None

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def packages(group: str) -> list[Package]:
    """Return the installed packages of a group; of packages with equal names, the first on ``sys.path``.

    Unreadable entry points are hidden from the whole process, because pydantic, torch and others read those of every
    package at import and would fail.
    """
    found, names = list[Package](), set[str]()
    _hidden.clear()
    every: Iterator[Any] = iter(metadata.distributions())
    for one in every:
        if (key := one._normalized_name) in names:  # the key of importlib.metadata
            continue
        names.add(key)
        path = Path(str(getattr(one, "_path", key)))
        name, _, version = printable(path.stem[:LONGEST]).partition("-")
        try:
            points = _points(_text(one, path, "entry_points.txt"), group)
        except Exception as error:
            _hidden.add(str(path))
            found.append(Package(name, version, (), one_line(f"entry_points.txt: {error}")))
            continue
        if points:
            try:
                fields = HeaderParser().parsestr(_text(one, path, "METADATA") or _text(one, path, "PKG-INFO"))
                stated = str(fields.get("Name", name)), str(fields.get("Version", version))
                if re.sub(r"[-_.]+", "_", stated[0]).lower() != key or not re.fullmatch(r"[\w.!+-]{1,100}", stated[1]):
                    raise ValueError(f"{stated!r:.100} do not match the name and version of {path.name!r:.100}")
                found.append(Package(*stated, points))
            except Exception as error:
                found.append(Package(name, version, (), one_line(f"METADATA: {error}")))
    for module in ("importlib.metadata", "importlib_metadata") if _hidden else ():
        with suppress(ImportError):  # the second, once imported, replaces the classes of the first
            _hide(importlib.import_module(module).PathDistribution)
    return found


def _hide(kind: Any) -> None:
    """Let a class of distributions return no text for entry points that are hidden."""
    read = getattr(kind.read_text, "__wrapped__", kind.read_text)

    @wraps(read)
    def shown(self: Any, filename: str) -> str | None:
        return None if filename == "entry_points.txt" and str(self._path) in _hidden else read(self, filename)

    kind.read_text = shown


def _text(distribution: Any, folder: Path, name: str) -> str:
    file = folder / name
    return read(file) if os.path.lexists(file) else distribution.read_text(name) or ""  # possibly in an archive


def _points(text: str, group: str) -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points of a group. Raise ``ValueError`` if a line of any group has no value."""
    found, section = list[metadata.EntryPoint](), None
    for line in filter(None, map(str.strip, text.splitlines())):
        name, equals, value = map(str.strip, line.partition("="))
        if line.startswith("[") and line.endswith("]"):
            section = line.strip("[]")
        elif section is None or line.startswith("#"):
            continue
        elif not equals:
            raise ValueError(f"{line!r:.50} has no value")
        elif section == group:
            if not metadata.EntryPoint.pattern.match(value):
                raise ValueError(f"the value of {name!r:.50} is {value!r:.50}, not package.module:attribute")
            found.append(metadata.EntryPoint(name, value, group))
    return tuple(found)


def read(path: Path) -> str:
    """Return the text of a file. Raises as ``check_size``."""
    check_size(path)
    return path.read_bytes().decode()


def check_size(path: Path) -> None:
    """Raise ``ValueError`` unless this is a regular file of at most 1 MiB, ``OSError`` if it does not exist."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("is not a regular file")
    if info.st_size > MOST_BYTES:
        raise ValueError(f"has {info.st_size:,} bytes, and {MOST_BYTES:,} are the limit")


def guarded(seconds: float, who: object, function: Callable[[], T]) -> T | str:
    """Return ``function()``, or a line of text if it raises an exception or takes longer than ``seconds``.

    The time limit works in the main thread, which receives signals. It interrupts Python code and system calls, but not
    C code that never checks for signals. Code that does not stop ends the program, as does Ctrl-C.
    """
    stopped, late = list[int](), list[int]()

    def run() -> T | str:
        try:
            return function()
        except BaseException as error:
            if stopped and isinstance(error, KeyboardInterrupt):
                raise
            return cause(error)

    def interrupt(number: int, frame: Any) -> Any:
        stopped.append(number)
        return stop(number, frame)

    def end(number: int, frame: Any) -> None:
        late.append(number)
        if len(late) > PATIENCE:
            os.write(2, f"rlplug: {who} does not end: uninstall it\n".encode())
            os._exit(1)
        raise TimeoutError(f"takes longer than {seconds:.3g} s")

    if threading.current_thread() is not threading.main_thread():
        return run()
    stop: Any = signal.getsignal(signal.SIGINT)
    handlers: list[tuple[int, Any]] = [(signal.SIGALRM, end), *([(signal.SIGINT, interrupt)] if callable(stop) else ())]
    before = {number: signal.signal(number, handler) for number, handler in handlers}
    begin, (left, again) = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        return run()
    except TimeoutError as error:  # raised just at its end
        return cause(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begin), 0.001), again)


def extra_of(distribution: str, module: str) -> str | None:
    """Return the smallest extra of a distribution that installs a module, as ``rlplug[wandb]``; None: there is none."""
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return None
    pairs = re.findall(r"(?m)^([\w.-]+).*; *(?:.* and )?extra == ['\"]([\w-]+)", "\n".join(lines))
    sizes = Counter(extra for _, extra in pairs)
    found = [extra for name, extra in pairs if name.lower().replace("-", "_") == module.lower()]
    return f"{distribution}[{min(found, key=lambda extra: sizes[extra])}]" if found else None


def cause(error: BaseException) -> str:
    """Format an error as one line, such as ``ImportError: No module named 'x'``."""
    try:
        return one_line(f"{type(error).__name__}: {error}".removesuffix(": "))
    except BaseException:
        return "an error that cannot be shown"


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))[:LONGEST]


def yaml_files(conf: Path) -> tuple[Path, ...]:
    """Return the YAML files of a folder of groups, sorted.

    Raises:
        ValueError: there are too many, or one is not a small text file, or its aliases expand to too many nodes.
    """
    found = list[Path]()
    every = (Path(folder, name) for folder, *kinds in os.walk(conf) for names in kinds for name in names)
    for number, path in enumerate(every):
        if number == MOST_FILES:
            raise ValueError(f"the folder of YAML groups has more than {MOST_FILES:,} files")
        if path.suffix == ".yaml":
            name = path.relative_to(conf).as_posix()
            try:
                if not name.isprintable() or name.startswith("hydra/"):  # would affect every command
                    raise ValueError("the group is Hydra's own" if name.isprintable() else "its name cannot be printed")
                if re.search(r"(?m)(^|[\s,:\[{-])\*\w", text := read(path)) and _nodes(text) > MOST_NODES:
                    raise ValueError(f"stands for more than {MOST_NODES:,} values")
            except (ValueError, OSError, RecursionError) as error:
                raise ValueError(f"conf/{name}: {error}") from None
            found.append(path)
    return tuple(sorted(found))


def _nodes(text: str) -> float:
    """Return the number of values in a YAML text with expanded aliases; infinity if one contains itself."""
    yaml: Any = importlib.import_module("yaml")  # here, because few files have aliases

    known = dict[int, float]()

    def count(node: Any) -> float:
        if (number := known.get(id(node))) is None:
            known[id(node)] = float("inf")  # contains itself
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            pairs = isinstance(node, yaml.MappingNode)
            number = known[id(node)] = 1 + sum(map(count, itertools.chain.from_iterable(parts) if pairs else parts))
        return number

    try:
        return count(yaml.compose(text, yaml.SafeLoader))
    except yaml.YAMLError:
        return 0  # the error is reported when the file is chosen


def conf_folder(package: str) -> Path:
    """Return the folder of YAML groups of a package named by ``rlplug_conf``.

    It is the package itself if it is called ``conf``, with or without an ``__init__.py``; otherwise ``conf`` inside it
    (an installed wheel) or next to it (a checkout with a top-level ``conf/``).

    Raises:
        FileNotFoundError: there is no such package or folder.
    """
    spec = find_spec(package)
    for root in map(Path, (spec and spec.submodule_search_locations) or ()):
        for folder in [root] if root.name == "conf" else [root / "conf", root.parent / "conf"]:
            if folder.is_dir():
                return folder
    raise FileNotFoundError(f"rlplug_conf names {package!r}, which has no folder of YAML groups")


def load_point(point: metadata.EntryPoint) -> Any:
    """Import what an entry point names, unless the source of its module is too large."""
    for name in itertools.accumulate(point.module.split("."), "{}.{}".format):
        spec = find_spec(name)
        if spec and (spec.origin or "").endswith(".py"):
            check_size(Path(spec.origin or ""))
    return point.load()


def versions() -> dict[str, str]:
    """Return the versions of Python, rlplug and its main libraries."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in LIBRARIES}}
