"""Records that components exchange: what an algorithm needs, orders for data, the data themselves, losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from rlplug.types import Batch, Mode, Tree, Weights

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode


Data: TypeAlias = Literal["rollout", "segments", "windows", "episodes"]
"""What a sample is: the last round, whole and once; segments in the order in which they came, each once
unless the buffer ``repeats``; windows of ``Needs.window`` transitions; whole episodes."""


@dataclass(frozen=True)
class Needs:
    """What an algorithm needs from buffer, collector and learner."""

    window: int = 1  # transitions per sample
    burn_in: int = 0  # transitions in front of the window that only warm up a recurrent state
    carry_stride: int = 0  # rows between two recurrent states that a buffer keeps, where windows begin; 0: none
    data: Data = "rollout"  # what it learns from
    off_policy: bool = False  # may learn from data of other policies
    rewards: bool = True  # it learns from rewards, so intrinsic ones have a meaning
    gradients: bool = False  # of its loss are computed where a segment is played, with the weights that played it
    perturbable: bool = False  # its action may be changed after ``act``
    noise: str = ""  # exploration module to take where no one changes its actions, which never vary by themselves
    keys: tuple[str, ...] = ()  # what is stored, and reaches ``prepare`` and ``forward``, after ``postprocess``
    recorded: tuple[str, ...] = ()  # what the run stores as well where anyone gives it, to write it down
    lookahead: int = 0  # transitions at the end of a recurrent window that returns and values reach, and no gradient

    @cached_property
    def stored(self) -> frozenset[str]:
        return frozenset((*self.keys, *self.recorded))


def _nothing() -> dict[str, Any]:  # torch.compile traces it, and no dict[str, Any]
    return {}


@dataclass
class Losses:
    """What ``forward`` returns.

    Attributes:
        terms: added up to the loss. Per row (``[..., B]``, as ``batch["valid"]``, or one row less): averaged over the
            GLOBAL count of valid rows; 0-d: as it is. With an agent axis (``[..., B, N]``, as ``batch["alive"]``):
            averaged over the agents that are alive in valid rows; then every term and metric is 0-d or has that axis.
        metrics: detached; per row or 0-d, averaged over ranks in the same way.
        feedback: for the buffer: ``priority [B]``, a new ``carry``. ``after_step`` takes out what is the algorithm's.
        diagnostics: returns further metrics, and is called without gradient, only in steps whose metrics are read.
    """

    terms: dict[str, Tensor]
    metrics: dict[str, Tensor] = field(default_factory=_nothing)
    feedback: Batch = field(default_factory=_nothing)
    diagnostics: Callable[[], dict[str, Tensor]] | None = None


Clip: TypeAlias = Literal["value", "norm", "global_norm"]


@dataclass
class Optim:
    """One optimizer of a ``Trainable``; its name in ``optimizers()`` is the name of a part."""

    optimizer: Optimizer
    grad_clip: float | None = None
    grad_clip_by: Clip = "global_norm"  # of every element, of every tensor, or of all tensors together
    every: int = 1  # stepped on every n-th call of ``minimize`` that names the part (TD3's actor: 2)
    lr: Tensor | None = None  # a schedule's 0-d tensor


@dataclass(frozen=True)
class Rollout:
    """An order for one segment of a shard."""

    num_steps: int
    mode: Mode
    version: int
    """the weights to play with: the number of updates that they had seen"""
    version_steps: int = 0
    """environment steps of the run when it had made these updates"""


@dataclass
class Segment:
    """The columns of one shard, which are in step with one another; shards are not."""

    batch: Batch
    """leaves ``[T+1, b, ...]``"""
    columns: slice = field(default_factory=lambda: slice(None))
    """where they stand among the environments of this rank"""
    shard: int = 0
    version: int = 0
    """of the weights that played it"""
    version_steps: int = 0
    """environment steps of the run when it had these weights"""
    whole: bool = False
    """whole episodes of a job, which no other segment continues; ``columns`` says nothing"""


@dataclass(frozen=True)
class Job:
    """Whole episodes on order, in environments of their own; nothing of it stays open or enters a checkpoint."""

    number: int  # chooses seeds and draws; no other job of the run has it
    policies: Mapping[str, str] = field(default_factory=dict[str, str])
    """submodule of the algorithm (empty: itself) -> which of the named weights it plays with; others: its own"""
    candidate: Batch | None = None  # made into weights where it is played, by ``Algorithm.candidate_weights``
    task: Tree = None  # what ``VecEnv.reset`` is given for every column
    episodes: int = 1
    max_steps: int = 27_000  # after which an episode is truncated; 27,000 is eval.max_episode_steps in evaluations
    mode: Mode = "explore"


class Play(Protocol):
    """Plays jobs and yields each with its episodes, in the order of ``jobs``.

    These are side by side, as they ended: leaves ``[L+1, episodes, ...]`` of ``Needs.keys`` and of the stream; shorter
    ones repeat their final row, ``valid=False``. ``return`` and ``length`` have one number for each, ``[episodes]``.
    """

    def __call__(
        self, jobs: Sequence[Job], weights: Mapping[str, Weights] | None = None, /
    ) -> Iterator[tuple[Job, Batch]]: ...


@dataclass(frozen=True)
class SegmentSpec:
    """What a collector's segments look like."""

    row: Batch  # one row of all environments of this rank as it will be stored, leaves ``[B, ...]``
    autoreset: AutoresetMode
    shards: Sequence[slice]  # the columns of each shard among the environments of this rank; all have as many
    bounds: Any = None  # limits that observations are checked against; None: they have been checked
    steps: int | None = None  # of one pass through a recording, over all ranks; None: environments are played
    rows: int = 0  # of a pass in the column that has most
