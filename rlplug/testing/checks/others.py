"""Checks of loggers, loops and hardware, in real runs of the default algorithm."""

from __future__ import annotations

import json
import pickle
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pluggy
import torch

from rlplug import tree
from rlplug.api import Plan
from rlplug.config import RunConfig, choose, compose
from rlplug.estimation.estimation import KEYS
from rlplug.registry import Events, load, tried_with
from rlplug.run.launch import resume, train
from rlplug.testing.checks.resume import check_resumes
from rlplug.testing.checks.runs import CPU, Case, case_of, node_of, options, play, require
from rlplug.testing.context import context, spec
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError

COLUMNS = ("reward", "valid", *KEYS)  # keys of episodes
STEPS, FEW_UPDATES = 2048, 32  # steps and updates of a whole run


def check_logger(name: str, *overrides: str) -> None:
    """Check that a logger's hooks exist, and that it logs a whole run and its resumption."""
    events = {event for event in vars(Events) if event.startswith("rlplug_")}
    mine = {hook for hook in dir(load("logger", name)) if hook.startswith("rlplug_")}
    require(mine & events, f"it implements no event of a run; there are {', '.join(sorted(events))}")
    words = [*CPU, f"logger.only=[{options('logger', name)[0]}]", f"total_steps={STEPS}", "log.every=500", *overrides]
    config = compose([*words, "eval.every=1000"])
    hooks = pluggy.PluginManager("rlplug")
    hooks.add_hookspecs(Events)
    with tempfile.TemporaryDirectory() as folder:
        hooks.register(_alone(config, name))
        hooks.check_pending()  # reports unknown hooks and arguments
        run = Path(folder) / "run"
        train(config, run, words)
        for total in (STEPS, 2 * STEPS):
            if total > STEPS:
                resume(run, [f"total_steps={total}"], tell=lambda line: None)
            summary = json.loads((run / "summary.json").read_text())
            require(summary["status"] == "finished", f"with it a run ends as {summary['status']!r}")


def _alone(config: RunConfig, name: str) -> object:
    (chosen,) = (chosen for chosen in config.logger.values() if chosen.name == name)
    return chosen.build(None)


def check_loop(name: str, *overrides: str) -> None:
    """Check that a loop ends within ``total_steps``, and predicts its number of updates if it counts steps."""
    by_steps = load("loop", name).unit == "env_steps"
    total = STEPS if by_steps else FEW_UPDATES
    words = (f"loop={options('loop', name)[0]}", f"total_steps={total}", *overrides)
    trainer = case_of((*tried_with("loop", name), *words)).build()
    loop, progress = trainer.loop, trainer.progress
    if by_steps:
        foreseen = [loop.updates(steps) for steps in range(0, total + 1, 64)]
        require(foreseen[0] == 0, f"updates(0) is {foreseen[0]}: nothing is learned before anything was collected")
        require(foreseen == sorted(foreseen), "updates() falls with more environment steps")
    rounds, played = _rounds(trainer)
    loop.run(trainer)
    require(rounds, "it never calls run.report(), which logs, evaluates and writes checkpoints: call it between rounds")
    within = trainer.steps <= total or max(played, default=total) < total  # whole episodes may exceed it
    require(within, f"it made {trainer.steps} {loop.unit} of total_steps={total}: check run.done before each round")
    require(progress.env_steps > 0 or not loop.collects, "it collected nothing; set collects = False")
    require(progress.env_steps == 0 or loop.collects, "it collected, but declares collects = False")
    require(progress.updates > 0, "it made no update")
    trainer.close()


def _rounds(trainer: Trainer) -> tuple[list[int], list[int]]:
    """Return the steps at which a run's rounds begin, and those of its rounds with jobs."""
    rounds, played = list[int](), list[int]()
    report, play = trainer.report, trainer.play

    def reported() -> None:
        report()
        rounds.append(trainer.steps)

    def plays(*args: Any, **options: Any) -> Any:
        played.extend(rounds[-1:])
        return play(*args, **options)

    trainer.report, trainer.play = reported, plays  # type: ignore[method-assign]
    return rounds, played


