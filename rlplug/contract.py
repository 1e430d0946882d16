"""What a component has to have, and what its methods have to return: a mistake is one error, in words.

    rlplug_x.algo:A.update returned None; return Losses

Nothing of this runs in a hot loop. A class is looked at when a configuration selects it, a model and an optimizer when
they are made, an environment when its spaces are read, at its resets and at its first step. What acts is watched while
the first row is made, and what learns during the first update (``watched``).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from rlplug import tree
from rlplug.api import Algorithm, Buffer, Exploration, Loop, Losses, Model, Needs, Optim, Trainable, VecEnv
from rlplug.envs.spaces import allocate
from rlplug.plan import Hardware
from rlplug.registry import Kind
from rlplug.types import Batch, ConfigError, EnvSpec, Group, groups_of

Check = Callable[[Any], str | None]
"""looks at what a method returned, and says what is wrong with it"""

BASES: Mapping[Kind, type[Any]] = {"algo": Algorithm, "exploration": Exploration, "model": Model}
MEMBERS: Mapping[Kind, tuple[type[Any], tuple[str, ...]]] = {  # what a class says itself; the others are there
    "algo": (Algorithm, ("needs", "act")),
    "model": (Model, ("forward",)),
    "buffer": (
        Buffer,
        ("gives", "sequences", "size_key", "add", "ready", "sample", "feedback", "nbytes", "save", "load"),
    ),
    "loop": (Loop, ("run",)),
    "hardware": (Hardware, ("plan",)),
}
OF_ENV = ("spec", "autoreset", "reset", "step", "state", "load", "close")
ENDS = ("terminated", "truncated")


def named(who: Any, member: str = "") -> str:
    """Return ``rlplug_x.algo:A.update`` for a class, or an object of it, and a member of it."""
    cls = who if isinstance(who, type) else type(who)
    return ".".join(filter(None, (f"{cls.__module__}:{cls.__qualname__}", member)))


def mistake(who: Any, member: str, what: str) -> ConfigError:
    """Return the error that says what is wrong with a member; it names no key, as no setting is to blame."""
    return ConfigError("", f"{named(who, member)} {what}")


# ---- what a class has ------------------------------------------------------------------------------------------------


def check_class(kind: Kind, cls: type[Any]) -> None:
    """Raise ``ConfigError`` unless a class has what its kind needs before anything of it is called."""
    base = BASES.get(kind)
    if base is not None and not (isinstance(cls, type) and issubclass(cls, base)):
        raise mistake(cls, "", f"is no {base.__name__}; write class {cls.__name__}({base.__name__}), of rlplug.api")
    if not hasattr(cls.Config, "__pydantic_fields__"):
        raise mistake(cls, "Config", "is an ordinary class; write @settings above it, of rlplug.settings")
    base, members = MEMBERS.get(kind, (object, ()))
    for member in members:
        if inspect.getattr_static(cls, member, None) in (None, inspect.getattr_static(base, member, None)):
            raise _missing(cls, base, member)
    for member in {"algo": ("needs", "recurrent"), "exploration": ("needs",), "loop": ("refusal",)}.get(kind, ()):
        if not isinstance(inspect.getattr_static(cls, member), classmethod | staticmethod):
            raise mistake(cls, member, "is no classmethod; write @classmethod above it")
    if kind == "algo" and cls.forward is Trainable.forward and cls.update is Trainable.update:
        raise _missing(cls, Trainable, "forward")


def _missing(who: Any, base: type[Any], member: str) -> ConfigError:
    """Return the error for a member that is not there, with its declaration in ``rlplug.api``."""
    there = getattr(base, member, None)
    if not callable(there):
        return mistake(who, member, f"is missing; declare {member}: {base.__annotations__[member]}")
    declared = str(inspect.signature(there)).replace("'", "")
    return mistake(who, member, f"is missing; write def {member}{declared}")


# ---- what is asked of it before anything is built --------------------------------------------------------------------


def check_needs(kind: Kind, cls: type[Any], returned: Any) -> Any:
    """Return what ``needs`` returned. Raises ``ConfigError`` if it is no ``Needs``, or not of an algorithm: no keys."""
    if kind == "algo" and not isinstance(returned, Needs):
        raise mistake(cls, "needs", f"returned {_kind(returned)}; return Needs")
    if kind != "algo" and not (isinstance(returned, tuple) and all(isinstance(key, str) for key in returned)):
        raise mistake(cls, "needs", f"returned {_kind(returned)}; return a tuple of keys of a row")
    return returned


def check_env(env: VecEnv) -> EnvSpec:
    """Return what an environment offers. Raises ``ConfigError`` unless it has what is asked of it."""
    for member in OF_ENV:
        if getattr(env, member, None) is None or getattr(type(env), member, 0) is getattr(VecEnv, member, None):
            raise _missing(env, VecEnv, member)
    for member, cls in (("spec", EnvSpec), ("autoreset", AutoresetMode)):
        if not isinstance(getattr(env, member), cls):
            raise mistake(env, member, f"is {_kind(getattr(env, member))}; it has to be of {cls.__name__}")
    return env.spec


def check_model(model: Model, space: Any, members: int, generators: Mapping[str, torch.Generator]) -> None:
    """Let a model read two rows of zeros, without a trace, and raise ``ConfigError`` if it returns something else.

    Args:
        members: that it computes, on a leading axis.
        generators: which are as before afterwards, as torch's own is.
    """
    if not isinstance(getattr(model, "out_dim", None), int):
        raise mistake(model, "out_dim", "is missing; set it in __init__ to the size of the features")
    states = {role: generator.get_state() for role, generator in generators.items()}
    modes = [(part, part.training) for part in model.modules()]
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    x = tree.map(lambda leaf: torch.as_tensor(leaf, device=where), allocate(space, 2))
    with torch.no_grad(), torch.random.fork_rng([] if where.type == "cpu" else None):
        carry = model.initial_carry(2)
        returned = model.eval()(x, carry, torch.ones(2, dtype=torch.bool, device=where))
    for part, training in modes:
        part.training = training
    for role, state in states.items():
        generators[role].set_state(state)
    if why := _no_pair(returned, "features", Tensor):
        raise mistake(model, "forward", why)
    shape = (*((members,) if members > 1 else ()), 2, model.out_dim)
    if (features := returned[0]).shape != shape:
        said = f"returned features of shape {[*features.shape]} for 2 rows; with out_dim={model.out_dim} they have"
        raise mistake(model, "forward", f"{said} {[*shape]}")
    if type(model).recurrent != bool(carry):
        said = "nothing" if type(model).recurrent else f"the carry {', '.join(carry)}"
        raise mistake(model, "initial_carry", f"returned {said}; the class says recurrent = {type(model).recurrent}")
    if _shapes(returned[1]) != _shapes(carry):
        said = f"returned the carry {_shapes(returned[1])}; initial_carry gives {_shapes(carry)}"
        raise mistake(model, "forward", said)


# ---- the first rows --------------------------------------------------------------------------------------------------


def check_rows(env: VecEnv, member: str, rows: Any, n: int) -> Batch:
    """Return what ``reset`` or ``step`` of ``n`` environments returned. Raises ``ConfigError`` if rows are not so."""
    spec, results = env.spec, ("reward", *ENDS) if member == "step" else ()
    if not isinstance(rows, dict):
        keys = ", ".join(("obs", *results))
        raise mistake(env, member, f"returned {_kind(rows)}; return a dict of {keys}")
    for name, group in spec.groups.items():
        part = rows.get(name) if spec.nested else rows
        if not isinstance(part, dict):
            raise mistake(env, member, f"returned no {name!r}; return a dict for every group of agents")
        lead = (n, *_agents(group))
        extras = group.extras if spec.nested else spec.extras
        missing = [key for key in ("obs", *results, *["alive"] * spec.has_agents, *group.extras) if key not in part]
        if missing:
            raise mistake(env, member, f"returned no {', '.join(missing)}; return it for every environment, {[*lead]}")
        if "action_mask" in part and "action_mask" not in extras:  # who cannot mask would not be refused
            where = f"Group({name!r})" if spec.nested else "EnvSpec"
            raise mistake(env, member, f"returned action_mask; name its space in the extras of the spec's {where}")
        wanted = {"obs": allocate(group.obs, 1)} | {key: np.zeros(1, np.bool_) for key in ENDS if key in results}
        wanted |= {"reward": np.zeros(1, np.float32)} if results else {}
        for key, like in wanted.items():
            _check_leaves(env, member, key, part[key], like, lead)
    return rows


def _check_leaves(env: VecEnv, member: str, key: str, given: Any, like: Any, lead: tuple[int, ...]) -> None:
    """Compare an array, or a dict of them, with one row of what it should be."""
    if isinstance(like, dict):
        if not isinstance(given, dict) or given.keys() != like.keys():
            got = f"the keys {', '.join(map(repr, given))}" if isinstance(given, dict) else _kind(given)
            raise mistake(env, member, f"returned {key} with {got}; its space has {', '.join(map(repr, like))}")
        for name, inner in like.items():
            _check_leaves(env, member, f"{key}[{name!r}]", given[name], inner, lead)
        return
    whose = "its space says" if key.startswith("obs") else "wanted is"
    shape = (*lead, *like.shape[1:])
    if tuple(getattr(given, "shape", ())) != shape:
        got = f"of shape {[*given.shape]}" if hasattr(given, "shape") else f"as {_kind(given)}"
        raise mistake(env, member, f"returned {key} {got}; {whose} {[*shape]}")
    if key != "reward" and (dtype := str(given.dtype).removeprefix("torch.")) != str(like.dtype):
        raise mistake(env, member, f"returned {key} of {dtype}; {whose} {like.dtype}")


@contextmanager
def acting(algorithm: Algorithm, exploration: Mapping[str, Exploration], spec: EnvSpec, n: int) -> Iterator[None]:
    """Check what acting on ``n`` environments returns, as long as this lasts: while the first row is made."""

    def acted(returned: Any) -> str | None:
        if why := _no_pair(returned, "a dict with the action", dict):
            return why
        for name, group in spec.groups.items():
            part = returned[0].get(name) if spec.nested else returned[0]
            if not isinstance(part, dict) or not isinstance(part.get("action"), Tensor):
                return f"returned no action{f' of {name}' * bool(spec.nested)}; return it as a tensor under that key"
            if part["action"].shape != (shape := (n, *_agents(group), *(group.action.shape or ()))):
                return f"returned actions of shape {[*part['action'].shape]}; wanted are {[*shape]}"
        return None

    with ExitStack() as watching:
        watching.enter_context(watched(algorithm, act=acted, postprocess=_is(dict), initial_carry=_is(dict)))
        for extra in exploration.values():
            watching.enter_context(watched(extra, perturb=acted, initial_carry=_is(dict)))
        yield


def nobody_gives(keys: Sequence[str], algorithm: Algorithm, exploration: Mapping[str, Exploration]) -> ConfigError:
    """Return the error for keys that neither the environment nor the algorithm puts into a row."""
    asking = [
        algorithm,
        *(extra for extra in exploration.values() if type(extra).needs.__func__ is not Exploration.needs.__func__),
    ]
    said = f"names {', '.join(keys)}, which neither the environment gives nor {named(algorithm, 'act')}"
    return ConfigError("", f"{' or '.join(named(who, 'needs') for who in asking)} {said}")


# ---- the first update ------------------------------------------------------------------------------------------------


@contextmanager
def learning(
    algorithm: Algorithm, exploration: Mapping[str, Exploration], buffer: Buffer, needs: Needs, compiled: bool
) -> Iterator[None]:
    """Check what learning returns, as long as this lasts: during the first update.

    Args:
        compiled: gradient steps are graphs, into which no check is traced.
    """
    sampled: list[Batch] = []

    def sample(returned: Any) -> str | None:
        if why := _is(dict)(returned) or _no_sample(returned, needs):
            return why
        sampled.append(returned)
        return None

    def bonus(returned: Any) -> str | None:
        if returned is None or not sampled:
            return None
        parts = groups_of(sampled[-1])
        given = returned if isinstance(returned, dict) else {"": returned}
        if not given.keys() <= parts.keys():
            return f"returned {_kind(returned)}; return a dict with a reward of every row for {' or '.join(parts)}"
        for name, x in given.items():
            shape = parts[name]["reward"].shape
            if not isinstance(x, Tensor) or x.shape != shape:
                got = f"rewards of shape {[*x.shape]}" if isinstance(x, Tensor) else _kind(x)
                return f"returned {got}; wanted is one of every row of the sample, {[*shape]}"
        return None

    of_update: dict[str, Check] = {"update": _is(Losses)} | ({} if compiled else {"forward": _losses})
    with ExitStack() as watching:
        watching.enter_context(watched(algorithm, **of_update, **({} if compiled else {"prepare": _is(dict)})))
        for extra in exploration.values():
            watching.enter_context(watched(extra, **of_update, intrinsic_reward=bonus))
        watching.enter_context(watched(buffer, sample=sample))
        yield


def check_given(batch: Batch | None, exploration: Mapping[str, Exploration]) -> None:
    """Raise ``ConfigError`` where a loop gives the learner something else than rows, and a module rewards rows."""
    for name, extra in exploration.items():
        if batch and "valid" not in batch and type(extra).intrinsic_reward is not Exploration.intrinsic_reward:
            said = f"rewards the rows of a sample, and the loop gives the learner {', '.join(batch)} instead"
            raise ConfigError(f"exploration.{name}", f"{said}; leave it out")


def _no_sample(batch: Batch, needs: Needs) -> str | None:
    groups = [part for part in batch.values() if isinstance(part, dict)]  # of agents have rewards of their own
    if missing := [key for key in ("reward", "valid") if not any(key in part for part in (batch, *groups))]:
        return f"returned no {', '.join(missing)}; a sample has all that was added"
    if needs.data == "windows":
        if missing := [key for key in ("index", "sample_prob") if key not in batch]:
            return f"returned no {', '.join(missing)}; return it for every column, [B]"
        if len(batch["valid"]) != (rows := needs.burn_in + needs.window + 1):
            each = (
                f"{f'{needs.burn_in} of burn-in and ' * bool(needs.burn_in)}{needs.window} of the window, and one more"
            )
            return f"returned {len(batch['valid'])} rows; wanted are {rows}: {each}"
    short = [key for key in needs.keys if key in batch and key != "carry" and not isinstance(batch[key], dict)]
    for key in ("reward", "terminated", "truncated", *short):
        leaf = batch.get(key)
        if isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[:2] != batch["valid"].shape:
            return f"returned {key} of {[*leaf.shape[:2]]} rows and columns; valid has {[*batch['valid'].shape]}"
    return None


def _losses(returned: Any) -> str | None:
    if not isinstance(returned, Losses):
        return f"returned {_kind(returned)}; return Losses, with a dict of terms"
    if not isinstance(returned.terms, dict) or not returned.terms:
        return (
            f"returned Losses whose terms are {_kind(returned.terms) if returned.terms else 'empty'}; name one at least"
        )
    for name, term in returned.terms.items():
        if not isinstance(term, Tensor):
            return f"returned the term {name!r} as {_kind(term)}; terms are tensors, of every row or 0-d"
    return None


def optimizers(who: Trainable) -> dict[str, Optim]:
    """Return the optimizers of a trainable. Raises ``ConfigError`` if they are no dict of ``Optim``."""
    returned: Any = who.optimizers()
    if not isinstance(returned, dict):
        raise mistake(who, "optimizers", f"returned {_kind(returned)}; return a dict of Optim, by the names of parts")
    for part, optim in returned.items():
        if not isinstance(optim, Optim):
            raise mistake(who, "optimizers", f"returned {part!r} as {_kind(optim)}; write Optim(...) around it")
    return returned


def check_step_sizes(
    key: str,
    cfg: Any,
    who: Trainable,
    parts: Callable[[], Mapping[str, Any]],
    following: Callable[[Any], Sequence[Tensor]],
) -> None:
    """Raise ``ConfigError`` where a step size (``lr`` or ``..._lr``) has a schedule that no optimizer follows.

    Args:
        key: of the component's node.
        parts: returns its ``OptimizerState`` by part.
        following: returns the tensors that ``ctx.schedule`` gave for these points.
    """
    schedules = {
        option: following(points)
        for option, points in vars(cfg).items()
        if re.search("(^|_)lr$", option) and isinstance(points, list) and len(points) > 1
    }
    for option in (option for option, tensors in schedules.items() if not tensors):
        raise mistake(who, "", f"never calls ctx.schedule(cfg.{option}), and {key}.{option} is a schedule")
    optims = {part: state.optim for part, state in parts().items()}
    for option, tensors in schedules.items() if optims else ():
        if not any(optim.lr is tensor for optim in optims.values() for tensor in tensors):
            deaf = " and ".join(repr(part) for part, optim in optims.items() if optim.lr is None)
            said = (
                f"gives {deaf} no lr, and {key}.{option} is a schedule; write Optim(..., lr=ctx.schedule(cfg.{option}))"
            )
            raise mistake(who, "optimizers", said)


# ---- watching --------------------------------------------------------------------------------------------------------


class _Watched:
    """A method whose results are looked at; an object, so that a deep copy of its owner gets one of its own."""

    def __init__(self, who: Any, member: str, check: Check) -> None:
        self.who, self.member, self.check = who, member, check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        returned = getattr(type(self.who), self.member)(self.who, *args, **kwargs)
        if why := self.check(returned):
            raise mistake(self.who, self.member, why)
        return returned


@contextmanager
def watched(who: Any, **checks: Check) -> Iterator[None]:
    """Check what methods return, as long as this lasts; nothing of it remains."""
    own = {member: check for member, check in checks.items() if member not in getattr(who, "__dict__", checks)}
    if own:
        vars(who).update({member: _Watched(who, member, check) for member, check in own.items()})
    try:
        yield
    finally:
        for member in own:
            vars(who).pop(member, None)


def _is(cls: type[Any]) -> Check:
    return lambda returned: None if isinstance(returned, cls) else f"returned {_kind(returned)}; return {_a(cls)}"


def _no_pair(returned: Any, first: str, cls: type[Any]) -> str | None:
    """Say what is wrong with what should be ``(first, carry)``."""
    pair = isinstance(returned, tuple) and len(returned) == 2
    if pair and isinstance(returned[0], cls) and isinstance(returned[1], dict):
        return None
    got = f"({', '.join(map(_kind, returned))})" if pair else _kind(returned)
    return f"returned {got}; return ({first}, a dict with the carry)"


def _kind(x: Any) -> str:
    match x:
        case None:
            return "None"
        case Tensor():
            return f"a tensor of shape {[*x.shape]}"
        case tuple():
            return f"a tuple of {len(x)}"
    return _a(type(x))


def _a(cls: type[Any]) -> str:
    name = cls.__name__
    return name if name[0].isupper() else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _shapes(carry: Batch) -> str:
    return ", ".join(
        f"{key} {[*leaf.shape] if isinstance(leaf, Tensor) else _kind(leaf)}" for key, leaf in carry.items()
    )


def _agents(group: Group) -> tuple[int, ...]:
    return (len(group.agents),) if group.agents else ()
