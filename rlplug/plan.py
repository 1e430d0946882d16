"""Hardware plans: devices of the learner, and actors that collect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from rlplug.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, option, settings
from rlplug.types import ConfigError

Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


@settings
class Actors:
    """Ray actors that step the environments."""

    count: NonNegativeInt = option("Number of actors in the run; 0: ranks step the environments themselves.")
    num_cpus: NonNegativeFloat = option("CPU cores per actor; fractions are allowed.")
    num_gpus: NonNegativeFloat = option("CUDA devices per actor; fractions are allowed.")
    start_timeout_s: PositiveFloat = option("Timeout in seconds for an actor's start and placement.")
    timeout_s: PositiveFloat = option("Timeout in seconds without a step or a segment.")
    on_failure: Literal["recreate", "ignore", "stop"] = option(
        "When an actor dies, hangs or raises: recreate restarts it from its last state, ignore continues without"
        " its environments, stop ends the run."
    )
    max_restarts: NonNegativeInt = option("Maximum consecutive restarts of an actor before the run stops.")
    max_total_restarts: NonNegativeInt = option("Maximum restarts of an actor before the run stops.")
    backoff_s: NonNegativeFloat = option("Seconds before a restart; doubled for each consecutive restart.")
    num_aggregation_workers: NonNegativeInt = option("Actors that concatenate segments before a rank fetches them.")
    evaluation: NonNegativeInt = option("Number of Ray actors that evaluate during training; 0: rank 0 evaluates.")


@settings
class RayCluster:
    """Ray cluster of the actors and of the ranks of ``hardware=ray``."""

    address: str | None = option("host:port of a cluster to join; null: start and stop a local one.")
    object_store_memory: PositiveInt | None = option("Bytes of a local cluster's object store; null: Ray's default.")
    num_cpus: NonNegativeFloat = option("CPU cores per rank of hardware=ray; fractions are allowed.")
    num_gpus: NonNegativeFloat = option("CUDA devices per rank; fractions are allowed; 0: CPU.")
    placement_strategy: Placement = option("Placement of the ranks of hardware=ray on the nodes of the cluster.")


@dataclass(frozen=True)
class Plan:
    """Devices and processes of a run. They do not affect what is learned."""

    accelerator: Literal["cpu", "cuda"] = "cpu"
    devices: int = 1
    num_nodes: int = 1
    precision: str = "32-true"
    microbatches: int = 1
    threads: int = 1  # torch threads per process
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    max_restarts: int = 0  # automatic restarts of a failed run from its last checkpoint
    actors: Actors | None = None  # None: every rank steps its own environments
    ray: RayCluster | None = None
    launcher: Literal["processes", "ray"] = "processes"  # launcher of the ranks, unless torchrun or srun starts them

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.devices * self.num_nodes


class Hardware(Protocol):
    """Chooses the devices and processes of a run."""

    def plan(self) -> Plan:
        """Inspect the machine and return a plan.

        Raises:
            ConfigError: devices are missing; the message names the available ones and a fix.
        """
        ...


def require_room(plan: Plan, there: Mapping[str, float], where: str) -> None:
    """Check that actors and ranks placed by Ray fit on a cluster at the same time.

    Args:
        there: the cluster's ``CPU`` and ``GPU`` resources.
        where: name of the cluster in messages.

    Raises:
        ConfigError: the cluster has too few resources.
    """
    groups = []
    if plan.launcher == "ray":
        groups.append(("devices", "ranks", "ray", plan.world_size, plan.ray))
    if plan.actors is not None:
        groups.append(("actors.count", "actors", "actors", plan.actors.count + plan.actors.evaluation, plan.actors))
    for resource, what in (("CPU", "cores"), ("GPU", "CUDA devices")):
        left, taken, name = there[resource], "", f"num_{resource.lower()}s"
        for setting, whose, group, count, cfg in groups:
            each = getattr(cfg, name)
            if count * each > left + 1e-6:
                key = f"hardware.{group}.{name}"
                way = f"use {key}={left / count:.2g} to share them" if left else f"use {key}=0"
                if resource == "GPU" and whose == "ranks" and left:
                    way = f"use hardware.devices={left // each:g}"  # NCCL needs one device per rank
                said = f"{count} {whose} with {each:g} {what} each need more than the {left:g} of {where}{taken}; {way}"
                raise ConfigError(f"hardware.{setting}", said)
            left, taken = left - count * each, f" that {count} {whose} leave"
