"""Records that components exchange: an algorithm's needs, requests for data, segments, losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from rlplug.types import Batch, Mode, NamedWeights, Tree

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode

__all__ = ["Clip", "Data", "Job", "Losses", "Needs", "Optim", "Play", "Rollout", "Segment", "SegmentSpec", "Window"]

Data: TypeAlias = Literal["rollout", "segments", "windows", "episodes"]
"""Kind of a sample. rollout: the last round, whole and once; segments: in order of arrival, each once unless the
buffer ``repeats``; windows: ``Needs.window`` transitions; episodes: whole episodes."""


@dataclass(frozen=True)
class Window:
    """Consecutive transitions that are sampled together, and the stored recurrent states."""

    length: int = 1  # transitions
    burn_in: int = 0  # preceding transitions that only warm up the recurrent state
    stride: int = 0  # rows between stored recurrent states, at which windows begin; 0: none are stored
    lookahead: int = 0  # last transitions of ``length``, used by returns and values but without gradient

    @property
    def rows(self) -> int:
        return self.burn_in + self.length + 1


@dataclass(frozen=True)
class Needs:
    """An algorithm's requirements for the buffer, the collector and the learner."""

    window: Window = Window()  # size of a sample, and where recurrent states are stored
    data: Data = "rollout"  # kind of its samples
    off_policy: bool = False  # can learn from data of other policies
    rewards: bool = True  # learns from rewards, so intrinsic rewards apply
    simulates: bool = False  # plans with ``ctx.simulator()``, whose rows are not preprocessed
    raw: bool = False  # reads rows as ``play`` returns them, before they are preprocessed
    gradients: bool = False  # actors compute gradients (``annotate``), which ``forward`` returns as a loss
    perturbable: bool = False  # exploration modules may change its actions after ``act``
    noise: str = ""  # acts greedily; needs an exploration module, such as this one
    keys: tuple[str, ...] = ()  # keys stored after ``postprocess``, for ``prepare`` and ``forward``
    recorded: tuple[str, ...] = ()  # optional keys that the run also stores, to record them

    @cached_property
    def stored(self) -> frozenset[str]:
        return frozenset((*self.keys, *self.recorded))


def _nothing() -> dict[str, Any]:  # torch.compile can trace this, but not dict[str, Any]
    return {}


@dataclass
class Losses:
    """Result of ``forward``.

    Attributes:
        terms: summands of the loss. Per row (``[..., B]``, as ``batch["valid"]``, or one row less): averaged over the
            GLOBAL count of valid rows; 0-d: unchanged. With an agent axis (``[..., B, N]``, as ``batch["alive"]``):
            averaged over the agents alive in valid rows; then every term and metric is 0-d or has that axis.
        metrics: detached; per row or 0-d, averaged over ranks in the same way.
        feedback: for the buffer: ``priority [B]``, a new ``carry``, new values of stored keys. ``after_step`` removes
            the algorithm's own keys.
        diagnostics: returns additional metrics; called without gradient, only in steps whose metrics are read.
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
    grad_clip_by: Clip = "global_norm"  # value: each element, norm: each tensor, global_norm: all tensors together
    every: int = 1  # stepped on every n-th call of ``minimize`` that names the part (TD3's actor: 2)
    lr: Tensor | Sequence[Tensor] | None = None  # 0-d tensor of a schedule, or one for each parameter group


@dataclass(frozen=True)
class Rollout:
    """A request for one segment of a shard."""

    num_steps: int
    mode: Mode
    version: int
    """weights to play with, as the number of updates that they have had"""
    version_steps: int = 0
    """environment steps of the run after these updates"""
    tasks: Tree = None
    """tasks of episodes that begin in it, of all environments of the run, ``[num_envs, ...]``; None: unchanged"""


@dataclass
class Segment:
    """Columns of one shard, which advance together; different shards do not."""

    batch: Batch
    """leaves ``[T+1, b, ...]``"""
    columns: slice = field(default_factory=lambda: slice(None))
    """positions among this rank's environments"""
    shard: int = 0
    version: int = 0
    """version of the weights that played it"""
    version_steps: int = 0
    """environment steps of the run at that version"""
    whole: bool = False
    """whether it holds whole episodes of a job, which no other segment continues; ``columns`` then has no meaning"""


@dataclass(frozen=True)
class Job:
    """A request for whole episodes in separate environments. It leaves no state and enters no checkpoint."""

    number: int  # unique within the run; determines seeds and random draws
    policies: Mapping[str, str] = field(default_factory=dict[str, str])
    """submodule of the algorithm (empty: the algorithm) -> name of the weights it plays with; default: its own"""
    candidate: Batch | None = None  # ``Algorithm.candidate_weights`` turns it into weights on the actor
    task: Tree = None  # argument of ``VecEnv.reset``, for every column
    episodes: int = 1
    max_steps: int = 27_000  # truncates an episode; in evaluations, 27,000 stands for eval.max_episode_steps
    mode: Mode | Mapping[str, Mode] = "explore"
    """how to act; or modes by submodule (empty: the algorithm and all others), as for a greedy learner's opponents"""
    keys: Sequence[str] | None = None
    """keys of rows to return, the others are not sent; None: all; ``()``: only the numbers for each episode"""


class Play(Protocol):
    """Plays jobs and yields each job with its episodes.

    Episodes are columns, in the order in which they end: leaves ``[L+1, episodes, ...]`` of ``Needs.keys`` and stream
    keys. Shorter episodes are padded with their final row, ``valid=False``. ``return`` and ``length`` are
    ``[episodes]``, as are ``success`` if the environment has ``is_success``, ``returns[group]`` if there are several
    groups, and ``metrics[name]`` if the environment reports its own metrics: NaN for an episode without that metric.
    Batches may have metrics with different names.

    A result depends on weights, seed and the job's number, not on other jobs. Evaluations yield in the order of
    ``jobs``, ``Run.play`` in the order in which jobs end.
    """

    def __call__(self, jobs: Sequence[Job], weights: NamedWeights | None = None, /) -> Iterator[tuple[Job, Batch]]: ...


@dataclass(frozen=True)
class SegmentSpec:
    """Layout of a collector's segments."""

    row: Batch  # one stored row of all environments of this rank, leaves ``[B, ...]``
    autoreset: AutoresetMode
    shards: Sequence[slice]  # columns of each shard among this rank's environments, equally many
    bounds: Any = None  # bounds to check observations against; None: they are already checked
    steps: int | None = None  # steps of one pass through a dataset, over all ranks; None: real environments
    rows: int = 0  # rows of one pass in the longest column
