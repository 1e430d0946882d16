"""The conformance kit: does a component keep to its contract?

In the tests of a plugin, everything that the distribution registers, a test each::

    from rlplug.testing import conformance

    @pytest.mark.parametrize("check", conformance.checks("rlplug-x"), ids=str)
    def test_conformance(check):
        check()

or one component, with what it needs to be tried quickly::

    conformance.check_algorithm("x", env="cartpole", overrides=["algo.warm_up=100"])

A component that needs a certain algorithm, environment, buffer or loop names it in its manifest, and is tried with it::

    Component("loop", "study", "rlplug_x:Study", tried_with=("algo=cloning", "buffer=experts"))

Every check makes real, short runs. It raises AssertionError, and the message says what to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlplug import registry
from rlplug.config import typed
from rlplug.registry import KINDS, Kind
from rlplug.testing.checks import (
    algorithms,
    buffers,
    envs,
    explorations,
    models,
    others,
    ranks,
    resume,
    settings,
    steps,
    stored,
)
from rlplug.testing.checks.runs import Case, case_of, node_of, option_of, options, require
from rlplug.types import ConfigError

ENVS = ("cartpole", "pendulum")
"""environments that algorithms are tried on, where they accept them and their manifest names no other"""

OF_ALGORITHM: dict[str, Callable[[Case], None]] = {
    "learns": algorithms.check_learns,
    "act": algorithms.check_act,
    "determinism": algorithms.check_determinism,
    "state": algorithms.check_state,
    "resumes": resume.check_resumes,
    "terms": steps.check_terms,
    "pure": steps.check_pure,
    "parts": steps.check_parts,
    "ranks": ranks.check_ranks,
    "compiled": algorithms.check_compiled,
}


@dataclass(frozen=True)
class Check:
    """One property of one component; call it to see whether it holds.

    Raises:
        AssertionError: it does not; the message says what to change.
    """

    kind: Kind
    name: str
    what: str
    run: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.kind}-{self.name}-{self.what}"

    def __call__(self) -> None:
        try:
            self.run()
        except Exception as error:
            error.add_note(f"conformance of {self.kind} {self.name!r}: {self.what}")
            raise


def checks(distribution: str | None = None, kinds: Sequence[Kind] = KINDS) -> list[Check]:
    """What a distribution's components have to keep to; by default those of every installed plugin."""
    return [
        check
        for (kind, name), plugins in registry.owners().items()
        if kind in kinds and distribution in (None, *(plugin.distribution for plugin in plugins))
        for check in checks_of(kind, name)
    ]


def checks_of(kind: Kind, name: str) -> list[Check]:
    """The checks of one component. Where they cannot even be listed, the last one says why."""
    found: list[Check] = []
    try:
        for what, run in _properties(kind, name):
            found.append(Check(kind, name, what, run))
    except Exception as error:
        found.append(Check(kind, name, "can-be-tried", partial(_raise, error)))
    return found


def check_component(kind: Kind, name: str) -> None:
    """Every check of one component."""
    for check in checks_of(kind, name):
        check()


def check_algorithm(name: str, env: str | None = None, overrides: Sequence[str] = ()) -> None:
    """Every check of an algorithm.

    Args:
        env: an option of the group ``env``; None: those of ``ENVS`` that it accepts.
        overrides: further words of the command line, such as a shorter warm-up.
    """
    settings.check_settings("algo", name)
    for case in [_case(name, env)] if env else cases(name):
        for check in OF_ALGORITHM.values():
            check(replace(case, overrides=(*case.overrides, *overrides)))


def check_exploration(name: str, algorithm: str, env: str, overrides: Sequence[str] = ()) -> None:
    """An exploration module on top of an algorithm that allows it."""
    settings.check_settings("exploration", name)
    case = _case(algorithm, env)
    case = replace(case, overrides=(*case.overrides, *overrides))
    require(explorations.accepts(case, name), f"{algorithm} on {env} refuses the exploration {name}")
    explorations.check_exploration(case, name)
    resume.check_resumes(case, f"exploration=[{name}]")


def cases(algorithm: str) -> list[Case]:
    """An algorithm on every environment that it is tried on, with the words of its manifest."""
    return [_case(algorithm, env) for env in accepted(algorithm)]


def _case(algorithm: str, env: str) -> Case:
    return case_of([*registry.tried_with("algo", algorithm), f"env={env}"], algorithm)


def accepted(algorithm: str) -> list[str]:
    """The environments that an algorithm accepts: of those that its manifest names, or else of ``ENVS``.

    Raises:
        AssertionError: none.
    """
    cls = registry.load("algo", algorithm)
    node = {key: value for key, value in node_of("algo", option_of("algo", algorithm)).items() if key != "name"}
    cfg, found, refusals = typed(cls.Config, node, "algo"), [], []
    named = [word[4:] for word in registry.tried_with("algo", algorithm) if word.startswith("env=")]
    for option in named or ENVS:
        name = node_of("env", option)["name"]
        env = envs.make(name, option)
        env.close()
        try:
            cls.needs(cfg, env.spec)
            found.append(option)
        except ConfigError as error:
            refusals.append(f"{option} ({error})")
    require(found, f"it accepts none of {'; '.join(refusals)}: call check_algorithm({algorithm!r}, env=...)")
    return found


def _properties(kind: Kind, name: str) -> Iterator[tuple[str, Callable[[], None]]]:
    yield "settings", partial(settings.check_settings, kind, name)
    match kind:
        case "algo":
            for case in cases(name):
                for what, check in OF_ALGORITHM.items():
                    yield f"{what}-{case.env}", partial(check, case)
        case "exploration":
            yield "on-algorithms", partial(_on_every_algorithm, name)
        case "buffer" if stored.fills_itself(name):
            yield "stored", partial(stored.check_stored, name)
            yield "resumes", partial(stored.check_stored_resumes, name)
        case "buffer":
            yield "streams", partial(buffers.check_streams, name)
            yield "nbytes", partial(buffers.check_nbytes, name)
            yield "saves", partial(buffers.check_saves, name)
        case "model":
            for option in options(kind, name):
                yield f"shapes-{option}", partial(models.check_model, name, option)
        case "env":
            for option in envs.complete(name):
                yield f"episodes-{option}", partial(envs.check_env, name, option)
        case "logger":
            yield "run", partial(others.check_logger, name)
        case "loop":
            yield "run", partial(others.check_loop, name)
            yield "resumes", partial(others.check_loop_resumes, name)
        case "hardware":
            yield "plan", partial(others.check_hardware, name)


def _on_every_algorithm(name: str) -> None:
    tried: list[Case] = [case_of(words)] if (words := registry.tried_with("exploration", name)) else []
    for algorithm in () if words else registry.names("algo"):
        with suppress(Exception):  # an algorithm that cannot be tried fails its own checks
            tried += cases(algorithm)
    served = [case for case in tried if explorations.accepts(case, name)]
    require(served, f"is refused by every algorithm: {', '.join(f'{case.name} on {case.env}' for case in tried)}")
    for case in served:
        explorations.check_exploration(case, name)
        resume.check_resumes(case, f"exploration=[{name}]")


def _raise(error: Any) -> None:
    raise error
