"""Prepare docstrings for the API reference: an extension of Griffe, which reads them for mkdocstrings."""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Any

import griffe

TERM = re.compile(r"^([A-Z][\w ]*)\n((?:    .+(?:\n|$))+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Turn ``size: int  # transitions per sample`` into a docstring of ``size``, and reST's marks into Markdown."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Describe an attribute without a docstring by the comment after it."""
        if attr.docstring is None and isinstance(node, ast.stmt) and node.end_lineno:
            _, mark, text = attr.lines_collection[attr.filepath][node.end_lineno - 1].rpartition("  # ")
            if mark and not text.startswith("type: "):
                attr.docstring = griffe.Docstring(text[0].upper() + text[1:] + ".", parent=attr)

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert ``::`` before a block of code, and a term with an indented definition."""
        if obj.docstring is not None:
            text = re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)
            text = TERM.sub(lambda found: f"**{found[1]}**\n\n{textwrap.dedent(found[2])}", text)
            obj.docstring.value = text
