"""Write docs/api/*.md: what plugin authors import, from signatures, docstrings and comments in the code.

    python docs/api.py            # rewrite them (`make docs`)
    python docs/api.py --check    # exit code 1 if one is out of date

It reads sources and imports nothing, so a signature stands on the page as it stands in the code, comments included.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = {
    "api": ("rlplug.api",),
    "types": ("rlplug.types",),
    "settings": ("rlplug.settings",),
    "functional": ("rlplug.functional",),
    "nn": ("rlplug.nn",),
    "buffer": ("rlplug.buffer",),
    "testing": ("rlplug.testing", "rlplug.testing.conformance"),
}
"""name of a page -> the modules on it"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A module's text and what stands at its top level."""

    name: str
    path: Path
    text: str
    body: list[ast.stmt]

    def code(self, node: ast.stmt, last: int | None = None) -> str:
        """Return the lines of a statement, with its decorators and the comment behind it."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        return textwrap.dedent("\n".join(self.text.splitlines()[first - 1 : last or node.end_lineno]))


@cache
def source(module: str) -> Source:
    """Return a module by its dotted name."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    return Source(module, path, text, ast.parse(text).body)


@dataclass(frozen=True)
class Entry:
    """A public name: the statement that defines it, or the package outside of rlplug that it comes from."""

    name: str
    home: Source | None
    node: ast.stmt | None
    doc: str

    @property
    def summary(self) -> str:
        """Return the first sentence of its documentation; of a name for a type that has none, the type."""
        first = " ".join(self.doc.split("\n\n")[0].split())
        if not first and isinstance(self.node, ast.Assign | ast.AnnAssign) and self.node.value:
            typed = isinstance(self.node, ast.AnnAssign) and ast.unparse(self.node.annotation) != "TypeAlias"
            return f"``{ast.unparse(self.node.annotation if typed else self.node.value)}``"
        return re.split(r"(?<=[^.]\.)(?<! al\.)\s", first)[0].rstrip(":")


