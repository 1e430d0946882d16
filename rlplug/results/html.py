"""Parts of an HTML page; every text is escaped here, as it may come from files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape


def section(title: str, body: str, about: str = "") -> str:
    """Return a section. ``body`` is HTML, ``about`` text."""
    return f"<section><h2>{escape(title)}</h2>" + (f"<p>{escape(about)}</p>" if about else "") + f"{body}</section>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", numbers: Collection[int] = ()) -> str:
    """Return a table of cells, which are HTML; the head and the caption are text.

    Args:
        numbers: columns that are aligned to the right.
    """
    names = [f'<th{" class=n" if i in numbers else ""} scope="col">{escape(name)}</th>' for i, name in enumerate(head)]
    lines = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="wide"><table>{above}<thead><tr>{"".join(names)}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def cell(text: str, is_number: bool = False) -> str:
    """Return a cell with a text."""
    return f"<td{' class=n' if is_number else ''}>{escape(text)}</td>"


def head(text: str) -> str:
    """Return the cell at the head of a row."""
    return f'<th scope="row">{escape(text)}</th>'
