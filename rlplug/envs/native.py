"""Environments with their own vector implementation."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from rlplug import tree
from rlplug.envs.checking import MisfitError, began, check_seeds, column, described, reader, rules_broken, take_over
from rlplug.envs.masks import find_masks, late
from rlplug.envs.seeded import close
from rlplug.envs.snapshot import restore, snapshot
from rlplug.envs.spaces import execute, single_agent
from rlplug.envs.wrapping import has_mask, view
from rlplug.types import Batch, ConfigError, EnvTraits, RunError, Tree


class NativeVector:
    """Adapts a ``gymnasium.vector.VectorEnv`` with any autoreset mode to ``VecEnv``.

    ``NEXT_STEP`` gives one row per step. In ``SAME_STEP``, and in ``DISABLED``, where this adapter resets ended columns
    at once, an ended column has two rows after one step: ``step`` then returns the first observation of the new episode
    in ``obs``, and, whenever a column ended, ``final_obs [B, ...]``: its final observation, and ``obs`` in the other
    columns (likewise ``final_action_mask``). An ended column is then one row ahead of the others: ``autoreset`` is
    ``SAME_STEP``.

    The generators of a vector environment continue over episodes, mostly one for all columns: an episode has no seed of
    its own. Only Gymnasium's SyncVectorEnv and AsyncVectorEnv, and vectors with an attribute ``independent = True``,
    whose ``reset`` takes one seed per column, use the seeds of single columns. ``state`` returns the environment's
    attributes if all of them can be read.

    The arrays that ``reset`` and ``step`` return may be overwritten by the next call.

    Args:
        env: the environment; this adapter owns and closes it.
        max_episode_steps: steps after which its episodes truncate; None: never, or unknown.
        frame_stack, mask_key, check_bounds, env_ids, seed_bits: as for ``EnvList``; the mask may also be in a Dict
        observation, and a vector with one seed for all columns always gets 31 bits.
        drop, select: see ``wrapping.view``.

    Raises:
        ConfigError: the environment does not declare an autoreset mode, or its spaces are not supported; it
        belongs to another vector, or two of its columns are one object.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        max_episode_steps: int | None = None,
        *,
        frame_stack: int = 1,
        mask_key: str | None = None,
        check_bounds: bool = True,
        env_ids: Sequence[int] | None = None,
        seed_bits: int = 32,
        drop: Sequence[str] = (),
        select: Sequence[int] | None = None,
    ) -> None:
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise ConfigError(
                "env.id", f"{env} does not declare its autoreset mode: metadata['autoreset_mode'] is {mode!r}"
            )
        self.env = env
        self._vector: Any = env.unwrapped
        take_over([env, *getattr(self._vector, "envs", ())])
        # Actions come from a policy for this space; the assertion takes a sixth of the time of CartPole's step.
        vars(env.unwrapped.action_space)["contains"] = lambda action: True
        self.num_envs = n = env.num_envs
        self.env_ids = list(range(n) if env_ids is None else env_ids)
        self.autoreset = mode
        self._mode = mode
        space, action_space = env.single_observation_space, env.single_action_space
        self._in_obs = mask_key if has_mask(space, mask_key) else None
        left, _ = view(space, [self._in_obs] if self._in_obs else [], None)
        shown, self._view = view(left, drop, select)
        self._seeds, self._steps, self._mask_key = [0] * n, 0, mask_key
        self._unused_bits = (
            0 if hasattr(self._vector, "replay") else 32 - seed_bits
        )  # such a vector continues from an EnvList's state
        known = isinstance(self._vector, SyncVectorEnv | AsyncVectorEnv)
        independent = getattr(self._vector, "independent", known)
        self.traits = EnvTraits(check_bounds=check_bounds, independent=independent)
        self._masks = None if mask_key is None else find_masks(action_space, mask_key, self._info(*self._reset()))
        mask_size = self._masks.size if self._masks else None
        self.spec = single_agent(shown, action_space, max_episode_steps, frame_stack, mask_size)
        self._read, self._read_one, self._execute = reader(shown, n), reader(shown), execute(action_space)

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        """Start an episode in every column.

        Raises:
            ValueError: there is not one seed per column.
            RunError: the environment raises, or returns values outside its spaces.
        """
        check_seeds(seeds, self.num_envs)
        self._seeds, self._steps = [int(seed) for seed in seeds], 0
        obs, info = self._reset()
        self._refuse_late_masks(info)
        batch = {"obs": self._observe(obs)}
        if self._masks is not None:
            none = np.zeros(self.num_envs, np.bool_)
            batch["action_mask"] = self._allowed(self._info(obs, info), none, none)
        return batch

    def assign(self, tasks: Tree) -> None:
        raise NotImplementedError("a native vector has no tasks")

    def step(self, action: np.ndarray) -> Batch:
        """Step every column. See the class for ``final_obs``.

        Raises:
            RunError: as for ``reset``.
        """
        try:
            obs, reward, terminated, truncated, info = self.env.step(self._execute(action))
        except (Exception, SystemExit) as error:
            raise self._failure("step", error) from error
        self._steps += 1
        batch: Batch
        try:
            self._refuse_late_masks(described("step", info))
            batch = {"reward": column("reward", reward, (self.num_envs,), "fiub").astype(np.float32, copy=False)}
            for key, ends in (("terminated", terminated), ("truncated", truncated)):
                batch[key] = column(key, ends, (self.num_envs,), "biu").astype(np.bool_, copy=False)
        except MisfitError as error:
            raise RunError(f"{self._place(self.env_ids)}: {error}") from error
        if self.autoreset is not AutoresetMode.NEXT_STEP:
            ended = batch["terminated"] | batch["truncated"]
            if ended.any():
                batch, obs, info = self._restarted(batch, obs, info, ended)
        batch["obs"] = self._observe(obs)
        if self._masks is not None:
            going = np.zeros(self.num_envs, np.bool_)
            ends = (
                (batch["terminated"], batch["truncated"])
                if self.autoreset is AutoresetMode.NEXT_STEP
                else (going, going)
            )
            batch["action_mask"] = self._allowed(self._info(obs, info), *ends)
            if "final_action_mask" in batch:
                batch["final_action_mask"] = np.where(ended[:, None], batch["final_action_mask"], batch["action_mask"])
        return batch

    def state(self) -> Tree | None:
        """Return the environment's attributes, or None if they are not all numbers, arrays and generators."""
        return snapshot(self.env)

    def load(self, state: Tree) -> None:
        """Restore ``state``, or, in a vector with ``replay``, the state of an ``EnvList``."""
        if isinstance(state, dict):
            self._vector.replay(state["seeds"], state["episodes"], state["actions"])
        else:
            restore(self.env, state)

    def close(self) -> None:
        close(self.env)

    def _reset(self) -> tuple[Any, Any]:
        # VectorEnv.reset only guarantees to accept one int; 31 bits, because some are implemented in C++.
        one = int(np.random.SeedSequence(self._seeds).generate_state(1)[0]) >> 1
        each: Any = [seed >> self._unused_bits for seed in self._seeds]
        try:
            return began(self.env.reset(seed=each if self.traits.independent else one))
        except MisfitError as error:
            raise RunError(f"{self._place(self.env_ids)}: {error}") from error
        except (Exception, SystemExit) as error:
            raise self._failure("reset", error) from error

    def _restarted(self, batch: Batch, obs: Any, info: Any, ended: np.ndarray) -> tuple[Batch, Any, Any]:
        """Return ``batch`` with the final rows of ended columns, and ``obs`` and ``info`` of the rows after them."""
        batch = tree.map(np.array, batch | {"final_obs": self._observe(obs)})  # a reset may overwrite these
        key = self._masks.key if self._masks else ""
        if self._mode is AutoresetMode.DISABLED:
            masks = [_of(self._info(obs, info), key, i) for i in range(self.num_envs)]
        else:
            masks: list[Any] = [None] * self.num_envs
            for i in map(int, np.flatnonzero(ended)):
                last = _row(info["final_obs"], i)
                tree.put(batch["final_obs"], i, self._read_one(self._view(last)))
                masks[i] = last[key] if self._in_obs else _of(info.get("final_info", {}), key, i)
        if self._masks is not None:
            batch["final_action_mask"] = self._allowed({key: masks}, batch["terminated"], batch["truncated"], ended)
        if self._mode is AutoresetMode.DISABLED:
            try:
                obs, fresh = self.env.reset(options={"reset_mask": ended})
            except (Exception, SystemExit) as error:
                raise self._failure("reset", error) from error
            masks = [_of(fresh, key, i) if ended[i] else mask for i, mask in enumerate(masks)]
            info = {key: masks}
        return batch, obs, info

    def _observe(self, obs: Any) -> Any:
        """Return the inside observations.

        Raises:
            RunError: they do not match their space.
        """
        try:
            return self._read(self._view(obs))
        except MisfitError as error:
            raise RunError(f"{self._place(self.env_ids)}: {error}") from error

    def _info(self, obs: Any, info: Any) -> Any:
        """Return ``info`` with the masks from the observation."""
        return info if self._in_obs is None else {self._in_obs: obs[self._in_obs]}

    def _allowed(
        self, info: Any, terminated: np.ndarray, truncated: np.ndarray, where: np.ndarray | None = None
    ) -> np.ndarray:
        """Return masks ``[B, A]``; everything is allowed outside ``where``."""
        assert self._masks is not None
        out = np.ones((self.num_envs, self._masks.size), np.bool_)
        key = self._masks.key
        for i in range(self.num_envs) if where is None else np.flatnonzero(where):
            one = {key: _of(info, key, int(i))}
            try:
                out[i] = self._masks.read(one, bool(terminated[i] or truncated[i]), bool(terminated[i]))
            except MisfitError as error:
                raise RunError(f"{self._place([self.env_ids[i]])}: {error}") from error
        return out

    def _refuse_late_masks(self, info: Mapping[str, Any]) -> None:
        if self._masks is None and self._mask_key and self._mask_key in info:
            raise RunError(f"{self._place(self.env_ids)}: {late(self._mask_key)}")

    def _place(self, ids: Sequence[int]) -> str:
        of = f"environment {ids[0]}" if len(ids) == 1 else f"environments {ids[0]} to {ids[-1]}"
        return f"{of} (a vector with seeds {_few(self._seeds)}, step {self._steps})"

    def _failure(self, where: str, error: Exception | SystemExit) -> RunError:
        if said := rules_broken(where, error):
            return RunError(f"{self._place(self.env_ids)}: {said}")
        inside = error.__traceback__.tb_next if error.__traceback__ else None
        lines = traceback.format_exception(type(error), error, inside)
        return RunError(f"{self._place(self.env_ids)} raised in {where}():\n{''.join(lines).rstrip()}")


def _of(info: Mapping[str, Any], key: str, i: int) -> Any:
    """Return column ``i`` of a key of a vector's ``info``, or None (see Gymnasium's ``VectorEnv._add_info``)."""
    there = info.get(f"_{key}")
    if key not in info or (there is not None and not there[i]):
        return None
    return info[key][i]


def _row(obs: Any, i: int) -> Any:
    """Return observation ``i`` of a batch in the environment's own space."""
    if isinstance(obs, dict):
        return {key: _row(part, i) for key, part in obs.items()}
    return tuple(_row(part, i) for part in obs) if isinstance(obs, tuple) else obs[i]


def _few(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds[:4])) + (", ..." if len(seeds) > 4 else "")
