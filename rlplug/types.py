"""Data of rlplug: plain dicts of tensors that follow one rule.

The stream rule
    A row is one observation. Transition ``t`` is rows ``t`` and ``t + 1`` of one column, always. A segment of ``T``
    transitions has leaves ``[T + 1, B]`` (``[T + 1, B, N]`` with ``N`` agents). An episode of ``L`` steps has ``L + 1``
    rows; its last row, the final observation, has ``valid=False``: it bootstraps and has no loss. ``reward_t``,
    ``terminated_t`` and ``truncated_t`` result from ``action_t``. Environment steps are ``sum(valid)``. Row ``T``
    is repeated as row 0 of the next segment.

``T`` is time, ``B`` columns (environments or samples of a batch), ``A`` the size of an action.

Agents
    In an environment with one group of ``N`` agents, keys of an agent have an agent axis: ``obs``, ``action``,
    ``reward``, ``terminated``, ``truncated``, ``alive``, ``action_mask`` are ``[T+1, B, N, ...]``. With several groups
    they are nested by group, ``{"<group>": {"obs": ..., "action": ...}}``. ``is_first, valid, index, sample_prob,
    task`` and extras such as ``state`` belong to the column: they have no agent axis and stay at the top level. An
    episode ends when no agent of any group is alive. If an agent terminates earlier, the next row has its final
    observation and ``alive=False``; rows of one agent follow the stream rule with ``valid & alive``. Its ``is_first``
    is ``agent_is_first``: an agent may join an episode late.

    In a turn-based game, all agents are alive, and the ``action_mask`` of an agent that waits allows exactly one
    action, which the environment ignores. An agent gets a reward in the row of the move that causes it, even while it
    waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import torch
    from gymnasium import Space
    from torch import Tensor

Batch: TypeAlias = dict[str, Any]  # tensors or nested batches; a recursive union would have to be narrowed at every use
Tree: TypeAlias = Any
Weights: TypeAlias = dict[str, "Tensor"]
NamedWeights: TypeAlias = Mapping[str, Weights]

Role = Literal["learner", "actor", "eval", "job"]
Mode = Literal["explore", "greedy", "random"]
Compile: TypeAlias = Literal["off", "auto", "max"]
Unit = Literal["env_steps", "updates"]
STEP: Mapping[Unit, str] = {"env_steps": "step", "updates": "update"}  # singular nouns for messages

KEYS: Mapping[str, tuple[str, str, str]] = {
    "obs": ("[T+1, B, ...]", "float32 or as the space", "observation of the row; a dict of them for Dict spaces"),
    "action": ("[T+1, B, ...]", "float32 or int64", "chosen action; bounded Box actions mean [-1, 1]; more is clipped"),
    "reward": ("[T+1, B]", "float32", "reward that followed the row's action"),
    "terminated": ("[T+1, B]", "bool", "the row's action ended the episode for good: no bootstrap"),
    "truncated": ("[T+1, B]", "bool", "the row's action was the last one allowed: bootstrap from the next row"),
    "is_first": ("[T+1, B]", "bool", "first observation of an episode: recurrent state is reset"),
    "agent_is_first": ("[T+1, B, N]", "bool", "as is_first, of an agent: also where it begins in mid-episode"),
    "valid": ("[T+1, B]", "bool", "the row begins a transition; False on final observations and row T"),
    "action_mask": ("[T+1, B, A]", "bool", "actions allowed in the row"),
    "alive": ("[T+1, B, N]", "bool", "agents that take part in the row, and act on it"),
    "state": ("[T+1, B, ...]", "float32", "global state of a multi-agent environment"),
    "env_state": ("[T+1, B, ...]", "as the space", "all that determines the next rows: where a simulator can start"),
    "task": ("[T+1, B, ...]", "as the space", "task of the episode"),
    "logp": ("[T+1, B]", "float32", "log-probability of the action under the policy that acted"),
    "value": ("[T+1, B]", "float32", "value estimate of the policy that acted; present on row T too"),
    "dist": ("[T+1, B, ...]", "float32", "parameters of the policy that acted, for KL terms"),
    "carry": ("[T+1, B, ...]", "float32", "recurrent state before the row; in a sample [1, B, ...], before row 0"),
    "prev_reward": ("[T+1, B]", "float32", "reward of the row before; 0 where is_first"),
    "prev_action": ("[T+1, B, ...]", "as action", "action of the row before; zeros where is_first"),
    "gradients": ("[1, n, ...]", "float32", "sums over valid rows, computed by the actor (annotate)"),
    "index": ("[B]", "int64", "insertion id of the sample in its buffer"),
    "priority": ("[B]", "float32", "new priority of a sample (feedback), or initial one of a row (postprocess)"),
    "version": ("[B]", "int64", "updates of the weights with which the column was collected (queue)"),
    "return": ("[B]", "float64", "sum of the rewards of an episode of a job"),
    "length": ("[B]", "int64", "steps of an episode of a job"),
    "success": ("[B]", "float64", "whether info had is_success in the last step of an episode of a job"),
    "metrics": ("[B]", "float64", "by name: the environment's own metrics of an episode of a job; NaN: it has none"),
    "sample_prob": ("[B]", "float32", "probability with which the buffer drew the sample"),
    "weight": ("[B]", "float32", "importance weight of a sample drawn by priority, at most 1 over all ranks"),
    "reward_int": ("[T+1, B]", "float32", "intrinsic reward, before it is added to reward"),
    "advantage": ("[T+1, B]", "float32", "advantage estimate (prepare)"),
    "returns": ("[T+1, B]", "float32", "return estimate, the value's target (prepare)"),
    "discount": ("[B]", "float32", "factor of the bootstrap value: gamma^k, 0 after termination (prepare)"),
    "next_obs": ("[B, ...]", "as obs", "observation that the n-step target bootstraps from (prepare)"),
    "noise": ("[B, A]", "float32", "standard normal noise for the reparameterised action (prepare)"),
    "next_noise": ("[B, A]", "float32", "the same for the bootstrap observation (prepare)"),
}
"""Reserved batch keys: shape, dtype, meaning. Plugins may add other keys."""


@dataclass(frozen=True)
class Group:
    """Agents with equal spaces. ``agents=()`` is a single agent, whose leaves have no agent axis.

    ``extras`` are an agent's further keys with several groups, such as ``action_mask``.
    """

    obs: Space[Any]
    action: Space[Any]
    agents: tuple[str, ...] = ()
    extras: dict[str, Space[Any]] = field(default_factory=dict[str, "Space[Any]"])


@dataclass(frozen=True)
class EnvSpec:
    """Spaces and properties of an environment, read once before any component is built."""

    groups: dict[str, Group]
    extras: dict[str, Space[Any]] = field(default_factory=dict[str, "Space[Any]"])
    max_episode_steps: int | None = None
    offers: frozenset[str] = frozenset()  # "bandit": actions do not affect later rows
    native_spaces: dict[str, Group] = field(default_factory=dict[str, Group])  # as the environment declares them
    frame_stack: int = 1  # frames, oldest first, on the first axis of an image observation

    @property
    def single_agent(self) -> Group:
        """Return the only group of a single-agent environment.

        Raises:
            ConfigError: the environment has several agents or groups.
        """
        (group, *_) = self.groups.values()
        if self.has_agents:
            names = [f"{name} ({', '.join(group.agents) or 'one agent'})" for name, group in self.groups.items()]
            said = f"has the agents {'; '.join(names)}, but the run supports one agent"
            raise ConfigError("env", f"{said}; use an environment of one agent, or an algorithm for several")
        return group

    tasks = property(lambda self: self.extras.get("task"))  # space of the extra ``task``; None: there are no tasks

    @property
    def has_agents(self) -> bool:
        return len(self.groups) > 1 or any(group.agents for group in self.groups.values())

    @property
    def nested(self) -> tuple[str, ...]:
        """Return the groups that are nested in a batch: all if there are several, otherwise none."""
        return tuple(self.groups) if len(self.groups) > 1 else ()

    @property
    def has_masks(self) -> bool:
        """Return whether rows have an action mask, for all agents or for those of a group."""
        return any("action_mask" in of.extras for of in (self, *self.groups.values()))


@dataclass(frozen=True)
class EnvTraits:
    """Traits of a vector environment; the defaults describe an ordinary one.

    Attributes:
        check_bounds: whether to warn about observations out of the bounds of their space.
        independent: whether the episodes of a column do not depend on the other columns.
        playable: False for an environment that only has the spaces of recorded episodes.
        device: device of its tensors; None: it exchanges arrays. Requires ``NEXT_STEP`` and no agents.
        traceable: on a device, whether the only mutable state that ``reset`` and ``step`` read is tensors updated in
            place.
        timeout_s: seconds after which a ``reset`` or ``step`` that has not returned is reported.
        render: returns an image ``[H, W, 3]`` uint8 of the first column; None: built without ``Context.render``.
        render_fps: frames per second of a video.
        simulator: implements ``Context.simulator``. The result outlives the environment.
        goals: implements ``Context.goals``, or returns None. The result outlives the environment.
        metrics: returns (column, metrics by name) of each episode that ended since its last call or since ``reset``, in
            time order; episodes without metrics have ``{}``.
    """

    check_bounds: bool = True
    independent: bool = True
    playable: bool = True
    device: torch.device | None = None
    traceable: bool = False
    timeout_s: float | None = None
    render: Callable[[], Any] | None = None
    render_fps: float = 30.0
    simulator: Callable[[], Any] | None = None
    goals: Callable[[], Any] | None = None
    metrics: Callable[[], list[tuple[int, dict[str, float]]]] | None = None


def groups_of(batch: Batch) -> dict[str, Batch]:
    """Return the sub-batch of each group; without nested groups, the batch itself under an empty name."""
    nested = [name for name, part in batch.items() if isinstance(part, dict) and "alive" in part and name not in KEYS]
    return {name: batch[name] for name in nested} if nested else {"": batch}


@dataclass
class Progress:
    """Counters of a run, part of every checkpoint."""

    env_steps: int = 0
    updates: int = 0
    episodes: int = 0
    version: int = 0
    refill: int = 0  # environment steps left to collect before a buffer that was not saved is sampled
    refilled: int = 0  # environment steps that were collected for that; no updates are due for them


LONGEST = 2000  # characters in a line of a message


def printable(text: object) -> str:
    """Return a text with terminal control characters, except newlines, escaped as ``\\x1b``."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(text))


class ConfigError(Exception):
    """Invalid configuration. Shown to the user as one message, without a traceback.

    Args:
        key: the full config key at fault, such as ``algo.gamma``; empty if there is no single one.
        message: what is wrong and what would be right.
    """

    def __init__(self, key: str, message: str) -> None:
        # pickle passes the arguments that Exception.__new__ stored: the same ones
        self.key = printable(key).replace("\n", "\\n")
        self.message = "\n".join(line[:LONGEST] for line in printable(message).split("\n"))

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class CheckpointError(ConfigError):
    """A path is not a checkpoint, or the checkpoint cannot be read here."""

    def __init__(self, message: str) -> None:
        super().__init__("", message)


class RunError(Exception):
    """A run failed for a reason other than its configuration. Shown as one message, without a traceback."""

    def __str__(self) -> str:
        return printable(super().__str__())
