"""Ranks on the machines of a Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlplug.actors.cluster import Cluster, warn
from rlplug.api import Plan
from rlplug.distributed.fabric import fabric_of, free_port, set_rank_env
from rlplug.distributed.signals import handle_signals
from rlplug.distributed.spawn import GRACE_S, RankError
from rlplug.types import ConfigError, RunError

PLACEMENT_S = 60.0
"""seconds in which the cluster has to have room for all ranks at the same time"""


def on_cluster(plan: Plan, function: Callable[..., Any], *args: Any, tell: Callable[[str], None] = print) -> Any:
    """Run ``function(fabric, tell, *args)`` on every rank, in processes of Ray.

    As with ``spawn_ranks``, Ctrl-C and SIGTERM are passed on to all ranks, and when one fails, all end.

    Returns:
        What the first rank returned.

    Raises:
        ConfigError: the cluster does not answer, or has no room for the ranks.
        RunError, KeyboardInterrupt, RankError: as in ``spawn_ranks``.
    """
    assert plan.ray is not None
    with closing(Cluster(plan.ray)) as cluster, _place(plan, cluster) as group:
        places = [
            {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)}
            | {"num_cpus": plan.ray.num_cpus, "num_gpus": plan.ray.num_gpus}
            for rank in range(plan.world_size)
        ]
        # max_calls=1 gives every rank a new process: a rank leaves a process group behind
        task: Any = ray.remote(max_calls=1, max_retries=0)
        address, port = ray.get(task(_first_address).options(**places[0]).remote())
        work = (plan, address, port, os.getcwd(), list(sys.path), function, args)
        refs = [
            task(_run_rank).options(name=f"rank {rank}", **place).remote(rank, *work)
            for rank, place in enumerate(places)
        ]
        with _pass_on_signals(refs) as signals:
            return _outcome(refs, signals)


@contextmanager
def _place(plan: Plan, cluster: Cluster) -> Iterator[Any]:
    """Reserve room for all ranks.

    Raises:
        ConfigError: the cluster has none.
    """
    assert plan.ray is not None
    each = {"CPU": plan.ray.num_cpus, "GPU": plan.ray.num_gpus}
    cluster.require(plan)
    needed = {key: n for key, n in each.items() if n} or {"CPU": 0.001}
    group = placement_group([needed] * plan.world_size, strategy=plan.ray.placement_strategy)
    try:
        if not group.wait(PLACEMENT_S):
            raise ConfigError(
                "hardware.ray.placement_strategy",
                f"within {PLACEMENT_S:g} s the cluster had no room for {plan.world_size} ranks with {needed} each by"
                f" {plan.ray.placement_strategy}: other programs use it, or it has too few machines",
            )
        yield group
    finally:
        with suppress(Exception):  # the cluster may be gone
            remove_placement_group(group)


def _first_address() -> tuple[str, int]:
    """Return where the first rank listens; called on its machine."""
    return get_node_ip_address(), free_port()


def _run_rank(
    rank: int, plan: Plan, address: str, port: int, cwd: str, path: list[str], function: Any, args: tuple[Any, ...]
) -> Any:
    """Run one rank. Its device is the first one it sees: Ray hides the others."""
    with suppress(OSError):  # another machine may not have this folder
        os.chdir(cwd)
    sys.path.extend(folder for folder in path if folder not in sys.path)
    set_rank_env(rank, plan.world_size, port, address, alone=True)
    return function(fabric_of(replace(plan, devices=1, num_nodes=plan.world_size)), print, *args)


def _outcome(refs: list[Any], signals: list[int]) -> Any:
    """Wait for the ranks; return the first one's value, or raise what failed first."""
    waiting, failed = list(refs), dict[Any, RayError]()
    while waiting and (not failed or len(signals) == 1):  # after one signal the ranks end by themselves
        done, waiting = ray.wait(waiting, timeout=1.0)
        failed |= _errors(done)
    if not failed:
        return ray.get(refs[0])
    failed |= _errors(_end(waiting))
    if signals:
        raise KeyboardInterrupt(signals[0])
    # the error of a rank may only follow from another rank's lost process, or from an earlier error
    ref = min(failed, key=lambda ref: isinstance(failed[ref], RayTaskError))
    raise _rank_error(refs.index(ref), len(refs), failed[ref])


def _errors(refs: list[Any]) -> dict[Any, RayError]:
    """Return the errors of the ranks that failed."""
    errors = dict[Any, RayError]()
    for ref in refs:
        try:
            ray.get(ref)
        except RayError as error:
            errors[ref] = error
    return errors


def _rank_error(rank: int, ranks: int, error: RayError) -> Exception:
    """Return what to raise for a rank's error."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, ConfigError | RunError):
            return error.cause
        return RankError(f"rank {rank} of {ranks} failed:\n{error.traceback_str}")
    return RankError(f"the process of rank {rank} of {ranks} was lost: {str(error).strip()}")


def _end(refs: list[Any]) -> list[Any]:
    """Return the ranks that end by themselves within seconds, and end the others, which wait for one that is gone."""
    if not refs:
        return []
    done, waiting = ray.wait(refs, num_returns=len(refs), timeout=GRACE_S)
    for ref in waiting:
        with suppress(RayError, TaskCancelledError, ValueError):
            ray.cancel(ref, force=True)
    return done


@contextmanager
def _pass_on_signals(refs: list[Any]) -> Iterator[list[int]]:
    """Pass Ctrl-C and SIGTERM on to all ranks, which end after their round; a second one ends them at once.

    Yields:
        The signals that arrived.
    """
    signals: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        signals.append(number)
        for ref in refs:
            ray.cancel(ref, force=len(signals) > 1, recursive=False)
        if len(signals) == 1:
            warn("stopping after this round, with a checkpoint; Ctrl-C again: at once, without one")

    with handle_signals(pass_on):
        yield signals
