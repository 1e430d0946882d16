"""Contracts of learning components: algorithms, exploration modules and models, and their access to the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from rlplug.api.data import Goals, Simulator
from rlplug.api.records import Job, Losses, Needs, Optim, Play, Segment
from rlplug.functional.returns import episode_metrics
from rlplug.nn.module import Module
from rlplug.types import Batch, ConfigError, EnvSpec, Mode, Progress, Role, Tree, Weights

if TYPE_CHECKING:
    from gymnasium import Space

    from rlplug.nn import Distribution

__all__ = ["Algorithm", "Context", "Curriculum", "Exploration", "Learner", "Model", "Reduction", "Trainable"]


class Context(Protocol):
    """Properties and services of the run, passed to every component."""

    spec: EnvSpec
    needs: Needs
    slots: Mapping[str, Any]  # chosen models by slot, with their class ``cls``
    device: torch.device
    total_steps: int
    rollout_length: int  # rollout length per environment
    batch_size: int  # transitions per sample, summed over ranks
    sample_uses: int  # times that the buffer returns each sample of segments, hence updates per sample
    replay_ratio: float | None  # updates per environment step; None: one per round
    learning_starts: int  # environment steps before the first update, collected with mode "random"
    num_shards: int  # equal shards of this process's environments
    rank: int
    world_size: int
    seed: int
    space: Space[Any] | None  # input space of a component inside another one
    ensemble_size: int  # independent members to hold, as a leading axis; see ``nn.Ensemble``
    render: bool  # whether environments should offer ``render() -> [H, W, 3] uint8`` of the first column

    @property
    def role(self) -> Role: ...  # role whose generator currently draws noise
    @property
    def num_envs(self) -> int: ...  # environments of the whole run (during an evaluation: of the evaluation)
    @property
    def env_ids(self) -> Sequence[int]: ...  # global indices of this process's environments

    def build(self, slot: Any, space: Space[Any], ensemble_size: int = 1) -> Any:
        """Build the model of a slot such as ``critic_model`` (if empty: ``model``), or of a ``ModelNode`` option."""
        ...

    def child(
        self, spec: EnvSpec, needs: Needs | None = None, *, agents: int = 1, models: Mapping[str, Any] | None = None
    ) -> Context:
        """Return the context of an algorithm inside an algorithm, ``cfg.<option>.build(ctx.child(spec))``.

        Args:
            spec: spaces of the child.
            needs: needs of the child; None: those of this algorithm.
            agents: number of agents in every environment that the child acts for. They are adjacent columns of the
                child: ``num_envs``, ``env_ids``, ``batch_size`` and the rows of random draws are multiplied by it.
            models: the child's own models by slot, which replace those of this algorithm.
        """
        ...

    def simulator(self) -> Simulator:
        """Return a simulator of the environment, which can step from any state.

        Raises:
            ConfigError: the environment offers none.
        """
        ...

    def goals(self) -> Goals:
        """Return the environment's functions for relabeling transitions with other goals.

        Raises:
            ConfigError: the environment offers none.
        """
        ...

    def schedule(self, node: Any) -> Tensor:
        """Return a 0-d tensor with the value of a ``Scheduled`` option, updated in place before every update."""
        ...

    def randn(self, *shape: int, rows: bool = True) -> Tensor:
        """Draw standard normal noise. With ``rows``, the first axis is this process's share of one global draw.

        If every rank learns from the same rows, its share is the whole draw.
        """
        ...

    def rand(self, *shape: int, rows: bool = True, host: bool = False) -> Tensor:
        """Draw uniform numbers in [0, 1). With ``host``, draw on the CPU, as buffers need."""
        ...

    def randint(self, high: int, *shape: int, rows: bool = True, host: bool = False) -> Tensor:
        """Draw uniform integers in [0, high)."""
        ...

    def apart(self, columns: Sequence[int] | None = None) -> AbstractContextManager[None]:
        """Undo the block's random draws when it ends, so that the same numbers are drawn again.

        Args:
            columns: this process's environments that act inside the block, whose rows of noise it draws; None: all.
        """
        ...


Reduction: TypeAlias = Literal["mean", "std", "sum", "max", "min"]


class Learner(Protocol):
    """The only place with backward passes and collectives."""

    progress: Progress
    algorithm: Algorithm

    def minimize(
        self, batch: Batch, who: Trainable, parts: Sequence[str] | None = None, *, diagnostics: bool = True
    ) -> Losses:
        """Make one gradient step of the parts that are due, then call ``who.after_step``.

        Args:
            batch: rows, of which only the ``valid`` ones count.
            parts: names in ``who.optimizers()``; None: all.
            diagnostics: also compute ``Losses.diagnostics``; a compiled step always does.

        Returns:
            Terms and metrics as global 0-d means, equal on every rank; feedback unchanged.
        """
        ...

    def apply(self, grads: Weights, who: Trainable, parts: Sequence[str] | None = None) -> None:
        """Clip the given gradients, keyed by parameter name, and step the optimizers."""

    def minibatches(self, batch: Batch, size: int, unit: Literal["row", "column"]) -> Iterator[Batch]:
        """Split a segment ``[T+1, B]`` into shuffled minibatches, equally many on every rank.

        ``row``: flat batches of ``size`` valid rows over all ranks. ``column``: ``[T+1, size]``, columns with at least
        one valid row.
        """
        ...

    def sample(self) -> tuple[Batch, dict[str, Tensor]]:
        """Draw another sample from the run's buffer, on this rank's device, normalized, with intrinsic rewards.

        Also return the mean intrinsic reward of every exploration module that has one, 0-d.
        """
        ...

    def reduce(self, x: Tensor, op: Reduction, where: Tensor | None = None) -> Tensor:
        """Reduce ``x [...]``, masked by ``where`` of the same shape, over all ranks to a 0-d tensor; 0 if empty."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, in rank order: ``[n, ...] -> [sum n, ...]``; ``n`` may differ."""
        ...