def check_loop_resumes(name: str, *overrides: str) -> None:
    """Check that a loop has no state: a resumed run has the same schedule."""
    case = case_of((*tried_with("loop", name), *overrides))
    check_resumes(case, f"loop={options('loop', name)[0]}", updates=3)


def check_curriculum(case: Case) -> None:
    """Check that tasks are those of the space, one per environment, and that metrics are numbers."""
    with closing(case.build()) as trainer:
        curriculum, space, num_envs = trainer.policy.curriculum, trainer.ctx.spec.tasks, trainer.ctx.num_envs
        require(curriculum is not None and space is not None, "its run has no tasks: name an environment with tasks")
        assert curriculum is not None
        assert space is not None
        for _ in range(3):
            play(trainer, 1)
            tasks = curriculum.tasks()
            lengths = {len(leaf) for leaf in tree.leaves(tasks)}
            require(lengths == {num_envs}, f"tasks() returns leaves of {lengths} rows: one per environment, {num_envs}")
            wrong = [task for i in range(num_envs) if not space.contains(task := tree.take(tasks, i))]
            require(not wrong, f"tasks() returns {wrong[:1]}, which the space {space} does not contain")
            numbers = curriculum.metrics()
            require(
                all(type(x) is float for x in numbers.values()), f"metrics() returns {numbers}: numbers only, float"
            )
        if curriculum.metric:
            curriculum.read(0.0)


def check_estimator(option: str) -> None:
    """Check that it returns one number per episode, does not change the rows, and ignores rows without a step."""
    chosen = choose("estimator", f"estimator.{option}", node_of("estimator", option))
    ctx, draws = context(spec(2, 3)), torch.Generator().manual_seed(1)
    estimator, keys = chosen.build(ctx), ("reward", "valid", *chosen.reads(ctx.spec))
    require(not (unknown := {*keys} - {*COLUMNS}), f"reads {sorted(unknown)}, but episodes have {', '.join(COLUMNS)}")
    valid = torch.arange(6).unsqueeze(1) < torch.tensor([6, 1, 3, 2, 5, 4, 6])
    rows = {key: torch.where(valid, torch.randn(6, 7, generator=draws).double(), 0.0) for key in COLUMNS}
    rows |= {"valid": valid, "obs": torch.randn(6, 7, 2, generator=draws), "action": torch.ones_like(valid).long()}
    rows["log_weight"] = (0.1 * (rows["target_logp"] - rows["logp"])).cumsum(0)
    longer = {key: torch.cat((x, torch.zeros_like(x[:2]))) for key, x in rows.items()}
    longer["log_weight"][-2:] = rows["log_weight"][-1]
    found = []
    for episodes in (rows, rows, longer):
        given = {key: episodes[key].clone() for key in keys}
        found.append(estimator.estimate(given, 0.9))
        changed = [key for key in keys if not torch.equal(given[key], episodes[key])]
        require(not changed, f"estimate() changes {', '.join(changed)} of the episodes in place")
    tensor = isinstance(found[0], torch.Tensor) and found[0].shape == (7,)
    require(tensor, f"estimate() returns {tree.what(found[0])}: one number per episode, [7]")
    require(torch.equal(found[0], found[1]), "estimate() returns other numbers for the same episodes")
    require(torch.allclose(found[0], found[2]), "estimate() counts rows that are not valid")


def check_hardware(name: str) -> None:
    """Check that its options give a plan, or an error that names what is missing on this machine."""
    for option in options("hardware", name):
        hardware = choose("hardware", "hardware", node_of("hardware", option)).build(None)
        try:
            plan = hardware.plan()
        except ConfigError as error:
            require(error.key.startswith("hardware"), f"is refused with the key {error.key!r}; name hardware")
            continue
        require(isinstance(plan, Plan), f"plan() returns a {type(plan).__name__}; return rlplug.api.Plan")
        require(pickle.loads(pickle.dumps(plan)) == plan, "a plan does not survive pickling")
        for field in ("devices", "num_nodes", "microbatches", "threads"):
            require(getattr(plan, field) > 0, f"plan().{field} is {getattr(plan, field)}")
