"""Runs from Python: train with objects of a script, drive a run round by round, and read its results."""

from __future__ import annotations

import json
import math
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rlplug.cli.train import chosen
from rlplug.cli.values import Config, Folder, give, overrides_of, train_words
from rlplug.registry import hookimpl
from rlplug.types import ConfigError, Mode, RunError

if TYPE_CHECKING:
    from rlplug.agent import Agent
    from rlplug.api import Run


class Result(float):
    """The mean return of a run's final evaluation, with the run's folder.

    Attributes:
        folder: the run folder.
    """

    folder: Path

    def __new__(cls, score: float, folder: Folder) -> Result:
        result = super().__new__(cls, score)
        result.folder = Path(folder)
        return result

    def __reduce__(self) -> Any:
        return Result, (float(self), self.folder)  # without the agent

    @property
    def score(self) -> float:
        """Return the mean return of the final evaluation."""
        return float(self)

    @property
    def summary(self) -> dict[str, Any]:
        """Return the content of ``summary.json``."""
        return json.loads((self.folder / "summary.json").read_bytes())

    @property
    def metrics(self) -> Any:
        """Return ``metrics.csv`` as a pandas data frame, with a row per log interval and per evaluation.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
        except ImportError:
            said = f"metrics needs pandas: pip install pandas; the numbers are in {self.folder / 'metrics.csv'}"
            raise ImportError(said) from None
        return pandas.read_csv(self.folder / "metrics.csv")

    @cached_property
    def agent(self) -> Agent:
        """Return the policy of the newest checkpoint; see ``rlplug.load``."""
        from rlplug.agent import load

        return load(self.folder)


def train(
    config: Config = (),
    *,
    env: Any = None,
    model: Any = None,
    callbacks: Any = (),
    folder: Folder | None = None,
    **settings: Any,
) -> Result:
    """Train a run.

    ``train(["algo=sac", "env=pendulum"])``, ``train(algo="sac", env="pendulum", total_steps=10_000)`` and
    ``train(compose(["algo=sac", "env=pendulum"]))`` are the same run. Settings below a key are a mapping,
    ``algo={"name": "sac", "gamma": 0.98}``, or have a dot in their name, ``**{"algo.gamma": 0.98}``.

    Args:
        config: overrides as on the command line, or the result of ``compose``.
        env: a name, a mapping with settings, a class or a function that makes a ``gymnasium.Env``, or such an
            environment, which is copied for every column of the run.
        model: a name, a mapping with settings, or a class of networks, ``Net(space)``; see ``model=custom``.
        callbacks: a class or an object with hooks, or several; see ``docs/hooks.md``.
        folder: the run folder; None: a new one below ``runs``.
        settings: further settings of the run. ``init_from`` may be the weights, a ``state_dict()``.

    Raises:
        ConfigError: the run cannot start as configured; nothing was written.
        RunError: the run failed.
    """
    from rlplug.run import launch

    run, place, command = chosen(train_words(config, env, model, callbacks, folder, settings), folder)
    return Result(launch.train(run, place, command), place)


def resume(
    path: Folder,
    overrides: Sequence[str] = (),
    *,
    env: Any = None,
    model: Any = None,
    callbacks: Any = (),
    eval_function: Callable[..., Any] | None = None,
    tell: Callable[[str], None] = print,
    **settings: Any,
) -> Result:
    """Resume a run from its newest good checkpoint.

    Args:
        path: the run folder.
        overrides: changes to settings that do not affect learning, as on the command line.
        env: the object of the script that the run was trained with, if there is one.
        model: likewise.
        callbacks: likewise.
        eval_function: likewise, of ``eval.function``.
        tell: called with each line for the user.
        settings: changes, as in ``train``: ``total_steps=20_000``.

    Returns:
        The result; the stored one if the run had already finished.

    Raises:
        ConfigError: the run cannot be resumed, or not with these overrides; nothing was written.
        RunError: the run failed.
    """
    from rlplug.run import launch, run_dir

    given = {"env": env, "model": model, "callbacks": callbacks, "eval_function": eval_function}
    give(lambda: run_dir.read(Path(path))[0], **given)
    score = launch.resume(Path(path), [*overrides, *overrides_of(settings)], tell)
    if score is None:
        score = Result(0.0, path).summary.get("eval/return_mean", math.nan)
    return Result(score, path)


def evaluate(
    path: Folder,
    overrides: Sequence[str] = (),
    *,
    mode: Mode = "greedy",
    model: Any = None,
    eval_function: Callable[..., Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Evaluate the newest good checkpoint of a run, or a given checkpoint, as ``rlplug evaluate`` does.

    ``evaluate(folder, seed=7, eval={"episodes": 100})`` plays 100 episodes.

    Args:
        path: a run folder, or one of its checkpoints.
        overrides: as on the command line.
        mode: ``greedy``; ``explore``, which samples from the policy without exploration modules; or ``random``.
        model: the script's class of networks that the run was trained with, if there is one.
        eval_function: likewise, of ``eval.function``.
        settings: as in ``train``. ``env`` is another environment, or the script's that the run was trained with.

    Returns:
        ``checkpoint``, ``env_steps``, ``updates``, ``episodes``, ``seed`` and the metrics ``eval/...``.

    Raises:
        ConfigError: there is no checkpoint, or the settings are invalid or change the environment's spaces.
    """
    from rlplug.results.evaluate import evaluate

    give(lambda: _trained(path), model=model, eval_function=eval_function)
    return evaluate(Path(path), [*overrides, *overrides_of(settings)], mode=mode)


