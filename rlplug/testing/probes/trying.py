"""Train algorithms on the probes that they support, and compare the result with the exact solution."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlplug import registry, tree
from rlplug.api import Algorithm, Losses
from rlplug.buffer.episodes import OF_EPISODE
from rlplug.collection.play import MOST_COLUMNS
from rlplug.config import RunConfig, parse
from rlplug.context import EnvShard, RunContext, needs_of
from rlplug.evaluation.evaluator import Evaluator
from rlplug.registry import Kind as ComponentKind
from rlplug.registry import hookimpl
from rlplug.run.build import build
from rlplug.testing.checks import stored
from rlplug.testing.checks.matrix import put, raw_of
from rlplug.testing.checks.runs import CPU, option_of, require, watch
from rlplug.testing.probes.quick import SETTINGS, set_options
from rlplug.testing.probes.worlds import PROBES, Kind, Probe, make
from rlplug.trainer.trainer import Trainer
from rlplug.types import Batch, ConfigError, EnvSpec

ID = "rlplug.testing.probes.worlds:Probe-v0"
EPISODES = 32
"""episodes of an evaluation"""
RECORDED, REMEMBERED = 1500, 6000
"""steps of the dataset for offline algorithms, and of the one for recurrent policies, with cues of every age"""
FIRST, GROWTH = 128, 1.6
"""gradient steps before the first evaluation, and growth factor between evaluations"""
LEAST, STUCK = 500, 0.8
"""minimum gradient steps before giving up, and the ratio to the error two evaluations before that is no progress"""
MOST, MOST_STEPS = 5000, 60_000
"""maximum gradient steps and environment steps"""


def kind_of(algorithm: str, probe: Probe, overrides: Sequence[str] = ()) -> Kind | None:
    """Return the kind of actions with which an algorithm supports a probe, or None.

    Its ``needs`` must accept the spaces, it must read masks if there are any, ``recurrent`` must accept a recurrent
    model if the probe needs memory, and it must discount (an option ``gamma``) if rewards are delayed. World models
    are tried on independent rounds only.
    """
    return next((kind for kind in probe.kinds if _serves(algorithm, probe, kind, overrides)), None)


def _serves(algorithm: str, probe: Probe, kind: Kind, overrides: Sequence[str]) -> bool:
    cls: type[Algorithm] = registry.load("algo", algorithm)
    config = _config(algorithm, probe, kind, overrides)
    with closing(config.env.build(_one_env())) as env:
        try:
            needs = needs_of(config.algo, config.models.values(), env.spec)
        except ConfigError:
            return False
    if probe.mask and "action_mask" not in needs.keys:
        return False
    if probe.stale and (config.loop.cls.reads or not needs.off_policy or needs.data != "segments"):
        return False
    if stored.fills_itself(config.buffer.name):  # with data that is not the probe's
        return False
    if not needs.rewards:  # it imitates, or compares the returns of single episodes
        compares = config.loop.name == "population" and not probe.noisy and bool(probe.best)
        return compares or bool(config.loop.cls.reads and (probe.best or probe.target))
    if probe.steps > 1 and not probe.memory and not hasattr(config.algo.cfg, "gamma"):
        return False
    if probe.steps > 1 and cls.needs(config.algo.cfg, env.spec).window.stride:  # a world model learns longer than that
        return False
    judged = type(None) if cls.values is Algorithm.values else cls
    return bool(probe.best or probe.target) or judged is cls


def _one_env() -> Any:
    return RunContext(spec=EnvSpec({})).derive(shard=EnvShard("learner", 1, range(1)))


def _config(algorithm: str, probe: Probe, kind: Kind, overrides: Sequence[str], data: str | None = None) -> RunConfig:
    """Return the config of a small run of an algorithm on a probe, with its manifest's overrides and ``overrides``.

    Raises:
        ConfigError: an option is invalid.
    """
    own = [f"algo={option_of('algo', algorithm)}", *CPU]
    plain = parse(raw_of(own))
    reads, windows = plain.loop.cls.reads, "windows" in plain.buffer.cls.gives
    more = [word for word in (*registry.tried_with("algo", algorithm), *overrides) if not word.startswith("env")]
    if reads:  # it trains on a dataset
        more = [word for word in more if not word.startswith(("loop=", "rollout_fragment_length=", "total_steps="))]
    words = [*own, "env=gymnasium", f"env.id={ID}", f"+env.kwargs.probe={probe.name}", f"+env.kwargs.action={kind}"]
    words += ["env.vectorization=list", *probe.words]
    words += ["preprocess.normalize_obs=false", "preprocess.normalize_reward=false"]
    if probe.memory:
        words += ["model=gru", "critic_model=null", *(["buffer=sequence", "buffer.alpha=0.0"] if windows else [])]
    else:
        words += ["model=mlp", "critic_model=null"]
        words += ["buffer=prioritized"] if probe.surprises and windows and not reads else []
    raw = raw_of([*words, *(word for word in more if "." not in word.partition("=")[0])])
    raw["algo"] |= {"gamma": probe.gamma} if "gamma" in raw["algo"] else {}
    for group, values in SETTINGS.items():
        if not group:
            raw |= {key: value for key, value in values.items() if raw[key] is not None}
        elif isinstance(raw[group], dict):
            set_options(raw[group], values)
    if probe.memory and windows:  # of sequences
        raw["train_batch_size"] = 16
    if reads:
        raw |= {"num_envs": 1, "num_steps_sampled_before_learning_starts": 0}
        raw["data"]["path"] = data
        set_options(raw["buffer"] or {}, {"capacity": 2 * REMEMBERED})
    if probe.stale and "broadcast_interval" in raw["loop"]:
        raw["loop"]["broadcast_interval"] = 10**6
    for word in more:
        put(raw, word)
    return parse(raw)


# ---- training --------------------------------------------------------------------------------------------------------


class Steps:
    """A hook that ends a run after a number of gradient steps, or of updates without gradient steps."""

    def __init__(self) -> None:
        self.made, self.updates, self.until = 0, 0, 0

    @hookimpl
    def rlplug_updated(self, run: Any, losses: Losses) -> None:
        self.updates += 1
        if self.count >= self.until or run.progress.env_steps >= MOST_STEPS:
            run.agreement.request_stop(1)

    @property
    def count(self) -> int:
        return max(self.made, self.updates)


@dataclass
class Found:
    """The learned values and actions.

    Args:
        values: values by state; NaN: not visited.
        actions: greedy actions by state.
        wrong: description of the differences from the exact solution; empty: none.
        steps: gradient steps.
        error: sum of the errors of values, in units of their tolerance, and of actions.
    """

    values: dict[int, float]
    actions: dict[int, list[float]]
    wrong: list[str]
    steps: int = 0
    error: float = 0.0


def check_probe(algorithm: str, probe: Probe, kind: Kind, overrides: Sequence[str] = ()) -> None:
    """Train an algorithm on a probe, and compare the result with the exact solution.

    Raises:
        AssertionError: they differ; the message has both.
    """
    found = learn(algorithm, probe, kind, overrides)
    require(
        not found.wrong,
        f"after {found.steps} gradient steps on the probe {probe.name!r} {'; '.join(found.wrong)}. This happens to"
        f" an algorithm that {probe.shows}. If it only learns slowly, its manifest can set options:"
        " Component(..., tried_with=('algo.<option>=<value>',))",
    )


def check_with(kind: ComponentKind, option: str, name: str, words: Sequence[str] = ()) -> None:
    """Train the first algorithm that works with a component of another kind on a probe; return if none does.

    Args:
        option: option of the component's group.
        name: name of the probe.
        words: overrides; ``algo=`` selects the algorithm.

    Raises:
        AssertionError: see ``check_probe``.
    """
    chosen = [word[5:] for word in words if word.startswith("algo=")]
    more = (*(word for word in words if not word.startswith("algo=")), f"{kind}={option}")
    for algorithm in chosen[-1:] or registry.names("algo"):
        try:
            actions = kind_of(algorithm, PROBES[name], more)
            if actions is None or (config := _config(algorithm, PROBES[name], actions, more)).loop.cls.reads:
                continue
            build(config, Path()).close()
        except ConfigError:
            continue
        try:
            check_probe(algorithm, PROBES[name], actions, more)
        except AssertionError as error:
            error.add_note(f"tried with algo={algorithm} {' '.join(more)}")
            raise
        return


def learn(algorithm: str, probe: Probe, kind: Kind, overrides: Sequence[str] = (), seed: int = 0) -> Found:
    """Train until the result is exact, and stays exact for more than half as many further steps."""
    with recorded(algorithm, probe, kind, overrides) as data:
        config = _config(algorithm, probe, kind, overrides, data)
        with closing(build(parse(config.raw | {"seed": seed}), Path())) as trainer:
            return _train(trainer, probe, kind)


def _train(trainer: Trainer, probe: Probe, kind: Kind) -> Found:
    steps, goal, looks = Steps(), FIRST, list[Found]()

    def look(*args: Any) -> None:
        steps.made += 1

    watch(trainer, look)
    trainer.hooks.register(steps)
    with closing(_evaluator(trainer, probe.memory)) as evaluator:
        while True:
            steps.until = goal
            trainer.agreement.request_stop(0)
            trainer.loop.run(trainer)
            trainer.learner.check_finite()
            looks.append(read(trainer, evaluator, probe, kind, steps.count))
            looks[-1].steps = steps.count
            slow = probe.memory or trainer.ctx.needs.window.stride > 0  # learning to remember or imagine may take long
            least = 4 * LEAST if slow else LEAST
            if steps.count >= MOST or trainer.progress.env_steps >= MOST_STEPS or _settled(looks, least):
                return looks[-1]
            goal = int(steps.count * GROWTH)


def _settled(looks: Sequence[Found], least: int) -> bool:
    """Return whether the result was exact twice in a row, or is wrong and no longer changes."""
    if len(looks) > 1 and not looks[-1].wrong and not looks[-2].wrong:
        return True
    if looks[-1].steps < least or len(looks) < 3:
        return False
    return looks[-1].error > STUCK * looks[-3].error


def _evaluator(trainer: Trainer, memory: bool) -> Evaluator:
    def made(shard: EnvShard) -> Any:
        return trainer.config.env.build(trainer.ctx.derive(shard=shard))

    keys = ("obs", "action", "action_mask", "q", "value")
    # a state can leak into the next episode only if an environment plays several
    episodes = 4 * MOST_COLUMNS if memory else EPISODES
    cfg = replace(trainer.config.eval, episodes=episodes)
    return Evaluator(made, trainer.algorithm, trainer.ctx, cfg, keys=keys)


def read(trainer: Trainer, evaluator: Evaluator, probe: Probe, kind: Kind, number: int = 0) -> Found:
    """Run greedy episodes, and compare actions, and values that do not depend on actions, with the exact solution."""
    algorithm, played = trainer.algorithm, evaluator.play(evaluator.job, number)
    states = probe.label(played["obs"].numpy())
    acted = played["valid"].numpy()
    best: Mapping[int, float] = probe.target if kind == "box" and probe.target else probe.best
    found = Found({}, {}, [])
    action = played["action"].float().reshape(*acted.shape, -1)[..., 0].numpy()
    for state, right in best.items():
        chosen = action[acted & (states == state)]
        found.actions[state] = sorted(set(chosen.round(2).tolist()))
        numbers = kind == "box" and bool(probe.target)
        taken = chosen if kind != "box" or numbers else (chosen > 0).astype(float)
        near = np.abs(taken - right) <= (probe.near if numbers else 0.0)
        found.error += float(np.abs(taken - right).mean()) if len(taken) else 1.0
        if not near.all():
            found.wrong.append(f"in state {state} it chooses {found.actions[state]}, but {right:g} is best")
    value = values_of(algorithm, played)
    off_policy_values = trainer.ctx.needs.data == "episodes" or trainer.loop.reads
    if value is not None and probe.values and not (off_policy_values and best):
        for state, right in probe.values.items():
            here = acted & (states == state)
            found.values[state] = float(value[here].mean()) if here.any() else float("nan")
            far = abs(found.values[state] - right) / probe.tolerance if here.any() else 0.0
            found.error += far
            if far > 1.0:
                why = [said for at, x, said in probe.mistakes if at == state and abs(x - found.values[state]) < 0.4]
                found.wrong.append(
                    f"the value of state {state} is {found.values[state]:.2f}, but {right:g} is exact"
                    + (f" ({why[0]})" if why else "")
                )
    return found


def values_of(algorithm: Algorithm, played: Batch) -> np.ndarray | None:
    """Return the value estimates ``[T+1, B]`` of every row, or of whole episodes; None if there are none.

    They are those of ``Algorithm.values``, else the ``value`` that ``act`` returns, else the maximum of its ``q``.
    """
    if type(algorithm).values is Algorithm.values:
        if "value" in played:
            return played["value"].numpy()
        return played["q"].amax(-1).numpy() if "q" in played else None
    rows: Batch = {key: played[key] for key in played if key not in (*OF_EPISODE, "q", "value")}
    if carry := algorithm.initial_carry(rows["valid"].shape[1]):
        rows["carry"] = tree.map(lambda x: x.unsqueeze(0), carry)
    with torch.no_grad():
        return algorithm.values(rows).numpy()


# ---- recordings ------------------------------------------------------------------------------------------------------


@contextmanager
def recorded(algorithm: str, probe: Probe, kind: Kind, overrides: Sequence[str] = ()) -> Iterator[str | None]:
    """Provide offline algorithms with a dataset of the probe: of optimal actions, or of random ones.

    Algorithms that do not read rewards get the optimal ones.
    """
    config = _config(algorithm, probe, kind, overrides)
    if not config.loop.cls.reads:
        yield None
        return
    with closing(config.env.build(_one_env())) as env:
        rewards = needs_of(config.algo, config.models.values(), env.spec).rewards
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recorded.npz"
        np.savez(path, allow_pickle=False, **record(probe, kind, random=0.9 if rewards else 0.0))
        yield str(path)


def record(probe: Probe, kind: Kind, random: float, seed: int = 0) -> dict[str, np.ndarray]:
    """Record ``RECORDED`` or ``REMEMBERED`` steps, a fraction ``random`` of them random, the others optimal."""
    dice, env = np.random.default_rng(seed), make(probe.name, kind)
    rows: dict[str, list[Any]] = {key: [] for key in ("observations", "actions", "rewards", "terminals", "timeouts")}
    rows |= {"next_observations": []} | ({"action_mask": []} if probe.mask else {})
    best: Mapping[int, float] = probe.target if kind == "box" and probe.target else probe.best
    episode, steps = 0, REMEMBERED if probe.memory else RECORDED
    while len(rows["rewards"]) < steps:
        (obs, info), seen, over = env.reset(seed=1000 + episode), list[Any](), False
        episode += 1
        while not over:
            seen.append(obs)
            state = int(probe.label(np.array(seen)[:, None])[-1, 0])
            allowed = np.flatnonzero(info["action_mask"]) if probe.mask else np.arange(probe.choices)
            if dice.random() < random or state not in best:
                action: Any = int(dice.choice(allowed)) if kind == "discrete" else dice.uniform(-1, 1, 1)
            else:
                right = best[state]
                action = int(right) if kind == "discrete" else np.array([right if probe.target else 2 * right - 1.0])
            action = action if kind == "discrete" else action.astype(np.float32)
            after, reward, terminated, truncated, later = env.step(action)
            row = {"observations": obs, "actions": action, "rewards": reward, "terminals": terminated}
            row |= {"timeouts": truncated, "next_observations": after} | (
                {"action_mask": info["action_mask"]} if probe.mask else {}
            )
            for key, leaf in row.items():
                rows[key].append(leaf)
            obs, info, over = after, later, terminated or truncated
    found = {key: np.array(column) for key, column in rows.items()}
    return found | {"rewards": found["rewards"].astype(np.float32)}
