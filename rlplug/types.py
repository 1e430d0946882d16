"""The data that flows through rlplug: plain dicts of tensors that obey one rule.

The stream rule
    A row is one observation. Transition ``t`` is rows ``t`` and ``t + 1`` of one column, always. A segment of ``T``
    transitions has leaves ``[T + 1, B]`` (``[T + 1, B, N]`` with ``N`` agents). An episode of ``L`` steps has ``L + 1``
    rows; its last row, the final observation, has ``valid=False``: it bootstraps, and carries no loss. ``reward_t``,
    ``terminated_t`` and ``truncated_t`` result from ``action_t``. Environment steps are ``sum(valid)``. Row ``T``
    reopens the next segment.

``T`` is time, ``B`` columns (environments, or samples of a batch), ``A`` the size of an action.

Agents
    In an environment of one group of ``N`` agents, what belongs to an agent has an agent axis: ``obs``, ``action``,
    ``reward``, ``terminated``, ``truncated``, ``alive``, ``action_mask`` are ``[T+1, B, N, ...]``. With several groups
    it stands in its group, ``{"<group>": {"obs": ..., "action": ...}}``. ``is_first, valid, index, sample_prob, task``
    and extras such as ``state`` belong to the column: they have no agent axis, and stay at the top level. An episode of
    a column ends when no agent of any group is alive any more. Where an agent's part in it ends earlier, the row behind
    has its final observation, and ``alive=False``; rows of one agent obey the stream rule with ``valid & alive``. Its
    ``is_first`` is ``agent_is_first``: an agent may begin with the episode, or later in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import torch
    from gymnasium import Space
    from torch import Tensor

Batch: TypeAlias = dict[str, Any]  # of tensors and batches: a recursive union would have to be narrowed at every use
Tree: TypeAlias = Any
Weights: TypeAlias = dict[str, "Tensor"]

Role = Literal["learner", "actor", "eval"]
Mode = Literal["explore", "greedy", "random"]
Compile: TypeAlias = Literal["off", "auto", "max"]
Unit = Literal["env_steps", "updates"]
STEP: Mapping[Unit, str] = {"env_steps": "step", "updates": "update"}  # what a person calls one of them

KEYS: Mapping[str, tuple[str, str, str]] = {
    "obs": ("[T+1, B, ...]", "float32 or as the space", "observation of the row; a dict of them for Dict spaces"),
    "action": ("[T+1, B, ...]", "float32 or int64", "chosen action; bounded Box actions mean [-1, 1]; more is clipped"),
    "reward": ("[T+1, B]", "float32", "reward that followed the row's action"),
    "terminated": ("[T+1, B]", "bool", "the row's action ended the episode for good: no bootstrap"),
    "truncated": ("[T+1, B]", "bool", "the row's action was the last one allowed: bootstrap from the next row"),
    "is_first": ("[T+1, B]", "bool", "first observation of an episode: recurrent state starts anew"),
    "agent_is_first": ("[T+1, B, N]", "bool", "as is_first, of an agent: also where it begins in mid-episode"),
    "valid": ("[T+1, B]", "bool", "the row begins a transition; False on final observations and row T"),
    "action_mask": ("[T+1, B, A]", "bool", "actions allowed in the row"),
    "alive": ("[T+1, B, N]", "bool", "agents that take part in the row, and act on it"),
    "state": ("[T+1, B, ...]", "float32", "global state of a multi-agent environment"),
    "task": ("[T+1, B, ...]", "as the space", "task that the episode is played on"),
    "logp": ("[T+1, B]", "float32", "log-probability of the action under the policy that acted"),
    "value": ("[T+1, B]", "float32", "value estimate of the policy that acted; present on row T too"),
    "dist": ("[T+1, B, ...]", "float32", "parameters of the policy that acted, for KL terms"),
    "carry": ("[T+1, B, ...]", "float32", "recurrent state before the row; in a sample [1, B, ...], before row 0"),
    "prev_reward": ("[T+1, B]", "float32", "reward of the row before; 0 where is_first"),
    "prev_action": ("[T+1, B, ...]", "as action", "action of the row before; zeros where is_first"),
    "gradients": ("[1, n, ...]", "float32", "sums over valid rows, computed where they were played: Needs.gradients"),
    "index": ("[B]", "int64", "insertion id of the sample in its buffer"),
    "priority": ("[B]", "float32", "new priority of a sample (feedback), or first one of a row (postprocess)"),
    "version": ("[B]", "int64", "updates that the weights had seen with which the column was played (queue)"),
    "return": ("[B]", "float64", "sum of the rewards of an episode of a job"),
    "length": ("[B]", "int64", "steps of an episode of a job"),
    "success": ("[B]", "float64", "whether info had is_success in the last step of an episode of a job"),
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
"""The one table of batch keys: shape, dtype, meaning. Plugins add their own keys freely; these names mean this."""


@dataclass(frozen=True)
class Group:
    """Agents with equal spaces. ``agents=()`` is the single agent: its leaves have no agent axis.

    ``extras`` are what an agent has in a row of several groups beside its observation, such as ``action_mask``.
    """

    obs: Space[Any]
    action: Space[Any]
    agents: tuple[str, ...] = ()
    extras: dict[str, Space[Any]] = field(default_factory=dict[str, "Space[Any]"])


@dataclass(frozen=True)
class EnvSpec:
    """What an environment offers, read once before anything is built."""

    groups: dict[str, Group]
    extras: dict[str, Space[Any]] = field(default_factory=dict[str, "Space[Any]"])
    max_episode_steps: int | None = None
    offers: frozenset[str] = frozenset()  # "bandit": no action changes a later row
    native_spaces: dict[str, Group] = field(default_factory=dict[str, Group])  # as the environment declares them
    frame_stack: int = 1  # frames, oldest first, on the first axis of an image observation

    @property
    def single_agent(self) -> Group:
        """The only group of a single-agent environment.

        Raises:
            ConfigError: it has several groups, or agents.
        """
        (group, *_) = self.groups.values()
        if self.has_agents:
            names = [f"{name} ({', '.join(group.agents) or 'one agent'})" for name, group in self.groups.items()]
            said = f"has the agents {'; '.join(names)}, but what was chosen serves one agent"
            raise ConfigError("env", f"{said}; take an environment of one agent, or an algorithm for several")
        return group

    @property
    def has_agents(self) -> bool:
        return len(self.groups) > 1 or any(group.agents for group in self.groups.values())

    @property
    def nested(self) -> tuple[str, ...]:
        """The groups that stand in a batch under their names: all, where there are several."""
        return tuple(self.groups) if len(self.groups) > 1 else ()

    @property
    def has_masks(self) -> bool:
        """Whether a row says which actions are allowed, to all agents or to those of a group."""
        return any("action_mask" in of.extras for of in (self, *self.groups.values()))


@dataclass(frozen=True)
class EnvTraits:
    """How a vector environment differs from an ordinary one, which has the defaults.

    Attributes:
        check_bounds: whether a run warns of observations beyond the bounds of their space.
        independent: whether the episodes of a column stay the same whatever other columns there are.
        playable: False for an environment that has only the spaces of recorded episodes.
        device: where it exchanges tensors instead of arrays (``NEXT_STEP``, no agents).
        traceable: on a device, ``reset`` and ``step`` read nothing that changes but tensors that are moved in place.
        timeout_s: seconds after which a line reports a ``reset`` or ``step`` that has not returned.
        render: returns an image ``[H, W, 3]`` uint8 of the first column; None: it was not made with ``Context.render``.
        render_fps: steps that a viewer sees in a second.
        simulator: returns what ``Context.simulator`` returns. It outlives the environment.
        goals: returns what ``Context.goals`` returns, or None. It outlives the environment.
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


