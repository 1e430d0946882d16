"""Tasks of the DeepMind Control suite (arXiv:1801.00690)."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict

from rlplug.api import Context, VecEnv
from rlplug.envs import EnvList, Subprocess, Wrapping
from rlplug.envs.subprocess import check_workers
from rlplug.settings import NonNegativeInt, PositiveInt, option, settings
from rlplug.types import ConfigError


@settings
class Config:
    domain: str = option("Domain of the suite, such as cheetah.")
    task: str = option("Task of that domain, such as run.")
    max_episode_steps: PositiveInt | None = option("Truncate episodes after this many steps; null: the task's limit.")
    frame_skip: PositiveInt = option("Repeat every action this many times and sum the rewards.")
    pixels: PositiveInt | None = option("Height and width of image observations; null: the task's vector observations.")
    camera: NonNegativeInt = option("Index of the camera that renders the images.")
    frame_stack: PositiveInt = option(
        "Stack this many images, oldest first, on the first axis; black before the first one."
    )
    vectorization: Literal["list", "subprocess"] = option(
        "list: environments in a loop; subprocess: lists of environments in processes."
    )
    workers: PositiveInt | None = option("Number of processes for vectorization=subprocess; null: number of cores.")


class DMControl(VecEnv):
    """Makes a vector of one task for each of ``ctx.env_ids``.

    Raises:
        ConfigError: dm-control is not installed, has no such task or camera, or cannot render.
    """

    Config = Config

    def __new__(cls, cfg: Config, ctx: Context) -> VecEnv:  # type: ignore[misc]
        wrapping = Wrapping(
            max_episode_steps=cfg.max_episode_steps, frame_skip=cfg.frame_skip, frame_stack=cfg.frame_stack
        )
        check_workers(cfg)
        make = partial(_make, cfg.domain, cfg.task, wrapping, cfg.pixels, cfg.camera)
        first = make()
        options: dict[str, Any] = {
            "max_episode_steps": wrapping.limit(first.unwrapped.max_episode_steps),  # type: ignore[attr-defined]
            "frame_stack": cfg.frame_stack,
            "env_ids": ctx.env_ids,
        }
        if cfg.vectorization == "subprocess" and not ctx.render:
            first.close()
            return Subprocess(make, workers=cfg.workers, **options)
        return EnvList([first, *(make() for _ in ctx.env_ids[1:])], **options)


def _make(domain: str, task: str, wrapping: Wrapping, pixels: int | None, camera: int) -> gymnasium.Env[Any, Any]:
    endless = wrapping.max_episode_steps is not None
    return wrapping(ControlEnv(domain, task, endless, pixels, camera))


class ControlEnv(gymnasium.Env[Any, np.ndarray]):
    """A task of the suite as a Gymnasium environment.

    Observations are a Dict of float32 vectors, scalars with length 1, or images ``[pixels, pixels, 3]``. An episode
    terminates if the task's discount is 0, and is truncated at the time limit. It depends only on the seed.

    Args:
        endless: remove the time limit.
        pixels: height and width of the images; None: the task's vector observations.
        camera: index of the camera that renders them.

    Raises:
        ConfigError: as ``DMControl``.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  as Gymnasium declares it
    render_mode = "rgb_array"

    def __init__(
        self, domain: str, task: str, endless: bool = False, pixels: int | None = None, camera: int = 0
    ) -> None:
        # The task's generator may sample the model (lqr): with one seed for all, every environment has the same one.
        kwargs = {"random": 0} | ({"time_limit": float("inf")} if endless else {})
        self.env = _suite(domain, task).load(domain, task, task_kwargs=kwargs)
        limit = self.env._step_limit
        self.max_episode_steps = int(limit) if np.isfinite(limit) else None
        self.pixels, self.camera = pixels, camera
        cameras = self.env.physics.model.ncam
        if camera >= max(cameras, 1):
            raise ConfigError("env.camera", f"is {camera}, but {domain} has {cameras} cameras, counted from 0")
        action = self.env.action_spec()
        self.action_space = Box(action.minimum.astype(np.float32), action.maximum.astype(np.float32))
        if pixels is not None:
            try:
                self.render()
            except Exception as error:
                raise ConfigError(
                    "env.pixels", f"rendering failed ({error}); set MUJOCO_GL to egl, osmesa or glfw"
                ) from error
            self.observation_space = Box(0, 255, (pixels, pixels, 3), np.uint8)
        else:
            shapes = {key: part.shape or (1,) for key, part in self.env.observation_spec().items()}
            self.observation_space = Dict({key: Box(-np.inf, np.inf, shape) for key, shape in shapes.items()})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.env.task.random.seed(seed)
        return self._obs(self.env.reset()), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        now = self.env.step(action)
        terminated = bool(now.last() and now.discount == 0)
        return self._obs(now), float(now.reward), terminated, now.last() and not terminated, {}

    def render(self) -> Any:
        """Return the camera image ``[H, W, 3]``."""
        size = (self.pixels, self.pixels) if self.pixels else (240, 320)
        return self.env.physics.render(*size, camera_id=self.camera)

    def close(self) -> None:
        self.env.close()

    def _obs(self, now: Any) -> Any:
        if self.pixels is not None:
            return self.render()
        return {key: np.atleast_1d(np.asarray(part, np.float32)) for key, part in now.observation.items()}


def _suite(domain: str, task: str) -> Any:
    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # headless rendering; read when dm_control is imported
    try:
        from dm_control import suite
    except ImportError as error:
        raise ConfigError("env.name", f"dm_control cannot be imported ({error}): pip install 'rlplug[dmc]'") from error
    if (domain, task) in suite.ALL_TASKS:
        return suite
    tasks = [name for other, name in suite.ALL_TASKS if other == domain]
    if tasks:
        raise ConfigError("env.task", f"{domain} has no task {task!r}; it has {', '.join(tasks)}")
    domains = ", ".join(dict.fromkeys(other for other, _ in suite.ALL_TASKS))
    raise ConfigError("env.domain", f"the suite has no domain {domain!r}; it has {domains}")
