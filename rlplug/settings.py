"""Typed settings, by which a component declares its options.

    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        lr: Scheduled[PositiveFloat] = option("Step size of Adam.")

The class defines types, ranges and one line of documentation per option; defaults are in the component's YAML.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, dataclass_transform

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, ConfigDict, Field
from pydantic import NonNegativeFloat as NonNegativeFloat
from pydantic import PositiveFloat as PositiveFloat
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

T = TypeVar("T")


class Nested(NamedTuple):
    """Marks an option that holds a component: in YAML a mapping with ``name`` and that component's settings."""

    kind: Literal["model", "algo"]
    several: bool = False  # a mapping of names to mappings of slots to components


ModelNode: TypeAlias = Annotated[Any, Nested("model")]
"""A model inside a component, built by ``ctx.build(cfg.<option>, space)``."""

AlgoNode: TypeAlias = Annotated[Any, Nested("algo")]
"""An algorithm inside a component: ``cfg.<option>.build(ctx.child(spec))``, and ``cfg.<option>.needs(spec)``.

A node with a name alone, ``algo: dqn``, or with some settings takes the rest from the YAML file of that name.
"""

AlgoNodes: TypeAlias = Annotated[dict[str, dict[str, Any]] | None, Nested("algo", several=True)]
"""Algorithms by name, or null. Each is a mapping with the nodes ``algo`` and, for models of its own, ``model`` and
``<part>_model``: ``{"hunters": {"algo": ..., "model": ...}}``."""

LARGEST = 2**63 - 1  # maximum of int64
NonNegativeInt = Annotated[int, Ge(0), Le(LARGEST)]
PositiveInt = Annotated[int, Gt(0), Le(LARGEST)]
UnitFloat = Annotated[float, Field(ge=0.0, le=1.0)]
AtLeastOne = Annotated[float, Field(ge=1.0)]
StepRange: TypeAlias = PositiveInt | tuple[PositiveInt, PositiveInt]
"""A number, or ``[low, high]`` to draw one for each sample; see ``functional.sequences.longest``."""


def _in_order(points: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    if not points or any(later < earlier for (earlier, _), (later, _) in pairwise(points)):
        raise PydanticCustomError("schedule", "points in the order of their steps, as in [[0, 1.0], [1000, 0.5]]")
    return points


Scheduled: TypeAlias = T | Annotated[list[tuple[NonNegativeInt, T]], AfterValidator(_in_order)]
"""A number, or ``[[env_step, value], ...]``: linear in between, constant before and after."""


def is_schedule(annotation: Any) -> bool:
    """Return whether a type is the list of points of a ``Scheduled`` option."""
    return any(getattr(mark, "func", None) is _in_order for mark in getattr(annotation, "__metadata__", ()))


def option(doc: str) -> Any:
    """Declare a required field with one line of documentation."""
    return Field(description=doc)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option,))
def settings(cls: type[T]) -> type[T]:
    """Turn a class into a frozen, validated, keyword-only dataclass that rejects unknown fields."""
    return dataclass(kw_only=True, frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))(cls)  # type: ignore[return-value]


@settings
class PolicyOptions:
    """Options of the distribution of actions, which a ``Config`` inherits and passes to ``nn.Policy``."""

    distribution: Literal["gaussian", "squashed_gaussian", "beta", "autoregressive"] = option(
        "Distribution of continuous actions; autoregressive: of several choices, each given those before it."
    )
    free_log_std: bool = option("Gaussian: one log standard deviation for all states; false: an output.")
    initial_log_std: float = option("Initial log standard deviation of Gaussian actions.")
