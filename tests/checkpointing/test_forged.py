"""Checkpoints that somebody forged with right checksums: an answer or one message; nothing is executed or awaited."""

from __future__ import annotations

import io
import json
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import rlplug
from rlplug.checkpointing.format import find
from rlplug.checkpointing.serialize import decode, encode
from rlplug.cli import main
from rlplug.envs import snapshot
from rlplug.tree import check_like
from rlplug.types import CheckpointError
from tests.checkpointing.runs import copy_of
from tests.tools import checkpoints as tool
from tests.tools.damage import Scene

CASES = 8


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    def too_long(*args: Any) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def scene(sac_run: Path, tmp_path: Path) -> Scene:
    run = copy_of(sac_run, tmp_path / "run")
    return Scene(run, run, tmp_path / "marker", random.Random(0))


def test_a_sample_of_checkpoints(tmp_path: Path):
    """More of them: ``python -m tests.tools.checkpoints 400``."""
    seed = random.SystemRandom().randrange(10**6)
    forger = tool.Forger(tmp_path, ("dqn",), seed)
    faults = [fault for number in range(CASES) for fault in forger.case(number)]
    assert not faults, f"seed {seed}: {faults}"
    assert sum(forger.outcomes.values()) == CASES * len(tool.LOADS)


@pytest.mark.slow
def test_400_checkpoints(tmp_path: Path):
    seed = random.SystemRandom().randrange(10**6)
    forger = tool.Forger(tmp_path, seed=seed)
    faults = [fault for number in range(400) for fault in forger.case(number)]
    assert not faults, f"seed {seed}: {faults}"
    assert {what for _, what in forger.outcomes} >= {"loaded", "refused"}


def test_the_tool_sees_what_is_wrong():
    def fault(code: int | None, printed: str) -> str | None:
        return tool.Answer("load", code, printed, 0.0).fault

    assert fault(2, "rlplug: it is damaged\n") is fault(0, "") is None
    assert (
        fault(1, "rlplug: environments 0 to 1 raised in step():\nrlplug: Traceback (most recent call last):\n") is None
    )
    for code, printed in (
        (None, ""),
        (-11, ""),
        (1, "Traceback (most recent call last):\n"),
        (2, "damaged\n"),
        (2, "rlplug: x\x1b\n"),
        (2, "rlplug: x\nrlplug: FORGED\n"),
        (2, "rlplug: x\n" * 50),
        (2, "rlplug: " + "x" * 5000),
    ):
        assert fault(code, printed), (code, printed)


# ---- trees -----------------------------------------------------------------------------------------------------------


def raw(tree: Any) -> bytes:
    """Return the bytes of a tree that ``encode`` would refuse, or take apart."""
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


def doubled(times: int) -> Any:
    tree: Any = [torch.zeros(1)]
    for _ in range(times):
        tree = [tree, tree]
    return tree


def itself() -> Any:
    tree: dict[str, Any] = {}
    tree["a"] = tree
    return tree