class Trainable(nn.Module):
    """Base of everything that learns: algorithms, their children, exploration modules, normalizers.

    A submodule may grow during training, such as a pool of past policies. Its ``get_extra_state`` returns its size as
    a tensor, and its ``set_extra_state`` creates missing parts: checkpoints, actors and ``rlplug.load`` call it before
    they load the submodule's weights. Growing modules have no optimizer.
    """

    Config: ClassVar[type[Any]]
    traceable: ClassVar[bool] = False
    """Whether ``compile=auto`` may compile ``act``, ``perturb``, ``prepare``, ``forward``, ``update``, ``after_step``:
    of the mutable state of ``self`` and of the learner, they read only tensors updated in place. ``act`` of candidates
    then runs under ``torch.func.vmap``. Not inherited."""

    def observe(self, segment: Segment, learner: Learner) -> None:
        """Update running statistics from each collected row, once and in time order.

        Statistics that ``act`` reads are buffers, which actors receive before every rollout; weights change in updates.
        It may call the learner's collectives, since it is called equally often on every rank.
        """

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute the losses of the named parts only. It is pure and draws no random numbers."""
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def optimizers(self) -> dict[str, Optim]:
        """Return the parts. Each parameter belongs to one part. Called once in each process that computes gradients."""
        return {}

    def update(self, batch: Batch, learner: Learner) -> Losses:
        """Learn from one prepared sample, in epochs and minibatches; the result is logged and fed back."""
        return learner.minimize(batch, self)

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        """Update targets, coefficients and the like after ``minimize`` (not ``Learner.apply``) stepped ``parts``."""

    def initial_carry(self, n: int) -> Batch:
        """Return the initial carry (recurrent state, noise process) of ``n`` columns; leaves ``[n, ...]``."""
        return {}

    def actor_keys(self) -> tuple[str, ...]:
        """Return the keys of ``state_dict()`` that an actor needs."""
        return tuple(self.state_dict())


class Algorithm(Trainable):
    """A learning algorithm, independent of environments, loops, Fabric, Ray and files."""

    ctx: Context

    @classmethod
    def needs(cls, cfg: Any, spec: EnvSpec) -> Needs:
        """Return what the algorithm needs. Called before any component is built.

        Raises:
            ConfigError: it cannot serve these spaces.
        """
        raise NotImplementedError(f"{cls.__name__}.needs")

    @classmethod
    def recurrent(cls, cfg: Any, needs: Needs) -> Needs:
        """Return ``needs`` for a recurrent model: with ``Window.stride`` and the key ``carry``.

        Raises:
            ConfigError: it does not support recurrent models, which is the default.
        """
        raise ConfigError("model", f"{cls.__name__} cannot learn with a recurrent model; use another model")

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Act on one row of every column.

        Args:
            step: ``obs``, ``is_first`` and the environment's extras such as ``action_mask``; ``[B, ...]``.
            carry: recurrent state before the row.
            mode: ``explore`` in training, ``greedy`` in evaluation, ``random``: uniform, before learning starts.

        Returns:
            The keys to store with the row (``action``, and for example ``logp`` and ``value``), and the new carry.
        """
        raise NotImplementedError(f"{type(self).__name__}.act")

    def postprocess(self, data: Batch) -> Batch:
        """Process a segment on the actor before it is sent: initial priorities, ranked rewards."""
        return data

    def annotate(self, batch: Batch) -> Batch:
        """Return keys ``[n, b, ...]`` to add to a segment, computed on the actor with the weights that played it.

        Rows are as in ``prepare``, but without intrinsic rewards. It draws no random numbers. The default returns
        ``initial_priorities``, and is called if ``Needs.keys`` has ``priority``.
        """
        if "priority" in batch:  # set by ``postprocess``
            return {}
        first = torch.where(batch["valid"][:-1], self.initial_priorities(batch), 0.0)
        return {"priority": torch.cat((first, torch.zeros_like(first[:1])))}

    def initial_priorities(self, batch: Batch) -> Tensor:
        """Return the initial priorities ``[T, B]`` of a segment's rows; see ``annotate``."""
        raise NotImplementedError(f"{type(self).__name__}.initial_priorities")

    def candidate_weights(self, candidate: Batch) -> Weights:
        """Return a job's candidate as weights keyed as ``actor_keys()``. It draws no random numbers."""
        raise NotImplementedError(f"{type(self).__name__}.candidate_weights")

    def evaluate(self, play: Play, episodes: int) -> dict[str, float]:
        """Return the metrics of one evaluation, whose job numbers begin at 0; ``eval/return_mean`` ranks checkpoints.

        It is called on every rank, and ``play`` returns the same on all.
        """
        ((_, batch),) = play([Job(0, episodes=episodes, mode="greedy")])
        return self.episode_metrics(batch)

    def episode_metrics(self, batch: Batch) -> dict[str, float]:
        """Return the metrics ``eval/...`` of whole episodes; ``batch`` has the keys of their stream."""
        return episode_metrics(batch, getattr(getattr(self, "ctx", None), "spec", None))

    def named_policy(self, name: str) -> Algorithm:
        """Return the submodule that is the policy ``name``; an algorithm that is one policy returns itself."""
        return self

    def adopt(self, policy: str, other: Algorithm) -> None:
        """Load ``other.named_policy(policy)`` from another run, as initial weights (``init_from``) or as an opponent.

        Args:
            policy: its name in this algorithm; empty: the only opponent of an evaluation.

        Raises:
            ConfigError: there is no such policy, which is the default.
            RuntimeError: the weights do not fit.
        """
        raise ConfigError("", f"{type(self).__name__} has no policies that play against others")

    def pictures(self, batch: Batch) -> Tensor | None:
        """Return images ``[n, H, W, 3]`` uint8 that compare predictions with a sample, for ``eval.record``.

        Args:
            batch: a sample of the buffer as ``prepare`` gets it; no random numbers are drawn from it.
        """
        return None

    def distribution(self, batch: Batch) -> Distribution:
        """Return the distribution of the action of every row ``[T+1, B]``; rows are as for ``logp``."""
        raise NotImplementedError(f"{type(self).__name__}.distribution")

    def logp(self, batch: Batch) -> Tensor:
        """Return the log-probability or log-density ``[T+1, B]`` of ``batch["action"]`` under the current policy.

        Like ``values``, it takes rows of a stream segment with observations as in ``prepare``, starts a recurrent model
        from the ``carry`` of row 0, draws no random numbers, and lets the caller decide whether gradients are recorded.

        Raises:
            NotImplementedError: the algorithm has no such policy, or does not offer it.
        """
        return self.distribution(batch).logp(batch["action"])

    def values(self, batch: Batch) -> Tensor:
        """Return the current critic's value of every row, ``[T+1, B]``; see ``logp``."""
        raise NotImplementedError(f"{type(self).__name__}.values")

    def prepare(self, batch: Batch) -> Batch:
        """Compute targets on the learner, without gradient: advantages, n-step returns, the noise of ``forward``."""
        return batch


