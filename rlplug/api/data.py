"""Contracts of data: environments, simulators, collectors, buffers, and estimators of recorded episodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from rlplug.api.records import Data, Job, Rollout, Segment, SegmentSpec
from rlplug.types import Batch, EnvSpec, EnvTraits, NamedWeights, Tree

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode

__all__ = ["Buffer", "Collector", "Estimator", "Goals", "RowLog", "Simulator", "Source", "VecEnv"]

Source: TypeAlias = Literal["collected", "stored"]


class RowLog(Protocol):
    """Storage of a buffer's content: a part of a checkpoint, written incrementally.

    Appended rows are in every later checkpoint and are written only once.
    """

    end: int  # number of the next row to append; 0 when nothing is stored
    state: Tree  # small additional state, written whole in every checkpoint; None when nothing is stored

    def part(self, number: int) -> RowLog:
        """Return part ``number`` (above 0) of this log, which holds another stream. Its ``state`` is not written."""
        ...

    def append(self, start: int, rows: Batch) -> None:
        """Append or replace the rows from ``start`` on, leaves ``[n, ...]``. They are copied immediately."""

    def trim(self, first: int) -> None: ...  # drop rows before ``first``

    def rows(self) -> Iterator[tuple[int, Batch]]:
        """Yield (number of the first row, leaves ``[n, ...]``) as appended; may begin before the first row needed."""
        ...


class Buffer(Protocol):
    """Stores rows. The constructor allocates nothing: leaves are known at the first ``add``."""

    gives: ClassVar[frozenset[Data]]  # kinds of samples that it can return, which must include ``needs.data``
    device: torch.device  # device that stores its rows
    sequences: ClassVar[bool]  # windows begin at rows with a stored recurrent state
    repeats: ClassVar[str] = ""  # name of the option for how often ``off_policy`` algorithms get a segment
    sources: ClassVar[frozenset[Source]] = frozenset({"collected"})  # "stored": it has rows before any are collected
    prioritizes: ClassVar[bool] = False  # samples in proportion to the ``priority`` of rows
    size_key: ClassVar[str]  # config key of its capacity
    relabels: ClassVar[frozenset[str]] = frozenset()  # keys of a sample that it may change, including ``obs.<part>``

    @classmethod
    def reads(cls, cfg: Any, spec: EnvSpec) -> tuple[str, ...]:
        """Return the keys of a row that it reads, to be stored in addition to the algorithm's ``Needs.keys``.

        Called before any component is built.

        Raises:
            ConfigError: it does not support these spaces.
        """
        return ()

    def add(self, segment: Segment) -> None:
        """Store a segment. Its row 0 repeats row T of the shard's previous segment. ``priority [T+1, b]`` is optional.

        A ``whole`` segment holds the episodes of one job, ``[L+1, episodes]``, which a loop stores; see ``Run.play``.
        """

    def ready(self) -> bool: ...  # whether it has enough rows for a sample
    @property
    def warm_up(self) -> int:
        """Return the number of environment steps of this process until the buffer is ready."""
        return 0

    def sample(self) -> Batch:
        """Return rows ``[burn_in + window + 1, B]`` with ``index`` and ``sample_prob``; a rollout buffer is drained.

        Segments come as ``[T+1, B]`` with ``version [B]``, episodes as ``[L+1, B]``, padded with ``valid=False``.

        A prioritized buffer adds ``weight [B]``, ``(N prob)^-beta``, which the learner divides by its maximum.
        """
        ...

    def feedback(self, index: Tensor, values: Batch) -> None:
        """Update ``priority [B]``, ``carry``, or stored keys by their new values in the first ``k`` rows of the sample,
        leaves ``[k, B, ...]``; insertion ids that have been overwritten are ignored.

        Raises:
            RunError: ``values`` has another key, or one that this buffer does not store.
        """

    def metrics(self) -> dict[str, float]:
        """Return metrics that are summed over ranks and logged as ``buffer/<name>``."""
        return {}

    def nbytes(self, row: Batch) -> int:
        """Return the bytes that this buffer will take for rows like ``row``, leaves ``[B, ...]``."""
        ...

    def save(self, log: RowLog) -> None: ...  # append the rows added since the last ``save`` or ``load``
    def load(self, log: RowLog) -> None: ...  # restore the saved buffer; called before the first ``add``


class VecEnv(Protocol):
    """``B`` environments that are stepped together.

    With ``autoreset`` ``NEXT_STEP``, the ``step`` after a final observation ignores the action and resets the column.
    With ``SAME_STEP``, the step that ends an episode also resets its column: ``obs`` is the first observation of the
    new episode, and ``final_obs`` (with ``final_action_mask``) the final one of the old.

    Multi-agent environments (``NEXT_STEP`` only) also return ``alive [B, N]``: the agents that act on the row. The
    actions of other agents are ignored. Keys of an agent have an agent axis; see ``rlplug.types``. An episode ends
    with the step after which no agent is alive. The row after an agent's last action holds its final observation;
    its later observations are arbitrary but finite.
    """

    spec: EnvSpec
    autoreset: AutoresetMode
    traits: EnvTraits = EnvTraits()

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        """Begin an episode in every column and return ``obs`` and extras, ``[B, ...]``. Seeds determine later episodes.

        ``tasks``, leaves ``[B, ...]``, apply to the columns until the next ``reset`` or ``assign``. None: the
        environment's own.
        """
        ...

    def assign(self, tasks: Tree) -> None:
        """Set the tasks of the episodes that begin from now on, leaves ``[B, ...]``; current ones keep theirs."""
        raise NotImplementedError(f"{type(self).__name__}.assign")

    def step(self, action: Any) -> Batch:
        """Execute ``action [B, ...]``; with agents ``[B, N, ...]``, with several groups ``{group: action}``.

        Returns:
            ``obs`` and extras of the next row; ``reward``, ``terminated``, ``truncated`` of the row acted on. If failed
            environments are replaced, also ``restarted [B]``: the column was replaced, and its next row begins an
            episode.
        """
        ...

    def state(self) -> Tree | None:
        """Return the environments' state, or None if they are restored from their seeds and action logs."""
        ...

    def load(self, state: Tree) -> None: ...
    def close(self) -> None: ...