def groups_of(batch: Batch) -> dict[str, Batch]:
    """Return what each group has of a batch; the only group has the batch itself, under an empty name."""
    nested = [name for name, part in batch.items() if isinstance(part, dict) and "alive" in part and name not in KEYS]
    return {name: batch[name] for name in nested} if nested else {"": batch}


@dataclass
class Progress:
    """Counters of a run; part of every checkpoint."""

    env_steps: int = 0
    updates: int = 0
    episodes: int = 0
    version: int = 0


LONGEST = 2000  # characters of a line of a message


def printable(text: object) -> str:
    """Return a text with all characters but newlines that would steer a terminal written as ``\\x1b``."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(text))


class ConfigError(Exception):
    """The run cannot start as configured. Shown to the user as one message, without a traceback.

    Args:
        key: the full config key that is wrong, ``algo.gamma``; empty when no single key is.
        message: what is wrong and what would be right.
    """

    def __init__(self, key: str, message: str) -> None:
        # pickle passes what Exception.__new__ has noted: the same arguments
        self.key = printable(key).replace("\n", "\\n")
        self.message = "\n".join(line[:LONGEST] for line in printable(message).split("\n"))

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class CheckpointError(ConfigError):
    """What was given to continue or to use is no checkpoint, or not one that can be read here."""

    def __init__(self, message: str) -> None:
        super().__init__("", message)


class RunError(Exception):
    """A run had to stop, through no mistake in its configuration. Shown as one message, without a traceback."""

    def __str__(self) -> str:
        return printable(super().__str__())
