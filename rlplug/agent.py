"""Inference with trained policies: loading from checkpoints, without the run's GPU or environment."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from gymnasium.spaces import flatdim
from gymnasium.vector.utils import batch_space

from rlplug import tree
from rlplug.agents.insight import Insight, select_of
from rlplug.agents.team import TeamRows
from rlplug.api import Algorithm
from rlplug.checkpointing.format import MISFITS, Checkpoint, find
from rlplug.checkpointing.installed import check_installed
from rlplug.config import Core, choose, migrate, typed
from rlplug.config.schema import CORE, kind_of
from rlplug.context import EnvShard, RunContext, needs_of
from rlplug.envs.spaces import batched, execute, observe, take
from rlplug.envs.spec_json import playable
from rlplug.trainer.normalize import Normalizer
from rlplug.trainer.optimizer import refuse_nan
from rlplug.types import Batch, CheckpointError, ConfigError, Mode


class Agent(Insight):
    """A trained policy, with observations and actions in the environment's native spaces.

    Attributes:
        spec: spaces of the training environment.
        env_steps: environment steps of training.
        algorithm: the algorithm, with its weights.
        ctx: the context that the algorithm was built with.
        normalize: maps observations to the algorithm's inputs.
    """

    def __init__(self, algorithm: Algorithm, ctx: RunContext, env_steps: int, normalize: Normalizer) -> None:
        self.algorithm, self.spec, self.env_steps = algorithm, ctx.spec, env_steps
        self.ctx, self.normalize, self._native = ctx, normalize, ctx.spec.native_spaces or ctx.spec.groups
        self._name, group = next(iter(ctx.spec.groups.items()))  # the only one of a single agent
        self._inside = group.action
        self._memory = {"prev_action", "prev_reward"}.intersection(ctx.needs.keys)
        self._observe = {name: observe(group.obs) for name, group in self._native.items()}
        self._execute = {name: execute(group.action) for name, group in self._native.items()}
        self._team = TeamRows(ctx.spec, self._memory)
        self.reset()

    def reset(self, ended: Any = None) -> None:
        """Begin new episodes with the next observations.

        Args:
            ended: mask of the episodes that ended, ``[n]`` bool; None: all, and their number may change.

        Raises:
            ValueError: ``ended`` does not match the current episodes.
        """
        if ended is None:
            self._first = np.ones(0, np.bool_)
            return
        ended = np.asarray(ended)
        if not len(self._first) or ended.shape != self._first.shape or ended.dtype != np.bool_:
            raise ValueError(f"ended should be [{len(self._first)}] bool, got {ended.shape} {ended.dtype}")
        self._first |= ended

    def act(
        self, obs: Any, mode: Mode = "greedy", reward: Any = None, action_mask: Any = None, env_state: Any = None
    ) -> Any:
        """Return one action, or ``[n, ...]``; a recurrent state is kept until the next call.

        Args:
            obs: one observation, or those of ``n`` environments, ``[n, ...]``; a dict or tuple according to the space.
            mode: ``greedy``, or ``explore``, which samples from the policy (without exploration modules).
            reward: reward of the last action, ``[n]`` for a batch; for policies that take it as input.
            action_mask: allowed actions, ``[A]`` or ``[n, A]`` bool; for policies trained with masks.
            env_state: the environment's state, ``[...]`` or ``[n, ...]``; for policies that plan with a simulator.

        Raises:
            ValueError: an argument is missing, or does not fit the spaces or the current episodes.
        """
        step, columns, select = self._step_of(obs, reward, action_mask, env_state)
        self._action = self._decide(step, mode, columns)["action"].cpu().numpy()
        if self._action.shape != (columns, *(self._inside.shape or ())):
            raise ValueError(f"the policy's actions {self._action.shape[1:]} do not fit {self._inside}")
        return take(self._execute[self._name](self._action), select)

    def _step_of(self, obs: Any, reward: Any, action_mask: Any, env_state: Any) -> tuple[Batch, int, Any]:
        batch, n = batched(self._native[self._name].obs, obs)
        columns = 1 if n is None else n
        self._begin(columns)
        step: Batch = {"obs": self._observe[self._name](batch), "is_first": self._first}
        if "prev_action" in self._memory:
            step["prev_action"] = self._action
        if "prev_reward" in self._memory:
            if reward is None and not self._first.all():
                raise ValueError("this policy reads the reward of its last action: act(obs, reward=...)")
            step["prev_reward"] = np.broadcast_to(np.asarray(0 if reward is None else reward, np.float32), columns)
        if "action_mask" in self.spec.extras:
            step["action_mask"] = self._mask(action_mask, columns)
        elif action_mask is not None:
            raise ValueError("this policy was trained without action masks")
        if env_state is not None:
            step["env_state"] = env_state if n is not None else tree.map(lambda x: np.asarray(x)[None], env_state)
        return step, columns, select_of(n)

    def _decide(self, step: Batch, mode: Mode, columns: int) -> Batch:
        """Return the policy's outputs for a row of arrays."""
        if mode not in get_args(Mode):
            raise ValueError(f"mode should be one of {', '.join(get_args(Mode))}, got {mode!r}")
        out, self._carry = self._look(step, columns, lambda row, carry: self.algorithm.act(row, carry, mode))
        self._first = np.zeros(columns, np.bool_)
        return out

    def _look(self, step: Batch, columns: int, look: Callable[[Batch, Batch], Any]) -> Any:
        with torch.inference_mode(), self.ctx.acting(EnvShard("eval", columns, range(columns))):
            # copies, so that the caller may reuse the arrays
            seen = tree.map(lambda x: torch.from_numpy(np.array(x, order="C")).to(self.ctx.device), step)
            if not self.spec.nested:
                seen["obs"] = self.normalize(seen["obs"])
            for key in self._memory & seen.keys():
                seen[key][seen["is_first"]] = 0
            return look(seen, self._carry)

    def _mask(self, mask: Any, columns: int) -> np.ndarray:
        size = flatdim(self.spec.extras["action_mask"])
        if mask is None:
            asked = f"act(obs, action_mask=...), [{size}] bool"
            raise ValueError(f"this policy was trained with action masks: {asked}")
        mask = np.asarray(mask, np.bool_)
        if mask.shape not in ((size,), (columns, size)):
            raise ValueError(f"action_mask has shape {[*mask.shape]}; expected [{size}] or [{columns}, {size}]")
        if not mask.any(-1).all():
            raise ValueError("action_mask forbids every action")
        return np.broadcast_to(mask, (columns, size))

    def _begin(self, columns: int) -> None:
        """Begin an episode in each column, unless they have already begun."""
        if (going := len(self._first)) == columns > 0:
            return
        if going and (self._carry or self._memory):
            raise ValueError(f"{columns} observations, but {going} episodes are open; call reset() to begin new ones")
        self._first = np.ones(columns, np.bool_)
        self._carry = self.algorithm.initial_carry(columns)
        self._action = np.zeros((columns, *(self._inside.shape or ())), self._inside.dtype)


