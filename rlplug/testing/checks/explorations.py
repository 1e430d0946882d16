"""Checks of exploration modules: they work with algorithms that accept them, and are refused by others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from torch import Tensor

from rlplug import tree
from rlplug.api import Exploration
from rlplug.nn import choices_of, flatten
from rlplug.registry import load
from rlplug.testing.checks.algorithms import require_inside
from rlplug.testing.checks.kept import Lent
from rlplug.testing.checks.ranks import check_exploration_ranks
from rlplug.testing.checks.resume import check_resumes
from rlplug.testing.checks.runs import (
    COLUMNS,
    Case,
    answers,
    asking,
    differences,
    episodes,
    node_of,
    play,
    require,
    some,
    trainables,
    watch,
)
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError

ROUNDS = 8
"""rounds of collection after a short run, to observe changed actions"""


def _component(option: str) -> type[Any]:
    """Return the class that an option selects; the option's name may differ."""
    return load("exploration", str(node_of("exploration", option)["name"]))


def _module(trainer: Trainer, option: str) -> Exploration:
    """Return a run's only module of that option."""
    return next(x for x in trainer.policy.exploration.values() if isinstance(x, _component(option)))


def accepts(case: Case, name: str) -> bool:
    """Return whether the exploration can be added. Refusals must name ``exploration``.

    Args:
        name: its option.

    Raises:
        AssertionError: it was accepted although the algorithm cannot train on its ``perturb``.
    """
    perturbs = _component(name).perturb is not Exploration.perturb
    try:
        trainer = case.build(f"exploration=[{name}]")
    except ConfigError as error:
        require(
            error.key.startswith("exploration"),
            f"is refused with the key {error.key!r}; a refusal must name its own key, exploration.{name}",
        )
        return False
    allowed = trainer.ctx.needs.perturbable or not perturbs
    trainer.close()
    require(allowed, f"changes the actions of {case.name}, whose needs() say perturbable=False; it must be refused")
    return True


def check_served(tried: Sequence[Case], name: str) -> None:
    """Check that one of the algorithms accepts it."""
    require(any(accepts(case, name) for case in tried), f"{_on(tried)} refuses the exploration {name}")


def check_on(case: Case, name: str) -> None:
    """Check that it works with an algorithm and resumes exactly, or is refused with a message about itself."""
    if accepts(case, name):
        check_exploration(case, name)
        check_resumes(case, f"exploration=[{name}]")


def check_ranks(tried: Sequence[Case], name: str) -> None:
    """Check that two ranks give the result of one, with the first algorithm that accepts it."""
    for case in tried:
        if accepts(case, name):
            check_exploration_ranks(case, name)
            return
    raise AssertionError(f"{_on(tried)} refuses the exploration {name}")


def _on(tried: Sequence[Case]) -> str:
    names = [f"{case.name} on {case.env}" for case in tried]
    return names[0] if len(names) == 1 else f"every algorithm ({some(names)})"


def check_exploration(case: Case, name: str) -> None:
    """Check a short run: it changes the data, actions stay inside the space, equal seeds give equal runs."""
    cls = _component(name)
    require(issubclass(cls, Exploration), f"{cls.__name__} is not an rlplug.api.Exploration: derive it from that class")
    trainer = case.build(f"exploration=[{name}]")
    _check_perturb(trainer, _module(trainer, name))  # before a run acts by it
    trainer.close()
    runs, shown = list[Any](), False
    for word in (f"exploration=[{name}]", f"exploration=[{name}]", "exploration=[]"):
        trainer = case.build(word)
        watch(trainer)
        lent = Lent()
        history = play(trainer, also=lent)
        held = lent.held(trainer)
        require(not held, f"{some(held)} shares memory of a segment, which the collector overwrites: keep a .clone()")
        for losses in history.losses:
            wrong = [key for key, value in losses.items() if not torch.isfinite(value).all()]
            require(not wrong, f"{some(wrong)} is not finite with {name} on top of {case.name}")
        weights = tree.map(torch.clone, trainer.algorithm.state_dict())
        for _ in range(ROUNDS):
            trainer.collect()
        runs.append(({"weights": weights, "obs": trainer.collector.state()["open"]["obs"]}, history.losses))
        if word != "exploration=[]":
            _check_module(trainer, _module(trainer, name))
            shown = _acts_otherwise(trainer, _module(trainer, name))
        trainer.close()
    names = differences(runs[0], runs[1])
    require(not names, f"two runs with seed 0 differ in {some(names)}: draw with ctx.randn, ctx.rand and ctx.randint")
    same = not differences(runs[0][0], runs[2][0]) and not shown
    require(not same, f"a run of {case.name} is the same with and without it")
    if hasattr(trainer.config.algo.cfg, "n_step"):
        trainer = case.build(f"exploration=[{name}]", "algo.n_step=3")
        watch(trainer)
        play(trainer)
        _check_reward(trainer, _module(trainer, name))
        trainer.close()


def _check_module(trainer: Trainer, extra: Exploration) -> None:
    _check_weights(trainer, extra)
    _check_reward(trainer, extra)
    learns = trainables(trainer.learner, extra).values()
    owned = {id(p) for who in learns for part in trainer.learner.parts(who).values() for p in part.params}
    lost = [name for name, p in extra.named_parameters() if p.requires_grad and id(p) not in owned]
    require(not lost, f"no optimizer has the parameter {some(lost)}: add it to a part, or call requires_grad_(False)")


