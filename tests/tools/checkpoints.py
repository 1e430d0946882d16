"""Checkpoints that somebody forged, and what becomes of those who load them: an answer, or one clear message.

python -m tests.tools.checkpoints 400 [seed]

A case takes one run of several algorithms, keeps its newest checkpoint, and forges that with right checksums: values of
its manifests and of the configuration, trees, tensors, archives, and instructions of pickle. Then ``resume``,
``evaluate`` and ``rlplug.load`` load it, each in a process of its own, with limits of time and memory. Nothing may end
in a traceback, a signal, or after a minute, nothing may be executed, and no control character may be printed.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
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
from tests.tools.damage import NONSENSE, Planted, Scene, copied, places

LIMIT_S = 60
MEMORY = 12 * 1024**3  # of address space, of which a process with torch takes some
MOST_LINES = 40  # of a message, which has one for each setting that is wrong
ESCAPES = ("\x1b[31m", "\x1b]0;owned\x07", "\x07\x08", "\u202e", "\x9b2J", "\r", "\u2028", "\x7f", "\ud800")
SHORT = ("eval.every=0", "eval.episodes=1", "hardware=cpu", "logger.only=[]", "tuned=none")
SMALL = ("num_steps_sampled_before_learning_starts=20", "train_batch_size=8", "buffer.capacity=100", "total_steps=120")
ROLLOUT = ("total_steps=128", "num_envs=2", "algo.sgd_minibatch_size=64", "rollout_fragment_length=32")
NORMALIZED = ("preprocess.normalize_obs=true", "preprocess.normalize_reward=true", "model.torso.hidden=[8]")
RUNS: dict[str, tuple[str, ...]] = {
    "ppo": ("algo=ppo", "env=cartpole", *ROLLOUT, "model.hidden=[8]"),
    "ppo_lstm": ("algo=ppo", "env=cartpole", "model=lstm", *ROLLOUT, *NORMALIZED),
    "dqn": ("algo=dqn", "env=cartpole", *SMALL, "model.hidden=[8]"),
    "rainbow": ("algo=dqn", "env=frozenlake", "buffer=prioritized", *SMALL, "model.hidden=[8]"),
    "sac": ("algo=sac", "env=pendulum", *SMALL, "model.hidden=[8]"),
    "icm": ("algo=td3", "env=pendulum", "exploration=[gaussian,icm]", *SMALL, "model.hidden=[8]"),
    "impala": ("algo=impala", "env=cartpole", "total_steps=400", "num_envs=2", "train_batch_size=100"),
    "bandit": ("algo=linucb", "env=linear_bandit", "total_steps=100"),
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
    values = (
        *NONSENSE,
        text,
        text,
        text,
        [text],
        {text: text},
        deep,
        "x" * 10**6,
        10**400,
        -(10**18),
        [10**9] * 3,
        2**31,
    )
    return rng.choice(
        (*values, "os:system", "this:x-v0", "../../../etc/passwd", "/dev/zero", "ray", "cuda", "${oc.env:HOME}")
    )


def replaced(node: Any, rng: random.Random, times: int = 1) -> Any:
    """Replace, delete or rename values of nested dicts and lists; each depth is equally likely."""
    for _ in range(times):
        found = list(places(node))
        if not found:
            return node
        depth = rng.choice(sorted({len(path) for path in found}))
        *parents, last = rng.choice([path for path in found if len(path) == depth])
        inner = node
        for key in parents:
            inner = inner[key]
        what = rng.random()
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
        flat = x.flatten()[:1] if x.numel() else torch.zeros(1)
        other += [
            x[..., :0] if x.ndim else x,
            x.unsqueeze(0),
            x.reshape(-1),
            x.double(),
            x.bool(),
            x.to(torch.complex64),
            x.half(),
        ]
        other += [
            flat.expand(10**12),
            flat.expand(10**6, 10**6),
            x.float().to_sparse() if x.numel() else x,
            torch.empty(2**40, device="meta"),
        ]
        other += [
            torch.nn.Parameter(x.float()),
            torch.full_like(x.float(), float("inf")),
            torch.zeros(3, 0, 2),
            x.cpu().flip(0) if x.ndim else x,
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
        found = list(places(node))
        if found:
            *parents, last = scene.rng.choice(found)
            inner = node
            for key in parents:
                inner = inner[key]
            what = scene.rng.random()
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
    values = (
        {"__array__": 5},
        {"__bytes__": one.expand(10**12)},
        {"__bytes__": torch.tensor([300, -1])},
        {"__array__": one.expand(10**12)},
    )
    values += (
        {"__bytes__": {"__array__": one}},
        {"__array__": one.to_sparse()},
        {"__array__": torch.nn.Parameter(one)},
    )
    values += ({"__bytes__": torch.zeros(2, 2)}, {"__array__": torch.quantize_per_tensor(one, 0.1, 0, torch.quint8)})
    path = scene.file(".pt")
    node = decode(path.read_bytes())
    if isinstance(node, dict):
        node[scene.rng.choice([*node, "x"])] = scene.rng.choice(values)
    file = io.BytesIO()
    torch.save(node if isinstance(node, dict) else scene.rng.choice(values), file)
    scene.plant(path, file.getvalue())


def shared(scene: Scene) -> None:
    """A tree of few objects that stands for more than fits into memory, or that holds itself."""
    node: Any = scene.rng.choice(([], {}, [torch.zeros(1)]))
    kind = scene.rng.choice(("list", "dict", "tuple", "itself", "itself in a dict", "deep"))
    for _ in range(40 if kind in ("list", "dict", "tuple") else 5000 if kind == "deep" else 0):
        node = (
            {"a": node, "b": node}
            if kind == "dict"
            else (node, node)
            if kind == "tuple"
            else [node, node]
            if kind == "list"
            else [node]
        )
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
    old = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        file = io.BytesIO()
        torch.save(node, file)
    finally:
        sys.setrecursionlimit(old)
    scene.plant(path, file.getvalue())


def archive(scene: Scene) -> None:
    """Archives as torch does not write them."""
    path = scene.file(".pt")
    old = zipfile.ZipFile(path)
    entries = {info.filename: old.read(info) for info in old.infolist()}
    program = next(name for name in entries if name.endswith("data.pkl"))
    kind = scene.rng.choice(
        ("compressed", "bomb", "duplicate", "missing", "script", "program", "records", "order", "legacy", "tail")
    )
    if kind == "missing":
        del entries[scene.rng.choice(list(entries))]
    elif kind == "script":
        entries[program.replace("data.pkl", "constants.pkl")] = entries[program]
    elif kind == "program":
        data = bytearray(entries[program])
        for _ in range(scene.rng.randint(1, 3)):
            data[scene.rng.randrange(len(data))] = scene.rng.randrange(256)
        entries[program] = bytes(data)
    elif kind == "records":
        for name in entries:
            if "/data/" in name:
                entries[name] = scene.rng.choice((b"", entries[name] * 2, entries[name][:-1]))
    elif kind == "order":
        entries[program.replace("data.pkl", "byteorder")] = scene.rng.choice((b"big", b"", b"x\x1b[31m"))
    out = io.BytesIO()
    with (
        zipfile.ZipFile(
            out, "w", zipfile.ZIP_DEFLATED if kind in ("compressed", "bomb") else zipfile.ZIP_STORED
        ) as new,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for name, data in entries.items():
            new.writestr(name, b"\x00" * 2**28 if kind == "bomb" and "/data/" in name else data)
        if kind == "duplicate":
            new.writestr(program, entries[program][::-1])
    data = out.getvalue()
    if kind == "legacy":
        data = saved(decode(path.read_bytes()), _use_new_zipfile_serialization=False)
    scene.plant(path, data + scene.rng.randbytes(50) if kind == "tail" else data)


PROGRAMS = (
    *(
        b"\x80\x04\x8a\xff" + b"\xff" * 255 + b".",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b".",
    ),
    *(
        b"\x80\x02]q\x00" + b"(" * 10**6 + b".",
        b"\x80\x02" + b"]" * 10**6 + b".",
        b"\x80\x02}q\x00h\x00h\x00s.",
        b"\x80\x02N.",
    ),
    *(
        b"\x80\x02ccollections\nOrderedDict\n)R.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NN)R.",
        b"\x80\x02cos\nmkdir\n.",
    ),
    *(
        b"\x80\x02ccollections\nCounter\n}K\x01K\x02s\x85R.",
        b"\x80\x02ctorch\nSize\n(J\xff\xff\xff\x7ft\x85R.",
        b"\x80\x02X\xff\xff\xff\x7fx.",
    ),
    *(
        b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
        b"\x80\x02ccollections\ndefaultdict\n)R.",
        b"\x80\x02c__builtin__\nset\n)R.",
    ),
    *(
        b"\x80\x02ctorch\ndevice\nX\x05\x00\x00\x00cuda:\x85R.",
        b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R.",
    ),
)


def program(scene: Scene) -> None:
    """Instructions of pickle that torch allows, or not."""
    path = scene.file(".pt")
    old = zipfile.ZipFile(path)
    out = io.BytesIO()
    data = scene.rng.choice(
        (*PROGRAMS, pickle.dumps(Planted(scene.marker), 2), pickle.dumps(OrderedDict(a=Planted(scene.marker)), 2))
    )
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            new.writestr(info.filename, data if info.filename.endswith("data.pkl") else old.read(info))
    scene.plant(path, out.getvalue())


def huge(scene: Scene) -> None:
    """A file that is larger than memory, and takes none on disk."""
    path = scene.file(".pt")
    path.unlink()
    with path.open("wb") as file:
        file.truncate(2**40)
    scene.forge(
        path.parent,
        lambda node: {**node, "files": {**node["files"], path.name: {"bytes": 2**40, "sha256": "x\x1b[31m"}}},
    )


def files(scene: Scene) -> None:
    """Names of files, and their order."""

    def change(node: dict[str, Any]) -> dict[str, Any]:
        record = scene.rng.choice(list(node["files"].values()))
        name = scene.rng.choice(
            ("rank1.pt", "rank0_rows_0_10.pt", "rank0_part9_rows_5_1.pt", "rank99999999999999999999.pt")
        )
        name = scene.rng.choice(
            (name, f"rank0_rows_0_{10**30}.pt", "../x.pt", "weights.pt\n", "rank0_rows_9_9_.pt", "rank٣.pt")
        )
        node["files"][name] = record
        return node

    scene.forge(scene.checkpoint(), change)


KINDS: dict[str, Callable[[Scene], None]] = {
    **{f"{key} of the manifest": part(key) for key in ("config", "spec", "plugins", "files", "spent")},
    **{
        f.__name__: f
        for f in (manifest, both, run_manifest, settings, versions, tree, marked, shared, archive, program)
    },
    **{f.__name__: f for f in (huge, files)},
}
WEIGHTS = {
    "tree": 5,
    "manifest": 3,
    "config of the manifest": 3,
    "spec of the manifest": 3,
    "both": 3,
    "archive": 2,
    "program": 2,
    "shared": 2,
}


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
    "resume": lambda run: rlplug(["resume", run, "total_steps=500"]),
    "evaluate": lambda run: rlplug(["evaluate", run, "eval.episodes=1"]),
    "load": load,
}


@dataclass
class Answer:
    how: str
    code: int | None  # None: it took too long
    printed: str
    seconds: float

    @property
    def fault(self) -> str | None:
        """What is wrong with the answer; None: nothing."""
        if self.code is None:
            return f"no answer in {LIMIT_S} s"
        if "Traceback (most recent call last)" in self.printed and " raised in " not in self.printed:
            return "a traceback"  # of ours: where an environment raises, its own is quoted
        if self.code not in (0, 1, 2):
            return f"exit code {self.code}"
        if odd := sorted({c for c in self.printed if not c.isprintable() and c != "\n"}):
            return f"control characters {odd}"
        lines = self.printed.splitlines()
        if any(line.startswith("rlplug: FORGED") for line in lines):
            return "a forged line"
        said = [line for line in lines if line.startswith("rlplug: ")]
        if self.code == 2 and not (said and len(lines) <= MOST_LINES):
            return f"{len(lines)} lines, {len(said)} of them its own"
        if any(len(line) > 3000 for line in lines):
            return "a line without an end"
        return None


def ask(run: Path, how: str, work: Path) -> Answer:
    """Load a run in a copy of this process."""
    begin, output = time.monotonic(), work / "output"
    output.unlink(missing_ok=True)
    if not (child := os.fork()):
        try:
            os.chdir(work)
            os.setsid()
            descriptor = os.open(output, os.O_CREAT | os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(descriptor, stream)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            sys.stdout, sys.stderr = (open(stream, "w", closefd=False, errors="surrogatepass") for stream in (1, 2))  # noqa: SIM115
            code = LOADS[how](run.name)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    code = None
    while time.monotonic() - begin < LIMIT_S:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.005)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    text = output.read_text(encoding="utf-8", errors="surrogateescape") if output.exists() else ""
    return Answer(how, code, text, time.monotonic() - begin)


class Forger:
    """Trains the runs, and runs cases on copies of them.

    Args:
        work: an empty folder.
        runs: names of ``RUNS``.
        seed: it determines a case, together with the case's number.
    """

    def __init__(self, work: Path, runs: tuple[str, ...] = tuple(RUNS), seed: int = 0) -> None:
        self.work, self.seed = work, seed
        self.runs = {name: trained(name, work / name) for name in runs}
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.longest = 0.0, ""

    def case(self, number: int) -> list[str]:
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
            answer = ask(copy, how, self.work)
            shutil.rmtree(copy)
            self.longest = max(self.longest, (answer.seconds, f"case {number} of {name}, {kind}, {how}"))
            self.outcomes[how, {0: "loaded", 1: "stopped", 2: "refused"}.get(answer.code or 0, "fault")] += 1
            if answer.fault:
                found.append(f"case {number} of {name}, {kind}, {how}: {answer.fault}\n{answer.printed[-2500:]}")
        if scene.marker.exists():
            found.append(f"case {number} of {name}, {kind}: something was executed")
            shutil.rmtree(scene.marker)
        shutil.rmtree(run)
        return found


def main(count: int, seed: int, only: int | None = None) -> int:
    import rlplug.agent  # noqa: F401  what every copy of this process needs

    print(f"seed {seed}", flush=True)
    work = Path(tempfile.mkdtemp(prefix="rlplug-checkpoints-"))
    forger = Forger(work, seed=seed)
    faults = 0
    for number in range(count) if only is None else [only]:
        for fault in forger.case(number):
            faults += 1
            print(f"--- {fault}".encode("ascii", "backslashreplace").decode(), flush=True)
    print(", ".join(f"{how}: {what} {n}" for (how, what), n in sorted(forger.outcomes.items())))
    seconds, slowest = forger.longest
    print(f"{count} forged checkpoints, seed {seed}: {faults} faults; the longest load took {seconds:.1f} s: {slowest}")
    shutil.rmtree(work)
    return bool(faults)


if __name__ == "__main__":
    words = [int(word) for word in sys.argv[1:]]
    sys.exit(main(words[0], words[1] if len(words) > 1 else random.SystemRandom().randrange(10**6), *words[2:]))
