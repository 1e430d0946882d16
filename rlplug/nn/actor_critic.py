"""A policy and a value function of the same observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium import spaces
from torch import Tensor

from rlplug.nn.autoregressive import along
from rlplug.nn.distributions import Distribution
from rlplug.nn.heads import Options, head_for
from rlplug.nn.mlp import Linear, precise
from rlplug.nn.module import Module
from rlplug.types import Batch, ConfigError, Mode


class Policy(Module):
    """The action distribution of every row.

    Args:
        torso: a model (``rlplug.api.Model``).
        action: the space of the actions.
        options: of the distribution; see ``head_for``.

    Raises:
        ConfigError: the action space is not supported, or the options do not fit it.
    """

    def __init__(self, torso: Any, action: spaces.Space[Any], options: Options | None = None) -> None:
        super().__init__()
        self.torso = torso
        self.policy = head_for(action, torso.out_dim, options=options)

    def initial_carry(self, n: int) -> Batch:
        """Return the recurrent states of ``n`` columns, by the name of their torso; leaves ``[n, ...]``."""
        carry = self.torso.initial_carry(n)
        return {"policy": carry} if carry else {}

    def parts(self, lr: Tensor, critic_lr: Tensor | None) -> dict[str, tuple[Sequence[Tensor], Tensor]]:
        """Return the parameters, ``[...]``, and the step size of the optimizer ``policy``."""
        return {"policy": ([*self.parameters()], lr)}

    def values(self, rows: Batch, carry: Batch) -> Tensor:
        """Return the value ``[...]`` of every row, which a policy by itself does not have."""
        raise NotImplementedError("this policy has no value function")

    def dist(self, rows: Batch, carry: Batch) -> tuple[Distribution, Batch]:
        """Return the distribution of every row's action, and the carry after the last row.

        Args:
            rows: ``obs`` and, if present, ``action_mask``, ``is_first`` and ``action``, on which entropies and KL
                divergences of an autoregressive policy depend; ``[B, ...]`` or ``[T, B, ...]``.
            carry: the state before the first row, shaped like ``initial_carry``.
        """
        features, after = self.torso(rows["obs"], carry.get("policy", {}), rows.get("is_first"))
        return self._dist(features, rows), {"policy": after} if "policy" in carry else {}

    def _dist(self, features: Tensor, rows: Batch) -> Distribution:
        return along(self.policy(features, rows.get("action_mask")), rows.get("action"))

    def act(self, step: Batch, carry: Batch, mode: Mode, ctx: Any) -> tuple[Batch, Batch]:
        """Act on one row of every column: ``Algorithm.act``.

        Returns:
            ``action``, with ``logp`` and ``dist`` (the parameters of the distribution) if they are in
            ``ctx.needs.stored``, only ``action`` in mode ``greedy``; and the carry after the row.
        """
        dist, carry = self.dist(step, carry)
        if mode == "greedy":
            return {"action": dist.mode()}, carry
        dist = dist.uniform() if mode == "random" else dist
        action = dist.sample(self.policy.noise(ctx, len(step["is_first"])))
        dist = along(dist, action)
        out: Batch = {"action": action}
        if "logp" in ctx.needs.stored:
            out["logp"] = dist.logp(action)
        if "dist" in ctx.needs.stored:
            out["dist"] = dist.params
        return out, carry


class ActorCritic(Policy):
    """The action distribution and the value of every row, from one or two torsos.

    Args:
        torso: the policy's model (``rlplug.api.Model``).
        value_torso: the value's model; None: share the policy's.
        action: the space of the actions.
        options: of the distribution; see ``head_for``.

    Raises:
        ConfigError: the action space is not supported, or the options do not fit it.
    """

    def __init__(
        self, torso: Any, value_torso: Any | None, action: spaces.Space[Any], options: Options | None = None
    ) -> None:
        super().__init__(torso, action, options)
        self.value_torso = value_torso
        self.value = Linear((value_torso or torso).out_dim, 1, gain=1.0)

    @classmethod
    def of_run(cls, ctx: Any, shared: bool, options: Options) -> ActorCritic:
        """Build the networks of a run with one group of agents.

        Args:
            ctx: the run's ``rlplug.api.Context``: ``model`` is the policy's torso, ``critic_model`` the value's.
            shared: share the policy's torso with the value.
            options: of the distribution; see ``head_for``.

        Raises:
            ConfigError: the action space is not supported, the options do not fit it, or the only recurrent torso would
                be unused.
        """
        group = ctx.spec.single_agent
        value_torso = None if shared else ctx.build("critic_model", group.obs)
        net = cls(ctx.build("model", group.obs), value_torso, group.action, options)
        if ctx.needs.window.stride and not net.initial_carry(1):
            raise ConfigError("critic_model", "has a recurrent state, but algo.vf_share_layers leaves it out")
        return net

    def parts(self, lr: Tensor, critic_lr: Tensor | None) -> dict[str, tuple[Sequence[Tensor], Tensor]]:
        """Return the parameters, ``[...]``, and step sizes of the optimizers: ``policy``, and ``value`` if it has one.

        Args:
            lr: step size of the policy and a shared torso, 0-d.
            critic_lr: step size of the value, 0-d; None: one optimizer for all.
        """
        if critic_lr is None:
            return {"policy": ([*self.parameters()], lr)}
        torso = [] if self.value_torso is None else [*self.value_torso.parameters()]
        policy = [*self.torso.parameters(), *self.policy.parameters()]
        return {"policy": (policy, lr), "value": ([*torso, *self.value.parameters()], critic_lr)}

    def initial_carry(self, n: int) -> Batch:
        carries = super().initial_carry(n)
        if self.value_torso is not None and (carry := self.value_torso.initial_carry(n)):
            carries["value"] = carry
        return carries

    def forward(self, rows: Batch, carry: Batch) -> tuple[Distribution, Tensor]:
        """Return the distribution of every row's action and its value ``[...]``.

        Args:
            rows: ``obs`` and, if present, ``action_mask``, ``is_first`` and ``action``, on which entropies and KL
                divergences of an autoregressive policy depend; ``[B, ...]`` or ``[T, B, ...]``.
            carry: the state before the first row, shaped like ``initial_carry``.
        """
        features, _ = self.torso(rows["obs"], carry.get("policy", {}), rows.get("is_first"))
        return self._dist(features, rows), self.values(rows, carry, features)

    def values(self, rows: Batch, carry: Batch, features: Tensor | None = None) -> Tensor:
        """Return the value ``[...]`` of every row; ``features``: those of the policy's torso, if already computed."""
        if self.value_torso is not None:
            features, _ = self.value_torso(rows["obs"], carry.get("value", {}), rows.get("is_first"))
        elif features is None:
            features, _ = self.torso(rows["obs"], carry.get("policy", {}), rows.get("is_first"))
        return precise(self.value, features).squeeze(-1)

    def dist(self, rows: Batch, carry: Batch) -> tuple[Distribution, Batch]:
        dist, after = super().dist(rows, carry)
        if self.value_torso is not None and "value" in carry:
            after["value"] = self.value_torso(rows["obs"], carry["value"], rows.get("is_first"))[1]
        return dist, after


def require_critic(used: bool, lambda_: float, critic_lr: object | None) -> None:
    """Raise ``ConfigError`` if a setting needs the value that ``algo.use_critic=false`` leaves out."""
    if not used and lambda_ != 1.0:
        raise ConfigError("algo.lambda_", f"{lambda_:g} weights values, but algo.use_critic=false has none; use 1")
    if not used and critic_lr is not None:
        raise ConfigError("algo.critic_lr", "is the step size of a value, but algo.use_critic=false has none; use null")
