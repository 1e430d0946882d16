"""``estimate``: off-policy evaluation of a checkpoint on recorded episodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlplug import cli
from rlplug.cli.arguments import run_first
from rlplug.cli.meant import no_flag
from rlplug.registry import warn_broken

USAGE = """rlplug estimate <run folder or checkpoint> data.path=<files> [--json] [key=value ...]

Estimates the expected return of a policy from recorded episodes of another policy (off-policy evaluation). Loads the
run's newest good checkpoint, or the given one (such as checkpoints/best), and samples actions from its policy. Runs no
environment and writes no files. Prints each estimate with its confidence interval; see docs/estimates.md.
--json prints one JSON object.

  data.path=data/medium    files, folders or patterns of episodes; default: the run's own dataset
  estimator=[step_wis,wdr]
                           episode_is, step_is, episode_wis, step_wis: (weighted) importance sampling; dm: a model of
                           action values; dr, wdr: (weighted) doubly robust; default: all
  estimate.gamma=0.99      discount of the return; default: 1, as in evaluations
  estimate.confidence=0.9  level of the intervals
  estimate.iterations=400  model fits; see also estimate.updates, batch_size, lr, folds, action_samples
  +model@estimate_model=mlp256
                           network of the models; default: the run's critic_model, else its model
  seed=7                   seed of the models; default: as in the run
  hardware=cpu             hardware; as for rlplug evaluate"""


def main(arguments: Sequence[str]) -> int:
    """Estimate the return of one checkpoint's policy.

    Raises:
        ConfigError: there is no checkpoint, there are no suitable episodes, or the overrides are wrong.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    words, as_json = cli.without_json(arguments)
    if flags := [word for word in words if word.startswith("-")]:
        raise no_flag(flags[0], "see rlplug estimate --help")
    path, overrides = run_first("estimate", words)
    warn_broken()

    from rlplug.results.evaluate import estimate  # here, because torch takes seconds to import

    result = estimate(path, overrides, cli.tell)
    cli.say(json.dumps(result) if as_json else table(result))
    return 0


def table(result: Mapping[str, Any]) -> str:
    """Format the estimates."""
    rows = {
        "checkpoint": result["checkpoint"],
        "env steps": f"{result['env_steps']:,}",
        "updates": f"{result['updates']:,}",
        "episodes": f"{result['episodes']:,}, {result['steps']:,} steps",
        "behavior": f"{result['estimate/behavior']:,.2f}",
    }
    if (size := result.get("estimate/effective_sample_size")) is not None:
        rows["effective"] = f"{size:,.1f} episodes, weighted per episode"
    lines = [f"{name:<11} {value}" for name, value in rows.items()]
    level = f"{100 * result['confidence']:g} % interval"
    estimates = [
        (name, _number(value), " to ".join(_number(result[f"estimate/{name}_{end}"]) for end in ("low", "high")))
        for key, value in result.items()
        if f"{key}_low" in result and (name := key.removeprefix("estimate/"))
    ]
    return "\n".join([*lines, "", *cli.table(("method", "estimate", level), estimates)])


def _number(value: float) -> str:
    """Format a number compactly, because importance weights can make estimates huge."""
    return f"{value:,.2f}" if abs(value) < 1e9 else f"{value:.4g}"
