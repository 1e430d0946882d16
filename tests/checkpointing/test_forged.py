"""Checkpoints that somebody forged with right checksums: an answer or one message; nothing is executed or awaited."""

import json
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import yaml

import rlplug
from rlplug.api import Optim
from rlplug.checkpointing.format import find
from rlplug.checkpointing.serialize import decode, encode
from rlplug.cli import main
from rlplug.config import choose, default_node
from rlplug.config.changes import resumed
from rlplug.envs import snapshot
from rlplug.envs.spec_json import playable
from rlplug.nn import LaProp
from rlplug.run import run_dir
from rlplug.trainer.optimizer import OptimizerState
from rlplug.tree import check_like
from rlplug.types import Batch, CheckpointError, ConfigError
from tests.checkpointing.runs import copy_of
from tests.tools import checkpoints as tool
from tests.tools.asking import Answer
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


@pytest.mark.parametrize(
    ("cases", "runs"), [(CASES, ("dqn",)), pytest.param(400, tuple(tool.RUNS), marks=pytest.mark.slow)]
)
def test_a_sample_of_checkpoints(cases: int, runs: tuple[str, ...], tmp_path: Path):
    """More of them: ``python -m tests.tools.checkpoints 400``."""
    seed = random.SystemRandom().randrange(10**6)
    forger = tool.Forger(tmp_path, seed, runs)
    faults = [fault for number in range(cases) for fault in forger.faults(number)]
    assert not faults, f"seed {seed}: {faults}"
    assert sum(forger.outcomes.values()) == cases * len(tool.LOADS)
    assert cases < 400 or {what for _, what in forger.outcomes} >= {"loaded", "refused"}


# ---- trees -----------------------------------------------------------------------------------------------------------


def doubled(times: int) -> Any:
    tree: Any = [torch.zeros(1)]
    for _ in range(times):
        tree = [tree, tree]
    return tree


