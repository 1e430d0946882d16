"""The contracts a plugin author writes against, on one page; docs/contracts.md walks through one step of a run.

Components of every kind are built by ``Class(cfg, ctx)``: ``cfg`` is the validated ``Config``, ``ctx`` a ``Context``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlplug.functional.returns import episode_metrics
from rlplug.nn.module import Module
from rlplug.plan import Hardware as Hardware
from rlplug.plan import Plan as Plan
from rlplug.types import Batch, ConfigError, EnvSpec, Mode, Progress, Role, Tree, Unit, Weights

if TYPE_CHECKING:
    from gymnasium import Space
    from gymnasium.vector import AutoresetMode

Clip: TypeAlias = Literal["value", "norm", "global_norm"]
Reduction: TypeAlias = Literal["mean", "std", "sum", "max", "min"]
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


@dataclass
class Optim:
    """One optimizer of a ``Trainable``; its name in ``optimizers()`` is the name of a part."""

    optimizer: Optimizer
    grad_clip: float | None = None
    grad_clip_by: Clip = "global_norm"  # of every element, of every tensor, or of all tensors together
    every: int = 1  # stepped on every n-th call of ``minimize`` that names the part (TD3's actor: 2)
    lr: Tensor | None = None  # a schedule's 0-d tensor


class Context(Protocol):
    """What the run knows, offered to every component."""

    spec: EnvSpec
    needs: Needs
    device: torch.device
    total_steps: int
    rollout_length: int  # transitions per environment of a collected segment
    batch_size: int  # transitions per sample, of the whole run
    sample_uses: int  # times that the buffer gives a sample of segments: so many updates follow from it
    replay_ratio: float | None  # updates per environment step; None: one a round
    learning_starts: int  # environment steps before the first update, played with mode "random"
    num_shards: int  # that the environments of this process come in, each with as many
    rank: int
    world_size: int
    seed: int
    deterministic: bool
    space: Space[Any] | None  # for a component inside another one: the space of its input
    ensemble_size: int  # independent members to hold, as a leading axis; see ``nn.Ensemble``
    render: bool  # an environment should have ``render() -> [H, W, 3] uint8``, of its first column, or None

    @property
    def role(self) -> Role: ...  # what draws noise at the moment
    @property
    def num_envs(self) -> int: ...  # of the whole run (of the evaluation, while it runs)
    @property
    def env_ids(self) -> Sequence[int]: ...  # global numbers of the environments of this process

    def build(self, slot: Any, space: Space[Any], ensemble_size: int = 1) -> Any:
        """Build the model of a slot (``critic_model``; an empty one means ``model``), or of a ``ModelNode`` option."""
        ...

    def child(self, spec: EnvSpec, needs: Needs | None = None) -> Context:
        """Return the context of an algorithm inside an algorithm, ``cfg.<option>.build(ctx.child(spec))``.

        Args:
            spec: the spaces that the child serves.
            needs: of the child; None: as this algorithm's.
        """
        ...

    def simulator(self) -> Simulator:
        """Return a model of the environment that plans from any state.

        Raises:
            ConfigError: the environment offers none.
        """
        ...

    def goals(self) -> Goals:
        """Return what the environment computes of transitions for other goals than theirs.

        Raises:
            ConfigError: it computes nothing.
        """
        ...

    def schedule(self, node: Any) -> Tensor:
        """Return a 0-d tensor that follows a ``Scheduled`` option; it is refreshed in place before every update."""
        ...

    def randn(self, *shape: int, rows: bool = True) -> Tensor:
        """Draw standard normal noise. With ``rows`` the first axis is this process's share of one global draw.

        Where every rank learns from the same rows, the share is the whole.
        """
        ...

    def rand(self, *shape: int, rows: bool = True, host: bool = False) -> Tensor:
        """Draw uniform numbers in [0, 1). With ``host`` they are drawn on the CPU, where a buffer needs them."""
        ...

    def randint(self, high: int, *shape: int, rows: bool = True, host: bool = False) -> Tensor:
        """Draw uniform integers in [0, high)."""
        ...


class Simulator(Protocol):
    """A pure function over batches of states: a tree search expands another node in every column."""

    def step(self, env_state: Any, action: Tensor) -> Batch:
        """Return ``env_state``, ``obs``, extras, ``reward`` and both ends after ``action [B, ...]``."""
        ...

    def reward(self, batch: Batch) -> Tensor:
        """Return the reward ``[B]`` of given transitions, for imagined goals or dynamics."""
        ...


class Goals(Protocol):
    """Pure functions of the goals that ``n`` transitions achieved and were meant to, arrays ``[n, ...]``."""

    def reward(self, achieved: Any, desired: Any) -> Any: ...  # [n] float32
    def terminated(self, achieved: Any, desired: Any) -> Any: ...  # [n] bool; None: goals end no episode


class Learner(Protocol):
    """The only backward and the only collectives of the project."""

    progress: Progress

    def minimize(
        self, batch: Batch, who: Trainable, parts: Sequence[str] | None = None, *, diagnostics: bool = True
    ) -> Losses:
        """Make one gradient step of the parts that are due; ``who.after_step`` follows.

        Args:
            batch: ``valid`` in it says which rows count.
            parts: names out of ``who.optimizers()``; None means all.
            diagnostics: compute what ``Losses.diagnostics`` offers; a compiled step always does.

        Returns:
            Terms and metrics as global 0-d means, the same number on every rank; feedback as it came.
        """
        ...

    def gradients(self, batch: Batch, who: Trainable, parts: Sequence[str] | None = None) -> Weights:
        """Return the averaged gradients that ``minimize`` would apply, by parameter name."""
        ...

    def apply(self, grads: Weights, who: Trainable, parts: Sequence[str] | None = None) -> None:
        """Clip and step with gradients from elsewhere."""

    def minibatches(self, batch: Batch, size: int, unit: Literal["row", "column"]) -> Iterator[Batch]:
        """Cut a segment ``[T+1, B]`` into shuffled parts, as many on every rank.

        ``row``: flat batches of ``size`` valid rows over all ranks. ``column``: ``[T+1, size]``, of columns that have
        a valid row.
        """
        ...

    def sample(self) -> tuple[Batch, dict[str, Tensor]]:
        """Draw a further sample of the run's buffer, on this rank's device, normalized, with intrinsic rewards.

        The mean reward of every exploration module that gives one, 0-d, comes second.
        """
        ...

    def reduce(self, x: Tensor, op: Reduction, where: Tensor | None = None) -> Tensor:
        """Reduce what counts of ``x [...]``, by ``where`` of its shape, over all ranks to a 0-d number; nothing: 0."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, in rank order: ``[n, ...] -> [sum n, ...]``; ``n`` may differ."""
        ...


