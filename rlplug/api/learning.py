"""Contracts of what learns: algorithms, explorations and models, and what the run offers them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from rlplug.api.data import Goals, Simulator
from rlplug.api.records import Job, Losses, Needs, Optim, Play, Segment
from rlplug.functional.returns import episode_metrics
from rlplug.nn.module import Module
from rlplug.types import Batch, ConfigError, EnvSpec, Mode, Progress, Role, Weights

if TYPE_CHECKING:
    from gymnasium import Space


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


Reduction: TypeAlias = Literal["mean", "std", "sum", "max", "min"]


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
        """Return what it needs with a recurrent model: ``needs`` with ``Window.stride``, and the key ``carry``.

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

    def initial_priorities(self, batch: Batch) -> Tensor:
        """Return the priority ``[T, B]`` with which every row of a segment begins, by the weights that played it.

        The actor asks for it where ``Needs.keys`` has ``priority``, unless ``postprocess`` gives one. Rows are as those
        of ``prepare``, but intrinsic rewards are not yet there. It draws nothing.
        """
        raise NotImplementedError(f"{type(self).__name__}.initial_priorities")

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
    def reads(cls, cfg: Any, spec: EnvSpec) -> tuple[str, ...]:
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
