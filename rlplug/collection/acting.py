"""Acting with the policy on the environments of a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from rlplug import tree
from rlplug.api import Algorithm, Exploration
from rlplug.compiler.compiler import Compiler
from rlplug.context import RunContext
from rlplug.host import OneCopy, on_device
from rlplug.types import Batch, Mode, Tree, Weights


def acting_state(algorithm: Algorithm) -> tuple[Weights, Weights]:
    """Return what acting needs from an algorithm: its weights, and its buffers, which ``observe`` also changes."""
    state = tree.only(algorithm.state_dict(), algorithm.actor_keys())
    buffers = {name for name, _ in algorithm.named_buffers()}
    return {k: x for k, x in state.items() if k not in buffers}, tree.only(state, buffers)


class Acting:
    """Acts on normalized rows: calls the algorithm, then the exploration modules, and keeps their recurrent states.

    Args:
        normalize: maps observations to the policy's inputs.
        compiler: compiles acting in training; None: run eagerly.
        one_copy: copies the outputs to the host; None: they are on the host, or stay on their device.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        exploration: Mapping[str, Exploration],
        ctx: RunContext,
        normalize: Callable[[Any], Any] | None = None,
        compiler: Compiler | None = None,
        one_copy: OneCopy | None = None,
    ) -> None:
        self.algorithm, self.exploration, self.ctx, self.normalize = algorithm, dict(exploration), ctx, normalize
        self.mode: Mode = "explore"
        self.trains = True
        """whether it explores with weights in the algorithm's own memory, so that acting may be replayed"""
        self._compiler, self.one_copy = compiler, one_copy
        self.lanes: Callable[..., tuple[Batch, Batch]] | None = None  # acts instead of the algorithm
        modules = self.exploration.values()
        self._perturbing = [x for x in modules if type(x).perturb_weights is not Exploration.perturb_weights]
        changing = {name for name, x in self.exploration.items() if type(x).perturb is not Exploration.perturb}
        self._without_logp = changing if "logp" in ctx.needs.recorded else set[str]()
        self._copied = set[str]()  # output keys that are copied to the host together

    def begin(self, n: int) -> None:
        """Reset the recurrent state and noise of ``n`` environments."""
        self.carry: Batch = self.algorithm.initial_carry(n)
        self.noise: dict[str, Batch] = {key: x.initial_carry(n) for key, x in self.exploration.items()}

    def __call__(self, step: Batch) -> Batch:
        """Act on a row of every environment, ``[B, ...]``, and advance the recurrent state."""
        batch = {"step": step, **self.state()}
        if self._compiler is not None and self.trains:
            found = self._compiler.call(self.acted, batch)
        else:
            found = self.acted(batch, self.mode)
        self.carry, self.noise = found["carry"], found["noise"]
        return self.one_copy.arrays(found["out"]) if self.one_copy is not None else found["out"]

    def acted(self, batch: Batch, mode: Mode = "explore") -> Batch:
        """Return the policy's outputs, ``out``, and the next recurrent states; ``batch`` has the previous ones."""
        step, noise = batch["step"], batch["noise"]
        if self.one_copy is not None:
            step = on_device(step, self.ctx.device)
        out, carry = self.decide(step, batch["carry"], mode)
        if mode == "explore" and self.exploration:
            noise = dict[str, Batch]()
            for name, extra in self.exploration.items():
                if name in self._without_logp:  # it belongs to a different action than the module's
                    out.pop("logp", None)
                out, noise[name] = extra.perturb(out, step, batch["noise"][name])
        if self.one_copy is not None and self._copied:
            out = self.one_copy.packed(tree.only(out, self._copied, self.ctx.spec.nested))
        return {"out": out, "carry": carry, "noise": noise}

    def decide(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Call the algorithm; see ``Algorithm.act``."""
        if self.normalize is not None:
            step = step | {"obs": self.normalize(step["obs"])}
        return (self.lanes or self.algorithm.act)(step, carry, mode)

    def judge(self, rows: Batch, mode: Mode | None = None) -> Batch:
        """Return the algorithm's outputs on rows without an action, arrays or tensors ``[B, ...]``, such as values."""
        return self.decide(on_device(rows, self.ctx.device), self.carry, mode or self.mode)[0]

    def example(self, row: Batch, keys: Sequence[str]) -> Batch:
        """Return the outputs for ``row`` that are stored. Runs the policy once, and restores the generators.

        Only ``keys`` and the action are stored, or everything if ``Algorithm.postprocess`` may read it. Of
        ``Needs.recorded``, only keys that every mode returns are stored.
        """
        states = [(generator, generator.get_state()) for generator in self.ctx.generators.values()]
        batch = self.state() | {"step": on_device(row, self.ctx.device)}
        outs, nested = [self.acted(batch)["out"], self.judge(row, "random")], self.ctx.spec.nested
        for generator, state in states:
            generator.set_state(state)
        postprocesses = type(self.algorithm).postprocess is not Algorithm.postprocess
        sometimes, example = outs[0].keys() ^ outs[1].keys(), dict[str, Any]()
        for out in outs:
            out = {key: x for key, x in out.items() if key not in self.ctx.needs.recorded or key not in sometimes}
            example = tree.merged(example, out if postprocesses else tree.only(out, ("action", *keys), nested))
        if self.one_copy is not None:
            self._copied = {*example}.union(*(example[name] for name in nested))
        return tree.merged(example, {"carry": self.carry}) if "carry" in keys else example

    @contextmanager
    def playing(self, mode: Mode, weights: Weights | None, row: Callable[[], Batch]) -> Iterator[None]:
        """Act in a mode inside the block.

        Args:
            weights: weights to act with instead of the algorithm's own; exploration modules may perturb them.
            row: returns the current row, on which these modules measure the effect of their noise.
        """
        modules = self._perturbing if mode == "explore" else ()
        own = weights is None and not modules
        self.mode, self.trains = mode, mode == "explore" and (own or self.ctx.device.type == "cpu")
        if own:
            yield
            return
        state = tree.only(self.algorithm.state_dict(keep_vars=True), {*self.algorithm.actor_keys()})
        before = {name: x.data for name, x in state.items()}

        def put(weights: Weights) -> None:
            for name, x in weights.items():
                state[name].data = x

        try:
            put(weights or {})
            if modules:
                unperturbed = self.judge(row(), "greedy")
                perturbed = {name: x.data for name, x in state.items() if isinstance(x, nn.Parameter)}
                for extra in modules:
                    perturbed = extra.perturb_weights(perturbed)
                put(perturbed)
                noisy = self.judge(row(), "greedy")
                for extra in modules:
                    extra.adapt_noise(unperturbed, noisy)
            yield
        finally:
            put(before)

    def state(self) -> Tree:
        return {"carry": self.carry, "noise": self.noise}

    def load(self, state: Tree) -> None:
        self.carry, self.noise = (on_device(state[key], self.ctx.device) for key in ("carry", "noise"))