def names(of: Source) -> list[str]:
    """Return what a module offers: ``__all__``, or else the public names that it defines or exports on purpose."""
    found: list[str] = []
    for node in of.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
        if isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names if alias.asname == alias.name]
        elif "TypeVar(" not in ast.unparse(node):
            found += _defined(node)
    return [name for name in found if not name.startswith("_")]


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def entry(of: Source, name: str) -> Entry:
    """Follow the imports of a name to its definition.

    Raises:
        KeyError: the module has no such name.
    """
    for place, node in enumerate(of.body):
        if name in _defined(node):
            return Entry(name, of, node, _doc(of, of.body, place))
        given = [alias.asname or alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and node.module and name in given:
            if node.module.split(".")[0] == "rlplug":
                return entry(source(node.module), name)
            return Entry(name, None, None, f"as in ``{node.module}``")
    raise KeyError(f"{of.name} has no {name}")


def _doc(of: Source, body: list[ast.stmt], place: int) -> str:
    """Return the docstring of a statement; of an assignment, the text below it or the comment behind it."""
    node = body[place]
    if isinstance(node, Function | ast.ClassDef):
        return ast.get_docstring(node) or ""
    below = body[place + 1] if place + 1 < len(body) else None
    if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
        return inspect.cleandoc(below.value.value)
    return of.code(node).splitlines()[-1].partition("  # ")[2]


# ---- what a page has -------------------------------------------------------------------------------------------------


def signature(of: Source, node: ast.stmt) -> str:
    """Return the code of a definition as far as its body; all of it, where that is one line or no definition."""
    if not isinstance(node, Function | ast.ClassDef) or node.body[0].lineno == node.lineno:
        return of.code(node)
    last = node.body[0].lineno - 1
    while not of.text.splitlines()[last - 1].partition("#")[0].strip():
        last -= 1
    return of.code(node, last)


def outline(of: Source, node: ast.ClassDef) -> str:
    """Return a class: its fields as they stand there, its constructor, and the methods that have no docstring."""
    parts = [signature(of, node)]
    for member in node.body:
        if isinstance(member, Function):
            shown = member.name == "__init__" or (_public(member) and not ast.get_docstring(member))
            code = signature(of, member) if shown else ""
            code = f"{code} ..." if code.endswith(":") else code
        elif isinstance(member, ast.Expr) and parts[1:] and isinstance(member.value, ast.Constant):
            code = of.code(member) if member.value.value is not Ellipsis else ""
        else:
            code = of.code(member) if isinstance(member, ast.AnnAssign | ast.Assign) and _public(member) else ""
        parts += [textwrap.indent(code, "    ")] if code else []
    return "\n".join(parts if parts[1:] else [f"{parts[0]} ..."])


def _public(node: ast.stmt) -> bool:
    return all(not name.startswith("_") for name in _defined(node))


def markdown(doc: str) -> list[str]:
    """Return a docstring as Markdown: sections in bold, their items as a list, code in fences."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n(?! )", doc):
        first, _, rest = block.partition("\n")
        head, colon, code = block.partition("::\n")
        if colon:
            out += [*_text(f"{head}:"), "", *_fence(textwrap.dedent(code.strip("\n")))]
        elif rest.startswith("    "):
            title = first.removesuffix(":")
            out += [f"**{title}**", "", *_section(textwrap.dedent(rest), items=first.endswith(":"))]
        elif "\n\n    " in block:
            text, _, code = block.partition("\n\n")
            out += [*_text(text), "", *_fence(textwrap.dedent(code))]
        else:
            out += _text(block)
        out.append("")
    return out


def _section(text: str, items: bool) -> list[str]:
    """Return the inside of a section; ``name: what it is`` begins an item."""
    parts = re.split(r"\n(?! )", text) if items and re.match(r"[\w*`, ]+: ", text) else []
    if not parts:
        return _text(text)
    found = [re.match(r"([\w*, ]+): (.*)", part, re.DOTALL) for part in parts]
    return [f"- `{m[1]}`: {_inline(m[2])}" if m else f"- {_inline(part)}" for m, part in zip(found, parts, strict=True)]


def _text(text: str) -> list[str]:
    return [_inline(part) if not part.startswith("- ") else part for part in text.split("\n\n")]


def _inline(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split()))


def _fence(code: str) -> list[str]:
    return ["```python", *code.splitlines(), "```"]


def described(name: str, item: Entry) -> Iterator[str]:
    """Yield the part of a page about one name."""
    of, node = item.home, item.node
    if of is None or node is None:
        return
    code = outline(of, node) if isinstance(node, ast.ClassDef) else signature(of, node)
    yield from (f"### {name}", "", *_fence(code), "", *(markdown(item.doc) if f"# {item.doc}" not in code else []))
    for member in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(member, Function) and _public(member) and (doc := ast.get_docstring(member)):
            yield from (f"#### {name}.{member.name}", "", *_fence(signature(of, member)), "", *markdown(doc))


def page(of: str) -> str:
    """Return the text of docs/api/<of>.md."""
    lines = [f"# {PAGES[of][0]}", "", "<!-- docs/api.py writes it from the code -->", ""]
    for module in map(source, PAGES[of]):
        entries = {name: entry(module, name) for name in names(module)}
        if module.name != PAGES[of][0]:
            lines += [f"## {module.name}", ""]
        lines += markdown(ast.get_docstring(ast.parse(module.text)) or "")
        lines += ["| name | what it is |", "|---|---|"]
        for name, item in entries.items():
            shown = f"[`{name}`](#{name.lower()})" if item.home else f"`{name}`"
            summary = _inline(item.summary).replace("|", "\\|")
            lines.append(f"| {shown} | {summary} |")
        lines.append("")
        for name, item in entries.items():
            lines += described(name, item)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def main() -> int:
    check, stale = "--check" in sys.argv[1:], []
    for name in PAGES:
        path, fresh = DOCS / "api" / f"{name}.md", page(name)
        if not path.exists() or path.read_text(encoding="utf-8") != fresh:
            stale.append(path.name)
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(fresh, encoding="utf-8")
    if stale:
        print("out of date, run `python docs/api.py`:" if check else "rewritten:", *stale)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
