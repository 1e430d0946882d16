"""``export``: write the policy of a run as a file that runs without rlplug."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlplug.cli import say, tell
from rlplug.cli.arguments import run_first
from rlplug.registry import warn_broken
from rlplug.types import ConfigError

USAGE = """rlplug export <run folder or checkpoint> [--format onnx|torch|html] [--to folder] [--json] [env...=value]

Exports the greedy policy of the run's newest good checkpoint, or of the given one (as checkpoints/best): with its
normalization of observations, masks of actions and recurrent state, from the environment's observations to its
actions. Plays the policy in the environment, and replays these steps in the export, in a process without rlplug:
an export that differs by more than 1e-5 is not written. See docs/export.md.

  --format onnx            for onnxruntime and others (default); torch: a .pt2 of torch.export; html: a page in
                           which the policy plays, in a browser, offline
  --to folder              where; if not given, exports/<format>-<environment steps> in the run folder
  --steps 1000             how many steps to replay
  --runtime package.tgz    html: the npm package onnxruntime-web; if not given, it is downloaded once
  --json                   print the manifest as one JSON object
  env.max_episode_steps=50, env=cartpole
                           change the environment to play in, as long as its spaces stay the same"""


def main(arguments: Sequence[str]) -> int:
    """Export one policy.

    Raises:
        ConfigError: the command line is wrong, or the policy cannot be exported.
        RunError: the export differs from the policy.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    parser = Parser("export")
    parser.add_argument("--format", default="onnx")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--runtime", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("words", nargs="*")
    given = parser.parse_intermixed_args(arguments)
    path, overrides = run_first("export", given.words)
    warn_broken()

    from rlplug.results.export import export  # here, because torch takes seconds to import

    found = export(path, given.format, given.to, given.steps, overrides, tell, given.runtime)
    say(json.dumps(found) if given.json else _table(found))
    return 0


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ``ConfigError``."""

    def __init__(self, verb: str) -> None:
        super().__init__(prog=f"rlplug {verb}", add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError("", f"{message}; see {self.prog} --help")


def _table(found: Mapping[str, Any]) -> str:
    replay = found["replay"]
    episodes = "episode" if replay["episodes"] == 1 else "episodes"
    rows = {
        "written": f"{found['folder']} ({', '.join(found['files'])})",
        "policy": f"{found['algo']} after {found['env_steps']:,} steps, {found['checkpoint']}",
        "inputs": ", ".join(_field(x) for x in found["inputs"]),
        "outputs": ", ".join(_field(x) for x in found["outputs"]),
        "replayed": f"{replay['steps']:,} steps of {replay['episodes']:,} {episodes} in {replay['runtime']}",
        "difference": f"at most {replay['largest_difference']:.2g}",
    }
    return "\n".join(f"{name:<11} {value}" for name, value in rows.items())


def _field(field: Mapping[str, Any]) -> str:
    return f"{field['name']} [{', '.join(map(str, field['shape']))}] {field['dtype']}"
