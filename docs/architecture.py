"""Draw the rooms of rlplug and their imports, and write the tables of docs/architecture.md, from the code itself.

    python docs/architecture.py            # rewrite page and drawing (`make docs`)
    python docs/architecture.py --check    # exit code 1 if one of them is out of date

A room is a package or module directly under ``rlplug``. It is drawn one floor above the highest room that it imports,
so every arrow leads down; where rooms import one another in a circle there is no such floor, and the command fails.
Imports for type checkers only do not count, as in ``.importlinter``. ``--check`` holds rooms and arrows to the code
exactly, and lets counts of lines be off by a tenth, so that not every change of the code is a change of this page.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from graphlib import TopologicalSorter
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import grimp

DOCS = Path(__file__).parent
CODE = DOCS.parent / "rlplug"
PAGE, PICTURE = DOCS / "architecture.md", DOCS / "img" / "architecture.svg"
NO_CODE = {
    getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")
}
MARK = re.compile(r"(<!-- architecture: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"\d[\d,]*")

ROOMS = {
    "cli": "train, resume, check ...",
    "session": "runs from Python",
    "hooks": "callbacks of the user",
    "limits": "metrics that end a run",
    "pretrained": "initial weights of a run",
    "script": "objects by their path",
    "run": "builds a run and drives it",
    "testing": "the conformance kit",
    "results": "plots, reports, exports",
    "agent": "load(path).act(obs)",
    "actors": "collection in Ray actors",
    "estimation": "off-policy estimates",
    "data": "recorded episodes, in and out",
    "trainer": "learns from segments",
    "evaluation": "evaluation episodes, videos",
    "checkpointing": "checkpoints on disk",
    "collection": "collects segments of rows",
    "context": "what a component may know",
    "plugins": "all built-in components",
    "distributed": "ranks, signals, generators",
    "config": "composes, checks settings",
    "envs": "environments as vectors",
    "contract": "checks what components are",
    "registry": "finds installed plugins",
    "agents": "agents as columns of one",
    "tracking": "what trackers of runs share",
    "buffer": "what buffers are made of",
    "api": "the contracts of a plugin",
    "plan": "what hardware a run takes",
    "settings": "typed options",
    "compiler": "machine code, CUDA graphs",
    "functional": "pure tensor functions",
    "nn": "parts of networks",
    "spaces": "hybrid action spaces",
    "tree": "operations on nested dicts",
    "terminal": "progress on a terminal",
    "host": "data on host and device",
    "packages": "what packages declare",
    "types": "the stream rule, batch keys",
}
BUDGETS: dict[str, dict[str, Any]] = json.loads((DOCS / "budgets.json").read_text(encoding="utf-8"))
"""rooms, or one file, and how many lines of code they have at most; tests/test_quality.py holds them"""
ALGORITHMS = [*(CODE / "plugins" / "algo").glob("*.py")]
KERNEL, CORE = BUDGETS["kernel"]["rooms"], BUDGETS["core"]["rooms"]

WIDTH, HEIGHT, ROW, GAP = 190, 46, 92, 22  # of a room, and the distances between floors and between neighbors
LANE = 14  # width of an arrow that passes a floor

Edge = tuple[str, str]
Floors = list[list[str]]


# ---- what the code says ----------------------------------------------------------------------------------------------


@cache
def graph(type_checking: bool = False) -> grimp.ImportGraph:
    """Imports between the files of rlplug."""
    return grimp.build_graph("rlplug", exclude_type_checking_imports=not type_checking, cache_dir=None)


def room_of(module: str) -> str:
    """The room of a module; ``rlplug/__main__.py`` belongs to the commands, and ``rlplug`` itself to none."""
    room = module.split(".")[1] if "." in module else ""
    return "cli" if room == "__main__" else room


def imports() -> dict[str, set[str]]:
    """The rooms that each room imports.

    Raises:
        SystemExit: a room has no description in ``ROOMS``, or is gone.
    """
    found: dict[str, set[str]] = {room_of(module): set() for module in graph().modules if room_of(module)}
    if unknown := found.keys() ^ ROOMS.keys():
        raise SystemExit(f"docs/architecture.py: bring ROOMS up to date: {', '.join(sorted(unknown))}")
    for module in graph().modules:
        for other in graph().find_modules_directly_imported_by(module):
            if room_of(module) and room_of(other) not in ("", room_of(module)):
                found[room_of(module)].add(room_of(other))
    return found


def levels(below: Mapping[str, set[str]]) -> dict[str, int]:
    """The floor of every room, 0 at the bottom.

    Raises:
        graphlib.CycleError: rooms import one another in a circle.
    """
    level: dict[str, int] = {}
    for room in TopologicalSorter(below).static_order():
        level[room] = 1 + max((level[other] for other in below[room]), default=-1)
    return level


def direct(below: Mapping[str, set[str]]) -> list[Edge]:
    """The arrows that do not follow from others."""

    def reach(room: str) -> set[str]:
        return below[room].union(*(reach(other) for other in below[room]))

    return [
        (room, other)
        for room in sorted(below)
        for other in sorted(below[room])
        if not any(other in reach(between) for between in below[room])
    ]


def files(room: str) -> list[Path]:
    """The source files of a room."""
    own = sorted((CODE / room).rglob("*.py")) or [CODE / f"{room}.py"]
    return [*own, CODE / "__main__.py"] if room == "cli" else own


def lines(paths: Sequence[Path]) -> int:
    """Lines of code in files."""
    return sum(code_lines(path.read_text(encoding="utf-8")) for path in paths)


@cache
def code_lines(text: str) -> int:
    """Count the lines of a module that are neither blank nor comment nor docstring."""
    docs = set[int]()
    for node in ast.walk(ast.parse(text)):
        for child in body if isinstance(body := getattr(node, "body", None), list) else ():
            match child:
                case ast.Expr(ast.Constant(str())):
                    docs.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


def circles() -> list[list[str]]:
    """Groups of files that import one another, those for type checkers counted."""
    every = graph(type_checking=True)
    around = {m: every.find_upstream_modules(m) & every.find_downstream_modules(m) for m in every.modules}
    found = {frozenset({m, *others}) for m, others in around.items() if others}
    return sorted((sorted(circle) for circle in found), key=lambda circle: (-len(circle), circle))


def classes(room: str) -> Iterator[tuple[int, int, str]]:
    """Methods, attributes (assigned to ``self``, and fields of a dataclass), and name of every class of a room."""
    for path in files(room):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                assigned = {
                    target.attr
                    for target in ast.walk(node)
                    if isinstance(target, ast.Attribute)
                    and isinstance(target.ctx, ast.Store)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                }
                if any(re.search("dataclass|settings", ast.unparse(mark)) for mark in node.decorator_list):
                    assigned |= {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
                yield sum(isinstance(item, ast.FunctionDef) for item in node.body), len(assigned), node.name


# ---- the page --------------------------------------------------------------------------------------------------------


def rooms_table() -> Iterator[str]:
    below = imports()
    level = levels(below)
    yield "| room | what it is | lines | imports |"
    yield "|---|---|---|---|"
    for room in sorted(ROOMS, key=lambda room: (-level[room], room)):
        others = ", ".join(f"`{other}`" for other in sorted(below[room])) or "nothing"
        yield f"| `{room}` | {ROOMS[room]} | {lines(files(room)):,} | {others} |"


def budgets_table() -> Iterator[str]:
    yield "| | rooms | count | limit |"
    yield "|---|---|---|---|"
    for name, budget in BUDGETS.items():
        rooms, limit = budget.get("rooms", ()), budget["limit"]
        total = sum(lines(files(room)) for room in rooms)
        what = ", ".join(f"`{room}`" for room in rooms)
        if name == "algorithm":
            own = budget["named"]
            total, what = max(lines([path]) for path in ALGORITHMS if path.name not in own), "the longest other file"
            for path in ALGORITHMS:
                if path.name in own:
                    yield f"| {name} | `plugins/algo/{path.name}` | {lines([path]):,} | {own[path.name]:,} |"
        elif name in ("methods", "attributes"):
            every = [found for room in CORE for found in classes(room)]
            largest = max(every, key=lambda found: found[name == "attributes"])
            total, what = largest[name == "attributes"], f"of one class of the core: `{largest[2]}`"
        yield f"| {name} | {what} | {total:,} | {limit:,} |"


def before_table() -> Iterator[str]:
    sizes = {room: lines(files(room)) for room in CORE}
    largest = max(sizes, key=lambda room: sizes[room])
    longest = max((path for room in CORE for path in files(room)), key=lambda path: lines([path]))
    methods, attributes, name = max(found for room in CORE for found in classes(room))
    circle = "; ".join(", ".join(f"`{module}`" for module in found) for found in circles()) or "none"
    yield "| | before | today |"
    yield "|---|---|---|"
    yield f"| largest folder of the core | `trainer`, 6,422 lines | `{largest}`, {sizes[largest]:,} lines |"
    long = f"`{longest.relative_to(CODE)}`, {lines([longest])} lines"
    yield f"| longest file of the core | `trainer/checkpoint.py`, 448 lines | {long} |"
    most = f"`{name}`, {methods} methods, {attributes} attributes"
    yield f"| class with the most methods | `Trainer`, 30 methods, 38 attributes | {most} |"
    yield f"| files that import one another | 11 in `trainer` | {circle} |"


TABLES = {"rooms": rooms_table, "budgets": budgets_table, "before": before_table}


def page(text: str) -> str:
    """The page with fresh tables."""
    return MARK.sub(lambda found: found[1] + "\n" + "\n".join(TABLES[found[2]]()) + "\n\n" + found[3], text)


# ---- the drawing -----------------------------------------------------------------------------------------------------


def is_room(node: str) -> bool:
    return node in ROOMS


def lay_out(level: Mapping[str, int], arrows: Sequence[Edge]) -> tuple[Floors, list[list[str]]]:
    """The floors from the top, and the path of every arrow; where one passes a floor, it has a lane there."""
    top = max(level.values())
    floors: Floors = [sorted(room for room in level if level[room] == top - i) for i in range(top + 1)]
    paths: list[list[str]] = []
    for upper, lower in arrows:
        lanes = [f"{upper}>{lower}@{i}" for i in range(top - level[upper] + 1, top - level[lower])]
        for i, lane in enumerate(lanes, top - level[upper] + 1):
            floors[i].append(lane)
        paths.append([upper, *lanes, lower])
    return floors, paths


def arrange(floors: Floors, paths: Sequence[Sequence[str]]) -> dict[str, float]:
    """The middle of every room and lane: near to what it is joined to, in an order in which few arrows cross."""
    near: dict[str, list[str]] = {node: [] for floor in floors for node in floor}
    for path in paths:
        for upper, lower in pairwise(path):
            near[upper].append(lower)
            near[lower].append(upper)
    x: dict[str, float] = {}
    for floor in floors:
        x.update(_side_by_side(floor, dict.fromkeys(floor, 0.0)))
    for turn in range(60):
        for floor in floors if turn % 2 else floors[::-1]:
            wanted = {node: mean([x[other] for other in near[node]] or [x[node]]) for node in floor}
            if turn < 40:  # later the order stays, and places become even
                floor.sort(key=lambda node: (wanted[node], node))
            x.update(_side_by_side(floor, wanted))
    left = min(x[node] - _half(node) for node in x)
    return {node: x[node] - left + GAP for node in x}


def _half(node: str) -> float:
    return (WIDTH if is_room(node) else LANE) / 2


def _side_by_side(floor: Sequence[str], wanted: Mapping[str, float]) -> dict[str, float]:
    """Places in this order without overlap, nearest to those that are wanted (isotonic regression)."""
    offsets = [0.0]
    for left, right in pairwise(floor):
        offsets.append(offsets[-1] + _half(left) + GAP + _half(right))
    blocks: list[tuple[float, int]] = []  # shift and number of places that are pushed together
    for node, offset in zip(floor, offsets, strict=True):
        shift, count = wanted[node] - offset, 1
        while blocks and blocks[-1][0] > shift:
            before, n = blocks.pop()
            shift, count = (before * n + shift * count) / (n + count), n + count
        blocks.append((shift, count))
    shifts = [shift for shift, count in blocks for _ in range(count)]
    return {node: shift + offset for node, shift, offset in zip(floor, shifts, offsets, strict=True)}


def draw() -> str:
    """The drawing as SVG."""
    below = imports()
    floors, paths = lay_out(levels(below), direct(below))
    x = arrange(floors, paths)
    y = {node: GAP + i * ROW for i, floor in enumerate(floors) for node in floor}
    width, height = max(x[node] + _half(node) for node in x) + GAP, GAP + len(floors) * ROW
    starts, ends = _ports(paths, x, 0, 1), _ports(paths, x, -1, -2)
    legend = "Numbers are lines of code. Blue rooms are the kernel. An arrow that follows from others is left out."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
            f' height="{height:.0f}" font-family="Helvetica, Arial, sans-serif">',
            "<title>The rooms of rlplug: arrows lead from a room to the rooms that it imports</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0,0 L8,4 L0,8 z" fill="#5b6675"/></marker></defs>',
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
            *(_arrow(path, x, y, starts[i], ends[i]) for i, path in enumerate(paths)),
            *(_box(room, x[room], y[room]) for room in x if is_room(room)),
            f'<text x="{GAP}" y="{height - 14:.0f}" font-size="13" fill="#444c56">{escape(legend)}</text>',
            "</svg>\n",
        ]
    )


def _ports(paths: Sequence[Sequence[str]], x: Mapping[str, float], end: int, towards: int) -> list[float]:
    """Where each arrow meets its room: spread over the edge, in the order of where it comes from."""
    at = [0.0] * len(paths)
    for room in {path[end] for path in paths}:
        own = sorted((i for i, path in enumerate(paths) if path[end] == room), key=lambda i: x[paths[i][towards]])
        for k, i in enumerate(own, 1):
            at[i] = x[room] + WIDTH * 0.8 * (k / (len(own) + 1) - 0.5)
    return at


def _arrow(path: Sequence[str], x: Mapping[str, float], y: Mapping[str, float], start: float, end: float) -> str:
    at, here = f"M{start:.0f},{y[path[0]] + HEIGHT}", (start, y[path[0]] + HEIGHT)
    for node in path[1:]:
        there = (end if is_room(node) else x[node], y[node])
        middle = (here[1] + there[1]) / 2
        at += f" C{here[0]:.0f},{middle:.0f} {there[0]:.0f},{middle:.0f} {there[0]:.0f},{there[1]}"
        here = (there[0], there[1] + HEIGHT)
        at += "" if is_room(node) else f" V{here[1]}"
    return f'<path d="{at}" fill="none" stroke="#5b6675" stroke-width="1.3" marker-end="url(#tip)"/>'


def _box(room: str, x: float, y: float) -> str:
    fill, edge = ("#dcebfd", "#2f6fbd") if room in KERNEL else ("#f3f4f6", "#8a94a3")
    left = x - WIDTH / 2
    return (
        f'<rect x="{left:.0f}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="{edge}"/>'
        f'<text x="{left + 9:.0f}" y="{y + 19}" font-size="15" font-weight="bold" fill="#1b2430">{room}</text>'
        f'<text x="{left + WIDTH - 9:.0f}" y="{y + 19}" font-size="12" text-anchor="end" fill="#444c56">'
        f"{lines(files(room)):,}</text>"
        f'<text x="{left + 9:.0f}" y="{y + 37}" font-size="11" fill="#444c56">{escape(ROOMS[room])}</text>'
    )


# ---- the command -----------------------------------------------------------------------------------------------------


def up_to_date(old: str, new: str) -> bool:
    """Whether two texts are the same but for numbers, and those are off by a tenth at most."""
    before, now = ([int(number.replace(",", "")) for number in NUMBER.findall(text)] for text in (old, new))
    same = NUMBER.sub("#", old) == NUMBER.sub("#", new)
    return same and all(abs(a - b) <= max(5, b // 10) for a, b in zip(before, now, strict=True))


def main() -> int:
    check, stale = "--check" in sys.argv[1:], []
    old = {path: path.read_text(encoding="utf-8") if path.exists() else "" for path in (PAGE, PICTURE)}
    for path, new in {PAGE: page(old[PAGE]), PICTURE: draw()}.items():
        if not (up_to_date(old[path], new) if check else old[path] == new):
            stale.append(path.name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if stale:
        print("out of date, run `python docs/architecture.py`:" if check else "rewritten:", *stale)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
