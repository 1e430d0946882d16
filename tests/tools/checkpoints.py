"""Checkpoints that somebody forged, and what becomes of those who load them: an answer, or one clear message.

python -m tests.tools.checkpoints 400 [seed]

A case takes one run of several algorithms, keeps its newest checkpoint, and forges that with right checksums: values of
its manifests and of the configuration, trees, tensors, archives, and instructions of pickle. Then ``resume``,
``evaluate`` and ``rlplug.load`` load it, each in a process of its own, with limits of time and memory. Nothing may end
in a traceback, a signal, or after a minute, nothing may be executed, and no control character may be printed.
"""

import io
import json
import os
import pickle
import random
import shutil
import struct
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from rlplug.checkpointing.format import FOLDER, MANIFEST, checkpoints
from rlplug.checkpointing.serialize import decode
from rlplug.cli import main as rlplug
from rlplug.config import compose
from rlplug.run import launch
from rlplug.types import ConfigError
from tests.tools.asking import ESCAPES, ask, main
from tests.tools.damage import NONSENSE, Planted, Scene, chosen, copied

SHORT = ("eval.every=0", "eval.episodes=1", "hardware=cpu", "logger.only=[]", "tuned=none")
SMALL = ("num_steps_sampled_before_learning_starts=20", "train_batch_size=8", "buffer.capacity=100", "total_steps=120")
ROLLOUT = ("total_steps=128", "num_envs=2", "algo.sgd_minibatch_size=64", "rollout_fragment_length=32")
NORMALIZED = ("preprocess.normalize_obs=true", "preprocess.normalize_reward=true", "model.torso.hidden=[8]")
SEARCH = ("num_envs=2", "total_steps=128", "algo.num_simulations=4", "train_batch_size=4", "replay_ratio=0.1")
TASKS = ("total_steps=800", "algo.meta_batch_size=2", "loop.episodes=4", "env.max_episode_steps=10")
RUNS: dict[str, tuple[str, ...]] = {
    "ppo": ("algo=ppo", "env=cartpole", *ROLLOUT, "model.hidden=[8]"),
    "ppo_lstm": ("algo=ppo", "env=cartpole", "model=lstm", *ROLLOUT, *NORMALIZED),
    "dqn": ("algo=dqn", "env=cartpole", *SMALL, "model.hidden=[8]"),
    "rainbow": ("algo=dqn", "env=frozenlake", "buffer=prioritized", *SMALL, "model.hidden=[8]"),
    "sac": ("algo=sac", "env=pendulum", *SMALL, "model.hidden=[8]"),
    "icm": ("algo=td3", "env=pendulum", "exploration=[gaussian,icm]", *SMALL, "model.hidden=[8]"),
    "impala": ("algo=impala", "env=cartpole", "total_steps=400", "num_envs=2", "train_batch_size=100"),
    "bandit": ("algo=linucb", "env=linear_bandit", "total_steps=100"),
    "vector": ("algo=ppo", "env=cartpole_torch", *ROLLOUT, "model.hidden=[8]"),
    "slates": ("algo=slateq", "env=interest_evolution", *SMALL, "model.hidden=[8]"),
    "goals": ("algo=ppo", "env=point_goals", *ROLLOUT, "model.hidden=[8]"),
    "agents": ("algo=qmix", "env=spread_torch", *SMALL, "model.hidden=8", "env.max_episode_steps=5"),
    "game": ("algo=alphazero", "env=tictactoe", *SEARCH, "model.hidden=[8]"),
    "tasks": ("algo=maml", "env=point_goals", *TASKS, "model.hidden=[8]"),
}


def trained(name: str, folder: Path) -> Path:
    launch.train(compose([*SHORT, *RUNS[name]]), folder, tell=lambda _: None)
    return folder


# ---- forgeries -------------------------------------------------------------------------------------------------------


