"""Checks of methods' results and arguments, on the first rows and in the first update only."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Algorithm, Buffer, Exploration, Losses, Model, Needs, Optim, Trainable, VecEnv
from rlplug.buffer.samples import bonus_misfit, sample_misfit
from rlplug.contract import explained, mistake, named, refuse
from rlplug.contract.members import record_misfit
from rlplug.envs.rows import actions_misfit, numbers_misfit, rows_misfit
from rlplug.envs.spaces import allocate
from rlplug.nn.trial import model_misfit, pair_misfit
from rlplug.types import Batch, ConfigError, EnvSpec

Watching = AbstractContextManager[None]
Check = Callable[..., str | None]
"""describes an error in a method's result, given its arguments; None: valid"""
Parts = Callable[[], Mapping[str, Any]]
Following = Callable[[Any], Sequence[Tensor]]


def check_model(model: Model, space: Any, members: int, generators: Mapping[str, torch.Generator]) -> None:
    """Run a model on two rows of zeros, without side effects, and raise ``ConfigError`` for an invalid result.

    Args:
        members: ensemble members that it computes, on a leading axis.
        generators: generators to restore afterwards, in addition to torch's.
    """
    if found := model_misfit(model, tree.map(torch.as_tensor, allocate(space, 2)), members, generators):
        raise mistake(model, *found)


def check_rows(env: VecEnv, member: str, rows: Any, n: int) -> Batch:
    """Return the checked result of ``reset`` or ``step`` of ``n`` environments. Raises ``ConfigError``."""
    refuse(env, member, rows_misfit(env.spec, member, rows, n))
    return rows


def acting(algorithm: Algorithm, exploration: Mapping[str, Exploration], spec: EnvSpec, n: int) -> Watching:
    """Check results of acting on ``n`` environments inside the block, for the first row."""

    def acted(returned: Any, *given: Any) -> str | None:
        return pair_misfit(returned, "a dict with the action", dict) or actions_misfit(spec, returned[0], n)

    both: dict[str, Check] = {"initial_carry": _is(dict)}
    acts = {"act": acted, "postprocess": _is(dict), "annotate": _is(dict)}
    return watched((algorithm, both | acts), *((extra, both | {"perturb": acted}) for extra in exploration.values()))


def missing_keys(keys: Sequence[str], algorithm: Algorithm, exploration: Mapping[str, Exploration]) -> ConfigError:
    """Return the error for keys that neither the environment nor the algorithm provides."""
    own = Exploration.reads.__func__
    reading = [named(extra, "reads") for extra in exploration.values() if type(extra).reads.__func__ is not own]
    said = f"names {', '.join(keys)}, provided neither by the environment nor by {named(algorithm, 'act')}"
    return ConfigError("", f"{' or '.join([named(algorithm, 'needs'), *reading])} {said}")


# ---- the first update ------------------------------------------------------------------------------------------------


def learning(
    algorithm: Algorithm, exploration: Mapping[str, Exploration], buffer: Buffer, needs: Needs, compiled: bool
) -> Watching:
    """Check results of learning inside the block, during the first update.

    Args:
        compiled: whether gradient steps are graphs, which cannot include checks.
    """
    of_update: dict[str, Check] = {"update": _is(Losses)} | ({} if compiled else {"forward": _losses})
    return watched(
        (algorithm, of_update | ({} if compiled else {"prepare": _prepared})),
        *((extra, of_update | {"intrinsic_reward": bonus_misfit}) for extra in exploration.values()),
        (buffer, {"sample": lambda returned: _is(dict)(returned) or sample_misfit(returned, needs)}),
    )


def check_given(batch: Batch | None, exploration: Mapping[str, Exploration]) -> None:
    """Raise ``ConfigError`` if a loop's batch is not rows but an exploration module rewards rows."""
    for name, extra in exploration.items():
        if batch and "valid" not in batch and type(extra).intrinsic_reward is not Exploration.intrinsic_reward:
            said = f"rewards sampled rows, but the loop passes the learner {', '.join(batch)}"
            raise ConfigError(f"exploration.{name}", f"{said}; leave it out")


def _prepared(returned: Any, batch: Batch) -> str | None:
    if not isinstance(returned, dict) or "valid" in returned or "valid" not in batch:
        return _is(dict)(returned) or numbers_misfit(returned, returned.get("alive", returned.get("valid")))
    rows = batch["valid"].shape
    whole = [key for key, x in returned.items() if isinstance(x, Tensor) and x.shape[:2] == rows]
    if not whole or rows[0] == rows[-1]:  # with equal lengths, [B, B] cannot be distinguished from [T+1, B]
        return None
    return f"returned no valid for the rows {[*rows]} of {whole[0]}; return batch | {{...}}"


