"""Launch of ranks on the nodes of a Ray cluster."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlplug.actors.cluster import connected, warn
from rlplug.distributed.fabric import fabric_of, free_port, set_rank_env
from rlplug.distributed.signals import handle_signals
from rlplug.distributed.spawn import RankError, Reports, outcome
from rlplug.plan import Plan
from rlplug.types import ConfigError, RunError

PLACEMENT_S = 60.0  # timeout to reserve room for all ranks


def on_cluster(plan: Plan, function: Callable[..., Any], *args: Any, tell: Callable[[str], None] = print) -> Any:
    """Run ``function(fabric, tell, *args)`` on every rank, in processes of Ray.

    As with ``spawn_ranks``, Ctrl-C and SIGTERM are forwarded to all ranks, and when one fails, all end.

    Returns:
        The result of rank 0.

    Raises:
        ConfigError: the cluster does not answer, or has no room for the ranks.
        RunError, KeyboardInterrupt, RankError: as in ``spawn_ranks``.
    """
    with connected(plan), _placed(plan) as places:
        # max_calls=1 gives every rank a new process, because ranks do not destroy their process group
        task: Any = ray.remote(max_calls=1, max_retries=0)
        address, port = ray.get(task(_first_address).options(**places[0]).remote())
        work = (plan, address, port, os.getcwd(), list(sys.path), function, args)
        refs = [
            task(_run_rank).options(name=f"rank {rank}", **place).remote(rank, *work)
            for rank, place in enumerate(places)
        ]
        waiting, signals = {ref: rank for rank, ref in enumerate(refs)}, list[int]()

        def poll(left: list[Any]) -> Reports:
            for ref in ray.wait(left, timeout=1.0)[0]:
                try:
                    yield ref, "value", ray.get(ref), None
                except RayError as error:
                    # a rank's error may be a consequence of another rank's lost process or earlier error
                    order = isinstance(error, RayTaskError), time.monotonic()
                    if signals:
                        yield ref, "interrupt", KeyboardInterrupt(signals[0]), order
                    else:
                        yield ref, "error", _failure(error, f"rank {refs.index(ref)} of {len(refs)}"), order

        def pass_on(number: int, frame: Any) -> None:
            signals.append(number)
            for ref in refs:
                ray.cancel(ref, force=len(signals) > 1, recursive=False)
            if len(signals) == 1:
                warn("stopping after this round, with a checkpoint; press Ctrl-C again to stop at once, without one")

        with handle_signals(pass_on):
            try:
                return outcome(waiting, poll, lambda: len(signals))
            finally:  # they may wait for a dead rank
                for ref in waiting:
                    with suppress(RayError, TaskCancelledError, ValueError):
                        ray.cancel(ref, force=True)


@contextmanager
def _placed(plan: Plan) -> Iterator[list[dict[str, Any]]]:
    """Reserve room for all ranks, and yield the Ray options of each rank."""
    assert plan.ray is not None
    cfg = plan.ray
    needed = {key: n for key, n in (("CPU", cfg.num_cpus), ("GPU", cfg.num_gpus)) if n} or {"CPU": 0.001}
    group = placement_group([needed] * plan.world_size, strategy=cfg.placement_strategy)
    try:
        if not group.wait(PLACEMENT_S):
            raise ConfigError(
                "hardware.ray.placement_strategy",
                f"the cluster could not place {plan.world_size} ranks with {needed} each ({cfg.placement_strategy})"
                f" within {PLACEMENT_S:g} s: other programs use it, or it has too few machines",
            )
        places = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(plan.world_size)]
        yield [{"scheduling_strategy": p, "num_cpus": cfg.num_cpus, "num_gpus": cfg.num_gpus} for p in places]
    finally:
        with suppress(Exception):  # the cluster may be dead
            remove_placement_group(group)


def _first_address() -> tuple[str, int]:
    """Return the address and port of rank 0; called on its node."""
    return get_node_ip_address(), free_port()


def _run_rank(
    rank: int, plan: Plan, address: str, port: int, cwd: str, path: list[str], function: Any, args: tuple[Any, ...]
) -> Any:
    """Run one rank. Its device is the first visible one, because Ray hides the others."""
    with suppress(OSError):  # another node may not have this folder
        os.chdir(cwd)
    sys.path.extend(folder for folder in path if folder not in sys.path)
    set_rank_env(rank, plan.world_size, port, address, alone=True)
    return function(fabric_of(replace(plan, devices=1, num_nodes=plan.world_size)), print, *args)


def _failure(error: RayError, rank: str) -> Exception:
    """Return the error that a rank raised, or why it is lost."""
    if not isinstance(error, RayTaskError):
        return RankError(f"the process of {rank} was lost: {str(error).strip()}")
    if isinstance(error.cause, ConfigError | RunError):
        return error.cause
    return RankError(f"{rank} failed:\n{error}")