def hostile(rng: random.Random) -> Any:
    """Return a value of JSON that somebody else would not write."""
    text = f"x{rng.choice(ESCAPES)}\nrlplug: FORGED{rng.choice(ESCAPES)}"
    deep: Any = "x"
    for _ in range(rng.choice((10, 300))):
        deep = [deep] if rng.random() < 0.5 else {text: deep}
    values = (*NONSENSE, text, text, text, [text], {text: text}, deep, "x" * 10**6, 10**400, -(10**18), [10**9] * 3)
    others = ("os:system", "this:x-v0", "../../../etc/passwd", "/dev/zero", "ray", "cuda", "${oc.env:HOME}", 2**31)
    return rng.choice((*values, *others))


def replaced(node: Any, rng: random.Random, times: int = 1) -> Any:
    """Replace, delete or rename values of nested dicts and lists."""
    for _ in range(times):
        if (place := chosen(node, rng)) is None:
            return node
        (inner, last), what = place, rng.random()
        if what < 0.1:
            del inner[last]
        elif what < 0.3 and isinstance(inner, dict):
            inner[f"{last}{rng.choice(ESCAPES)}\nrlplug: FORGED" if rng.random() < 0.7 else "x"] = inner.pop(last)
        elif what < 0.4 and isinstance(inner, dict):
            inner[f"x{rng.choice(ESCAPES)}\nrlplug: FORGED"] = hostile(rng)
        elif what < 0.55 and isinstance(inner[last], int | float):
            inner[last] = rng.choice((0, -1, 1, 2, inner[last] * 2, inner[last] + 1, 10**9, 1e308, float("nan"), -0.0))
        else:
            inner[last] = hostile(rng)
    return node


def manifest(scene: Scene) -> None:
    times = scene.rng.choice((1, 1, 1, 3))
    scene.forge(scene.checkpoint(), lambda node: replaced(node, scene.rng, times))


def part(key: str) -> Callable[[Scene], None]:
    """A forgery of one part of the checkpoint's manifest."""

    def forge(scene: Scene) -> None:
        scene.forge(scene.checkpoint(), lambda node: {**node, key: replaced(node[key], scene.rng)})

    return forge


def both(scene: Scene) -> None:
    """The same change in the checkpoint's manifest and in the run's configuration."""
    seed = scene.rng.random()
    scene.forge(scene.checkpoint(), lambda node: {**node, "config": replaced(node["config"], random.Random(seed))})
    config = replaced(yaml.safe_load((scene.run / "config.yaml").read_text()), random.Random(seed))
    text = yaml.safe_dump(config, sort_keys=False).encode("utf-8", "surrogatepass")
    scene.write(scene.run / "config.yaml", text)


def run_manifest(scene: Scene) -> None:
    path = scene.run / MANIFEST
    node = replaced(json.loads(path.read_bytes()), scene.rng, scene.rng.choice((1, 3)))
    scene.write(path, json.dumps(node).encode())


def settings(scene: Scene) -> None:
    path = scene.run / "config.yaml"
    node = replaced(yaml.safe_load(path.read_text()), scene.rng, scene.rng.choice((1, 1, 3)))
    scene.write(path, yaml.safe_dump(node, sort_keys=False).encode("utf-8", "surrogatepass"))


def versions(scene: Scene) -> None:
    """Names and versions of packages, which messages quote."""

    def change(node: dict[str, Any]) -> dict[str, Any]:
        key = scene.rng.choice(sorted(node["plugins"]))
        what = scene.rng.choice(("kind", "name", "distribution", "version"))
        node["plugins"][key][what] = f"x{scene.rng.choice(ESCAPES)}\nrlplug: FORGED"
        return node

    scene.forge(scene.checkpoint(), change)
    path = scene.run / MANIFEST
    node = change(json.loads(path.read_bytes()))
    node["versions"][scene.rng.choice(sorted(node["versions"]))] = f"x{scene.rng.choice(ESCAPES)}\nrlplug: FORGED"
    scene.write(path, json.dumps(node).encode())


