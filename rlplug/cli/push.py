"""``push``: write the model card of a run, to a folder or to the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rlplug.cli import say, tell
from rlplug.cli.arguments import run_first
from rlplug.cli.export import Parser
from rlplug.registry import warn_broken
from rlplug.types import ConfigError

USAGE = """rlplug push <run folder> [--to folder | --to hf://user/name] [--json]

Writes a model card of the run, README.md in the form of the Hugging Face hub, with the weights of its newest good
checkpoint, its configuration, its metrics and curve (with matplotlib), and the exports of that checkpoint.
rlplug.load and rlplug evaluate work in the folder.

  --to card                a folder; if not given, card in the run folder
  --to hf://user/name      a model on the hub, which is created if it is not there; needs a token (`hf auth login`)
  --json                   print one JSON object"""


def main(arguments: Sequence[str]) -> int:
    """Push one run.

    Raises:
        ConfigError: the command line is wrong, or there is no run, no token or no such folder.
        RunError: the hub refuses.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    parser = Parser("push")
    parser.add_argument("--to")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("words", nargs="*")
    given = parser.parse_intermixed_args(arguments)
    path, more = run_first("push", given.words)
    if more:
        raise ConfigError("", f"push takes one run folder, and not {more[0]} too; see rlplug push --help")
    warn_broken()

    from rlplug.results.card import push  # here, because torch takes seconds to import

    found = push(path, given.to, tell)
    said = f"{found['to']}: {len(found['files'])} files, {sum(found['files'].values()) / 1e6:,.1f} MB"
    say(json.dumps(found) if given.json else said)
    return 0