class Team(Agent):
    """The trained policies of an environment with agents. Observations, actions and masks are dicts by group.

    In a group with ``N`` agents they are ``[N, ...]``, or ``[n, N, ...]`` of ``n`` environments.
    """

    def act(
        self, obs: Any, mode: Mode = "greedy", reward: Any = None, action_mask: Any = None, alive: Any = None
    ) -> dict[str, Any]:
        """Return the actions of all agents; see ``Agent.act``.

        Args:
            reward: rewards of the last actions by group, ``[N]`` or ``[n, N]``, for policies that take them as input.
            alive: agents that act, ``[N]`` or ``[n, N]`` bool; None: all.
        """
        if not isinstance(obs, Mapping) or obs.keys() != self._native.keys():
            raise ValueError(f"obs should map groups to observations: {', '.join(self._native)}")
        sizes = ((name, of.obs, len(self.spec.groups[name].agents)) for name, of in self._native.items())
        spaces = {name: batch_space(space, agents) if agents else space for name, space, agents in sizes}
        found = {name: batched(space, obs[name]) for name, space in spaces.items()}
        (n, *others) = {n for _, n in found.values()}
        if others:
            raise ValueError("the groups differ in their number of environments")
        self._begin(columns := 1 if n is None else n)
        seen = {name: self._observe[name](batch) for name, (batch, _) in found.items()}
        out = self._decide(self._team.row(seen, self._first, alive, action_mask, reward), mode, columns)
        groups = {name: out[name] if self.spec.nested else out for name in self._native}
        self._team.actions = {name: group["action"].cpu().numpy() for name, group in groups.items()}
        actions = {name: self._execute[name](x) for name, x in self._team.actions.items()}
        return {name: action[0] for name, action in actions.items()} if n is None else actions


