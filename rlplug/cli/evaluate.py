"""``evaluate``: play evaluation episodes with a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlplug.cli import say, tell
from rlplug.cli.arguments import run_first
from rlplug.cli.meant import no_flag
from rlplug.cli.play import video
from rlplug.registry import warn_broken
from rlplug.results.places import run_at
from rlplug.types import ConfigError, Mode

USAGE = """rlplug evaluate <run folder or checkpoint> [--json] [--record] [--explore | --random] [key=value ...]

Runs greedy episodes in the run's environment, with the weights of the run's newest good checkpoint or of
the given one (such as checkpoints/best). --json prints one JSON object. --explore samples actions from the policy,
without exploration modules; --random samples them uniformly, whatever the policy. --record also writes a video of one
greedy episode, or of eval.record=3, to videos/ of the run folder. Writes no other files unless record.path is set.

  against=runs/other       opponent of a league: the policy of another run
  against.prey=runs/other  play a policy with that of another run
  eval.episodes=100        number of episodes; default: as in the run
  eval.steps=10_000        further episodes until they have this many steps together; default: as in the run
  eval.timeout_s=60        seconds after which the complete episodes are the result; default: as in the run
  eval.max_episode_steps=1000
                           steps after which an episode is truncated; default: as in the run
  eval.function=module:judge
                           your own evaluation; default: as in the run
  seed=7                   seed of the episodes; default: those of the run's own evaluation at that step
  hardware=cpu             hardware; default: as in the run, or the CPU if that is not available
  record.path=data/expert  record the episodes, for data.path of other runs; see docs/data.md
  env.max_episode_steps=50, +env.kwargs.g=9.8
                           change the environment; its spaces must stay the same"""

ABOVE = ("return_mean", "return_std", "return_min", "return_max", "length_mean")
"""metrics ``eval/...`` in rows of their own"""


def main(arguments: Sequence[str]) -> int:
    """Evaluate one checkpoint.

    Raises:
        ConfigError: there is no checkpoint, it cannot be used here, or the overrides are wrong.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    modes: list[Mode] = [mode for mode in ("explore", "random") if f"--{mode}" in arguments]
    if len(modes) > 1:
        raise ConfigError("", "evaluate takes one of --explore and --random")
    known = ("--json", "--record", *(f"--{mode}" for mode in modes))
    words = [argument for argument in arguments if argument not in known]
    if flags := [word for word in words if word.startswith("-")]:
        raise no_flag(flags[0], "see rlplug evaluate --help")
    path, overrides = run_first("evaluate", words)
    warn_broken()

    from rlplug.results.evaluate import evaluate  # here, because torch takes seconds to import

    against, overrides = opponents(overrides)
    if against and "--record" in arguments:
        raise ConfigError("against", "does not apply to --record, whose video shows the policy as it was trained")
    shown = {"video": str(video(path, overrides))} if "--record" in arguments else {}
    result = evaluate(path, overrides, tell, *(modes or ["greedy"]), against=against) | shown
    say(json.dumps(result) if "--json" in arguments else table(result))
    return 0


def opponents(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the runs of ``against=<run>`` and ``against.<policy>=<run>`` by policy, and the other words."""
    found = [re.fullmatch(r"against(?:\.([^=]+))?=(.*)", word) for word in words]
    runs = {match[1] or "": match[2] for match in found if match}
    for policy, path in runs.items():
        try:
            runs[policy] = str(run_at(path))
        except ConfigError as error:
            raise ConfigError(f"against.{policy}".rstrip("."), error.message) from None
    return runs, [word for word, match in zip(words, found, strict=True) if not match]


def table(result: Mapping[str, Any]) -> str:
    """Format the result of an evaluation."""
    extremes = (f"{name} {result[key]:,.2f}" for name in ("min", "max") if (key := f"eval/return_{name}") in result)
    spread = f" ({', '.join(extremes)})" if "eval/return_min" in result else ""
    deviation = f" ± {result['eval/return_std']:,.2f}" if "eval/return_std" in result else ""
    rows = {
        "checkpoint": result["checkpoint"],
        "env steps": f"{result['env_steps']:,}",
        "updates": f"{result['updates']:,}",
        "episodes": f"{result['episodes']:,} (seed {result['seed']})",
        "return": f"{result['eval/return_mean']:,.2f}{deviation}{spread}",
    }
    rows |= {"length": f"{result['eval/length_mean']:,.1f}"} if "eval/length_mean" in result else {}
    own = {key.removeprefix("eval/"): x for key, x in result.items() if key.startswith("eval/")}  # any algorithm's
    rows |= {key: f"{x:,.4g}" for key, x in own.items() if key not in ABOVE}
    rows |= {"video": result["video"]} if "video" in result else {}
    width = max(11, *map(len, rows))
    return "\n".join(f"{name:<{width}} {value}" for name, value in rows.items())