class Trainable(nn.Module):
    """Whatever learns: an algorithm, its children, exploration, a normalizer.

    A module of it may grow while it learns, such as a pool of past policies. It returns what it has grown to as a
    tensor from ``get_extra_state``, and ``set_extra_state`` makes what is missing: a checkpoint, an actor and
    ``rlplug.load`` call it before they load the module's weights. What grows has no optimizer.
    """

    Config: ClassVar[type[Any]]
    traceable: ClassVar[bool] = False
    """``act``, ``perturb``, ``prepare``, ``forward``, ``update`` and ``after_step`` read nothing of ``self`` and of the
    learner that changes, but tensors that are moved in place: ``compile=auto`` may compile them. Not inherited."""

    def observe(self, segment: Segment, learner: Learner) -> None:
        """See each collected row once, in time order: running statistics.

        It may call the learner's collectives, and so is called equally often on every rank.
        """

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute the losses of the named parts, and no others. It is pure, and draws nothing."""
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def optimizers(self) -> dict[str, Optim]:
        """Return the parts. Each parameter belongs to one of them. Called once, and by whoever computes gradients."""
        return {}

    def update(self, batch: Batch, learner: Learner) -> Losses:
        """Learn from one prepared sample; epochs and minibatches live here. What is returned is logged and fed back."""
        return learner.minimize(batch, self)

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        """Follow a ``minimize`` (not ``Learner.apply``) that moved ``parts``: target networks, coefficients."""

    def initial_carry(self, n: int) -> Batch:
        """Return the recurrent state with which it acts, or a noise process, of ``n`` columns; leaves ``[n, ...]``."""
        return {}

    def actor_keys(self) -> tuple[str, ...]:
        """Return the names in ``state_dict()`` that an actor needs."""
        return tuple(self.state_dict())


class Algorithm(Trainable):
    """Knows no environment, loop, Fabric, Ray or file."""

    ctx: Context

    @classmethod
    def needs(cls, cfg: Any, spec: EnvSpec) -> Needs:
        """Return what it needs. Called before anything is built.

        Raises:
            ConfigError: it cannot serve these spaces.
        """
        raise NotImplementedError(f"{cls.__name__}.needs")

    @classmethod
    def recurrent(cls, cfg: Any, needs: Needs) -> Needs:
        """Return what it needs with a recurrent model: ``needs`` with ``carry_stride``, and the key ``carry``.

        Raises:
            ConfigError: it cannot learn with such a model, as by default.
        """
        raise ConfigError("model", f"{cls.__name__} cannot learn with a recurrent model; take another model")

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Act on one row of every column.

        Args:
            step: ``obs``, ``is_first``, and ``action_mask`` and the like where the environment has them; ``[B, ...]``.
            carry: the recurrent state before the row.
            mode: ``explore`` to learn, ``greedy`` to be evaluated, ``random`` before learning starts.

        Returns:
            What is stored with the row (``action`` and, say, ``logp`` and ``value``), and the new carry.
        """
        raise NotImplementedError(f"{type(self).__name__}.act")

    def postprocess(self, data: Batch) -> Batch:
        """Change a segment on the actor, before it leaves: initial priorities, ranked rewards."""
        return data

    def first_priorities(self, batch: Batch) -> Tensor:
        """Return the priority ``[T, B]`` with which every row of a segment begins, by the weights that played it.

        The actor asks for it where ``Needs.keys`` has ``priority``, unless ``postprocess`` gives one. Rows are as those
        of ``prepare``, but intrinsic rewards are not yet there. It draws nothing.
        """
        raise NotImplementedError(f"{type(self).__name__}.first_priorities")

    def candidate_weights(self, candidate: Batch) -> Weights:
        """Return the weights, by name in ``actor_keys()``, that a job's candidate plays with. It draws nothing."""
        raise NotImplementedError(f"{type(self).__name__}.candidate_weights")

    def evaluate(self, play: Play, episodes: int) -> dict[str, float]:
        """Return the metrics of an evaluation. Job numbers begin at 0 in each; ``eval/return_mean`` ranks checkpoints.

        It is called on every rank, and ``play`` gives all of them the same.
        """
        ((_, batch),) = play([Job(0, episodes=episodes, mode="greedy")])
        return episode_metrics(batch)

    def logp(self, batch: Batch) -> Tensor:
        """Return the log-probability or log-density ``[T+1, B]`` of ``batch["action"]`` under the present policy.

        Like ``values`` it takes rows of a stream segment, observations as ``prepare`` gets them, computes a recurrent
        model from the ``carry`` stored with row 0, draws nothing, and leaves gradients to the caller.

        Raises:
            NotImplementedError: the algorithm has no such policy, or does not say.
        """
        raise NotImplementedError(f"{type(self).__name__}.logp")

    def values(self, batch: Batch) -> Tensor:
        """Return the present critic's estimate of the return from every row on, ``[T+1, B]``; see ``logp``."""
        raise NotImplementedError(f"{type(self).__name__}.values")

    def prepare(self, batch: Batch) -> Batch:
        """Compute on the learner, without gradient: advantages, n-step targets, the noise that ``forward`` uses."""
        return batch


