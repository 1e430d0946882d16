"""Off-policy evaluation: estimates of a policy's return from episodes of another policy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from rlplug import tree
from rlplug.agents.insight import has_density
from rlplug.api import Algorithm, Estimator
from rlplug.config import Chosen, Core, RunConfig
from rlplug.config.errors import Refusals, refuse
from rlplug.config.schema import Estimate as Config
from rlplug.context import EnvShard, RunContext
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.distributed.fabric import OneProcess
from rlplug.distributed.rng import global_state, load_global_state, seed_global_from
from rlplug.estimation.fqe import FQE, fit
from rlplug.functional import off_policy
from rlplug.functional.returns import reverse_scan
from rlplug.nn import as_executed
from rlplug.trainer.learner import RankLearner
from rlplug.types import Batch, ConfigError, RunError

STREAM = ("reward", "terminated", "truncated", "is_first", "valid")
WEIGHTS, VALUES = ("log_weight", "logp"), ("q", "value")  # what needs the dataset's logp, and what needs a model
KEYS = (*WEIGHTS, "target_logp", *VALUES, "obs", "action")  # keys of episodes that an estimator may read
AT_ONCE = 32  # episodes evaluated at a time
ESTIMATION = 5  # separates the random draws of estimates from others of the run's seed


class Estimation:
    """Estimates the return of an algorithm's policy in ``explore`` mode from recorded episodes.

    The whole dataset is in memory during an estimate.

    Args:
        recording: whole episodes, in the spaces of ``ctx``.
        chosen: the estimators by name.
        normalize: maps observations to the policy's inputs; None: identity.

    Raises:
        ConfigError: the algorithm does not offer log-probabilities, or data needed by a method is missing.
    """

    def __init__(
        self,
        cfg: Config,
        recording: Recording,
        algorithm: Algorithm,
        ctx: RunContext,
        chosen: Mapping[str, Chosen],
        normalize: Callable[[Any], Any] | None = None,
    ) -> None:
        self.cfg, self.recording, self.algorithm, self.ctx, self.normalize = cfg, recording, algorithm, ctx, normalize
        self.estimators: dict[str, Estimator] = {name: one.build(ctx) for name, one in chosen.items()}
        self.reads = {name: one.reads(ctx.spec) for name, one in chosen.items()}
        self.modeled = [name for name, keys in self.reads.items() if {*keys} & {*VALUES}]
        self.weighted = [name for name, keys in self.reads.items() if {*keys} & {*WEIGHTS}]
        self.weighted += ["estimate.model=q_regression"] * bool(self.modeled and cfg.model == "q_regression")
        extras = [key for key in ("action_mask", *ctx.needs.keys) if key in ctx.spec.extras]
        self.keys = ["obs", "action", *STREAM, *dict.fromkeys(extras), *["logp"] * bool(self.weighted)]
        self.lengths = torch.as_tensor(recording.lengths)
        self.slot = "estimate_model" if "estimate_model" in ctx.slots else "critic_model"
        refuse(self._refusals())

    # fmt: off
    def _refusals(self) -> Refusals:
        cfg, sources, key, n = self.cfg, self.recording.files, self.recording.reading.key, len(self.lengths)
        yield self.ctx.spec.has_agents, "env", "has several agents, but estimates support one"
        yield not self.estimators, "estimator", "none is chosen; choose some, as in estimator=[step_wis,dr]"
        for name, unknown in ((name, key) for name, keys in self.reads.items() for key in keys if key not in KEYS):
            yield True, f"estimator.{name}", f"reads {unknown!r}, but episodes have {', '.join(KEYS)}"
        yield (not has_density(type(self.algorithm)), "algo", f"{type(self.algorithm).__name__} does not "
               "implement logp(), which estimates need")
        for name, source in ((name, source) for name in self.keys for source in sources):
            what, way = ("which the estimates read", "") if name != "logp" else (
                f"the behavior's log-probabilities, needed by {', '.join(self.weighted)}",
                "; estimator=[dm] with estimate.model=fqe does not need it")
            yield (name not in source.keys, key, f"{source.path} has no key {name!r}, {what}; "
                   f"it has {', '.join(sorted(source.keys))}{way}")
        yield n < 2, key, f"has {n} episode; an interval needs 2 or more"
        yield (self.modeled and self.ctx.slots[self.slot].cls.recurrent, self.slot, "has a recurrent state, but the "
               f"action values of {' and '.join(self.modeled)} have none; use another network for them: "
               "+model@estimate_model=mlp256, or estimators of importance sampling only")
        yield (self.modeled and cfg.folds > n, "estimate.folds",
               f"{cfg.folds} folds, but there are {n} episodes; use fewer")
    # fmt: on

    @classmethod
    def reading(
        cls,
        core: Core,
        paths: Sequence[str],
        key: str,
        algorithm: Algorithm,
        ctx: RunContext,
        chosen: Mapping[str, Chosen],
        normalize: Callable[[Any], Any] | None,
        tell: Callable[[str], None],
    ) -> Estimation:
        """Open the episodes of the setting ``key``; ``tell`` is called with notes about reading them."""
        recording = Recording(paths, reading := Reading.by(core.data, ctx.spec, key))
        for note in reading.notes:
            tell(note)
        return cls(core.estimate, recording, algorithm, ctx, chosen, normalize)

    def estimate(self, number: int = 0) -> dict[str, float]:
        """Estimate with the current weights.

        Args:
            number: index of the estimate, which with the run's seed determines all random draws.

        Returns:
            ``estimate/<name>`` of every estimator, and ``_low`` and ``_high``, the bounds of its interval, unless it
            returns NaN; ``estimate/behavior``, the mean return of the dataset; with importance weights,
            ``estimate/effective_sample_size``, in episodes.

        Raises:
            RunError: a log-probability or value is NaN.
        """
        cfg = self.cfg
        with self._drawing(number):
            every = range(len(self.lengths))
            rows = tree.cat([self._judged(every[begin : begin + AT_ONCE]) for begin in every[::AT_ONCE]])
            if not bool(rows.pop("truncated").any()):  # without a time limit, values do not depend on the step
                rows["time"] = torch.zeros_like(rows["time"])
            keys = {"reward", "valid", "logp", "target_logp"}.union(*self.reads.values()) & rows.keys()
            out = {key: tree.map(lambda x: self._columns(x.cpu()), rows[key]) for key in keys}
            valid = out["valid"]
            reward = out["reward"] = torch.where(valid, out["reward"].double(), 0.0)
            returns = reverse_scan(torch.full_like(reward, cfg.gamma), reward)
            out["log_weight"] = off_policy.log_weights(out["target_logp"], out["logp"], valid)
            if self.modeled:
                out["q"], out["value"] = (self._columns(x) for x in self._model(rows, out, returns))
        metrics: dict[str, float] = {}
        for name, estimator in self.estimators.items():
            values = estimator.estimate({key: out[key] for key in ("reward", "valid", *self.reads[name])}, cfg.gamma)
            if values.shape != reward.shape[1:]:
                said = f"returned {tree.what(values)}; return one number per episode, {[*reward.shape[1:]]}"
                raise RunError(f"{type(estimator).__name__}.estimate {said}")
            if not bool(values.isnan().any()):
                bounds = zip(("", "_low", "_high"), off_policy.mean_interval(values, cfg.confidence), strict=True)
                metrics |= {f"estimate/{name}{end}": x.item() for end, x in bounds}
        metrics["estimate/behavior"] = returns[0].mean().item()
        if "logp" in self.keys:
            metrics["estimate/effective_sample_size"] = off_policy.effective_sample_size(out["log_weight"][-1]).item()
        return metrics

    def _judged(self, episodes: range) -> Batch:
        """Return the rows of some episodes, with log-probabilities and actions of the policy."""
        read = [self.recording.episode(number, self.keys, 2) for number in episodes]
        longest, device = max(len(one["valid"]) for one in read), self.ctx.device
        batch: Batch = tree.map(lambda *x: torch.from_numpy(np.stack([_padded(y, longest) for y in x], 1)), *read)
        batch = tree.map(lambda x: x.to(device), batch)
        t = torch.arange(longest, device=device).unsqueeze(-1).expand(-1, len(read))
        kept = t <= self.lengths[episodes.start : episodes.stop].to(device)
        behavior = batch.pop("logp", torch.zeros(kept.shape, device=device)).double()
        if not bool(torch.isfinite(behavior[batch["valid"]]).all()):
            said = f"in episodes {episodes.start} to {episodes.stop - 1} of {self._name}"
            said = f"logp, the behavior's log-probability, is not a finite number {said}"
            raise ConfigError(self.recording.reading.key, said)
        seen = batch | {"obs": batch["obs"] if self.normalize is None else self.normalize(batch["obs"])}
        for key in ("prev_action", "prev_reward"):
            if key in self.ctx.needs.keys:
                before = batch[key.removeprefix("prev_")][:-1]
                seen[key] = torch.cat((torch.zeros_like(before[:1]), before))
        if carry := self.algorithm.initial_carry(len(read)):
            seen["carry"] = tree.map(lambda x: x.unsqueeze(0), carry)
        with torch.no_grad():
            target = self.algorithm.logp(seen).double()
            choices = self._choices(seen) if self.modeled else {}
        if not bool(torch.isfinite(target[batch["valid"]]).all()):
            raise RunError("the policy's log-probability of a recorded action is not a finite number")
        self._check_support(seen, target)
        rows = {key: batch[key] for key in ("action", "reward", "valid")} | choices
        rows |= {"obs": seen["obs"], "target_logp": target, "logp": behavior}
        rows |= {"truncated": batch["truncated"], "time": t / self.lengths.max()}
        rows["end"] = batch["terminated"] | batch["truncated"]
        return tree.map(lambda x: x.transpose(0, 1)[kept.T], rows)  # concatenated episodes

    def _check_support(self, seen: Batch, target: Tensor) -> None:
        """Check that a policy with bounded support, as a squashed Gaussian, is not evaluated on actions out of bounds.

        Raises:
            ConfigError: it is; its density there is clamped to that at the bounds and meaningless.
        """
        space, action = self.ctx.spec.single_agent.action, seen["action"]
        if "logp" not in self.keys or not action.is_floating_point():
            return
        inner = as_executed(space, action)
        beyond = seen["valid"] & (action != inner).reshape(*seen["valid"].shape, -1).any(-1)
        if bool(beyond.any()):
            with torch.no_grad():
                within = self.algorithm.logp(seen | {"action": inner}).double()
            if torch.equal(within[beyond], target[beyond]):
                said = f"{self._name} has actions beyond the bounds, as of a Gaussian, which this policy never takes"
                way = "estimator=[dm] takes them as they were executed"
                raise ConfigError(self.recording.reading.key, f"{said}; {way}")

    def _choices(self, seen: Batch) -> Batch:
        """Return actions of the policy, ``choices [T+1, B, K, ...]``, and their ``probs [T+1, B, K]``.

        For ``Discrete`` spaces these are all actions; otherwise sampled ones, equally weighted.
        """
        space = self.ctx.spec.single_agent.action
        if isinstance(space, Discrete):
            every = [torch.full_like(seen["action"], action) for action in range(int(space.n))]
            logp = [self.algorithm.logp(seen | {"action": action}) for action in every]
            return {"choices": torch.stack(every, -1), "probs": torch.stack(logp, -1).exp()}
        k, (length, columns) = self.cfg.action_samples, seen["valid"].shape
        keys = [key for key in seen if key in ("obs", "is_first", "prev_action", "prev_reward", *self.ctx.spec.extras)]
        wide = tree.map(lambda x: x.repeat_interleave(k, 1), {key: seen[key] for key in keys})
        carry, actions = self.algorithm.initial_carry(n := columns * k), list[Tensor]()
        with self.ctx.acting(EnvShard("eval", n, range(n))):
            for t in range(length):
                out, carry = self.algorithm.act(tree.take(wide, t), carry, "explore")
                actions.append(out["action"].unflatten(0, (columns, k)))
        choices = torch.stack(actions)
        return {"choices": choices, "probs": torch.full(choices.shape[:3], 1.0 / k, device=choices.device)}

    def _model(self, rows: Batch, columns: Batch, returns: Tensor) -> tuple[Tensor, Tensor]:
        """Fit action values; return those of the recorded actions and of the policy, each ``[rows]``.

        Episodes are randomly assigned to folds, and each is evaluated by the model that held it out.

        Args:
            columns: reward and log-weights, ``[T, episodes]``.
            returns: return from every step on, ``[T, episodes]``.
        """
        draws, device = self.ctx.generators["eval"], self.ctx.device
        lot = torch.randperm(len(self.lengths), generator=draws, device=device) % self.cfg.folds
        rows["fold"] = lot.repeat_interleave(self.lengths.to(device) + 1)
        after = torch.arange(len(returns) + 1).unsqueeze(-1) <= self.lengths

        def in_rows(x: Tensor) -> Tensor:
            return torch.cat((x, torch.zeros_like(x[:1]))).T[after.T].float().to(device)

        rows["obs"], rows["followed"] = tree.map(_standardized, rows["obs"]), in_rows(returns)
        if self.cfg.model == "q_regression":
            reward, log_weight, valid = (columns[key] for key in ("reward", "log_weight", "valid"))
            targets = off_policy.regression(reward, log_weight, valid, self.cfg.gamma)
            rows["followed"], rows["weight"] = map(in_rows, targets)
        ctx = self.ctx.derive(optimizer=())  # steps by Adam, whatever the run's algorithm does
        fqe = FQE(self.cfg, ctx, self.slot, float(returns[0].abs().mean())).to(device)
        learner = RankLearner(fabric=OneProcess(device), ctx=ctx, algorithm=fqe, buffer=None)  # type: ignore[arg-type]
        fit(fqe, rows, learner, draws)
        learner.check_finite()
        q, value = (x.gather(0, rows["fold"].unsqueeze(0)).squeeze(0).cpu() for x in fqe.judge(rows))
        return q, value

    def _columns(self, x: Tensor) -> Tensor:
        """Return ``x [rows, ...]`` as ``[T, episodes, ...]``, padded with zeros."""
        out = x.new_zeros(len(self.lengths), int(self.lengths.max()) + 1, *x.shape[1:])
        steps = torch.arange(out.shape[1])
        out[steps <= self.lengths.unsqueeze(-1)] = x
        return out.transpose(0, 1)[:-1]

    @property
    def _name(self) -> str:
        return ", ".join(str(source.path) for source in self.recording.files[:3])

    @contextmanager
    def _drawing(self, number: int) -> Iterator[None]:
        """Seed from the run's seed and ``number`` inside the block, and restore all generators afterwards."""
        generator = self.ctx.generators["eval"]
        before, everywhere = generator.get_state(), global_state(self.ctx.device)
        entropy = (self.ctx.seed, ESTIMATION, number)
        generator.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
        seed_global_from(*entropy)
        try:
            yield
        finally:
            generator.set_state(before)
            load_global_state(everywhere, self.ctx.device)