def tensors(rng: random.Random, x: Any) -> Any:
    """Return something in the place of a leaf of a tree."""
    x = torch.as_tensor(x) if isinstance(x, np.ndarray) else x
    other: list[Any] = [None, "x\x1b[31m\nrlplug: FORGED", 10**400, -1, float("nan"), b"x", [], {}, (), [[1, [2]]]]
    if isinstance(x, torch.Tensor):
        flat, many = x.flatten()[:1] if x.numel() else torch.zeros(1), x if x.numel() else torch.zeros(1)
        other += [x[..., :0] if x.ndim else x, x.unsqueeze(0), x.reshape(-1), x.double(), x.bool(), x.half()]
        other += [x.to(torch.complex64), flat.expand(10**12), flat.expand(10**6, 10**6), many.float().to_sparse()]
        other += [torch.empty(2**40, device="meta"), torch.nn.Parameter(x.float()), torch.zeros(3, 0, 2)]
        other += [
            torch.full_like(x.float(), float("inf")),
            x.cpu().flip(0) if x.ndim and x.dtype != torch.uint32 else x,
        ]
        other += [torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8), torch.randint(-(2**62), 2**62, x.shape)]
    elif isinstance(x, int | float) and not isinstance(x, bool):
        other += [2**63, -(2**63), 1e308, x + 1, -x, str(x), torch.tensor(x % 2**31), [x]]
    elif isinstance(x, str):
        other += [x + "\x00", "\ud800", x * 10**6]
    return rng.choice(other)


def tree(scene: Scene) -> None:
    """Replace leaves or branches of a tree."""
    path = scene.file(".pt")
    node = decode(path.read_bytes())
    for _ in range(scene.rng.choice((1, 1, 2))):
        if (place := chosen(node, scene.rng)) is not None:
            (inner, last), what = place, scene.rng.random()
            if what < 0.15:
                del inner[last]
            elif what < 0.25 and isinstance(inner, dict):
                inner[f"x\x1b[31m\nrlplug: FORGED{scene.rng.random()}"] = inner.pop(last)
            else:
                inner[last] = tensors(scene.rng, inner[last])
    scene.plant(path, saved(node))


