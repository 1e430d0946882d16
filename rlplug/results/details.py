"""Sections of a report about its runs: how groups differ, videos, machine and versions, commands."""

from __future__ import annotations

import base64
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rlplug.checkpointing import atomic
from rlplug.config.errors import show
from rlplug.results.diff import versions
from rlplug.results.groups import Group, differing, flat, partial
from rlplug.results.html import cell, head, section, table
from rlplug.results.listing import ago
from rlplug.results.record import RunRecord

VIDEOS = {".gif": "image/gif", ".mp4": "video/mp4", ".webm": "video/webm"}
EMBEDDED, ALL_EMBEDDED = 4 * 2**20, 24 * 2**20  # bytes of a video, and of all of them; larger ones are linked


def differences(groups: Sequence[Group]) -> str:
    """Return the section of settings that differ between groups."""
    if len(groups) < 2:
        return ""
    settings = [group.settings for group in groups]
    rows = [[head(key), *(cell(_plain(one[key])) for one in settings)] for key in differing(settings)]
    body = table(("", *(group.label for group in groups)), rows) if rows else "<p>No setting that all groups have.</p>"
    if some := partial(settings):
        rows = [[head(key), *(cell(_plain(one[key]) if key in one else "") for one in settings)] for key in some]
        inner = table(("", *(group.label for group in groups)), rows)
        body += f"<details><summary>{len(some)} settings that only some groups have</summary>{inner}</details>"
    return section("What differs between groups", body)


def videos(runs: Sequence[RunRecord], base: Path) -> str:
    """Return the section of each run's last video: embedded, or linked from the folder ``base`` if it is large."""
    found = [
        (run, path) for run in runs for path in sorted((run.path / "videos").glob("*"))[-1:] if path.suffix in VIDEOS
    ]
    figures: list[str] = []
    left = ALL_EMBEDDED
    for run, path in found:
        size, kind = path.stat().st_size, VIDEOS[path.suffix]
        if size <= min(EMBEDDED, left):
            left -= size
            source = f"data:{kind};base64,{base64.b64encode(atomic.read(path)).decode()}"
            alt = escape(f"video of {run.path.name}")
            shown = f'<img alt="{alt}" src="{source}">'
            if kind.startswith("video/"):
                shown = f'<video controls loop muted playsinline aria-label="{alt}" src="{source}"></video>'
        else:
            link = escape(quote(os.path.relpath(path, base)))
            shown = f'<p><a href="{link}">{escape(path.name)}</a>, {size / 2**20:.1f} MiB, not embedded</p>'
        figures.append(f"<figure>{shown}<figcaption>{escape(f'{run.path.name}, {path.stem}')}</figcaption></figure>")
    return section("Videos", f'<div class="videos">{"".join(figures)}</div>') if figures else ""


def machines(runs: Sequence[RunRecord]) -> str:
    """Return the section of machine, commit and versions, with the runs that have a value where there are several."""
    found: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        for key, value in _origin(run):
            found.setdefault(key, {}).setdefault(value, []).append(run.path.name)
    rows = []
    for key, values in found.items():
        several = len(values) > 1
        lines = [f"{value} ({', '.join(names)})" if several else value for value, names in values.items()]
        rows.append([head(key), "<td>" + "<br>".join(map(escape, lines)) + "</td>"])
    return section("Machine and versions", table(("", ""), rows))


def commands(groups: Sequence[Group]) -> str:
    """Return the section of runs, each with the command that repeats it."""
    parts: list[str] = []
    for group in groups:
        parts.append(f"<h3>{escape(group.label)}</h3>")
        for run in group.runs:
            wall = run.summary.get("wall_s")
            time = f", {ago(wall)} of training" if isinstance(wall, int | float) else ""
            steps = f"{run.steps:,} {'steps' if run.unit == 'env_steps' else 'updates'}"
            about = f"seed {run.config.get('seed')}, {run.state}, {steps}{time}"
            parts.append(
                f'<p class="path"><code>{escape(str(run.path))}</code> <span class="soft">{escape(about)}</span></p>'
            )
            parts += [f'<p class="soft">{escape(line)}</p>' for line in _resumed(run)]
            if run.command:
                line = escape(shlex.join(run.command))
                parts.append(
                    f'<div class="repeat"><pre>{line}</pre><button type="button" data-copy>copy</button></div>'
                )
            else:
                parts.append("<p>It was started from Python; its config.yaml has every setting.</p>")
    return section("Runs, and the commands that repeat them", "".join(parts))


def _origin(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield what a run's manifest records of its machine, commit and versions."""
    git, hardware = run.manifest.get("git"), run.manifest.get("hardware")
    if isinstance(git, Mapping):
        yield "commit", f"{git.get('commit')}{', with changes' if git.get('changed') else ''}"
    if isinstance(hardware, Mapping):
        yield "machine", f"{hardware.get('machine')}, {hardware.get('cpus')} CPUs"
        yield "accelerator", str(hardware.get("accelerator") or "none")
        if isinstance(plan := hardware.get("plan"), Mapping):
            many = " x ".join(str(plan.get(key)) for key in ("num_nodes", "devices", "accelerator"))
            yield "nodes x devices", f"{many}, {plan.get('precision')}, threads {plan.get('threads')}"
    yield from versions(run).items()


def _resumed(run: RunRecord) -> Iterator[str]:
    """Yield a line for each resume of a run, with the settings that it changed."""
    resumes = run.manifest.get("resumed")
    for one in resumes if isinstance(resumes, list) else ():
        flattened = dict(flat(one)) if isinstance(one, Mapping) else {}
        changed = {key.removeprefix("changed."): value for key, value in flattened.items() if key.endswith(".to")}
        words = [f"{key.removesuffix('.to')}={_plain(value)}" for key, value in changed.items()]
        at = f"resumed at environment step {flattened.get('env_steps')}"
        yield " ".join([at, "with", *words] if words else [at])


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else show(value)