def _check_perturb(trainer: Trainer, extra: Exploration) -> None:
    """Check that it returns new, allowed actions inside the space."""
    if type(extra).perturb is Exploration.perturb:
        return
    rows, space = episodes(trainer), trainer.ctx.spec.single_agent.action
    if "action_mask" in trainer.ctx.needs.keys and isinstance(space, Discrete | MultiDiscrete):
        rows += [row | {"action_mask": _mask(space, i)} for i, row in enumerate(rows)]
    acted = answers(trainer.algorithm, trainer.ctx, rows, "explore")
    with asking(trainer.ctx):
        carry = extra.initial_carry(COLUMNS)
        for out, row in zip(acted, rows, strict=True):
            before = tree.map(torch.clone, out)
            changed, carry = extra.perturb(out, row, carry)
            names = differences(before, out)
            require(not names, f"perturb() writes into {some(names)} of its argument: return a new tensor")
            require(changed.keys() >= out.keys(), f"perturb() drops {sorted(out.keys() - changed.keys())}")
            require_inside(changed["action"], space, "perturb()")
            if "action_mask" in row:
                one_hot = flatten(space, changed["action"]).bool()
                require(
                    (row["action_mask"] | ~one_hot).all(),
                    'perturb() takes forbidden actions: respect step["action_mask"]',
                )


def _mask(space: Discrete | MultiDiscrete, seed: int) -> Tensor:
    """Return a mask that allows about half of the actions, at least one of every part."""
    draw = torch.Generator().manual_seed(seed)
    scores = [torch.rand(COLUMNS, n, generator=draw) for n in choices_of(space) or ()]
    return torch.cat([(part > 0.5) | (part == part.amax(-1, keepdim=True)) for part in scores], -1)


def _check_weights(trainer: Trainer, extra: Exploration) -> None:
    if type(extra).perturb_weights is Exploration.perturb_weights:
        return
    own = {name: p.detach().clone() for name, p in trainer.algorithm.named_parameters()}
    with asking(trainer.ctx):
        noisy = extra.perturb_weights({name: p.clone() for name, p in own.items()})
        extra.perturb_weights(own)
    require(noisy.keys() == own.keys(), f"weights() adds or drops {some(sorted(noisy.keys() ^ own.keys()))}")
    wrong = [name for name, p in own.items() if (noisy[name].shape, noisy[name].dtype) != (p.shape, p.dtype)]
    require(not wrong, f"weights() changes shape or dtype of {some(wrong)}")
    names = differences({name: p.detach() for name, p in trainer.algorithm.named_parameters()}, own)
    require(not names, f"weights() writes into {some(names)} of its argument: return new tensors")


def _acts_otherwise(trainer: Trainer, extra: Exploration) -> bool:
    """Return whether perturbed weights give other values or actions.

    The values of an untrained policy may differ so much that noise does not change its action within a short run:
    Ape-X's DQN has 0.26 and 0.56 on CartPole's first row, and 0.36 and 0.78 with noise.
    """
    own = {name: p.detach().clone() for name, p in trainer.algorithm.named_parameters()}
    rows = episodes(trainer, 4)
    plain = answers(trainer.algorithm, trainer.ctx, rows, "greedy")
    with asking(trainer.ctx):
        noisy = extra.perturb_weights(own)
    trainer.algorithm.load_state_dict(noisy, strict=False)
    found = differences(plain, answers(trainer.algorithm, trainer.ctx, rows, "greedy"))
    trainer.algorithm.load_state_dict(own, strict=False)
    return bool(found)


def _check_reward(trainer: Trainer, extra: Exploration) -> None:
    """Check that the reward has one detached number per row, which depends only on the row's transition."""
    learner: Any = trainer.learner
    sample = tree.map(torch.clone, learner.sampled)
    before = tree.map(torch.clone, sample)
    reward: Any = extra.intrinsic_reward(sample)
    names = differences(before, sample)
    require(not names, f"reward() writes into {some(names)} of its argument: return a new tensor")
    if reward is None:
        return
    require(isinstance(reward, Tensor), f"reward() returns a {type(reward).__name__}; return a tensor or None")
    require(
        reward.shape == sample["reward"].shape,
        f"reward() has shape {list(reward.shape)}; expected a number for every row: {list(sample['reward'].shape)}",
    )
    require(torch.isfinite(reward[sample["valid"]]).all(), "reward() is not finite on every valid row")
    require(not reward.requires_grad, "reward() has a gradient: compute it under torch.no_grad()")
    begins = sample["valid"].clone()
    begins[-1] = False
    require(
        (reward[~begins] == 0).all(),
        'reward() is not 0 on every row that begins no transition: not batch["valid"], or the last row of the sample',
    )
    columns = reward.shape[1]
    for start in range(min(columns, 4)):
        mine = tree.map(
            lambda x, i=start: x[:, i :: min(columns, 4)] if x.ndim > 1 else x[i :: min(columns, 4)], sample
        )
        torch.testing.assert_close(
            extra.intrinsic_reward(mine),
            reward[:, start :: min(columns, 4)],
            rtol=1e-4,
            atol=1e-6,
            msg="reward() of a column depends on the other columns of the sample: keep statistics in observe()",
        )
    for p in trainer.algorithm.parameters():
        p.grad = None
    extra.update(sample, learner)
    reached = [name for name, p in trainer.algorithm.named_parameters() if p.grad is not None]
    require(not reached, f"its loss gives a gradient to {some(reached)} of the algorithm")
