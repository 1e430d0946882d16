"""Hardware plans: the devices on which a run learns and the actors with which it collects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from rlplug.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, option, settings
from rlplug.types import ConfigError

Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


@settings
class Actors:
    """Ray actors, which hold the environments."""

    count: NonNegativeInt = option("Actors of the whole run; 0: ranks play their environments themselves.")
    num_cpus: NonNegativeFloat = option("Cores of each, or a fraction of one.")
    num_gpus: NonNegativeFloat = option("CUDA devices of each, or a fraction of one.")
    start_timeout_s: PositiveFloat = option(
        "Seconds in which an actor has to start, on a machine that may have to be found."
    )
    timeout_s: PositiveFloat = option("Seconds without a step or an arriving segment after which an actor is ended.")
    on_failure: Literal["recreate", "ignore", "stop"] = option(
        "When an actor dies, hangs or raises. recreate: it is restarted where it was; ignore: the run goes on without"
        " its environments; stop: the run stops."
    )
    max_restarts: NonNegativeInt = option("How often in a row an actor is restarted before the run stops.")
    max_total_restarts: NonNegativeInt = option("The same over the whole run, since it was started or resumed.")
    backoff_s: NonNegativeFloat = option("Seconds before an actor is restarted; doubled each further time.")
    num_aggregation_workers: NonNegativeInt = option("Actors that concatenate segments before a rank fetches them.")
    evaluation: NonNegativeInt = option("Actors that play evaluations while training goes on; 0: the first rank does.")


@settings
class RayCluster:
    """The Ray cluster of the actors, and of the ranks of ``hardware=ray``."""

    address: str | None = option("host:port of a cluster to join; null: one is started on this machine, and stopped.")
    object_store_memory: PositiveInt | None = option("Bytes for segments and weights; null: Ray's default.")
    num_cpus: NonNegativeFloat = option("Cores of each rank of hardware=ray, or a fraction of one.")
    num_gpus: NonNegativeFloat = option("CUDA devices of each, or a fraction of one; 0: they learn on processors.")
    placement_strategy: Placement = option("How these ranks are placed on the cluster's machines.")


@dataclass(frozen=True)
class Plan:
    """Where a run computes. Nothing in it changes what is learned."""

    accelerator: Literal["cpu", "cuda"] = "cpu"
    devices: int = 1
    num_nodes: int = 1
    precision: str = "32-true"
    microbatches: int = 1
    threads: int = 1  # of torch, in each process
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    max_restarts: int = 0  # how often a run that failed continues by itself from its last checkpoint
    actors: Actors | None = None  # None: every rank plays its own environments
    ray: RayCluster | None = None
    launcher: Literal["processes", "ray"] = "processes"  # of the ranks, unless torchrun or srun starts them

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.devices * self.num_nodes


class Hardware(Protocol):
    """Decides where a run computes."""

    def plan(self) -> Plan:
        """Look at the machine and return a plan.

        Raises:
            ConfigError: the devices are missing; the message says what was found and what would work.
        """
        ...


def require_room(plan: Plan, there: Mapping[str, float], where: str) -> None:
    """Check that actors, and ranks that Ray places, fit on a cluster at the same time.

    Args:
        there: its ``CPU`` and ``GPU``.
        where: what it is called in messages.

    Raises:
        ConfigError: they need more.
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
                way = f"{key}={left / count:.2g} shares them" if left else f"{key}=0 needs none"
                if resource == "GPU" and whose == "ranks" and left:
                    way = f"hardware.devices={left // each:g} can"  # NCCL wants a device for every rank
                said = f"{count} {whose} with {each:g} {what} each need more than the {left:g} of {where}{taken}; {way}"
                raise ConfigError(f"hardware.{setting}", said)
            left, taken = left - count * each, f" that {count} {whose} leave"
