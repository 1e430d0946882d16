"""Using what a run has learned: from a checkpoint alone, without the run's GPU, and to act without its environment."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from gymnasium.spaces import Dict, Discrete, MultiDiscrete, Space, Tuple, flatdim

from rlplug import tree
from rlplug.api import Algorithm, Plan, VecEnv
from rlplug.checkpointing.reading import Checkpoint, find
from rlplug.config import Chosen, Core, choose, migrate, typed
from rlplug.config.overrides import change
from rlplug.config.run import CORE, kind_of
from rlplug.context import EnvShard, RunContext, needs_of
from rlplug.distributed.torch_setup import set_up_torch
from rlplug.envs.spaces import execute, observe
from rlplug.envs.spec_json import from_json, mismatch
from rlplug.evaluation.evaluator import Evaluator
from rlplug.registry.installed import check_installed
from rlplug.trainer.normalize import Normalizer
from rlplug.types import Batch, CheckpointError, ConfigError, Mode

EVALUABLE = ("eval.episodes", "seed", "env", "hardware", "deterministic")
"""what may change for an evaluation"""
WHY = f"an evaluation may change {', '.join(EVALUABLE)} alone"


class Agent:
    """A trained policy. It takes observations and gives actions as the environment itself has them.

    Attributes:
        spec: the spaces it was trained on.
        env_steps: environment steps that it was trained for.
        algorithm: what acts, with its weights.
    """

    def __init__(self, algorithm: Algorithm, ctx: RunContext, env_steps: int, normalize: Callable[[Any], Any]) -> None:
        self.algorithm, self.spec, self.env_steps = algorithm, ctx.spec, env_steps
        self._ctx, self._normalize = ctx, normalize
        ctx.spec.single_agent  # noqa: B018  raises for several agents
        (self._native,) = (ctx.spec.native_spaces or ctx.spec.groups).values()
        self._observe, self._execute = observe(self._native.obs), execute(self._native.action)
        self._memory = [key for key in ("prev_action", "prev_reward") if key in ctx.needs.keys]
        self.reset()

    def reset(self, ended: Any = None) -> None:
        """The next observations are the first ones of their episodes.

        Args:
            ended: which of a batch of episodes, ``[n]`` bool; None: all, and there may be another number of them.

        Raises:
            ValueError: ``ended`` is not about the episodes that are going on.
        """
        if ended is None:
            self._first: np.ndarray | None = None
            self._carry: Batch = {}
            return
        ended = np.asarray(ended)
        if self._first is None or ended.shape != self._first.shape or ended.dtype != np.bool_:
            going = 0 if self._first is None else len(self._first)
            raise ValueError(
                f"ended should be [{going}] bool, one for each episode, and is {ended.shape} {ended.dtype}"
            )
        self._first |= ended

    def act(self, obs: Any, mode: Mode = "greedy", reward: Any = None, action_mask: Any = None) -> Any:
        """What to do now; a recurrent state is kept until the next call.

        Args:
            obs: one observation, or a batch ``[n, ...]`` of ``n`` environments; a dict or tuple of them for a Dict or
                Tuple space.
            mode: ``greedy``; ``explore`` draws from the policy (exploration modules are for training alone).
            reward: of the last action, ``[n]`` for a batch, for a policy that sees it.
            action_mask: the allowed actions, ``[A]`` or ``[n, A]`` bool; a policy that was trained with masks needs
                it.

        Returns:
            One action, or ``[n, ...]``.

        Raises:
            ValueError: the observation is not of the environment's space, or of another number of environments than
                those whose episodes are going on; or the reward or the mask that the policy sees is missing.
        """
        if mode not in get_args(Mode):
            raise ValueError(f"mode should be one of {', '.join(get_args(Mode))}, and is {mode!r}")
        n = _count(self._native.obs, obs)
        batch = _stacked(self._native.obs, obs, n is None)
        columns = 1 if n is None else n
        self._begin(columns)
        assert self._first is not None
        step = {"obs": self._observe(batch), "is_first": self._first}
        if "prev_action" in self._memory:
            step["prev_action"] = self._zeroed(self._action)
        if "prev_reward" in self._memory:
            if reward is None and not self._first.all():
                raise ValueError("this policy sees the reward of its last action: act(obs, reward=...)")
            before = np.zeros(columns) if reward is None else np.broadcast_to(reward, columns)
            step["prev_reward"] = self._zeroed(before.astype(np.float32))
        if "action_mask" in self.spec.extras:
            step["action_mask"] = self._mask(action_mask, columns)
        with torch.inference_mode(), self._ctx.acting(EnvShard("eval", columns, range(columns))):
            seen = _tensors(step, self._ctx.device)
            seen["obs"] = self._normalize(seen["obs"])
            out, self._carry = self.algorithm.act(seen, self._carry, mode)
        self._action = out["action"].cpu().numpy()
        self._first = np.zeros(columns, np.bool_)
        action = self._execute(self._action)
        return action[0] if n is None else action

    def _mask(self, mask: Any, columns: int) -> np.ndarray:
        size = flatdim(self.spec.extras["action_mask"])
        if mask is None:
            raise ValueError(
                f"this policy was trained with masks of the allowed actions: act(obs, action_mask=...), [{size}] bool"
            )
        mask = np.asarray(mask, np.bool_)
        if mask.shape not in ((size,), (columns, size)):
            raise ValueError(f"action_mask has shape {[*mask.shape]}; [{size}] or [{columns}, {size}] is right")
        mask = np.broadcast_to(mask, (columns, size))
        if not mask.any(-1).all():
            raise ValueError("action_mask forbids every action")
        return mask

    def _begin(self, columns: int) -> None:
        """Episodes in so many columns, unless they are going on already."""
        if self._first is not None and len(self._first) != columns:
            if self._carry or self._memory:
                raise ValueError(
                    f"{columns} observations, but {len(self._first)} episodes are going on; reset() begins new ones"
                )
            self._first = None
        if self._first is None:
            space = self.spec.single_agent.action
            self._first = np.ones(columns, np.bool_)
            self._carry = self.algorithm.initial_carry(columns)
            self._action = np.zeros((columns, *(space.shape or ())), space.dtype)

    def _zeroed(self, values: np.ndarray) -> np.ndarray:
        """Zeros where an episode begins."""
        assert self._first is not None
        return np.where(self._first.reshape(-1, *[1] * (values.ndim - 1)), np.zeros_like(values), values)


def load(path: str | Path, device: str | torch.device = "cpu", seed: int | None = None) -> Agent:
    """The policy of a run, with the weights of its newest good checkpoint, or of a given checkpoint.

    Neither the environment nor the run's hardware is needed, and of plugins only the algorithm and its models.

    Args:
        path: a run folder, or one of its checkpoints.
        device: where it acts.
        seed: of what is drawn in explore mode; None: the run's.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read or used here.
        ConfigError: there is no such device; or several agents were trained, which ``evaluate`` alone can play.
    """
    checkpoint = find(Path(path), ("weights",), tell=warnings.warn)
    own: int = checkpoint.manifest["config"]["seed"]
    algorithm, ctx, normalize = _restored(
        checkpoint, torch.device(device), own if seed is None else seed, warnings.warn
    )
    return Agent(algorithm, ctx, checkpoint.manifest["env_steps"], normalize)


def evaluate(
    path: str | Path, overrides: Sequence[str] = (), tell: Callable[[str], None] = warnings.warn
) -> dict[str, Any]:
    """Play greedy episodes in a run's environment. Writes nothing.

    With the run's own ``seed`` and ``eval.episodes`` they are the episodes of the run's own evaluation at the
    checkpoint's step. They are played on one device of the run's hardware; where that is not available, and
    ``overrides`` choose no other, on the processor.

    Args:
        path: a run folder, whose newest good checkpoint is played, or one of its checkpoints.
        overrides: ``eval.episodes=100``, ``seed=7``, ``hardware=cpu``, ``env.max_episode_steps=50``,
            ``+env.kwargs.g=9.8``, as on the command line.
        tell: is given, line by line, what a person should know.

    Returns:
        ``checkpoint``, ``env_steps``, ``episodes``, ``seed`` and the metrics ``eval/...``.

    Raises:
        CheckpointError: as ``load``.
        ConfigError: the overrides cannot be followed, or make another environment of it.
    """
    checkpoint = find(Path(path), ("weights",), tell)
    manifest = checkpoint.manifest
    raw = change(migrate(manifest["config"], ("env", "hardware")), overrides, EVALUABLE, WHY)
    core = typed(Core, {key: raw[key] for key in CORE if key in raw})
    if raw["env"]["name"] == manifest["config"]["env"]["name"]:
        check_installed({"env": manifest["plugins"]["env"]})
    env = choose("env", "env", raw["env"])
    plan = _plan(raw, any(re.match(r"\+*hardware\b", override) for override in overrides), tell)
    set_up_torch(plan, core.deterministic)
    algorithm, ctx, normalize = _restored(checkpoint, torch.device(plan.accelerator), core.seed, tell)

    def make(shard: EnvShard) -> VecEnv:
        made = env.build(ctx.derive(shard=shard))
        now = replace(made.spec, max_episode_steps=ctx.spec.max_episode_steps)
        if difference := mismatch(ctx.spec, now):
            made.close()
            raise ConfigError("env", f"is not what {checkpoint.path} was trained on: {difference}")
        return made

    with closing(Evaluator(make, algorithm, ctx, core.eval.episodes, normalize)) as evaluator:
        returns, lengths = zip(*evaluator.play(manifest["env_steps"]), strict=True)
    return {
        "checkpoint": str(checkpoint.path),
        "env_steps": manifest["env_steps"],
        "episodes": len(returns),
        "seed": core.seed,
        "eval/return_mean": float(np.mean(returns)),
        "eval/return_std": float(np.std(returns)),
        "eval/return_min": float(np.min(returns)),
        "eval/return_max": float(np.max(returns)),
        "eval/length_mean": float(np.mean(lengths)),
    }


def _plan(raw: Mapping[str, Any], asked_for: bool, tell: Callable[[str], None]) -> Plan:
    try:
        plan: Plan = choose("hardware", "hardware", raw["hardware"]).build(None).plan()
        if plan.accelerator == "cuda" and not torch.cuda.is_available():  # it was another machine's
            raise ConfigError("hardware", "needs a CUDA device, and none is found here")
        return plan
    except ConfigError as error:
        if asked_for:
            raise
        tell(f"evaluating on the processor, since the run's hardware is not here: {error}")
        return Plan()


def _restored(
    checkpoint: Checkpoint, device: torch.device, seed: int, tell: Callable[[str], None]
) -> tuple[Algorithm, RunContext, Callable[[Any], Any]]:
    """The algorithm with its weights, the context it was built in, and what it sees of an observation.

    The caller's random numbers stay as they are.
    """
    manifest, raw = checkpoint.manifest, migrate(checkpoint.manifest["config"], ("algo", "model"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("", f"there is no device {device} here; cpu works")
    used = {key: origin for key, origin in manifest["plugins"].items() if kind_of(key) in ("algo", "model")}
    for note in check_installed(used):
        tell(note)
    spec = from_json(manifest["spec"])
    algo, models = choose("algo", "algo", raw["algo"]), _models(raw)
    ctx = RunContext(
        spec=spec,
        needs=needs_of(algo, models.values(), spec),
        slots=models,
        device=device,
        num_envs=raw["num_envs"],
        total_steps=raw["total_steps"],
        rollout_length=manifest["rollout_length"],
        batch_size=manifest["batch_size"],
        seed=seed,
        deterministic=raw["deterministic"],
    )
    with torch.random.fork_rng(devices=[]):
        algorithm = algo.build(ctx).to(device)
    seen: dict[str, Any] = checkpoint.tree("weights")["normalizer"]
    columns = len(seen.get("returns", ()))  # the first rank's environments
    normalizer = Normalizer(typed(Core, {key: raw[key] for key in CORE if key in raw}).preprocess, spec, columns).to(
        device
    )
    try:
        algorithm.load_state_dict(checkpoint.tree("weights")["algorithm"])
        normalizer.load_state_dict(seen)
    except (RuntimeError, KeyError) as error:
        reason = [line.strip() for line in str(error).splitlines()][:2][-1]
        raise CheckpointError(f"{checkpoint.path} does not fit algo {algo.name!r} as it is now: {reason}") from None
    ctx.schedules.refresh(manifest["env_steps"])
    return algorithm, ctx, normalizer


def _models(raw: Mapping[str, Any]) -> dict[str, Chosen]:
    """By slot; an empty slot holds ``model``."""
    slots = {key: node for key, node in raw.items() if kind_of(key) == "model"}
    return {slot: choose("model", slot, raw["model"] if node is None else node) for slot, node in slots.items()}


def _count(space: Space[Any], obs: Any) -> int | None:
    """How many observations these are; None: it is one, without a leading axis.

    Raises:
        ValueError: they are not of the space.
    """
    if isinstance(space, Tuple):
        if not isinstance(obs, tuple) or len(obs) != len(space.spaces):
            got = f"{len(obs)} parts" if isinstance(obs, tuple) else f"a {type(obs).__name__}"
            raise ValueError(f"the observation is {got}; the observation space is {space}")
        return _same([_count(sub, part) for sub, part in zip(space.spaces, obs, strict=True)], space)
    if isinstance(space, Dict):
        if not isinstance(obs, Mapping) or obs.keys() != space.spaces.keys():
            got = f"a dict of {', '.join(map(str, obs))}" if isinstance(obs, Mapping) else f"a {type(obs).__name__}"
            raise ValueError(f"the observation is {got}; the observation space is {space}")
        return _same([_count(sub, obs[key]) for key, sub in space.spaces.items()], space)
    x = np.asarray(obs)
    assert space.shape is not None
    lead = x.ndim - len(space.shape)
    if lead not in (0, 1) or x.shape[lead:] != space.shape:
        shape = ", ".join(map(str, space.shape))
        raise ValueError(
            f"the observation has shape [{', '.join(map(str, x.shape))}]; the observation space is {space}:"
            f" [{shape}], or [n{', ' * bool(shape)}{shape}] for n of them"
        )
    dtype = np.dtype(space.dtype)
    if x.dtype.kind not in ("iubf" if dtype.kind == "f" else "iub"):
        raise ValueError(f"the observation is of type {x.dtype}; the observation space is {space}")
    return len(x) if lead else None


def _same(counts: Sequence[int | None], space: Space[Any]) -> int | None:
    if len(set(counts)) != 1:
        raise ValueError(f"the parts of the observation differ in their leading axis; the space is {space}")
    return counts[0]


def _stacked(space: Space[Any], obs: Any, one: bool) -> Any:
    """With a leading axis."""
    if isinstance(space, Tuple):
        return tuple(_stacked(sub, part, one) for sub, part in zip(space.spaces, obs, strict=True))
    if isinstance(space, Dict):
        return {key: _stacked(sub, obs[key], one) for key, sub in space.spaces.items()}
    x = np.asarray(obs)
    if isinstance(space, Discrete | MultiDiscrete):
        n = space.n if isinstance(space, Discrete) else space.nvec
        if np.any(x < space.start) or np.any(x >= space.start + n):
            raise ValueError(f"the observation {x.tolist()} is outside of the observation space, {space}")
    return x[None] if one else x


def _tensors(arrays: Any, device: torch.device) -> Any:
    """Return tensors in memory of their own, so that the caller may go on to use his arrays."""
    return tree.map(lambda x: torch.from_numpy(np.array(x, order="C")).to(device), arrays)