class Exploration(Trainable):
    """Exploration module: changes actions (``perturb``, ``perturb_weights``) or rewards (``intrinsic_reward``)."""

    overrides_action: ClassVar[bool] = False  # ``perturb`` ignores its input action, so it has to come first
    knows_agents: ClassVar[bool] = False  # supports several agents itself; else each group gets a module of its own

    @classmethod
    def reads(cls, cfg: Any, spec: EnvSpec) -> tuple[str, ...]:
        """Return the keys of a row that it reads, as ``Buffer.reads`` does."""
        return ()

    def perturb(self, out: Batch, step: Batch, carry: Batch) -> tuple[Batch, Batch]:
        """Return ``out`` with a changed ``action``, and the new carry. Called in explore mode and before the run.

        Args:
            out: result of ``act``.
            step: input of ``act``.
            carry: state of the noise before the row.

        Raises:
            ConfigError: it does not support these actions, or the other keys of ``out``.
        """
        return out, carry

    def perturb_weights(self, w: Weights) -> Weights:
        """Return the weights (``named_parameters``) to act with in explore mode during the next segment."""
        return w

    def adapt_noise(self, plain: Batch, noisy: Batch) -> None:
        """Adapt ``perturb_weights`` once per segment, from greedy ``act`` results without and with its noise."""

    def noise_by_env(self) -> Tensor | None:
        """Return the noise level of every environment of the run, ``[num_envs]``; None: equal levels."""
        return None

    def intrinsic_reward(self, batch: Batch) -> Tensor | dict[str, Tensor] | None:
        """Return the intrinsic reward of every row of the unshuffled sample, ``[T+1, B]``.

        With agents it has the shape of ``reward``; with several groups, return a dict of the rewarded groups.
        """
        return None


