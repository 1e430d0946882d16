"""What a device replays is what it would do eagerly, to the bit; on the CPU, by a tape with the same interface."""

import warnings
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch

from rlplug import host, tree
from rlplug.compiler import compiler as compilers
from rlplug.compiler.compiler import EAGER, Compiler
from rlplug.compiler.parity import CALLS
from rlplug.config import compose
from rlplug.run.build import build
from rlplug.trainer import steps
from tests.compiler import WORLD
from tests.compiler.tape import Tape

CPU = torch.device("cpu")
OFF_POLICY = ("train_batch_size=8", "num_steps_sampled_before_learning_starts=16")
VECTOR = ("+env.kwargs.observation=vector", "model=mlp", "model.hidden=[8]")
CONTINUOUS, DISCRETE = "+env.kwargs.action=box", "+env.kwargs.action=discrete"
RUNS = {
    "sac": ("algo=sac", CONTINUOUS, *OFF_POLICY, *VECTOR),
    "sac discrete": ("algo=sac", DISCRETE, *OFF_POLICY, *VECTOR),
    "sac, target now and then": ("algo=sac", CONTINUOUS, "algo.target_update_period=3", *OFF_POLICY, *VECTOR),
    "td3": ("algo=td3", CONTINUOUS, *OFF_POLICY, *VECTOR),
    "ddpg": ("algo=ddpg", CONTINUOUS, *OFF_POLICY, *VECTOR),
    "dqn": ("algo=dqn", DISCRETE, "algo.target_update_period=5", *OFF_POLICY, *VECTOR),
    "dqn prioritized": ("algo=dqn", DISCRETE, "buffer=prioritized", *OFF_POLICY, *VECTOR),
    "dqn with icm": ("algo=dqn", DISCRETE, "exploration=[epsilon_greedy,icm]", *OFF_POLICY, *VECTOR),
    "ppo": ("algo=ppo", DISCRETE, "rollout_fragment_length=8", "algo.sgd_minibatch_size=16", *VECTOR),
    "a2c": ("algo=a2c", DISCRETE, "algo.opt_type=adam", "algo.epsilon=1e-8", "rollout_fragment_length=8", *VECTOR),
}


def history(words, tape, monkeypatch, rounds=14):
    """Return what a run logs and holds, and the names of what it did not compile; ``tape`` records as on a device."""
    monkeypatch.setattr(steps, "Compiler", partial(Compiler, graphs=tape))
    with closing(build(compose([*WORLD, *words, "compile=max" if tape else "compile=off"]), Path())) as trainer:
        said, seen = [], []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            while trainer.progress.updates < rounds:
                trainer.collect()
                if trainer.ready() and trainer.progress.env_steps >= 16:
                    losses = trainer.update()
                    seen.append({**losses.terms})
            said = [str(one.message) for one in caught if "compile" in str(one.message)]
        trainer.learner.check_finite()
        weights = tree.map(torch.clone, trainer.policy.state())
        optimizers = trainer.learner.state()["optimizers"]
        return seen, weights, optimizers, said


def equal(a, b):
    for (path, x), (_, y) in zip(tree.items(a), tree.items(b), strict=True):
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(x, y, rtol=0, atol=0, msg=lambda said, path=path: f"{path}: {said}")


@pytest.mark.parametrize("run", RUNS)
def test_a_replayed_run_is_the_eager_one_to_the_bit(run, monkeypatch):
    monkeypatch.setattr(host, "reads_freely", lambda x: False)
    tape = Tape()
    eager, replayed = (history(RUNS[run], x, monkeypatch) for x in (None, tape))
    assert not replayed[3]
    assert tape.recorded
    for a, b in zip(eager[0], replayed[0], strict=True):
        equal(a, b)
    equal(eager[1], replayed[1])
    equal(eager[2], replayed[2])


class Function:
    """A function of a batch with weights, draws, outputs of both kinds, and whatever a test adds."""

    def __init__(self):
        self.weight = torch.ones(3)
        self.generator = torch.Generator().manual_seed(1)
        self.factor, self.calls = 2.0, 0

    def draw(self):
        return torch.rand(3, generator=self.generator)

    def __call__(self, batch):
        self.calls += 1
        self.weight.add_(self.draw())
        product = batch["x"] * self.weight * self.factor
        return {"x": batch["x"], "row": product, "sum": product.sum(), "parts": [product.amax(), {"count": 3}]}