def load(path: str | Path, device: str | torch.device = "cpu", seed: int | None = None) -> Agent:
    """Load the policy of a run's newest good checkpoint, or of a given checkpoint; with several agents, a ``Team``.

    It needs neither the environment nor the run's hardware, and only the plugins of the algorithm and its models.

    Args:
        path: a run folder, or one of its checkpoints.
        device: device to act on.
        seed: seed of explore mode; None: the run's.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read or used here.
        ConfigError: there is no such device.
    """
    checkpoint = find(Path(path), ("weights",), tell=warnings.warn)
    core = core_of(checkpoint.manifest["config"] | ({} if seed is None else {"seed": seed}))
    algorithm, ctx, normalize = restored(checkpoint, torch.device(device), core, warnings.warn)
    return (Team if ctx.spec.has_agents else Agent)(algorithm, ctx, checkpoint.manifest["env_steps"], normalize)


def core_of(raw: Mapping[str, Any]) -> Core:
    return typed(Core, {key: raw[key] for key in CORE if key in raw})


def restored(
    checkpoint: Checkpoint, device: torch.device, core: Core, tell: Callable[[str], None]
) -> tuple[Algorithm, RunContext, Normalizer]:
    """Return the algorithm with its weights, its context, and the normalization of observations."""
    manifest, raw = checkpoint.manifest, migrate(checkpoint.manifest["config"], ("algo", "model"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("", f"there is no device {device} here; use cpu")
    used = {key: origin for key, origin in manifest["plugins"].items() if kind_of(key) in ("algo", "model")}
    for note in check_installed(used):
        tell(note)
    spec, algo = playable(manifest["spec"]), choose("algo", "algo", raw["algo"])
    slots = {slot: node or raw["model"] for slot, node in raw.items() if kind_of(slot) == "model"}  # as config.parse
    models = {slot: choose("model", slot, node) for slot, node in slots.items()}
    run = {name: getattr(core, name) for name in ("num_envs", "total_steps", "seed", "preprocess")}
    tempo = {name: manifest[name] for name in ("rollout_length", "batch_size")}
    weights: dict[str, Any] = checkpoint.tree("weights")
    try:
        needs = needs_of(algo, models.values(), spec)
        ctx = RunContext(spec=spec, needs=needs, slots=models, device=device, **run, **tempo)
        ctx.make_env = lambda of: choose("env", "env", raw["env"]).build(of)  # only for simulators
        with torch.random.fork_rng(devices=[]):  # keep the caller's generators unchanged
            algorithm = algo.build(ctx).to(device)
        columns = len(weights["normalizer"].get("returns", ()))  # environments of rank 0
        normalizer = Normalizer(core.preprocess, spec, columns).to(device)
        algorithm.load_state_dict(weights["algorithm"])
        normalizer.load_state_dict(weights["normalizer"])
        refuse_nan(algorithm.named_parameters())
    except MISFITS as error:
        reason = [line.strip() for line in (str(error) or type(error).__name__).splitlines()][:2][-1]
        raise CheckpointError(f"{checkpoint.path} does not fit algo {algo.name!r} as it is now: {reason}") from None
    ctx.schedules.refresh(checkpoint.steps)
    return algorithm, ctx, normalizer
