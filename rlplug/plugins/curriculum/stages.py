"""Curricula along a given order of tasks: by environment steps, or by a metric."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from pydantic import Field

from rlplug.api import Context, Curriculum
from rlplug.settings import PositiveInt, option, settings
from rlplug.types import ConfigError, Tree

Value = int | float | list[Any]


def task_of(space: Space[Any] | None, value: Any, key: str) -> np.ndarray:
    """Return a task of a space from a value of the configuration.

    Raises:
        ConfigError: the space is none of Box, Discrete and MultiDiscrete, or does not contain the value.
    """
    if not isinstance(space, Box | Discrete | MultiDiscrete):
        raise ConfigError("curriculum", f"supports tasks that are numbers or arrays, but the tasks are {space}")
    try:
        given = np.asarray(value)
        with np.errstate(invalid="ignore"):  # too large for the space
            task = given.astype(space.dtype)
    except ValueError:  # lists of different lengths, texts
        raise ConfigError(key, f"{value} is no task; the tasks are {space}") from None
    exact = space.dtype.kind == "f" or (task == given).all()
    if not exact or not space.contains(task if task.shape else task[()]):
        raise ConfigError(key, f"{value} is no task; the tasks are {space}")
    return task


def numbers(task: np.ndarray) -> dict[str, float]:
    """Return a task as metrics: ``task``, or ``task_0``, ``task_1`` ... of an array."""
    names = ["task"] if not task.shape else [f"task_{i}" for i in range(task.size)]
    return dict(zip(names, map(float, task.flat), strict=True))


class Linear(Curriculum):
    """Interpolates between two tasks over the steps of the run, rounded to integers where tasks are integers.

    Raises:
        ConfigError: a task is not in the environment's space of tasks.
    """

    @settings
    class Config:
        start: Value = option("First task: a number or a list.")
        end: Value = option("Task from step ``steps`` on.")
        steps: PositiveInt = option("Steps of the run over which the task changes.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.ctx, space = ctx, ctx.spec.tasks
        self.start, self.end = (task_of(space, getattr(cfg, key), f"curriculum.{key}") for key in ("start", "end"))
        self.fraction = ctx.schedule([(0, 0.0), (cfg.steps, 1.0)])

    @property
    def task(self) -> np.ndarray:
        """Return the current task."""
        between = self.start + (self.end.astype(np.float64) - self.start) * self.fraction.item()
        return (between if self.start.dtype.kind == "f" else np.rint(between)).astype(self.start.dtype)

    def tasks(self) -> Tree:
        return np.stack([self.task] * self.ctx.num_envs)

    def metrics(self) -> dict[str, float]:
        return {"fraction": self.fraction.item()} | numbers(self.task)


class Threshold(Curriculum):
    """Plays the next stage when a logged metric reaches a level.

    Raises:
        ConfigError: a stage is not in the environment's space of tasks.
    """

    @settings
    class Config:
        stages: Annotated[list[Value], Field(min_length=1)] = option("Tasks, in order: numbers or lists.")
        metric: Annotated[str, Field(min_length=1)] = option("Metric that has to reach the level.")
        level: float = option("Value of the metric at which the next stage begins.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.ctx, self.metric, self.level = ctx, cfg.metric, cfg.level
        self.stages = [task_of(ctx.spec.tasks, value, "curriculum.stages") for value in cfg.stages]
        self.stage: torch.Tensor
        self.register_buffer("stage", torch.tensor(0))

    def tasks(self) -> Tree:
        return np.stack([self.stages[int(self.stage)]] * self.ctx.num_envs)

    def read(self, value: float) -> None:
        if value >= self.level:
            self.stage += int(self.stage < len(self.stages) - 1)

    def metrics(self) -> dict[str, float]:
        return {"stage": float(self.stage)} | numbers(self.stages[int(self.stage)])