def load(path: Folder, device: Any = "cpu", seed: int | None = None, *, model: Any = None) -> Agent:
    """Load the policy of a run's newest good checkpoint, or of a given checkpoint; with several agents, a ``Team``.

    It needs neither the environment nor the run's hardware, and only the plugins of the algorithm and its models.

    Args:
        path: a run folder, or one of its checkpoints.
        device: device to act on.
        seed: seed of explore mode; None: the run's.
        model: the script's class of networks that the run was trained with, if there is one.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read or used here.
        ConfigError: there is no such device.
    """
    from rlplug import agent

    give(lambda: _trained(path), model=model)
    return agent.load(Path(path), device, seed)


def _trained(path: Folder) -> dict[str, Any]:
    """Return the configuration of the run that wrote a checkpoint."""
    from rlplug.checkpointing.format import find

    return find(Path(path), ("weights",)).manifest["config"]


class Session:
    """A run that the caller drives, one round at a time. ``step`` continues the loop until the end of its round.

        with rlplug.Session(algo="ppo", env="cartpole") as run:
            while not run.done:
                metrics = run.step()
            run.evaluate()

    At the end of the block, a run that is done is evaluated, as by ``train``. A run that is not done is interrupted,
    also if the caller's code raises: it has a checkpoint, from which ``Session.resume`` continues exactly as if the run
    had not stopped. If the run itself raises, it has failed, and continues from its last checkpoint.

    Arguments are those of ``train``.

    Attributes:
        folder: the run folder.
        metrics: the last value of every metric.
    """

    def __init__(
        self,
        config: Config = (),
        *,
        env: Any = None,
        model: Any = None,
        callbacks: Any = (),
        folder: Folder | None = None,
        **settings: Any,
    ) -> None:
        run, self.folder, command = chosen(train_words(config, env, model, callbacks, folder, settings), folder)
        self._start(run.hardware.plan(), "created", run.raw, list(command), list[str]())

    def _start(self, plan: Any, how: str, *args: Any) -> None:
        from rlplug.distributed.fabric import launched_elsewhere

        if plan.world_size > 1 and not launched_elsewhere():
            said = f"has {plan.world_size} ranks, which are processes of their own; a session needs one: devices=1"
            raise ConfigError("hardware", f"{said}, or rlplug.train")
        self._how, self._args, self.metrics = how, (plan, self.folder, *args), dict[str, float]()
        self._stack, self._trainer, self._stopped, self._closed = ExitStack(), None, False, False

    @classmethod
    def resume(
        cls,
        path: Folder,
        overrides: Sequence[str] = (),
        *,
        env: Any = None,
        model: Any = None,
        callbacks: Any = (),
        eval_function: Callable[..., Any] | None = None,
        **settings: Any,
    ) -> Session:
        """Return a session that continues a run from its newest good checkpoint. Arguments and errors as ``resume``."""
        from rlplug.run import run_dir
        from rlplug.run.launch import planned

        self = cls.__new__(cls)
        self.folder = Path(path)
        given = {"env": env, "model": model, "callbacks": callbacks, "eval_function": eval_function}
        give(lambda: run_dir.read(self.folder)[0], **given)
        words = [*overrides, *overrides_of(settings)]
        self._start(planned(self.folder, words), "reopened", words)
        return self

    def __enter__(self) -> Session:
        from rlplug.distributed.fabric import fabric_of
        from rlplug.run import launch

        plan, *args = self._args
        with self._stack as stack:
            opened: Any = getattr(launch, self._how)(fabric_of(plan), print, plan, *args)
            self._trainer = stack.enter_context(opened)
            if self._trainer is None:
                raise RunError(f"{self.folder} has finished; raise total_steps to continue it")
            self._trainer.hooks.register(_Latest(self.metrics))
            stack.enter_context(launch.driven(self._trainer))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        inside = any(frame.f_locals.get("self") is self for frame, _ in traceback.walk_tb(at))
        if isinstance(error, _DoneError) or (isinstance(error, Exception) and not inside):
            kind = error = at = None  # the run itself has not failed
        self._closed = True
        left = error is None and not self.done
        if left:
            self._run.agreement.request_stop(signal.SIGINT)
        try:
            self._stack.__exit__(kind, error, at)
        except KeyboardInterrupt:
            if not left:
                raise

    @property
    def _run(self) -> Any:
        if self._trainer is None:
            raise RunError("the session is not open; write: with rlplug.Session(...) as run")
        return self._trainer

    @property
    def _open(self) -> Any:
        if self._closed:
            said = f"continue the run by rlplug.Session.resume({str(self.folder)!r})"
            raise RunError(f"the session has ended with its block; {said}")
        return self._run

    @property
    def done(self) -> bool:
        """Return whether no round is left: ``total_steps`` or a ``stop`` is reached, or a stop was requested."""
        return self._stopped or self._run.done

    @property
    def env_steps(self) -> int:
        """Return the environment steps so far."""
        return self._run.progress.env_steps

    @property
    def updates(self) -> int:
        """Return the updates so far."""
        return self._run.progress.updates

    @property
    def algorithm(self) -> Any:
        """Return the algorithm, whose weights the next round uses."""
        return self._run.algorithm

    @property
    def result(self) -> Result:
        """Return the score of the last evaluation, and the folder."""
        return Result(self.metrics.get("eval/return_mean", float("nan")), self.folder)

    def step(self) -> dict[str, float]:
        """Make the next round of the run's loop, and return the last value of every metric.

        Before it, the run logs, evaluates and writes a checkpoint, each if it is due.

        Raises:
            RunError: the run is done, or failed.
        """
        from rlplug.collection.play import Stopped

        if self._open and self.done:
            raise _DoneError("the run is done: while not run.done: run.step()")
        try:
            self._run.loop.run(_Round(self._run))
        except _RoundEnd:
            pass
        except Stopped:
            self._stopped = True
        return dict(self.metrics)

    def evaluate(self) -> dict[str, float]:
        """Evaluate now, log the result, and return it. Training is not affected."""
        return self._open.reports.evaluate(self._run)

    def save(self) -> Path:
        """Write a checkpoint now, and return its folder."""
        return self._open.reports.save(self._run)


class _DoneError(RunError):
    """No round is left."""


class _RoundEnd(Exception):  # noqa: N818  it is no error
    """Leaves a loop at the end of a round. A loop keeps no state, so calling it again continues."""


class _Round:
    """The run as its loop sees it, for one round."""

    def __init__(self, run: Any) -> None:
        self._run, self._begun = run, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def report(self) -> None:
        if self._begun:
            raise _RoundEnd
        self._begun = True
        self._run.report()


class _Latest:
    """Keeps the last value of every metric."""

    def __init__(self, metrics: dict[str, float]) -> None:
        self.metrics = metrics

    @hookimpl
    def rlplug_logged(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        self.metrics.update(metrics, step=step)