def saved(node: Any, **options: Any) -> bytes:
    """Return a file of torch's, without what ``encode`` refuses."""

    def plain(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: plain(value) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(map(plain, node))
        if isinstance(node, np.ndarray):
            return {"__array__": torch.from_numpy(node.copy())}
        if isinstance(node, bytes):
            return {"__bytes__": torch.tensor(list(node), dtype=torch.uint8)}
        return node

    file = io.BytesIO()
    torch.save(plain(node), file, **options)
    return file.getvalue()


def marked(scene: Scene) -> None:
    """Trees with the marks of arrays and bytes in wrong places."""
    one = torch.zeros(1)
    arrays = (
        5,
        one.expand(10**12),
        one.to_sparse(),
        torch.nn.Parameter(one),
        torch.quantize_per_tensor(one, 0.1, 0, torch.quint8),
    )
    texts = (one.expand(10**12), torch.tensor([300, -1]), {"__array__": one}, torch.zeros(2, 2))
    values = [*({"__array__": x} for x in arrays), *({"__bytes__": x} for x in texts)]
    path = scene.file(".pt")
    node = decode(path.read_bytes())
    if isinstance(node, dict):
        node[scene.rng.choice([*node, "x"])] = scene.rng.choice(values)
    scene.plant(path, raw(node if isinstance(node, dict) else scene.rng.choice(values)))


def shared(scene: Scene) -> None:
    """A tree of few objects that stands for more than fits into memory, or that holds itself."""
    node: Any = scene.rng.choice(([], {}, [torch.zeros(1)]))
    double = {"list": lambda x: [x, x], "dict": lambda x: {"a": x, "b": x}, "tuple": lambda x: (x, x)}
    kind = scene.rng.choice((*double, "itself", "itself in a dict", "deep"))
    for _ in range(40 if kind in double else 5000 if kind == "deep" else 0):
        node = double[kind](node) if kind in double else [node]
    if kind == "itself":
        node = []
        node.append(node)
    elif kind == "itself in a dict":
        node = {}
        node["a"] = node
    path = scene.file(".pt")
    whole = decode(path.read_bytes())
    if isinstance(whole, dict) and scene.rng.random() < 0.7:
        whole[scene.rng.choice([*whole])] = node
        node = whole
    scene.plant(path, raw(node))


def raw(tree: Any) -> bytes:
    """Return the bytes of a tree that ``encode`` would refuse, or take apart, however deep it is."""
    old, file = sys.getrecursionlimit(), io.BytesIO()
    sys.setrecursionlimit(100_000)
    try:
        torch.save(tree, file)
    finally:
        sys.setrecursionlimit(old)
    return file.getvalue()


def unpacked(path: Path) -> tuple[dict[str, bytes], str]:
    """Return the entries of torch's archive, and which of them is its program."""
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    return entries, next(name for name in entries if name.endswith("data.pkl"))


def packed(entries: dict[str, bytes], how: int = zipfile.ZIP_STORED, more: dict[str, bytes] | None = None) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as new, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, data in [*entries.items(), *(more or {}).items()]:
            new.writestr(name, data)
    return out.getvalue()


def archive(scene: Scene) -> None:
    """Archives as torch does not write them."""
    path, rng = scene.file(".pt"), scene.rng
    entries, program = unpacked(path)
    records = [name for name in entries if "/data/" in name]
    kinds = ("compressed", "bomb", "duplicate", "missing", "script", "program", "records", "order", "legacy", "tail")
    kind, more = rng.choice(kinds), {}
    if kind == "missing":
        del entries[rng.choice(list(entries))]
    elif kind == "script":
        entries[program.replace("data.pkl", "constants.pkl")] = entries[program]
    elif kind == "program":
        data = bytearray(entries[program])
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        entries[program] = bytes(data)
    elif kind == "records":
        entries |= {name: rng.choice((b"", entries[name] * 2, entries[name][:-1])) for name in records}
    elif kind == "order":
        entries[program.replace("data.pkl", "byteorder")] = rng.choice((b"big", b"", b"x\x1b[31m"))
    elif kind == "bomb":
        entries |= dict.fromkeys(records, bytes(2**28))
    elif kind == "duplicate":
        more = {program: entries[program][::-1]}
    if kind == "legacy":
        data = saved(decode(path.read_bytes()), _use_new_zipfile_serialization=False)
    else:
        data = packed(entries, zipfile.ZIP_DEFLATED if kind in ("compressed", "bomb") else zipfile.ZIP_STORED, more)
    scene.plant(path, data + rng.randbytes(50) if kind == "tail" else data)


CALLS = (
    "collections\nOrderedDict\n)R",
    "torch._utils\n_rebuild_tensor_v2\n(NN)R",
    "os\nmkdir\n",
    "torch\nSize\n(J\xff\xff\xff\x7ft\x85R",
)
CALLS += (
    "collections\nCounter\n}K\x01K\x02s\x85R",
    "__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R",
    "__builtin__\nset\n)R",
)
CALLS += (
    "collections\ndefaultdict\n)R",
    "torch\ndevice\nX\x05\x00\x00\x00cuda:\x85R",
    "builtins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R",
)
PROGRAMS = (
    *(b"\x80\x02c" + call.encode("latin-1") + b"." for call in CALLS),
    *(b"\x80\x04\x8a\xff" + b"\xff" * 255 + b".", b"\x80\x02\x8b\xff\xff\xff\x7f.", b"\x80\x02}q\x00h\x00h\x00s."),
    *(b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b".", b"\x80\x02]q\x00" + b"(" * 10**6 + b".", b"\x80\x02N."),
    *(b"\x80\x02" + b"]" * 10**6 + b".", b"\x80\x02X\xff\xff\xff\x7fx."),
)


def program(scene: Scene) -> None:
    """Instructions of pickle that torch allows, or not."""
    path, planted = scene.file(".pt"), Planted(scene.marker)
    entries, name = unpacked(path)
    programs = (*PROGRAMS, pickle.dumps(planted, 2), pickle.dumps(OrderedDict(a=planted), 2))
    scene.plant(path, packed(entries | {name: scene.rng.choice(programs)}))


def huge(scene: Scene, path: Path | None = None, size: int = 2**40) -> None:
    """A file that is larger than memory, and takes none on disk."""
    path, record = path or scene.file(".pt"), {"bytes": size, "sha256": "x\x1b[31m"}
    path.unlink()
    path.touch()
    os.truncate(path, size)
    scene.forge(path.parent, lambda node: {**node, "files": {**node["files"], path.name: record}})


def files(scene: Scene) -> None:
    """Names of files, and their order."""
    names = ("rank1.pt", "rank0_rows_0_10.pt", "rank0_part9_rows_5_1.pt", "rank99999999999999999999.pt", "../x.pt")
    names += (f"rank0_rows_0_{10**30}.pt", "weights.pt\n", "rank0_rows_9_9_.pt", "rank٣.pt")

    def change(node: dict[str, Any]) -> dict[str, Any]:
        node["files"][scene.rng.choice(names)] = scene.rng.choice(list(node["files"].values()))
        return node

    scene.forge(scene.checkpoint(), change)


FORGERIES = (manifest, both, run_manifest, settings, versions, tree, marked, shared, archive, program, huge, files)
KINDS: dict[str, Callable[[Scene], None]] = {
    **{f"{key} of the manifest": part(key) for key in ("config", "spec", "plugins", "files", "spent")},
    **{forge.__name__: forge for forge in FORGERIES},
}
WEIGHTS = {"tree": 5, "manifest": 3, "config of the manifest": 3, "spec of the manifest": 3, "both": 3}
WEIGHTS |= {"archive": 2, "program": 2, "shared": 2}


# ---- what becomes of those who load them -----------------------------------------------------------------------------


def load(run: str) -> int:
    """Load a policy from Python and let it act, as a script would."""
    import rlplug as public

    try:
        agent = public.load(run)
        space = next(iter((agent.spec.native_spaces or agent.spec.groups).values())).obs
        with suppress(ValueError):  # one that needs more than an observation
            agent.act(space.sample())
    except ConfigError as error:
        print(f"rlplug: {error}", file=sys.stderr)
        return 2
    return 0


LOADS: Mapping[str, Callable[[str], int]] = {
    "resume": lambda run: rlplug(["resume", run, "total_steps=1000"]),
    "evaluate": lambda run: rlplug(["evaluate", run, "eval.episodes=1"]),
    "load": load,
}


class Forger:
    """Trains the runs, and runs cases on copies of them.

    Args:
        work: an empty folder.
        seed: it determines a case, together with the case's number.
        runs: names of ``RUNS``.
    """

    def __init__(self, work: Path, seed: int = 0, runs: tuple[str, ...] = tuple(RUNS)) -> None:
        import rlplug.agent  # noqa: F401  what every copy of this process needs

        self.work, self.seed = work, seed
        self.runs = {name: trained(name, work / name) for name in runs}
        for name, run in self.runs.items():  # compiles what the cases resume, which may take a minute
            launch.resume(copied(run, work / f"{name} compiled"), ("total_steps=1000",), lambda _: None)
        self.outcomes: Counter[tuple[str, str]] = Counter()

    def faults(self, number: int) -> list[str]:
        """Run one case and return what is wrong with it."""
        rng = random.Random(f"{self.seed} {number}")
        name = rng.choice(list(self.runs))
        run = copied(self.runs[name], self.work / "case")
        for older in checkpoints(run)[1:]:
            shutil.rmtree(older)
        (run / FOLDER / "best").unlink(missing_ok=True)
        scene = Scene(run, run, self.work / "marker", rng)
        kind = rng.choices(list(KINDS), [WEIGHTS.get(kind, 1) for kind in KINDS])[0]
        KINDS[kind](scene)
        found: list[str] = []
        for how in LOADS:
            copy = copied(run, self.work / "loaded")
            answer = ask(how, lambda how=how, copy=copy: LOADS[how](copy.name), self.work)
            shutil.rmtree(copy)
            self.outcomes[how, {0: "loaded", 1: "stopped", 2: "refused"}.get(answer.code or 0, "fault")] += 1
            if fault := answer.fault():
                found.append(f"case {number} of {name}, {kind}, {how}: {fault}\n{answer.printed[-2500:]}")
        if scene.marker.exists():
            found.append(f"case {number} of {name}, {kind}: something was executed")
            shutil.rmtree(scene.marker)
        shutil.rmtree(run)
        return found


if __name__ == "__main__":
    sys.exit(main(Forger, sys.argv[1:]))
