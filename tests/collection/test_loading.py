"""States of a stream that do not fit the environments and the policy: refused before anything is collected."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlplug import tree
from rlplug.api import Collector, Needs, Rollout
from rlplug.checkpointing.format import MISFITS
from rlplug.checkpointing.serialize import copy_to_host, decode, encode
from rlplug.collection.shard import ShardCollector
from rlplug.collection.stepping import make_shard
from rlplug.config import compose
from rlplug.context import EnvShard
from rlplug.envs import NativeVector
from rlplug.run.build import build
from rlplug.testing.context import context
from rlplug.types import Tree
from tests.collection.test_collector import COLUMNS, Follower, short_cartpole

ROLLOUT = Rollout(8, "explore", 0)
RUNS = {
    "recurrent": ("algo=ppo", "env=cartpole", "model=lstm"),
    "noisy": ("algo=td3", "env=pendulum", "exploration=[ornstein_uhlenbeck]"),
    "asynchronous": ("algo=impala", "env=cartpole", "loop.broadcast_interval=3"),
    "same step": (),
}
CHECKED = ("open", "carry", "noise", "beyond", "fresh", "played", "weights")


class Kept(NativeVector):
    """An environment whose state is read; in these tests nobody steps it after it was loaded."""

    def state(self) -> Tree:
        return {}

    def load(self, state: Tree) -> None:
        assert state == {}


def same_step() -> ShardCollector:
    env = Kept(SyncVectorEnv([short_cartpole] * COLUMNS, autoreset_mode=AutoresetMode.SAME_STEP))
    ctx = context(env.spec, needs=Needs(keys=("obs", "action", "prev_action")), num_envs=COLUMNS)
    return make_shard(env, Follower(), ctx, EnvShard("actor", COLUMNS, range(COLUMNS)), list(range(COLUMNS)))


def made(name: str, folder: Path) -> Collector | ShardCollector:
    if name == "same step":
        return same_step()
    options = ("tuned=none", "num_envs=3", "total_steps=20_000", "logger=[]", "hardware=cpu")
    return build(compose([*RUNS[name], *options]), folder).collector


def played(name: str, folder: Path) -> Tree:
    """Return the state of a collector after a few rows, as it is read from a checkpoint."""
    collector = made(name, folder)
    if isinstance(collector, ShardCollector):
        collector.collect(8)
        while not collector.state()["beyond"].any():
            collector.collect(8)
    else:
        collector.submit(ROLLOUT)
    return decode(encode(copy_to_host(collector.state())))


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tree]:
    folder = tmp_path_factory.mktemp("run")
    return made(request.param, folder), played(request.param, folder)


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all tensors and arrays."""
    if isinstance(node, torch.Tensor | np.ndarray):
        yield path
    for key, part in (
        node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
    ):
        yield from leaves(part, (*path, key))


def replaced(node: Any, path: tuple[Any, ...], change: Any) -> Any:
    """Return a copy in which ``change(container, key)`` was called with what holds the value at a path."""
    first, *rest = path
    parts = dict(node) if isinstance(node, dict) else list(node)
    if rest:
        parts[first] = replaced(parts[first], tuple(rest), change)
    else:
        change(parts, first)
    return parts


def put(function: Any) -> Any:
    def change(parts: Any, key: Any) -> None:
        parts[key] = function(torch.as_tensor(parts[key]))

    return change


CHANGES = {
    "another shape": put(lambda x: x[None]),
    "no rows": put(lambda x: x[:0]),
    "one more row": put(lambda x: torch.cat((x, x[:1]))),
    "another dtype": put(lambda x: x.to(torch.float16)),
    "another kind of number": put(lambda x: x.to(torch.int64 if x.is_floating_point() else torch.float32)),
    "no tensor": put(lambda x: "x"),
    "a list": put(lambda x: x.tolist()),
    "a dict": put(lambda x: {"x": x}),
    "nothing": put(lambda x: None),
    "missing": lambda parts, key: parts.pop(key),
    "another name": lambda parts, key: parts.update(renamed=parts.pop(key)),
}


def test_a_state_that_does_not_fit_is_refused(run: tuple[Any, Tree]):
    collector, state = run
    tried = 0
    for key in CHECKED:
        for path in leaves(state.get(key), (key,)):
            for name, change in CHANGES.items():
                forged = replaced(state, path, change)
                try:
                    collector.load(forged)
                except ValueError as error:
                    said = str(error)
                else:
                    said = "it was loaded"
                assert said.startswith("collector"), (path, name, said)
                tried += 1
    assert tried >= 6 * len(CHANGES)


def test_tensors_in_the_place_of_arrays_are_rows_too(run: tuple[Any, Tree]):
    collector, state = run
    tensors = {key: tree.map(torch.as_tensor, state[key]) for key in ("open", "fresh") if state.get(key) is not None}
    collector.load(copy.deepcopy(state) | tensors)
    again = decode(encode(copy_to_host(collector.state())))
    for key in tensors:
        assert all(isinstance(leaf, np.ndarray) for leaf in tree.leaves(again[key]))
        tree.map(np.testing.assert_array_equal, again[key], state[key])


@pytest.mark.parametrize(
    ("options", "path", "value"),
    [
        (("algo=ppo", "env=cartpole", "tuned=none"), ("open", "obs"), float("inf")),
        (("algo=dqn", "env=frozenlake", "tuned=none"), ("open", "obs"), 10**6),
        (RUNS["recurrent"], ("carry",), float("nan")),
    ],
    ids=["infinite", "out of the space", "recurrent state"],
)
def test_numbers_that_the_policy_cannot_act_on(
    options: tuple[str, ...], path: tuple[str, ...], value: Any, tmp_path: Path
):
    """They fail while the state is loaded, and not in the first rollout."""
    collector = build(compose([*options, "total_steps=20_000", "logger=[]", "hardware=cpu"]), tmp_path).collector
    collector.submit(ROLLOUT)
    state = decode(encode(copy_to_host(collector.state())))
    node = state
    for key in path:
        node = node[key]
    for leaf in tree.leaves(node):
        leaf[...] = value
    with pytest.raises(MISFITS):
        collector.load(state)