BOMBS: dict[str, Callable[[], Any]] = {
    "lists of lists": lambda: doubled(60),
    "dicts of dicts": lambda: (one := {"a": 1}, {"b": one, "c": one})[1],
    "tuples of tuples": lambda: (one := (1, 2), (one, one))[1],
    "itself": itself,
    "a tensor of a billion billions": lambda: {"a": torch.zeros(1).expand(10**9, 10**9)},
    "an array of them": lambda: {"__array__": torch.zeros(1).expand(10**9, 10**9)},
    "bytes of them": lambda: {"__bytes__": torch.zeros(1, dtype=torch.uint8).expand(10**15)},
    "a tensor without memory": lambda: torch.empty(2**40, device="meta"),
    "a sparse tensor": lambda: torch.zeros(3).to_sparse(),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_few_bytes_that_stand_for_more_than_memory_holds(bomb: str):
    with pytest.raises(Exception, match=r"occurs twice|less memory than values|sparse|Sparse|storage|meta"):
        decode(raw(BOMBS[bomb]()))


def test_what_is_written_can_be_read():
    """Views of tensors, empty parts that are one object, equal parts that are not, and one tensor in two places."""
    x, empty = torch.arange(12.0).reshape(3, 4), ()
    tree = {
        "a": x.T,
        "b": x[1:, ::2],
        "c": [empty, empty, [], {}],
        "d": [[1], [1]],
        "e": (x, x),
        "f": np.arange(3),
        "g": b"x",
    }
    found = decode(encode(tree))
    assert torch.equal(found["a"], x.T)
    assert torch.equal(found["b"], x[1:, ::2])
    assert (found["c"], found["d"], found["g"]) == (tree["c"], tree["d"], tree["g"])
    shared = [1]
    assert decode(encode({"a": shared, "b": shared})) == {"a": [1], "b": [1]}


@pytest.mark.parametrize("verb", [["resume"], ["evaluate"]])
def test_a_file_that_is_larger_than_memory(verb: list[str], scene: Scene, capsys: pytest.CaptureFixture[str]):
    for path in sorted((scene.run / "checkpoints").glob("step_*")):
        file = path / "weights.pt"
        file.unlink()
        with file.open("wb") as empty:
            empty.truncate(2**42)
        record = {"bytes": 2**42, "sha256": "x"}
        scene.forge(path, lambda node, record=record: {**node, "files": {**node["files"], "weights.pt": record}})
    assert main([*verb, str(scene.run)]) == 2
    said = capsys.readouterr().err
    assert "weights.pt: its 4,398,046,511,104 bytes do not fit into memory" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("own", "loaded", "wrong"),
    [
        ({"a": {"b": 1}}, {"a": {"b": "x"}}, "a.b should be a number of shape [], and is of type str"),
        ({"a": 1}, {"a": torch.zeros(3)}, "a should be a number of shape [], and is a number of shape ['n']"),
        ({"a": {}}, {"a": [1]}, "a should be of type dict, and is a list"),
        ({"a": np.zeros((2, 3))}, {"a": np.zeros((2, 4))}, "should be a number of shape ['n', 3]"),
        ({"a": "x"}, {"a": b"x"}, "a should be of type str, and is of type bytes"),
        (
            {"a": 1, "b": None, "c": [1], "d": torch.zeros(2, 3)},
            {"a": 0.5, "b": "x", "c": (), "d": np.ones((9, 3))},
            None,
        ),
        ({"a": 1}, {"b": 1}, None),
    ],
)
def test_a_state_of_another_kind(own: Any, loaded: Any, wrong: str | None):
    if wrong is None:
        check_like(own, loaded)
    else:
        with pytest.raises(ValueError, match=r".") as error:
            check_like(own, loaded)
        assert wrong in str(error.value)


@pytest.mark.parametrize(
    ("loaded", "wrong"),
    [
        ({"a": np.ones((2, 3), np.float32)}, None),
        ({"a": torch.zeros(2, 3)}, None),
        ({"a": torch.zeros(3, 3)}, "a should be float32 of shape [2, 3], and is float32 of shape [3, 3]"),
        ({"a": np.zeros((2, 3))}, "a should be float32 of shape [2, 3], and is float64 of shape [2, 3]"),
        ({"a": None}, "a should be float32 of shape [2, 3], and is of type NoneType"),
        ({"a": 0.0}, "a should be float32 of shape [2, 3], and is float of shape []"),
        ({}, " should have the keys a, but has others"),
        ({"a": torch.zeros(2, 3), "b": 1}, " should have the keys a, but has others"),
    ],
)
def test_a_state_that_is_not_exactly_alike(loaded: Any, wrong: str | None):
    if wrong is None:
        check_like({"a": torch.zeros(2, 3)}, loaded, exact=True)
    else:
        with pytest.raises(ValueError, match=re.escape(wrong)):
            check_like({"a": torch.zeros(2, 3)}, loaded, exact=True)