class Simulator(Protocol):
    """Pure functions of batches of states, for planning: a tree search expands a different node in every column.

    The environment's rows have its state as the numeric extra ``env_state``, an array or a dict of arrays, unless the
    agents may not know it. An ended state does not change: a step from it returns the same state and the reward 0.
    """

    def step(self, env_state: Any, action: Tensor) -> Batch:
        """Return the result of ``action [B, ...]``: ``env_state``, ``obs``, extras and the keys of ``VecEnv.step``."""
        ...

    def reward(self, batch: Batch) -> Tensor:
        """Return the reward ``[B]`` of transitions, for other goals or learned dynamics.

        Args:
            batch: ``obs``, ``action``, ``next_obs``, and ``env_state``, ``next_env_state`` where they are known.
        """
        ...

    def terminated(self, batch: Batch) -> Tensor: ...  # [B] bool: whether transitions, as for ``reward``, terminate


class Goals(Protocol):
    """Pure functions of the achieved and desired goals of ``n`` transitions, arrays ``[n, ...]``."""

    def reward(self, achieved: Any, desired: Any) -> Any: ...  # [n] float32
    def terminated(self, achieved: Any, desired: Any) -> Any: ...  # [n] bool; None: goals do not end episodes


class Collector(Protocol):
    """Source of segments. Each actor is a shard; without actors, the process itself is one."""

    @property
    def spec(self) -> SegmentSpec: ...

    @property
    def in_flight(self) -> Sequence[int | None]:
        """Return the number of submitted but not yet polled rollouts of every shard; None: the shard is lost."""
        ...

    def start(self) -> None:
        """Prepare to collect; called once, after all checks.

        Raises:
            ConfigError: resources outside this process are not as configured.
        """

    def submit(self, rollout: Rollout, shards: Sequence[int] | None = None) -> None:
        """Request a segment from every shard, or from ``shards``; each shard serves its requests in order.

        Each segment is played with the current statistics and the weights of ``rollout.version``: the current weights
        if this is the first request for that version, otherwise the weights of that first request.
        """

    def poll(self, shards: int | None = None) -> list[Segment]:
        """Wait for requested segments, the oldest of each shard first, and return them.

        The collector owns the tensors, which are valid until the next ``submit`` or ``poll``.

        Args:
            shards: number of segments, in order of completion, possibly several from one shard; None: one from every
                shard, concatenated along the column axis to one segment.
        """
        ...

    def play(self, jobs: Sequence[Job], weights: NamedWeights) -> Iterator[tuple[int, Batch]]:
        """Play jobs with the current weights and statistics, and yield the index and episodes of each as it ends.

        See ``Play``. No rollout may be in flight.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics of the time since the last call, which are logged as ``time/<name>``."""
        return {}

    def episode_metrics(self) -> list[dict[str, float]]:
        """Return the environments' own metrics of each episode since the last call, logged as ``episode/<name>``."""
        return []

    def state(self) -> Tree:
        """Return the state of every shard after its last polled segment: no request is lost or played twice."""
        ...

    def load(self, state: Tree) -> None: ...
    def close(self) -> None: ...


class Estimator(Protocol):
    """Estimates the expected return of a policy from another policy's recorded episodes (off-policy evaluation)."""

    @classmethod
    def reads(cls, cfg: Any, spec: EnvSpec) -> tuple[str, ...]:
        """Return the keys of episodes that it reads in addition to ``reward`` and ``valid``.

        ``log_weight``: logarithm of the importance weight up to a row; ``logp``, ``target_logp``: log-probabilities of
        the behavior and of the evaluated policy; ``q``, ``value``: a model's values of the recorded action and of the
        evaluated policy; ``obs``, ``action``. ``log_weight`` and ``logp`` need a dataset with ``logp``.
        """
        return ()

    def estimate(self, episodes: Batch, gamma: float) -> Tensor:
        """Return one number per episode, ``[B]``, whose mean is the estimate; NaN: undefined.

        Args:
            episodes: the keys that it reads, leaves ``[T, B, ...]`` on the CPU. Columns are whole episodes from their
                first step on; rows after the last step are zeros and not ``valid``, but ``log_weight`` keeps its last
                value.
            gamma: discount factor.
        """
        ...