def _losses(returned: Any, *given: Any) -> str | None:
    if not isinstance(returned, Losses):
        return f"returned {tree.what(returned)}; return Losses, with a dict of terms"
    if not isinstance(returned.terms, dict) or not returned.terms:
        return f"returned Losses whose terms are {tree.what(returned.terms)}; return a dict with at least one term"
    for what, tensors in (("term", returned.terms), ("metric", returned.metrics)):
        for name, x in tensors.items():
            if not isinstance(x, Tensor):
                return f"returned the {what} {name!r} as {tree.what(x)}; {what}s are tensors, per row or 0-d"
            if what == "term" and torch.is_grad_enabled() and not x.requires_grad:
                return f"returned the term {name!r} without a gradient; compute it without detach() and no_grad()"
    return None


def optimizers(who: Trainable) -> dict[str, Optim]:
    """Return the optimizers of a trainable. Raises ``ConfigError`` unless they are a dict of ``Optim``."""
    try:
        with explained(who, "optimizers"):
            returned: Any = who.optimizers()
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        said = "gives an optimizer no parameters; self.parameters() can be read only once: call it for each optimizer"
        raise mistake(who, "optimizers", said) from error
    if not isinstance(returned, dict):
        said = f"returned {tree.what(returned)}; return a dict of Optim by part name"
        raise mistake(who, "optimizers", said)
    for part, optim in returned.items():
        if not isinstance(optim, Optim):
            raise mistake(who, "optimizers", f"returned {part!r} as {tree.what(optim)}; wrap it in Optim(...)")
        refuse(who, "optimizers", record_misfit(optim, Optim))
    return returned


def check_step_sizes(key: str, cfg: Any, who: Trainable, parts: Parts, following: Following) -> None:
    """Raise ``ConfigError`` if a step size (``lr`` or ``..._lr``) has a schedule that no optimizer follows.

    Args:
        key: key of the component's node.
        parts: returns its ``OptimizerState`` by part.
        following: returns the tensors that ``ctx.schedule`` returned for these points.
    """
    sizes = {name: x for name, x in vars(cfg).items() if re.search("(^|_)lr$", name)}
    schedules = {name: following(x) for name, x in sizes.items() if isinstance(x, list) and len(x) > 1}
    for name in (name for name, tensors in schedules.items() if not tensors):
        raise mistake(who, "", f"never calls ctx.schedule(cfg.{name}), but {key}.{name} is a schedule")
    followed = {part: state.optim.lr for part, state in parts().items()}
    given = [x for lr in followed.values() if lr is not None for x in ([lr] if isinstance(lr, Tensor) else lr)]
    for name, tensors in schedules.items() if followed else ():
        if not any(lr is tensor for lr in given for tensor in tensors):
            deaf = " and ".join(repr(part) for part, lr in followed.items() if lr is None)
            way = f"write Optim(..., lr=ctx.schedule(cfg.{name}))"
            raise mistake(who, "optimizers", f"gives {deaf} no lr, but {key}.{name} is a schedule; {way}")


# ---- watching --------------------------------------------------------------------------------------------------------


class _Watched:
    """A method with checked results; an object, so that a deep copy of its owner copies it, too."""

    def __init__(self, who: Any, member: str, check: Check) -> None:
        self.who, self.member, self.check = who, member, check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings(), explained(self.who, self.member, args):
            warnings.filterwarnings("error", "Using a target size", UserWarning)
            try:
                returned = getattr(type(self.who), self.member)(self.who, *args, **kwargs)
            except UserWarning as error:
                shapes = " and ".join(re.findall(r"torch.Size\((.*?)\)", str(error)))
                raise mistake(self.who, self.member, f"compares shapes that broadcast: {shapes}") from error
        refuse(self.who, self.member, self.check(returned, *args))
        return returned


@contextmanager
def watched(*every: tuple[Any, Mapping[str, Check]]) -> Iterator[None]:
    """Check the results of methods of several objects inside the block only."""
    free = [(who, member, check) for who, checks in every for member, check in checks.items() if _is_free(who, member)]
    for who, member, check in free:
        vars(who)[member] = _Watched(who, member, check)
    try:
        yield
    finally:
        for who, member, _ in free:
            vars(who).pop(member, None)


def _is_free(who: Any, member: str) -> bool:
    """Return whether an object can have an instance member of this name, and has none."""
    return hasattr(who, "__dict__") and member not in vars(who)


def _is(cls: type[Any]) -> Check:
    return lambda returned, *given: (
        None if isinstance(returned, cls) else f"returned {tree.what(returned)}; return {tree.article(cls.__name__)}"
    )
