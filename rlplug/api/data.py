"""Contracts of what gives and keeps data: environments, simulators, collectors and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from rlplug.api.records import Data, Job, Rollout, Segment, SegmentSpec
from rlplug.types import Batch, EnvSpec, EnvTraits, Tree, Weights

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode


Source: TypeAlias = Literal["collected", "stored"]


class RowLog(Protocol):
    """Where a buffer keeps its content: a part of a checkpoint, written incrementally.

    Rows that were appended once are in every later checkpoint, and are not written again.
    """

    end: int  # number of the row that the next ``append`` usually begins with; 0 when nothing is stored
    state: Tree  # the small rest, which every checkpoint writes whole; None when nothing is stored

    def part(self, number: int) -> RowLog:
        """Return part ``number``, above 0, of this log: rows of another stream. Its ``state`` is not written."""
        ...

    def append(self, start: int, rows: Batch) -> None:
        """Append rows ``start`` and following, leaves ``[n, ...]``, or replace them. They are copied at once."""

    def trim(self, first: int) -> None: ...  # forget rows before ``first``

    def rows(self) -> Iterator[tuple[int, Batch]]:
        """Yield (number of the first row, leaves ``[n, ...]``) as appended; may begin below the first row needed."""
        ...


class Buffer(Protocol):
    """Keeps rows. ``Class(cfg, ctx)`` allocates nothing: leaves are known at the first ``add``."""

    gives: ClassVar[frozenset[Data]]  # what its samples can be: ``needs.data`` has to be among them
    device: torch.device  # where its rows are kept
    sequences: ClassVar[bool]  # windows begin at rows whose recurrent state it keeps
    repeats: ClassVar[str] = (
        ""  # its option that says how often it gives a segment, to algorithms that are ``off_policy``
    )
    sources: ClassVar[frozenset[Source]] = frozenset({"collected"})  # "stored": it has rows before any is collected
    prioritizes: ClassVar[bool] = False  # draws by the ``priority`` of rows
    size_key: ClassVar[str]  # the config key that says how much it keeps: ``buffer.capacity``
    relabels: ClassVar[frozenset[str]] = frozenset()  # keys of a sample that need not be as added; ``obs.<part>``

    @classmethod
    def reads(cls, cfg: Any, spec: EnvSpec) -> tuple[str, ...]:
        """Return the keys of a row that it reads, which are stored with those of the algorithm's ``Needs``.

        Called before anything is built.

        Raises:
            ConfigError: it cannot serve these spaces.
        """
        return ()

    def add(self, segment: Segment) -> None:
        """Store a segment. Its row 0 is row T of the one before of its shard. Reads ``priority [T+1, b]``, if given."""

    def ready(self) -> bool: ...  # whether there is enough for a sample
    @property
    def warm_up(self) -> int:
        """Return how many environment steps this process makes before that."""
        return 0

    def sample(self) -> Batch:
        """Return rows ``[burn_in + window + 1, B]`` with ``index`` and ``sample_prob``; a rollout all it has, once.

        Segments come as ``[T+1, B]`` with ``version [B]``, episodes as ``[L+1, B]``, padded with ``valid=False``.

        One that draws by priority adds ``weight [B]``, ``(N prob)^-beta``: the learner divides it by the largest one.
        """
        ...

    def feedback(self, index: Tensor, values: Batch) -> None:
        """Take new ``priority [B]`` or ``carry``; insertion ids that were overwritten meanwhile are ignored.

        Raises:
            RunError: ``values`` has another key, or one that this buffer does not keep.
        """

    def metrics(self) -> dict[str, float]:
        """Return what is logged as ``buffer/<name>``, summed over ranks."""
        return {}

    def nbytes(self, row: Batch) -> int:
        """Return the bytes this buffer will take for rows whose leaves look like those of ``row`` (``[B, ...]``)."""
        ...

    def save(self, log: RowLog) -> None: ...  # append what is new since the last ``save``, or ``load``
    def load(self, log: RowLog) -> None: ...  # be as the buffer was that saved; called before the first ``add``


class VecEnv(Protocol):
    """``B`` environments stepped together, whatever they are made of.

    With ``autoreset`` ``NEXT_STEP``, a column whose row is a final observation is reset by the next ``step``, which
    ignores its action. With ``SAME_STEP``, the step that ends an episode also resets its column: it returns the new
    episode's first observation in ``obs``, and the final one in ``final_obs`` (``final_action_mask``) beside it.

    With agents (``NEXT_STEP`` only) it also gives ``alive [B, N]``: who acts on the row; the actions of the others mean
    nothing. What belongs to an agent has an agent axis; see ``rlplug.types``. A column ends with the step behind which
    nobody is alive. The row behind an agent's last action has its final observation; later ones are finite.
    """

    spec: EnvSpec
    autoreset: AutoresetMode
    traits: EnvTraits = EnvTraits()

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        """Begin an episode in every column; later seeds follow from its own. Return ``obs``, extras: ``[B, ...]``.

        ``tasks``, leaves ``[B, ...]``, are those of the columns until the next ``reset``.
        """
        ...

    def step(self, action: Any) -> Batch:
        """Execute ``action [B, ...]``; ``[B, N, ...]`` of agents, ``{group: action}`` where there are several groups.

        Returns:
            ``obs`` and extras of the next row; ``reward``, ``terminated``, ``truncated`` of the row acted on. Where
            failed environments are replaced, ``restarted [B]``: this one was, and its next row begins an episode.
        """
        ...

    def state(self) -> Tree | None:
        """Return the environments' state; None: they are restored from their seeds and action logs."""
        ...

    def load(self, state: Tree) -> None: ...
    def close(self) -> None: ...