@pytest.mark.parametrize(
    ("path", "value"),
    [(("log", "updates"), "x"), (("progress", "episodes"), [1]), (("means",), 5), (("orders",), {})],
)
def test_counters_that_are_no_numbers(
    path: tuple[str, ...], value: Any, scene: Scene, capsys: pytest.CaptureFixture[str]
):
    folder = find(scene.run).path
    tree = decode((folder / "learner.pt").read_bytes())
    *parents, last = path
    node = tree
    for key in parents:
        node = node[key]
    node[last] = value
    scene.plant(folder / "learner.pt", encode(tree))
    assert main(["resume", str(scene.run), "total_steps=250"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"does not fit what is installed and configured now: {'.'.join(path)} should be " in line


# ---- environments ----------------------------------------------------------------------------------------------------


def test_a_state_of_an_environment_replaces_no_method_and_calls_nothing():
    env = rlplug.compose(["env=cartpole"])  # which registers rlplug's own
    import gymnasium

    vector = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")
    vector.reset(seed=1)
    good = snapshot.snapshot(vector)
    assert good is not None
    assert env.num_envs
    snapshot.restore(vector, good)
    with pytest.raises(ValueError, match="'step' is not the state of an environment"):
        snapshot.restore(vector, [*good[:-1], good[-1] | {"step": 5}])
    with pytest.raises(ValueError, match="'test' is not a generator"):
        snapshot.restore(vector, [*good[:-1], good[-1] | {"_np_random": {"bit_generator": "test"}}])


# ---- manifests and settings ------------------------------------------------------------------------------------------

FORGED = "x\x1b[31m\x9b2J\u202e\nrlplug: FORGED"


def quoted(key: str, field: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda node: {**node, "plugins": {**node["plugins"], key: {**node["plugins"][key], field: FORGED}}}


MANIFESTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    **{f"{field} of a plugin": quoted("algo", field) for field in ("kind", "name", "distribution", "version")},
    "key of a plugin": lambda node: {**node, "plugins": {FORGED: node["plugins"]["algo"]}},
    "run": lambda node: {**node, "run": FORGED},
    "not restored": lambda node: {**node, "not_restored": [FORGED]},
    "a setting's value": lambda node: {**node, "config": {**node["config"], "num_envs": FORGED}},
    "a setting's name": lambda node: {**node, "config": {**node["config"], FORGED: 1}},
    "a setting's name inside": lambda node: {**node, "config": {**node["config"], "eval": {FORGED: 1}}},
    "a component's name": lambda node: {**node, "config": {**node["config"], "algo": {"name": FORGED}}},
    "a component's option": lambda node: {
        **node,
        "config": {**node["config"], "algo": {**node["config"]["algo"], FORGED: 1}},
    },
    "a space": lambda node: {**node, "spec": {**node["spec"], "groups": [{"name": FORGED, "obs": {"type": FORGED}}]}},
    "no group": lambda node: {**node, "spec": {**node["spec"], "groups": []}},
    "no environment": lambda node: {**node, "config": {k: v for k, v in node["config"].items() if k != "env"}},
    "a word for the environment": lambda node: {**node, "config": {**node["config"], "env": FORGED}},
    "no total": lambda node: {**node, "config": {**node["config"], "total_steps": FORGED}},
    "a book": lambda node: {**node, "config": {**node["config"], "num_envs": "x" * 10**5}},
}


@pytest.mark.filterwarnings("ignore")  # of which checkpoints are passed over
@pytest.mark.parametrize("forgery", MANIFESTS)
def test_what_a_manifest_says_is_quoted_in_one_line(forgery: str, scene: Scene, capsys: pytest.CaptureFixture[str]):
    for path in sorted((scene.run / "checkpoints").glob("step_*")):
        scene.forge(path, MANIFESTS[forgery])
    config = yaml.safe_load((scene.run / "config.yaml").read_text())
    forged = MANIFESTS[forgery](
        {**json.loads((scene.run / "manifest.json").read_bytes()), "config": config, "spec": {}}
    )
    (scene.run / "config.yaml").write_bytes(yaml.safe_dump(forged.pop("config"), sort_keys=False).encode())
    (scene.run / "manifest.json").write_text(json.dumps(forged))
    refusals = 0
    for words in (["resume", str(scene.run), "total_steps=250"], ["evaluate", str(scene.run)]):
        code = main(words)
        printed = capsys.readouterr().err
        refusals += code == 2
        assert code in (0, 2)
        assert "Traceback" not in printed
        assert all(
            line.startswith("rlplug: ") and not line.startswith("rlplug: FORGED") for line in printed.splitlines()
        )
        assert all(c.isprintable() or c == "\n" for c in printed)
        assert max(map(len, printed.splitlines()), default=0) < 3000
    assert tool.load(str(scene.run)) in (0, 2)
    printed = capsys.readouterr().err
    assert all(c.isprintable() or c == "\n" for c in printed)
    assert "\nrlplug: FORGED" not in printed
    assert refusals


def test_a_plugin_that_cannot_be_built_for_other_spaces(scene: Scene):
    def one_more(node: dict[str, Any]) -> dict[str, Any]:
        for groups in (node["spec"]["groups"], node["spec"]["native_spaces"]):
            for group in groups:
                group["obs"] = {"type": "Discrete", "n": 10**9, "start": 0, "dtype": "int64"}
        return node

    folder = find(scene.run).path
    scene.forge(folder, one_more)
    with pytest.raises(CheckpointError, match="does not fit algo 'sac' as it is now"):
        rlplug.load(folder)


def test_a_deep_tree_is_no_traceback():
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    old = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        data = raw(deep)
    finally:
        sys.setrecursionlimit(old)
    with pytest.raises(RecursionError):
        decode(data)