class Curriculum(Trainable):
    """Chooses the tasks of training episodes. Its state is in buffers, equal on all ranks; it has no optimizers.

    Rows that it observes have their ``task``.
    """

    metric: str = ""  # metric to ``read``, such as ``episode/return``; empty: none

    def tasks(self) -> Tree:
        """Return the task of the next episode of every environment of the run; arrays, ``[num_envs, ...]``.

        It is called before each round, equally often on every rank, and draws with ``rows=False``.
        """

    def read(self, value: float) -> None:
        """Receive ``metric`` whenever it is logged."""

    def metrics(self) -> dict[str, float]:
        """Return metrics, which are logged as ``curriculum/<name>`` and equal on all ranks."""
        return {}


class Model(Module):
    """A network that maps ``ctx.space`` to features."""

    batched: ClassVar[bool] = False  # implements ``ctx.ensemble_size`` itself instead of through ``nn.Ensemble``
    recurrent: ClassVar[bool] = False  # has a carry
    traceable: ClassVar[bool] = False  # see ``Trainable``; not inherited
    out_dim: int

    def initial_carry(self, n: int) -> Batch:
        """Return the recurrent state of ``n`` columns; leaves ``[n, ...]``."""
        return {}

    def forward(self, x: Any, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        """Return features ``[..., out_dim]`` of ``x``, ``[B, ...]`` or ``[T, B, ...]``, and the new carry.

        A recurrent model resets its carry where ``is_first``; others ignore both.
        """
        raise NotImplementedError(f"{type(self).__name__}.forward")
