"""Updates a second from a recording four times as large as a limit of memory, beside one that the buffer holds.

    python benchmarks/streaming.py
    python benchmarks/streaming.py --rounds 5 --updates 5000

The kernel limits the data of each process (``RLIMIT_DATA``: heap and private mappings), also that of torch itself.
Both recordings are of random numbers, which do not compress, in the spaces of Humanoid. The small one is read into the
replay before the first update (``loop.stream=false``); of the large one the same replay is a window that moves over it,
a batch further for every update (``loop.stream=true``). IQL, one thread; the two take turns; medians. Then the window
moves over all of the large one once. As a control that is read with ``loop.stream=false``, which the limit has to end.
Results go to ``results/streaming.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
OBS, ACTION, STEPS = 348, 17, 1000  # Humanoid-v5
ROW = 4 * (OBS + ACTION + 1) + 4  # bytes: and the four flags
MIB = 2**20
TIMES, BATCH = 4, 256  # the limit; samples of an update
WINDOW = 0.1  # of the limit: what the replay holds, and the small recording has
FILE = 32 * MIB


def write(folder: Path, size: int) -> int:
    """Write a recording of ``size`` bytes; return its steps."""
    from gymnasium.spaces import Box

    from rlplug.data import parquet
    from rlplug.envs.spaces import single_agent
    from rlplug.envs.spec_json import to_json

    obs, action = (Box(low, high, (n,), np.float32) for low, high, n in ((-np.inf, np.inf, OBS), (-1.0, 1.0, ACTION)))
    about = {"spec": to_json(single_agent(obs, action, STEPS)), "versions": {}}
    rng, episodes, per_file = np.random.default_rng(0), size // (STEPS * ROW), FILE // (STEPS * ROW)
    folder.mkdir(parents=True)
    for begin in range(0, episodes, per_file):
        some = [episode(rng) for _ in range(min(per_file, episodes - begin))]
        parquet.write(folder / f"{begin:06}.parquet", some, about)
    return episodes * STEPS


def episode(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the rows of an episode, which is truncated."""
    n = STEPS + 1
    at = np.arange(n)
    return {
        "obs": rng.standard_normal((n, OBS), np.float32),
        "action": rng.uniform(-1.0, 1.0, (n, ACTION)).astype(np.float32),
        "reward": rng.standard_normal(n, np.float32),
        "terminated": np.zeros(n, np.bool_),
        "truncated": at == STEPS - 1,
        "is_first": at == 0,
        "valid": at < STEPS,
    }


def measure(data: Path, updates: int, capacity: int, fragment: int, limit: int) -> dict[str, Any]:
    """Train under a limit of memory, in this process; ``fragment``: steps read for an update, or 0: all before them."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    from rlplug.cli.train import train

    with tempfile.TemporaryDirectory() as folder:
        words = ["algo=iql", "env=recorded", f"env.path={data}", f"data.path={data}", "hardware=cpu", "logger.only=[]"]
        words += [f"loop.stream={str(fragment > 0).lower()}", f"rollout_fragment_length={fragment or 1000}"]
        words += [f"buffer.capacity={capacity}"]
        words += [f"num_steps_sampled_before_learning_starts={capacity // 2}", "checkpoint.every=0"]
        train([*words, f"total_steps={updates}", f"log.every={updates}", f"hydra.run.dir={folder}/run"])
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024  # type: ignore[index]
    return {
        "updates_per_s": summary["updates_per_s"],
        "startup_s": summary["startup_s"],
        "read_mib": round(summary["env_steps"] * ROW / MIB),
        "peak_resident_mib": round(peak),
    }


def turn(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Measure in a process of its own."""
    # Arrow maps a GiB before it needs it, which the limit counts
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MIMALLOC_ARENA_RESERVE": "0"}
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=512, help="MiB of data a process may have (default: 512)")
    parser.add_argument("--updates", type=int, default=1000, help="of a turn (default: 1000)")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        data, *numbers = args.measure
        print(json.dumps(measure(Path(data), *map(int, numbers))))
        return
    limit = args.limit * MIB
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder, "small"), Path(folder, "large")
        capacity, steps = write(small, int(WINDOW * limit)), write(large, TIMES * limit)
        most = capacity + STEPS  # rows: the final ones of episodes count
        control = turn(large, args.updates, steps + steps // STEPS + 1, 0, limit)
        if control.returncode == 0:
            raise SystemExit("the limit limits nothing: the whole recording was read into memory")
        refusal = next(line for line in control.stderr.splitlines()[::-1] if "Error" in line)
        print(f"control: {refusal}", flush=True)
        turns = {"fits": (small, 0), "streamed": (large, BATCH)}
        order = [*turns] * args.rounds + ["all of it"]
        turns["all of it"] = large, steps // args.updates + 1
        seen: dict[str, list[dict[str, Any]]] = {name: [] for name in turns}
        for name in order:
            data, fragment = turns[name]
            done = turn(data, args.updates, most, fragment, limit)
            if done.returncode:
                raise SystemExit(done.stderr)
            seen[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{name:10s}" + "".join(f"  {key} {x:,.1f}" for key, x in seen[name][-1].items()), flush=True)
        on_disk = {
            name: sum(file.stat().st_size for file in data.iterdir()) // MIB for name, (data, _) in turns.items()
        }
    medians = {
        name: {"on_disk_mib": on_disk[name]}
        | {key: round(statistics.median(one[key] for one in said), 1) for key in said[0]}
        for name, said in seen.items()
    }
    share = medians["streamed"]["updates_per_s"] / medians["fits"]["updates_per_s"]
    print(f"streamed at {100 * share:.0f} % of the speed")
    about = {
        "rounds": args.rounds,
        "limit_mib": args.limit,
        "load": round(os.getloadavg()[0], 2),
        "share": round(share, 3),
    }
    text = json.dumps(about | {"medians": medians}, indent=1)
    (HERE / "results" / "streaming.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