BOMBS: dict[str, Callable[[], Any]] = {
    "lists of lists": lambda: doubled(60),
    "dicts of dicts": lambda: (one := {"a": 1}, {"b": one, "c": one})[1],
    "tuples of tuples": lambda: (one := (1, 2), (one, one))[1],
    "itself": lambda: [one := {"a": 1}, one.update(a=one)][0],
    "a tensor of a billion billions": lambda: {"a": torch.zeros(1).expand(10**9, 10**9)},
    "an array of them": lambda: {"__array__": torch.zeros(1).expand(10**9, 10**9)},
    "bytes of them": lambda: {"__bytes__": torch.zeros(1, dtype=torch.uint8).expand(10**15)},
    "a tensor without memory": lambda: torch.empty(2**40, device="meta"),
    "a sparse tensor": lambda: torch.zeros(3).to_sparse(),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_few_bytes_that_stand_for_more_than_memory_holds(bomb: str):
    with pytest.raises(Exception, match=r"occurs twice|less memory than values|sparse|Sparse|storage|meta"):
        decode(tool.raw(BOMBS[bomb]()))


def test_what_is_written_can_be_read():
    """Views of tensors, empty parts that are one object, equal parts that are not, and one tensor in two places."""
    x, empty, shared = torch.arange(12.0).reshape(3, 4), (), [1]
    plain = {"c": [empty, empty, [], {}], "d": [[1], [1]], "e": shared, "f": shared, "g": b"x"}
    found = decode(encode({"a": x.T, "b": x[1:, ::2], "two": (x, x), "array": np.arange(3), **plain}))
    assert torch.equal(found["a"], x.T)
    assert torch.equal(found["b"], x[1:, ::2])
    assert {key: found[key] for key in plain} == plain


@pytest.mark.parametrize("verb", ["resume", "evaluate"])
def test_a_file_that_is_larger_than_memory(verb: str, scene: Scene, capsys: pytest.CaptureFixture[str]):
    for path in sorted((scene.run / "checkpoints").glob("step_*")):
        tool.huge(scene, path / "weights.pt", 2**42)
    assert main([verb, str(scene.run)]) == 2
    said = capsys.readouterr().err
    assert "weights.pt: its 4,398,046,511,104 bytes do not fit into memory" in said
    assert "Traceback" not in said


def test_native_spaces_that_do_not_match_those_inside(discrete_run: Path, tmp_path: Path):
    run = copy_of(discrete_run, tmp_path / "run")
    spec = find(run).manifest["spec"]
    playable(spec)
    spec["native_spaces"][0]["obs"]["n"] = 99
    with pytest.raises(CheckpointError, match="the native spaces of 'agent' in the manifest do not match those inside"):
        playable(spec)


ROWS_OF = {
    "current": ("rank0", ("collector", "open", "obs")),
    "open": ("rank0", ("buffer", "open", "obs")),
    "observation": ("rank0_rows_37_101", ("obs",)),
    "action": ("rank0_rows_37_101", ("action",)),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: tool.trained(name, tmp_path_factory.mktemp(name) / "run"))


@pytest.fixture(scope="module")
def discrete_run(runs: Callable[[str], Path]) -> Path:
    return runs("rainbow")


@pytest.mark.parametrize("place", ROWS_OF)
def test_rows_outside_of_their_discrete_spaces(
    place: str, discrete_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Networks and environments would index out of range."""
    run = copy_of(discrete_run, tmp_path / "run")
    scene, (name, (*above, key)) = Scene(run, run, tmp_path / "marker", random.Random(0)), ROWS_OF[place]
    file = find(run).path / f"{name}.pt"
    whole = node = decode(file.read_bytes())
    for part in above:
        node = node[part]
    node[key] = node[key] + 99
    scene.plant(file, encode(whole))
    assert main(["resume", str(run), "total_steps=200"]) == 2
    said = capsys.readouterr().err
    size = 4 if key == "action" else 16
    assert re.search(rf"{key} ranges from \d+ to \d+; its space is Discrete\({size}\)", said), said
    assert "Traceback" not in said


MANY = {"a": 1, "b": None, "c": [1], "d": torch.zeros(2, 3)}
ROWS = {"a": torch.zeros(2, 3)}


@pytest.mark.parametrize(
    ("own", "loaded", "exact", "wrong"),
    [
        ({"a": {"b": 1}}, {"a": {"b": "x"}}, False, "a.b should be a number of shape [], and is of type str"),
        ({"a": 1}, {"a": torch.zeros(3)}, False, "a should be a number of shape [], and is a number of shape ['n']"),
        ({"a": {}}, {"a": [1]}, False, "a should be of type dict, and is a list"),
        ({"a": np.zeros((2, 3))}, {"a": np.zeros((2, 4))}, False, "should be a number of shape ['n', 3]"),
        ({"a": "x"}, {"a": b"x"}, False, "a should be of type str, and is of type bytes"),
        (MANY, {"a": 0.5, "b": "x", "c": (), "d": np.ones((9, 3))}, False, None),
        ({"a": 1}, {"b": 1}, False, None),
        ({"a": 1}, {"a": None}, False, "a should be a number of shape [], and is of type NoneType"),
        ({"a": None}, {"a": 1}, False, None),
        (ROWS, {"a": np.ones((2, 3), np.float32)}, True, None),
        (ROWS, {"a": torch.zeros(3, 3)}, True, "a should be float32 of shape [2, 3], and is float32 of shape [3, 3]"),
        (ROWS, {"a": np.zeros((2, 3))}, True, "a should be float32 of shape [2, 3], and is float64 of shape [2, 3]"),
        (ROWS, {"a": None}, True, "a should be float32 of shape [2, 3], and is of type NoneType"),
        (ROWS, {"a": 0.0}, True, "a should be float32 of shape [2, 3], and is float of shape []"),
        (ROWS, {}, True, " should have the keys a, but has others"),
        (ROWS, {**ROWS, "b": 1}, True, " should have the keys a, but has others"),
        ([1, 2], [1], True, " should be a list of 2, and is a list of 1"),
        ({"a": [1, 2]}, {"a": [1, "x"]}, True, "a.1 should be int of shape [], and is of type str"),
    ],
)
def test_a_state_of_another_kind(own: Any, loaded: Any, exact: bool, wrong: str | None):
    with pytest.raises(ValueError, match=re.escape(wrong)) if wrong else nullcontext():
        check_like(own, loaded, exact=exact)


@pytest.mark.parametrize(
    ("path", "value"), [(("log", "updates"), "x"), (("progress", "episodes"), [1]), (("means",), 5), (("orders",), {})]
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


def test_a_counter_that_only_equals_its_number(scene: Scene, capsys: pytest.CaptureFixture[str]):
    folder = find(scene.run).path
    tree = decode((folder / "learner.pt").read_bytes())
    tree["progress"]["updates"] = torch.tensor(tree["progress"]["updates"])
    scene.plant(folder / "learner.pt", encode(tree))
    assert main(["resume", str(scene.run), "total_steps=250"]) == 2
    assert "progress.updates should be int of shape [], and is int64 of shape []" in capsys.readouterr().err


WRONG_ROWS: dict[str, Callable[[Batch], Any]] = {
    "a key renamed": lambda rows: {"x" if key == "reward" else key: leaf for key, leaf in rows.items()},
    "a key less": lambda rows: {key: leaf for key, leaf in rows.items() if key != "is_first"},
    "another dtype": lambda rows: rows | {"valid": rows["valid"].float()},
    "another shape": lambda rows: rows | {"obs": rows["obs"].unsqueeze(-1)},
    "another length": lambda rows: rows | {"reward": rows["reward"][1:]},
    "a dict": lambda rows: rows | {"reward": {"x": rows["reward"]}},
    "a text": lambda rows: rows | {"reward": "x"},
}


@pytest.mark.parametrize("wrong", WRONG_ROWS)
@pytest.mark.parametrize("run", ["rainbow", "agents", "game"])
def test_rows_unlike_those_that_are_collected(
    run: str, wrong: str, runs: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """All of them: with equal rows only, a buffer would notice nothing."""
    folder = copy_of(runs(run), tmp_path / "run")
    scene, at = Scene(folder, folder, tmp_path / "marker", random.Random(0)), find(folder).path

    def changed(part: Any) -> Any:
        if isinstance(part, list | tuple):
            return type(part)(map(changed, part))
        if isinstance(part, dict):
            return WRONG_ROWS[wrong](part) if "valid" in part else {key: changed(x) for key, x in part.items()}
        return part

    for file in sorted(at.glob("rank0*.pt")):
        own = decode(file.read_bytes())
        scene.plant(file, encode(own | {"buffer": changed(own["buffer"])} if "buffer" in own else changed(own)))
    assert main(["resume", str(folder), "total_steps=1000"]) == 2
    assert "does not fit what is installed and configured now" in capsys.readouterr().err


@pytest.mark.parametrize("cls", [torch.optim.RMSprop, torch.optim.AdamW, LaProp])
@pytest.mark.parametrize("wrong", [(), {}, {"step": 1.0}, "shape", "kind"])
def test_an_optimizers_state_of_another_kind(cls: type[torch.optim.Optimizer], wrong: Any):
    own, other = (OptimizerState(Optim(cls([torch.zeros(3, 2, requires_grad=True)], lr=0.1))) for _ in range(2))
    for part in (own, other):
        part.params[0].grad = torch.ones(3, 2)
        part.optim.optimizer.step()
    state = own.state()
    part = state["optimizer"]["state"][0]
    changes = {"shape": lambda x: x.reshape(-1), "kind": lambda x: "x"}
    if wrong in ("shape", "kind"):
        part |= {key: changes[wrong](x) for key, x in part.items() if x.ndim}
    else:
        state["optimizer"]["state"][0] = wrong
    if wrong == {}:  # a parameter that was never updated
        other.load(state)
        other.optim.optimizer.step()
    else:
        with pytest.raises(ValueError, match=r"the state of an optimizer\.0"):
            other.load(state)


# ---- environments ----------------------------------------------------------------------------------------------------


def test_a_state_of_an_environment_replaces_no_method_and_calls_nothing():
    rlplug.compose(["env=cartpole"])  # which registers rlplug's own
    vector = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")
    vector.reset(seed=1)
    good = snapshot.snapshot(vector)
    assert good is not None
    snapshot.restore(vector, good)
    with pytest.raises(ValueError, match="'step' is not the state of an environment"):
        snapshot.restore(vector, [*good[:-1], good[-1] | {"step": 5}])
    with pytest.raises(ValueError, match="'test' is not a generator"):
        snapshot.restore(vector, [*good[:-1], good[-1] | {"_np_random": {"bit_generator": "test"}}])


# ---- manifests and settings ------------------------------------------------------------------------------------------

FORGED = "x\x1b[31m\x9b2J\u202e\nrlplug: FORGED"


def quoted(key: str, field: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda node: {**node, "plugins": {**node["plugins"], key: {**node["plugins"][key], field: FORGED}}}


def setting(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda node: {**node, "config": {**node["config"], **changes}}


MANIFESTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    **{f"{field} of a plugin": quoted("algo", field) for field in ("kind", "name", "distribution", "version")},
    "key of a plugin": lambda node: {**node, "plugins": {FORGED: node["plugins"]["algo"]}},
    "run": lambda node: {**node, "run": FORGED},
    "not restored": lambda node: {**node, "not_restored": [FORGED]},
    "a setting's value": setting(num_envs=FORGED),
    "a setting's name": setting(**{FORGED: 1}),
    "a setting's name inside": setting(eval={FORGED: 1}),
    "a component's name": setting(algo={"name": FORGED}),
    "a component's option": lambda node: setting(algo={**node["config"]["algo"], FORGED: 1})(node),
    "a space": lambda node: {**node, "spec": {**node["spec"], "groups": [{"name": FORGED, "obs": {"type": FORGED}}]}},
    "no group": lambda node: {**node, "spec": {**node["spec"], "groups": []}},
    "no environment": lambda node: {**node, "config": {k: v for k, v in node["config"].items() if k != "env"}},
    "a word for the environment": setting(env=FORGED),
    "no total": setting(total_steps=FORGED),
    "a book": setting(num_envs="x" * 10**5),
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
    loads = {"resume": lambda: main(["resume", str(scene.run), "total_steps=250"])}
    loads |= {"evaluate": lambda: main(["evaluate", str(scene.run)]), "load": lambda: tool.load(str(scene.run))}
    codes = []
    for how, load in loads.items():
        codes.append(load())
        assert Answer(how, codes[-1], capsys.readouterr().err, 0.0).fault((0, 2)) is None
    assert 2 in codes[:2]


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
    with pytest.raises(RecursionError):
        decode(tool.raw(deep))


def test_settings_that_are_nested_too_deeply_are_refused():
    deep: Any = 1
    for _ in range(120):
        deep = {"x": [deep]}
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read: it is nested too deeply"):
        resumed({"seed": 0, "record": deep}, [])


@pytest.mark.parametrize(("name", "said"), [("\ud800", "should be a valid string"), (None, "null"), (1, "1")])
def test_a_setting_whose_name_is_not_text_is_refused(name: Any, said: str):
    with pytest.raises(ConfigError, match=rf"{said}( is not the name of a setting; names are text)?$"):
        choose("hardware", "hardware", default_node("hardware", "cpu") | {name: 1})


@pytest.mark.parametrize("nested", [False, True])
def test_a_stored_setting_whose_name_is_not_text_is_refused(nested: bool, scene: Scene):
    path = scene.run / "config.yaml"
    settings = yaml.safe_load(path.read_bytes())
    (settings["algo"] if nested else settings)[None] = 3
    scene.write(path, yaml.safe_dump(settings).encode())
    with pytest.raises(CheckpointError, match=r"config\.yaml: the name of a setting is not text: 'null'"):
        run_dir.read(scene.run)
