"""The conformance kit checks components against their contracts.

Test everything that a plugin's distribution registers, one test per check::

    from rlplug.testing import conformance

    @pytest.mark.parametrize("check", conformance.checks("rlplug-x"), ids=str)
    def test_conformance(check):
        check()

or one component, with overrides that make it fast::

    conformance.check_algorithm("x", env="cartpole", overrides=["algo.warm_up=100"])
    conformance.check_exploration("y", algorithm="sac", env="pendulum")
    conformance.check_buffer("z", env="cartpole", overrides=["algo=dqn", "buffer.capacity=1000"])

A component that needs a certain algorithm, environment, buffer or loop names it in its manifest::

    Component("loop", "study", "rlplug_x:Study", tried_with=("algo=cloning", "buffer=experts"))

Every check makes real, short runs. It raises AssertionError with a message that suggests a fix; its notes name the
component, algorithm and environment. A check that takes longer than ``limit_s`` reports where it was. In a script,
call checks under ``if __name__ == "__main__":``, since some start processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

from rlplug import registry
from rlplug.registry import Kind
from rlplug.registry.discovery import unknown
from rlplug.testing.checks import (
    algorithms,
    buffers,
    envs,
    explorations,
    exports,
    leaving,
    models,
    others,
    presets,
    ranks,
    resume,
    schedules,
    settings,
    steps,
    stored,
)
from rlplug.testing.checks.runs import Case, case_of, option_of, options
from rlplug.testing.checks.words import ENVS, accepted, changes_of, first_case
from rlplug.testing.limits import LIMIT_S, refuse_import, time_limit
from rlplug.testing.probes import PROBES, check_probe, check_with, kind_of
from rlplug.types import ConfigError

OF_ALGORITHM: dict[str, Callable[[Case], None]] = {
    "learns": algorithms.check_learns,
    "act": algorithms.check_act,
    "determinism": algorithms.check_determinism,
    "state": algorithms.check_state,
    "resumes": resume.check_resumes,
    "terms": steps.check_terms,
    "pure": steps.check_pure,
    "parts": steps.check_parts,
    "rows-stay": leaving.check_rows_stay,
    "pickles": leaving.check_pickles,
    "schedules": schedules.check_schedules,
    "ranks": ranks.check_ranks,
    "compiled": algorithms.check_compiled,
    "export": exports.check_export,
}


@dataclass(frozen=True)
class Check:
    """One property of one component, or of a package's preset; call it to check the property.

    Args:
        kind: kind of the component; group of a preset, such as ``tuned``.
        limit_s: time limit in seconds.

    Raises:
        AssertionError: it does not hold; the message suggests a fix.
        TimeoutError: it takes longer; the message names the line in progress.
    """

    kind: str
    name: str
    what: str
    run: Callable[[], None]
    limit_s: float = LIMIT_S

    def __str__(self) -> str:
        return f"{self.kind}-{self.name}-{self.what}"

    def __call__(self) -> None:
        refuse_import()
        try:
            with time_limit(self.limit_s):
                self.run()
        except Exception as error:
            error.add_note(f"conformance of {self.kind} {self.name!r}: {self.what}")
            raise


def checks(
    distribution: str | None = None, kinds: Sequence[str] | None = None, limit_s: float = LIMIT_S
) -> list[Check]:
    """Return the checks of a distribution's components and presets; by default, of every installed plugin.

    Args:
        kinds: only these kinds; ``tuned`` and ``experiment`` are presets. None: all.
        limit_s: time limit of each check in seconds.

    Raises:
        ConfigError: no plugin of that distribution is installed, or it is broken.
    """
    if distribution is not None:
        distribution = _installed(distribution)
    found = [
        check
        for (kind, name), plugins in registry.owners().items()
        if distribution in (None, *(plugin.distribution for plugin in plugins)) and (kinds is None or kind in kinds)
        for check in checks_of(kind, name, limit_s=limit_s)
    ]
    return found + [
        Check(file.group, file.option, "composes", partial(presets.check_preset, file), limit_s)
        for file in presets.of(distribution)
        if kinds is None or file.group in kinds
    ]


def _installed(distribution: str) -> str:
    """Return the normalized name of a distribution: ``rlplug_x`` becomes ``rlplug-x``."""
    alike = distribution.lower().replace("_", "-").replace(".", "-")
    plugins = {plugin.distribution.lower().replace("_", "-"): plugin for plugin in registry.plugins()}
    if (plugin := plugins.get(alike)) is not None:
        if plugin.cause:
            raise ConfigError("", f"the plugin {plugin} is broken: {plugin.cause}")
        return plugin.distribution
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version(distribution)
        entry = "[project.entry-points.rlplug], and pip install -e it again"
        raise ConfigError("", f"{distribution} {version} is installed, but has no entry point: write {entry}")
    names = unknown(distribution, [plugin.distribution for plugin in plugins.values()])
    raise ConfigError("", f"no plugin of {distribution!r} is installed: pip install -e <its folder>; {names}")


def checks_of(
    kind: Kind, name: str, env: str | None = None, overrides: Sequence[str] = (), limit_s: float = LIMIT_S
) -> list[Check]:
    """Return the checks of one component; if listing them fails, the last one raises. See ``check_component``."""
    found: list[Check] = []
    try:
        for what, run in _properties(kind, name, env, tuple(overrides)):
            found.append(Check(kind, name, what, run, limit_s))
    except Exception as error:
        found.append(Check(kind, name, "can-be-tried", partial(_raise, error), limit_s))
    return found


def check_component(
    kind: Kind, name: str, env: str | None = None, overrides: Sequence[str] = (), limit_s: float = LIMIT_S
) -> None:
    """Run every check of one component.

    Args:
        env: option of the group ``env`` to test with; None: its manifest's, or those of ``ENVS`` that fit.
        overrides: further overrides, such as ``algo=dqn`` or a shorter warm-up.
        limit_s: time limit of each check in seconds.
    """
    for check in checks_of(kind, name, env, overrides, limit_s):
        check()


def check_algorithm(name: str, env: str | None = None, overrides: Sequence[str] = (), limit_s: float = LIMIT_S) -> None:
    """Run every check of an algorithm; see ``check_component``."""
    check_component("algo", name, env, overrides, limit_s)


def check_exploration(
    name: str,
    algorithm: str | None = None,
    env: str | None = None,
    overrides: Sequence[str] = (),
    limit_s: float = LIMIT_S,
) -> None:
    """Run every check of an exploration module with an algorithm that must accept it; None: with every algorithm."""
    chosen = [] if algorithm is None else [*registry.tried_with("algo", algorithm), f"algo={algorithm}"]
    check_component("exploration", name, env, [*chosen, *overrides], limit_s)


def check_buffer(name: str, env: str | None = None, overrides: Sequence[str] = (), limit_s: float = LIMIT_S) -> None:
    """Run every check of a buffer, and a run of ``algo=``, by default the first that fits, that resumes exactly.

    See ``check_component``; overrides ``buffer.<option>=`` also apply to the checks without a run.
    """
    check_component("buffer", name, env or ENVS[0], overrides, limit_s)


def check_model(name: str, env: str | None = None, overrides: Sequence[str] = (), limit_s: float = LIMIT_S) -> None:
    """Run every check of a model, on many spaces, and a run of ``algo=`` with it; see ``check_buffer``."""
    check_component("model", name, env or ENVS[0], overrides, limit_s)


def check_env(name: str, env: str | None = None, overrides: Sequence[str] = (), limit_s: float = LIMIT_S) -> None:
    """Run every check of an environment, and a run of ``algo=`` on it; see ``check_buffer``.

    Args:
        env: option of the group ``env`` that selects it; None: all of them.
    """
    for option in [env] if env else envs.complete(name):
        check_component("env", name, option, overrides, limit_s)


def cases(algorithm: str, env: str | None = None, overrides: Sequence[str] = ()) -> list[Case]:
    """Return an algorithm's cases, one per test environment, with its manifest's overrides."""
    words = registry.tried_with("algo", algorithm)
    return [
        case_of([*words, f"env={option}", *overrides], algorithm) for option in ([env] if env else accepted(algorithm))
    ]


Property = tuple[str, Callable[[], None]]


def _properties(kind: Kind, name: str, env: str | None, overrides: tuple[str, ...]) -> Iterator[Property]:
    yield "settings", partial(settings.check_settings, kind, name)
    if kind == "algo":
        for case in cases(name, env, overrides):
            for what, check in OF_ALGORITHM.items():
                yield f"{what}-{case.env}", partial(_on, check, case)
        yield from _probes(name, overrides)
        return
    words = (*registry.tried_with(kind, name), *([f"env={env}"] if env else []), *overrides)
    changes = changes_of(kind, words)
    match kind:
        case "exploration":
            tried, option = _every_case(words), option_of(kind, name)
            yield "served", partial(explorations.check_served, tried, option)
            for case in tried:
                yield f"on-{case.name}-{case.env}", partial(_on, explorations.check_on, case, option)
            yield "ranks", partial(explorations.check_ranks, tried, option)
            yield "schedules", partial(schedules.check_exploration_schedules, tried, option)
        case "buffer" if stored.fills_itself(name):
            case = case_of(words)
            yield "stored", partial(_on, stored.check_stored, case, name)
            yield "resumes", partial(_on, resume.check_resumes, case, f"buffer={option_of('buffer', name)}")
        case "buffer":
            yield "streams", partial(buffers.check_streams, name, **changes)
            yield "nbytes", partial(buffers.check_nbytes, name, **changes)
            yield "saves", partial(buffers.check_saves, name, **changes)
            if getattr(registry.load(kind, name), "prioritizes", False):
                yield "priorities", partial(buffers.check_priorities, name, **changes)
            for probe in ("ends", "rare"):
                yield f"probe-{probe}", partial(check_with, kind, option_of(kind, name), probe, words)
        case "model":
            for option in options(kind, name):
                yield f"shapes-{option}", partial(models.check_model, name, option, **changes)
            if registry.load(kind, name).recurrent:
                yield "probe-cue", partial(check_with, kind, option_of(kind, name), "cue", words)
        case "env":
            for option in [env] if env else envs.complete(name):
                yield f"episodes-{option}", partial(envs.check_env, name, option, **changes)
        case "logger":
            yield "run", partial(others.check_logger, name, *overrides)
        case "loop":
            yield "run", partial(others.check_loop, name, *overrides)
            yield "resumes", partial(others.check_loop_resumes, name, *overrides)
        case "curriculum":
            case = case_of((f"curriculum={option_of(kind, name)}", *words))
            yield "tasks", partial(_on, others.check_curriculum, case)
            yield "resumes", partial(_on, resume.check_resumes, case)
        case "estimator":
            for option in options(kind, name):
                yield f"episodes-{option}", partial(others.check_estimator, option)
        case "hardware":
            yield "plan", partial(others.check_hardware, name)
    if kind == "env" and not env and registry.load("env", name).traits.playable:
        own = [option for option in envs.complete(name) if f"env={option}" in words] or envs.complete(name)[:1]
        words = (*words, *(f"env={option}" for option in own)) if own else ()
    if kind in ("buffer", "model", "env") and words and not (kind == "buffer" and stored.fills_itself(name)):
        yield "in-a-run", partial(_in_a_run, kind, name, words)


def _probes(name: str, overrides: tuple[str, ...]) -> Iterator[Property]:
    """Yield the checks of an algorithm on the probes that it supports, against exact solutions."""
    for probe in PROBES.values():
        if (actions := kind_of(name, probe, overrides)) is not None:
            yield f"probe-{probe.name}", partial(check_probe, name, probe, actions, overrides)


def _on(check: Callable[..., None], case: Case, *args: str) -> None:
    """Make a check whose errors name the run."""
    try:
        check(case, *args)
    except BaseException as error:  # also of a time limit
        error.add_note(f"tried with {case}")
        raise


def _every_case(words: Sequence[str]) -> list[Case]:
    """Return the cases of the overrides ``words``; without ``algo=``, of all algorithms."""
    if any(word.startswith("algo=") for word in words):
        return [case_of(words)]
    rest, found = [word for word in words if not word.startswith("env=")], list[Case]()
    env = next((word[4:] for word in reversed(words) if word.startswith("env=")), None)
    for algorithm in registry.names("algo"):
        with suppress(Exception):  # such an algorithm fails its own checks
            found += cases(algorithm, env, rest)
    return found


def _in_a_run(kind: Kind, name: str, words: Sequence[str]) -> None:
    """Check that a run resumes exactly, with the algorithm of ``words``, or the first that accepts it."""
    more = [] if kind == "env" else [f"{kind}={option_of(kind, name)}"]
    _on(resume.check_resumes, first_case(_every_case(words), *more), *more)


def _raise(error: Any) -> None:
    raise error