class Exploration(Trainable):
    """Changes what is done (``perturb``, ``perturb_weights``) or what is rewarded (``intrinsic_reward``)."""

    overrides_action: ClassVar[bool] = False  # ``perturb`` ignores the action that it is given, so it has to come first
    knows_agents: ClassVar[bool] = False  # serves environments with agents, too

    @classmethod
    def needs(cls, cfg: Any, spec: EnvSpec) -> tuple[str, ...]:
        """Return the keys of a row that it reads, which are stored with those of the algorithm's ``Needs``.

        Called before anything is built.

        Raises:
            ConfigError: it cannot serve these spaces.
        """
        return ()

    def perturb(self, out: Batch, step: Batch, carry: Batch) -> tuple[Batch, Batch]:
        """Change ``out["action"]`` in explore mode; return the new carry second. First called before the run begins.

        ``out`` is what ``act`` returned, ``step`` what it was given.

        Raises:
            ConfigError: it cannot use these actions, or what the algorithm returns beside them.
        """
        return out, carry

    def perturb_weights(self, w: Weights) -> Weights:
        """Return the weights (``named_parameters``) that act in explore mode during the next segment."""
        return w

    def adapt_noise(self, plain: Batch, noisy: Batch) -> None:
        """Adapt ``perturb_weights`` once a segment, by what ``act`` greedily returns without and with its noise."""

    def noise_by_env(self) -> Tensor | None:
        """Return how much every environment of the run explores, ``[num_envs]``; None: all the same."""
        return None

    def intrinsic_reward(self, batch: Batch) -> Tensor | dict[str, Tensor] | None:
        """Return the intrinsic reward of every row, ``[T+1, B]``, of the unshuffled sample.

        With agents it has the shape of ``reward``; where there are several groups, return a dict of those rewarded.
        """
        return None


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
    sequences: ClassVar[bool]  # windows begin at rows whose recurrent state it keeps
    repeats: ClassVar[str] = (
        ""  # its option that says how often it gives a segment, to algorithms that are ``off_policy``
    )
    sources: ClassVar[frozenset[Source]] = frozenset({"collected"})  # "stored": it has rows before any is collected
    prioritizes: ClassVar[bool] = False  # draws by the ``priority`` of rows
    size_key: ClassVar[str]  # the config key that says how much it keeps: ``buffer.capacity``
    relabels: ClassVar[frozenset[str]] = frozenset()  # keys of a sample that need not be as added; ``obs.<part>``

    @classmethod
    def needs(cls, cfg: Any, spec: EnvSpec) -> tuple[str, ...]:
        """Return the keys of a row that it reads, which are stored with those of the algorithm's ``Needs``.

        Called before anything is built; a buffer may lack this method.

        Raises:
            ConfigError: it cannot serve these spaces.
        """
        return ()

    @property
    def device(self) -> torch.device: ...  # where its rows are kept

    def add(self, segment: Segment) -> None:
        """Store a segment. Its row 0 is row T of the one before of its shard. Reads ``priority [T+1, b]``, if given."""

    def ready(self) -> bool: ...  # whether there is enough for a sample
    @property
    def warm_up(self) -> int: ...  # environment steps of this process before that; a buffer may lack this

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
        """Return what is logged as ``buffer/<name>``, summed over ranks; a buffer may lack this method."""
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

    With an attribute ``check_bounds = False`` observations beyond the bounds of their space are as good as others. With
    ``independent = False`` the episodes of a column depend on which other columns there are: one seed serves all.
    With an attribute ``timeout_s`` a line tells of a ``reset`` or ``step`` that takes longer, in seconds.
    With an attribute ``device``, that of its ``ctx``, it trades tensors on it instead of arrays (``NEXT_STEP``, no
    agents): segments are on it, too, for algorithms that learn from rollouts; others get them on the host.
    With a class attribute ``playable = False`` it only says the spaces of recorded episodes, and nothing is evaluated.
    With a method ``simulator() -> Simulator | None`` it offers a model of itself, as ``Context.simulator`` returns it,
    and with ``goals() -> Goals | None`` rewards for other goals; these live on when the environments are closed.
    """

    spec: EnvSpec
    autoreset: AutoresetMode

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


@dataclass(frozen=True)
class SegmentSpec:
    """What a collector's segments look like."""

    row: Batch  # one row of all environments of this rank as it will be stored, leaves ``[B, ...]``
    autoreset: AutoresetMode
    shards: Sequence[slice]  # the columns of each shard among the environments of this rank; all have as many
    bounds: Any = None  # limits that observations are checked against; None: they have been checked
    steps: int | None = None  # of one pass through a recording, over all ranks; None: environments are played
    rows: int = 0  # of a pass in the column that has most


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
        """Return what is logged as ``time/<name>``, of the time since the last call; a collector may lack this."""
        return {}

    def state(self) -> Tree:
        """Return where every shard stands behind its last polled segment: nothing ordered is lost or played twice."""
        ...

    def load(self, state: Tree) -> None: ...
    def close(self) -> None: ...