class Simulator(Protocol):
    """A pure function over batches of states: a tree search expands another node in every column."""

    def step(self, env_state: Any, action: Tensor) -> Batch:
        """Return ``env_state``, ``obs``, extras, ``reward`` and both ends after ``action [B, ...]``."""
        ...

    def reward(self, batch: Batch) -> Tensor:
        """Return the reward ``[B]`` of given transitions, for imagined goals or dynamics.

        Args:
            batch: ``action``, and what ``step`` returns of the transitions beside the reward, or what is imagined.
        """
        ...


class Goals(Protocol):
    """Pure functions of the goals that ``n`` transitions achieved and were meant to, arrays ``[n, ...]``."""

    def reward(self, achieved: Any, desired: Any) -> Any: ...  # [n] float32
    def terminated(self, achieved: Any, desired: Any) -> Any: ...  # [n] bool; None: goals end no episode


class Collector(Protocol):
    """Where segments come from. An actor is a shard, and so is the process itself."""

    @property
    def spec(self) -> SegmentSpec: ...

    @property
    def in_flight(self) -> Sequence[int | None]:
        """Return how many rollouts of every shard were ordered and not polled yet; None: the shard is lost."""
        ...

    def start(self) -> None:
        """Be ready to collect; called once, when everything has been checked that can be.

        Raises:
            ConfigError: what lies outside of this process is not as configured.
        """

    def submit(self, rollout: Rollout, shards: Sequence[int] | None = None) -> None:
        """Order a segment of every shard, or of some; each plays its orders one after another.

        It is played with the statistics of now, and with the weights of ``rollout.version``: those of now if no
        rollout asked for that version before, else those of then.
        """
        ...

    def poll(self, shards: int | None = None) -> list[Segment]:
        """Return segments that were ordered, the oldest of their shards, and wait for them.

        The tensors belong to the collector, and are valid until the next ``submit`` or ``poll``.

        Args:
            shards: so many segments, those that are ready first, which may be two of one shard; None: one of every
                shard, side by side as one segment.
        """
        ...

    def play(self, jobs: Sequence[Job], weights: Mapping[str, Weights]) -> Iterator[tuple[Job, Batch]]:
        """Play jobs with the weights and statistics of now; see ``Play``. Nothing is in flight."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return what is logged as ``time/<name>``, of the time since the last call."""
        return {}

    def state(self) -> Tree:
        """Return where every shard stands behind its last polled segment: nothing ordered is lost or played twice."""
        ...

    def load(self, state: Tree) -> None: ...
    def close(self) -> None: ...
