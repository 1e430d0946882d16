"""What a hardware plugin decides: where a run learns, and where it collects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from rlplug.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, option, settings
from rlplug.types import ConfigError

Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


@settings
class Actors:
    """Processes of Ray that hold the environments."""

    count: NonNegativeInt = option("Actors of the whole run; 0: ranks play their environments themselves.")
    num_cpus: NonNegativeFloat = option("Cores of each, or a fraction of one.")
    num_gpus: NonNegativeFloat = option("CUDA devices of each, or a fraction of one.")
    timeout_s: PositiveFloat = option(
        "Seconds without an environment step, or for a segment to come, after which an actor is given up."
    )
    on_failure: Literal["recreate", "ignore", "stop"] = option(
        "When an actor dies, hangs or raises. recreate: another one goes on where it was; ignore: the run goes on"
        " without its environments; stop: so does the run."
    )
    max_restarts: NonNegativeInt = option("How often in a row an actor is made anew before the run stops.")
    backoff_s: NonNegativeFloat = option("Seconds before an actor is made anew; twice as long each further time.")
    max_requests_in_flight: PositiveInt = option(
        "Rounds that an actor has been asked for at a time; above 1 it plays on while updates are made."
    )
    broadcast_interval: PositiveInt = option("Rounds between two broadcasts of the weights.")
    max_weight_sync_delay: PositiveInt | None = option(
        "Steps of an actor after which weights are broadcast all the same; null: the interval decides alone."
    )
    num_aggregation_workers: NonNegativeInt = option("Actors that put segments together before a rank gets them.")
    evaluation: NonNegativeInt = option("Actors that play evaluations while training goes on; 0: the first rank does.")


@settings
class RayCluster:
    """The Ray that actors, and the ranks of ``hardware=ray``, live on."""

    address: str | None = option("host:port of a cluster to join; null: one is started on this machine, and stopped.")
    object_store_memory: PositiveInt | None = option("Bytes for segments and weights in it; null: as Ray decides.")
    num_cpus: NonNegativeFloat = option("Cores of each rank of hardware=ray, or a fraction of one.")
    num_gpus: NonNegativeFloat = option("CUDA devices of each, or a fraction of one; 0: they learn on processors.")
    placement_strategy: Placement = option("How these ranks are placed on the cluster's machines.")


@dataclass(frozen=True)
class Plan:
    """Nothing in it changes what is learned."""

    accelerator: Literal["cpu", "cuda"] = "cpu"
    devices: int = 1
    num_nodes: int = 1
    precision: str = "32-true"
    microbatches: int = 1
    threads: int = 1
    """threads of torch per process"""
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    max_restarts: int = 0
    """how often a run that broke off continues from its last checkpoint by itself"""
    actors: Actors | None = None
    """None: every rank plays its environments itself"""
    ray: RayCluster | None = None
    launcher: Literal["processes", "ray"] = "processes"
    """who starts the ranks, if nobody has: this machine's processes, or a cluster of Ray"""

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.devices * self.num_nodes


class Hardware(Protocol):
    def plan(self) -> Plan:
        """Look at the machine and decide.

        Raises:
            ConfigError: the devices are not there; says what was found and what would work.
        """
        ...


def require_room(plan: Plan, there: Mapping[str, float], where: str) -> None:
    """Raises:
    ConfigError: what lives on Ray, actors and ranks at the same time, needs more than is ``there``.
    """
    assert plan.ray is not None
    crowds = []
    if plan.launcher == "ray":
        crowds.append(("devices", "ranks", "ray", plan.world_size, plan.ray))
    if plan.actors is not None:
        crowds.append(("actors.count", "actors", "actors", plan.actors.count + plan.actors.evaluation, plan.actors))
    for resource, what in (("CPU", "cores"), ("GPU", "CUDA devices")):
        left, taken = there[resource], ""
        for setting, whose, group, count, cfg in crowds:
            name = f"num_{resource.lower()}s"
            each = getattr(cfg, name)
            if count * each > left + 1e-6:
                key = f"hardware.{group}.{name}"
                way = f"{key}={left / count:.2g} shares them" if left else f"{key}=0 needs none"
                if resource == "GPU" and whose == "ranks" and left:
                    way = f"hardware.devices={left // each:g} can"  # NCCL wants a device for every rank
                raise ConfigError(
                    f"hardware.{setting}",
                    f"{count} {whose} with {each:g} {what} each need more than the {left:g} of {where}{taken}; {way}",
                )
            left, taken = left - count * each, f" that {count} {whose} leave"
