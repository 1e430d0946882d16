"""Gradient steps of DreamerV3 a second, and memory, beside SheepRL: equal sizes, one thread each, the processor.

    python -m venv /tmp/sheeprl && /tmp/sheeprl/bin/pip install sheeprl==0.8.4 torch==<ours>
    python benchmarks/dreamerv3.py --peer /tmp/sheeprl/bin/python
    python benchmarks/dreamerv3.py --peer /tmp/sheeprl/bin/python --compiled       # and compiled steps of both

A step updates world model, actor and critic from 16 sequences of 64 rows of CartPole's observations, with 15 imagined
steps. The two take turns in processes of their own, and the time is that of the processor, so that a busy machine
disturbs both alike. Results go to ``results/dreamerv3.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, RUNNER = HERE / "results" / "dreamerv3.json", HERE / "runners" / "sheeprl_dreamerv3.py"


def ours(size: str, batch: int, length: int, steps: int, compiled: bool) -> dict[str, float]:
    """Time updates of a run that has collected a few sequences."""
    import torch

    from rlplug.config import compose
    from rlplug.run.build import build

    torch.set_num_threads(1)
    words = [f"train_batch_size={batch}", f"algo.batch_length={length}", f"model.size={size}", "hardware=cpu"]
    words += ["num_steps_sampled_before_learning_starts=1024", "logger.only=[]", "eval.every=0", "tuned=none"]
    words += [f"compile={'max' if compiled else 'off'}", "algo.open_loop_every=1000000"]
    trainer = build(compose(["algo=dreamerv3", "env=cartpole", *words]), Path())
    for _ in range(4 * length):
        trainer.collect("random")
    started = time.perf_counter()
    for _ in range(2):
        trainer.learner.update()
    first, wall, spent = time.perf_counter() - started, time.perf_counter(), time.process_time()
    for _ in range(steps):
        trainer.learner.update()
    found = {"cpu_s": (time.process_time() - spent) / steps, "wall_s": (time.perf_counter() - wall) / steps}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    parameters = sum(p.numel() for p in trainer.algorithm.parameters() if p.requires_grad)
    trainer.close()
    return found | {"first_s": first, "memory_mb": memory, "parameters": parameters}


def measured(python: str, script: Path, words: list[str]) -> dict[str, float]:
    """Run a script in a process of its own, on one thread; return its last line of JSON."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([python, str(script), *words], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{script.name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="interpreter of an environment with SheepRL")
    parser.add_argument("--size", default="1m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compiled", action="store_true", help="also measure compiled steps")
    chosen = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(chosen.rounds):
        for how in ("eager", *(["compiled"] if chosen.compiled else [])):
            words = [chosen.size, "16", "64", str(chosen.steps), how]
            for who, python, script in (("rlplug", sys.executable, Path(__file__)), ("sheeprl", chosen.peer, RUNNER)):
                one = measured(python, script, (["--ours"] if who == "rlplug" else []) + words)
                found.setdefault(f"{who} {how}", []).append(one)
                print(f"round {number + 1}, {who}, {how}: {json.dumps(one)}", flush=True)
    results: dict[str, Any] = {
        name: {key: statistics.median(one[key] for one in every) for key in every[0]} for name, every in found.items()
    }
    for how in ("eager", "compiled"):
        if f"rlplug {how}" in results:
            own, peer = results[f"rlplug {how}"], results[f"sheeprl {how}"]
            results[f"{how}: updates per second, ratio"] = round(peer["cpu_s"] / own["cpu_s"], 3)
    RESULTS.write_text(json.dumps({"size": chosen.size, "rounds": chosen.rounds} | results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ours"]:
        size, batch, length, steps, how = sys.argv[2:]
        print(json.dumps(ours(size, int(batch), int(length), int(steps), how == "compiled")))
    else:
        main()