def estimation_of(
    config: RunConfig, algorithm: Algorithm, ctx: RunContext, normalize: Callable[[Any], Any] | None
) -> Estimation | None:
    """Return a run's estimation on its recorded episodes; None: estimates are off, or this is another rank.

    Raises:
        ConfigError: estimates are requested but impossible.
    """
    cfg, playable = config.estimate, config.env.cls.traits.playable
    if ctx.rank or cfg.with_eval is False or (cfg.with_eval is None and (playable or not config.estimator)):
        return None
    if (paths := cfg.path or config.data.path) is None:
        raise ConfigError("estimate.with_eval", "true needs recorded episodes: estimate.path=<folder>")
    key = "estimate.path" if cfg.path else "data.path"
    said = partial(print, "rlplug:", file=sys.stderr, flush=True)
    tell = said if cfg.path else lambda note: None  # notes on data.path are printed elsewhere
    try:
        return Estimation.reading(config, paths, key, algorithm, ctx, config.estimator, normalize, tell)
    except ConfigError as error:
        if cfg.with_eval:
            raise
        said(f"no evaluation is possible without an environment: {error}")
        return None


def _padded(x: np.ndarray, length: int) -> np.ndarray:
    """Pad ``x [n, ...]`` to ``length`` with copies of its last row."""
    return np.concatenate((x, np.repeat(x[-1:], length - len(x), 0)))


def _standardized(x: Tensor) -> Tensor:
    """Standardize ``x [rows, ...]`` to zero mean and unit standard deviation, unless it has integers."""
    if not x.is_floating_point():
        return x
    deviation, mean = torch.std_mean(x, 0)
    return (x - mean) / deviation.clamp(min=1e-6)
