"""Ranks that Ray places on the machines of a cluster."""

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

from rlplug.actors.cluster import Cluster, say
from rlplug.api import Plan
from rlplug.distributed.fabric import fabric_of, free_port, set_rank_env
from rlplug.distributed.signals import handling
from rlplug.distributed.spawn import GRACE, RankError
from rlplug.types import ConfigError, RunError

ROOM = 60.0
"""seconds in which a cluster has to have room for all ranks at once"""


def on_cluster(plan: Plan, function: Callable[..., Any], *args: Any, tell: Callable[[str], None] = print) -> Any:
    """Run ``function(fabric, tell, *args)`` on every rank, in processes of Ray.

    As with ``spawn_ranks``, Ctrl-C and SIGTERM reach all of them, and when one fails, all end.

    Raises:
        ConfigError: the cluster does not answer, or has no room for them.
        RunError, KeyboardInterrupt, RankError: as ``spawn_ranks``.
    """
    assert plan.ray is not None
    with closing(Cluster(plan.ray)) as cluster, _placed(plan, cluster) as group:
        places = [
            {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)}
            | {"num_cpus": plan.ray.num_cpus, "num_gpus": plan.ray.num_gpus}
            for rank in range(plan.world_size)
        ]
        # a process of its own for each: it leaves a process group behind
        task: Any = ray.remote(max_calls=1, max_retries=0)
        address, port = ray.get(task(_meeting_point).options(**places[0]).remote())
        question = (plan, address, port, os.getcwd(), list(sys.path), function, args)
        refs = [
            task(_work).options(name=f"rank {rank}", **place).remote(rank, *question)
            for rank, place in enumerate(places)
        ]
        with _passing_on_signals(refs) as asked:
            return _listen(refs, asked)


@contextmanager
def _placed(plan: Plan, cluster: Cluster) -> Iterator[Any]:
    """Room for all ranks at once.

    Raises:
        ConfigError: there is none.
    """
    assert plan.ray is not None
    each = {"CPU": plan.ray.num_cpus, "GPU": plan.ray.num_gpus}
    cluster.require(plan)
    needed = {key: n for key, n in each.items() if n} or {"CPU": 0.001}
    group = placement_group([needed] * plan.world_size, strategy=plan.ray.placement_strategy)
    try:
        if not group.wait(ROOM):
            raise ConfigError(
                "hardware.ray.placement_strategy",
                f"the cluster has no room for {plan.world_size} ranks with {needed} each by"
                f" {plan.ray.placement_strategy}, within {ROOM:g} s: other programs have it, or machines are too few",
            )
        yield group
    finally:
        with suppress(Exception):  # the cluster may be gone
            remove_placement_group(group)


def _meeting_point() -> tuple[str, int]:
    """Where the first rank listens."""
    return get_node_ip_address(), free_port()


def _work(
    rank: int, plan: Plan, address: str, port: int, cwd: str, path: list[str], function: Any, args: tuple[Any, ...]
) -> Any:
    """One rank. Its device is the first one that it sees: Ray shows it no others."""
    with suppress(OSError):  # another machine need not have it
        os.chdir(cwd)
    sys.path.extend(folder for folder in path if folder not in sys.path)
    set_rank_env(rank, plan.world_size, port, address, alone=True)
    return function(fabric_of(replace(plan, devices=1, num_nodes=plan.world_size)), print, *args)


def _listen(refs: list[Any], asked: list[int]) -> Any:
    """The first rank's value, or what went wrong."""
    waiting, wrong = list(refs), dict[Any, RayError]()
    while waiting and (not wrong or len(asked) == 1):  # those that were asked to stop end by themselves
        done, waiting = ray.wait(waiting, timeout=1.0)
        wrong |= _errors(done)
    if not wrong:
        return ray.get(refs[0])
    wrong |= _errors(_end(waiting))
    if asked:
        raise KeyboardInterrupt(asked[0])
    # whose process is gone is why others failed, whoever was heard of first
    ref = min(wrong, key=lambda ref: (isinstance(wrong[ref], RayTaskError), refs.index(ref)))
    raise _said(refs.index(ref), len(refs), wrong[ref])


def _errors(refs: list[Any]) -> dict[Any, RayError]:
    """What those failed of that did."""
    errors = dict[Any, RayError]()
    for ref in refs:
        try:
            ray.get(ref)
        except RayError as error:
            errors[ref] = error
    return errors


def _said(rank: int, ranks: int, error: RayError) -> Exception:
    """What a rank failed of."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, ConfigError | RunError):
            return error.cause
        return RankError(f"rank {rank} of {ranks} failed:\n{error.traceback_str}")
    return RankError(f"the process of rank {rank} of {ranks} was lost: {str(error).strip()}")


def _end(refs: list[Any]) -> list[Any]:
    """End ranks that wait for somebody who is gone; those are returned that had a last word."""
    if not refs:
        return []
    done, waiting = ray.wait(refs, num_returns=len(refs), timeout=GRACE)
    for ref in waiting:
        with suppress(RayError, TaskCancelledError, ValueError):
            ray.cancel(ref, force=True)
    return done


@contextmanager
def _passing_on_signals(refs: list[Any]) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM ask all ranks to end after their round; the second one ends them. Yields what came."""
    asked: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        asked.append(number)
        for ref in refs:
            ray.cancel(ref, force=len(asked) > 1, recursive=False)
        if len(asked) == 1:
            say("stopping after this round, with a checkpoint; Ctrl-C again: at once, without one")

    with handling(pass_on):
        yield asked