class Model(Module):
    """A network from ``ctx.space`` to features."""

    batched: ClassVar[bool] = False  # computes ``ctx.ensemble_size`` members itself; otherwise ``nn.Ensemble`` does
    recurrent: ClassVar[bool] = False  # has a carry
    traceable: ClassVar[bool] = False  # see ``Trainable``; not inherited
    out_dim: int

    def initial_carry(self, n: int) -> Batch:
        """Return the recurrent state of ``n`` columns; leaves ``[n, ...]``."""
        return {}

    def forward(self, x: Any, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        """Map ``[B, ...]`` or ``[T, B, ...]`` to features ``[..., out_dim]``, and return the new carry second.

        A recurrent model clears its carry where ``is_first``; others ignore both.
        """
        raise NotImplementedError(f"{type(self).__name__}.forward")


class Run(Protocol):
    """What a loop drives, and what the hooks of a run see."""

    config: Any  # the validated run configuration, ``rlplug.config.RunConfig``
    run_dir: Path
    progress: Progress
    loop: Loop
    steps: int  # how far it is, in the unit of its loop
    logged: int  # rows of metrics so far; a continued run goes on behind those of its checkpoint
    algorithm: Algorithm
    collector: Collector
    learner: Learner

    @property
    def done(self) -> bool: ...  # it has its ``total_steps``, or cannot make a whole round more, or was asked to stop

    def report(self) -> None:
        """Log, evaluate and write a checkpoint, each where it is due.

        A loop calls it between rounds, equally often on every rank; where it collects nothing, between updates.

        Raises:
            RunError: a gradient step since the last call was not made of finite numbers.
        """

    def collect(self, mode: Mode = "explore", shards: int | None = None) -> None:
        """Collect one round of segments: observed, counted, stored.

        Args:
            shards: so many segments of each rank, those that are ready first, at most one for every shard; None: one of
                every shard, side by side as one. A loop keeps to one way.
        """

    def play(
        self, jobs: Sequence[Job], weights: Mapping[str, Weights] | None = None, *, mine: bool = False
    ) -> Iterator[tuple[Job, Batch]]:
        """Play jobs: counted, observed and recorded, not stored. Every rank orders the same ones.

        See ``Play``. The ranks share the jobs out; all have been played when this returns. ``total_steps`` may be
        exceeded by the episodes of the last call. Gradient steps count every episode once: of a batch that every rank
        has, ``minibatches`` gives each rank a part.

        Args:
            mine: every rank receives the jobs that it played, in the order of ``jobs``, and their episodes are its
                part of the whole; where one rank collects for all, and by default, every rank receives all of them.

        Raises:
            RunError: rollouts are in flight, or a rank would have no job to keep.
        """
        ...

    def ready(self) -> bool: ...  # whether the buffer has enough for an update

    def update(self, batch: Batch | None = None) -> Losses:
        """Make one learner step, from one sample of the buffer or from ``batch``.

        Args:
            batch: raw rows, as ``play`` gives them, or batches of them by name: they are preprocessed as a sample is.
        """
        ...


class Loop(Protocol):
    """The regime: who collects, and when to update.

    It keeps no state: all that it decides follows from ``run.progress``, so that a continued run goes on in step.
    """

    # what ``total_steps``, ``eval.every``, ``log.every``, ``checkpoint.every`` and schedules count
    unit: ClassVar[Unit] = "env_steps"
    collects: ClassVar[bool] = True  # False: its buffer has to have rows of its own
    reads: ClassVar[bool] = False  # what it collects comes from a recording, and cannot come from an environment
    one_pass: bool = False  # of a recording it reads no more than that, and the buffer has to hold it
    shards: int | None = None  # segments of a round, those that are ready first; None: one of every shard
    in_flight: int = 1  # rollouts of a shard that are ordered at a time; above 1 it plays on during updates
    broadcast_interval: int = 1  # rounds that are played with the same weights
    max_weight_sync_delay: int | None = None  # steps of a shard after which they are changed in any case
    max_staleness: int | None = None  # updates; a segment that arrives with older weights is not stored; None: any age
    preemption_threshold: float | None = None  # share of the other ranks whose finished rollouts end this rank's
    min_rollout_fraction: float = 1.0  # of a rollout that is played all the same

    @classmethod
    def refusal(cls, algorithm: type[Algorithm], needs: Needs) -> str | None:
        """Return why it cannot drive an algorithm, in words that go on from its name; None: it can."""

    def updates(self, env_steps: int) -> int:
        """Return how many updates will have been made after so many environment steps, which are its unit."""
        ...

    def run(self, run: Run) -> None:
        """Drive ``run`` until it is done; call ``run.report()`` between rounds."""
