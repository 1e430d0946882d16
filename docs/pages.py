"""Build the site: the hooks that mkdocs.yml names.

Pages of the site are the Markdown files of this folder, and those of ``OUTSIDE``. A marker in a page is replaced by
what is generated from the code: ``<!-- options: ... -->`` (see tables.py) and ``<!-- matrix -->`` (see matrix.py). A
link to another file of the repository leads to a page with its source. Equations become MathML, which browsers render
without scripts or fonts. ``llms.txt`` lists the pages for language models, and ``llms-full.txt`` holds their text.
"""

from __future__ import annotations

import html
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.append(str(DOCS))

import matrix  # noqa: E402
import tables  # noqa: E402

OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    **{
        f"plugins/{path.name}/README.md": f"packages/{path.name}.md"
        for path in sorted((ROOT / "plugins").iterdir())
        if (path / "README.md").is_file()
    },
}
"""pages of the repository outside of docs -> their places in the site"""
HOME = {"README.md": "index.md", "plugins": "custom_plugin.md", "docs/adr": "adr/README.md", "rlplug/api": "api/api.md"}
"""other links that lead to a page"""
INSIDE = ("adr/", "api/", "architecture", "changelog", "contributing", "exports")
"""pages that the search lists after those for users"""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".ini": "ini", ".json": "json"}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=[)\s])")
FENCE = re.compile(r"^(```|    ).*?(?:^```$|$)", re.DOTALL | re.MULTILINE)
MATRIX = "<!-- matrix -->"

texts: dict[str, str] = {}
"""place of a page -> its Markdown"""
titles: dict[str, tuple[str, str]] = {}
"""place of a page -> its title and address"""


def math(source: str, *rest: Any, **more: Any) -> str:
    """Format a block of code in the language ``math``, as GitHub does."""
    return mathml(source, "block")


def mathml(source: str, display: Literal["block", "inline"] = "inline") -> str:
    """Convert TeX to MathML; a mark on primes lets site.css choose a font in which they have the right size.

    Raises:
        PluginError: a command is not supported.
    """
    text = convert(source.strip(), display=display)
    if unknown := re.search(r"\\[a-zA-Z]+", text):
        raise PluginError(f"{unknown[0]} is not supported in equations: {source}")
    return text.replace("<mi>&#x02032;</mi>", '<mo class="prime">&#x02032;</mo>')


# ---- events of MkDocs ------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> None:
    fence = {"name": "math", "class": "math", "format": math}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    texts.clear()
    listed = json.dumps(config.nav)
    others = [path.name for path in sorted(DOCS.glob("*.md")) if f'"{path.name}"' not in listed]
    if config.nav is not None and others:
        config.nav.append({"More": others})


def on_files(files: Files, config: MkDocsConfig) -> None:
    for path, place in OUTSIDE.items():
        files.append(_file(config, place, (ROOT / path).read_text(encoding="utf-8")))
    for file in [*files.documentation_pages()]:
        for target in _targets(file):
            place = _place(target)
            if place.startswith("source/") and place not in files.src_uris:
                files.append(_file(config, place, _source(target)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri.startswith(INSIDE):
        page.meta["search"] = {"boost": 0.3}
    markdown = tables.MARK.sub(lambda found: tables.generate(found[1]), markdown)
    here = Path(page.file.src_uri).parent

    def moved(link: re.Match[str]) -> str:
        target = (_origin(page.file).parent / link[1]).resolve()
        place = _place(target)
        return os.path.relpath(place, here) + (link[2] or "") if place else link[0]

    if not page.file.src_uri.startswith("source/"):
        markdown = LINK.sub(moved, markdown)
        texts[page.file.src_uri] = markdown
    return markdown.replace(MATRIX, matrix.page(matrix.found())) if MATRIX in markdown else markdown


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    titles[page.file.src_uri] = str(page.title), page.url
    return re.sub(
        r'<span class="arithmatex">\\\((.*?)\\\)</span>',
        lambda found: mathml(html.unescape(found[1])),
        content,
        flags=re.DOTALL,
    )


def on_post_build(config: MkDocsConfig) -> None:
    site = Path(config.site_dir)
    listed = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    whole: list[str] = []
    reference = _reference(site)
    for place, markdown in sorted(texts.items(), key=lambda item: (item[0].count("/"), item[0])):
        title, address = titles[place]
        listed.append(f"- [{title}]({address}): {_summary(markdown)}")
        whole.append(f"<!-- {place} -->\n\n{reference.get(place, markdown).strip()}\n")
    (site / "llms.txt").write_text("\n".join(listed) + "\n", encoding="utf-8")
    (site / "llms-full.txt").write_text("\n".join(whole), encoding="utf-8")


# ---- where pages come from, and where links lead ---------------------------------------------------------------------


def _file(config: MkDocsConfig, place: str, text: str) -> File:
    return File.generated(config, place, content=text)


def _origin(file: File) -> Path:
    """Return the path in the repository that the text of a page comes from."""
    for path, place in OUTSIDE.items():
        if place == file.src_uri:
            return ROOT / path
    return DOCS / file.src_uri


def _place(target: Path) -> str:
    """Return the place in the site for a path of the repository; empty for what is no such path."""
    if not target.exists() or not target.is_relative_to(ROOT):
        return ""
    path = target.relative_to(ROOT).as_posix()
    if place := {**OUTSIDE, **HOME}.get(path, ""):
        return place
    if target.is_dir():
        return _place(target / "README.md")
    if target.is_relative_to(DOCS) and target.suffix not in (".py", ".json"):
        return path.removeprefix("docs/")
    return f"source/{path.lstrip('.')}.md"  # MkDocs leaves out files whose names begin with a dot


def _targets(file: File) -> Iterator[Path]:
    for link in LINK.finditer(file.content_string):
        yield (_origin(file).parent / link[1]).resolve()


def _source(target: Path) -> str:
    """Return a page with the source of a file."""
    path, text = target.relative_to(ROOT).as_posix(), target.read_text(encoding="utf-8")
    language = LANGUAGES.get(target.suffix, "text")
    return f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n\n# {path}\n\n````{language}\n{text.rstrip()}\n````\n"


# ---- for language models ---------------------------------------------------------------------------------------------


def _summary(markdown: str) -> str:
    """Return the first sentence after the title."""
    text = re.sub(r"^(#|\[|·|<!--|---|search:|!\[).*$", "", FENCE.sub("", markdown), flags=re.MULTILINE).strip()
    first = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", " ".join(text.split("\n\n")[0].split()))
    return re.split(r"(?<!\bal\.)(?<=[^.]\.)\s", first)[0]


def _reference(site: Path) -> Mapping[str, str]:
    """Return the text of the API reference by page, as it is in the search index."""
    found: dict[str, str] = {}
    for entry in json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]:
        if entry["location"].startswith("api/"):
            place = entry["location"].partition("#")[0].removesuffix(".html") + ".md"
            text = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"</p>|<br ?/?>", "\n", entry["text"])))
            found[place] = found.get(place, "") + f"\n## {html.unescape(entry['title'])}\n\n{text.strip()}\n"
    return found