def called(function, compiler, batches):
    compiler.generators = [function.generator]
    return [
        tree.map(
            lambda x: x.clone() if isinstance(x, torch.Tensor) else x,
            compiler._call((function,), "it", function, batch),
        )
        for batch in batches
    ]


def batches(n, rows=2):
    return [{"x": torch.full((rows, 3), float(i))} for i in range(n)]


def test_static_inputs_packed_outputs_and_draws():
    function, plain, tape = Function(), Function(), Tape()
    found = called(function, Compiler(CPU, True, graphs=tape), batches(8))
    for batch, one in zip(batches(8), found, strict=True):
        expected = plain(batch)
        equal({key: expected[key] for key in ("x", "row", "sum")}, {key: one[key] for key in ("x", "row", "sum")})
        assert one["parts"][0] == expected["parts"][0]
        assert one["parts"][1] == {"count": 3}
    assert function.calls == EAGER + CALLS + 1, "and one call that was recorded"
    assert tape.recorded == 1
    assert torch.equal(function.generator.get_state(), plain.generator.get_state())


def test_every_number_of_rows_has_a_recording():
    function, tape = Function(), Tape()
    compiler = Compiler(CPU, True, graphs=tape)
    called(function, compiler, [batch for rows in (1, 2, 3) for batch in batches(6, rows)])
    called(function, compiler, [batch for rows in (3, 1, 2) for batch in batches(2, rows)])
    assert tape.recorded == 3


def test_too_many_numbers_of_rows_run_eagerly(monkeypatch):
    monkeypatch.setattr(compilers, "MOST_RECORDINGS", 2)
    function, plain = Function(), Function()
    compiler, every = Compiler(CPU, True, graphs=Tape()), [b for rows in (1, 2, 3) for b in batches(4, rows)]
    with pytest.warns(UserWarning, match="more than 2 graphs: its shapes keep changing"):
        found = [x if (x := called(function, compiler, [b])[0]) is not None else function(b) for b in every]
    for one, batch in zip(found, every, strict=True):
        assert torch.equal(one["row"], plain(batch)["row"])


def test_what_the_host_waits_for_is_not_recorded():
    class Waits(Function):
        def __call__(self, batch):
            found = super().__call__(batch)
            return found if batch["x"].sum() >= 0 else {}

    function, tape = Waits(), Tape()
    compiler = Compiler(CPU, True, graphs=tape)
    with pytest.warns(UserWarning, match="it could not be compiled; it runs eagerly: the host waits for"):
        *_, found = called(function, compiler, batches(EAGER))
    assert found["row"].shape == (2, 3), "and the call counts"
    assert compiler._call((function,), "it", function, batches(1)[0]) is None
    assert not tape.recorded


def test_a_recording_that_fails_leaves_everything_as_it_was():
    class Fails(Function):
        def __call__(self, batch):
            found = super().__call__(batch)
            return found if self.calls <= EAGER else {"sum": torch.tensor(self.weight.sum().item())}

    function, plain = Fails(), Function()
    compiler = Compiler(CPU, True, graphs=Tape())
    called(function, compiler, batches(EAGER))
    with pytest.warns(UserWarning, match="cannot be recorded"):
        compiler._call((function,), "it", function, batches(1)[0])
    for batch in batches(EAGER):
        plain(batch)
    assert torch.equal(function.weight, plain.weight)
    assert torch.equal(function.generator.get_state(), plain.generator.get_state())


@pytest.mark.parametrize("what", ["returned", "moved"])
def test_what_reads_a_number_that_changes_falls_back(what):
    """Parity at first use: the number is that of the recording."""

    class Changes(Function):
        def __call__(self, batch):
            found = super().__call__(batch)
            if what == "returned":
                self.factor += 1.0
            else:
                self.weight.mul_(self.calls)
                found["row"], found["sum"] = found["x"], found["x"].sum()
                found["parts"] = []
            return found

    function, compiler = Changes(), Compiler(CPU, True, graphs=Tape())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches(EAGER + CALLS):
            compiler.generators = [function.generator]
            compiler._call((function,), "it", function, batch)
    assert len(caught) == 1
    assert "compared with the eager function, " in str(caught[0].message)
    assert compiler._call((function,), "it", function, batches(1)[0]) is None
