"""Environment steps a second of augmented random search, and of SB3-contrib's: equal settings, one core.

    pip install --no-deps --target /tmp/sb3 sb3-contrib stable-baselines3
    PYTHONPATH=/tmp/sb3 python benchmarks/ars.py                     # CartPole and Pendulum, three rounds
    PYTHONPATH=/tmp/sb3 python benchmarks/ars.py pendulum --steps 32000 --rounds 5

Both take turns, each measurement in a process of its own with one thread, so that a busy machine disturbs both alike.
Set-up is not part of the speed; processor seconds are given, too. Linear policies, 8 directions of which all are used,
no normalization. The results go to ``results/ars.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "ars.json"
IDS = {"cartpole": "CartPole-v1", "pendulum": "Pendulum-v1"}
DIRECTIONS, STDEV, STEP = 8, 0.05, 0.02


def rlplug(env: str, steps: int) -> tuple[int, float, float]:
    """Return environment steps, seconds and processor seconds of a run."""
    import torch

    from rlplug.config import compose
    from rlplug.run.build import build, start

    words = [f"algo=ars env={env} tuned=none total_steps={steps} logger.only=[] eval.every=0 log.every=1000000000"]
    words += [f"algo.num_rollouts={DIRECTIONS} algo.rollouts_used={DIRECTIONS} algo.noise_stdev={STDEV}"]
    words += [f"algo.sgd_stepsize={STEP} algo.eval_prob=0.0 preprocess.normalize_obs=false checkpoint.every=0"]
    words += ["hardware=cpu hardware.threads=1"]
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(compose(" ".join(words).split()), Path(folder))
        start(trainer)
        torch.func.vmap(torch.neg)(torch.zeros(1))  # imports what it needs
        began = time.perf_counter(), time.process_time()
        trainer.loop.run(trainer)
        spent = time.perf_counter() - began[0], time.process_time() - began[1]
        trainer.close()
    return trainer.progress.env_steps, *spent


def sb3(env: str, steps: int) -> tuple[int, float, float]:
    """Return environment steps, seconds and processor seconds of a run of SB3-contrib."""
    import torch
    from sb3_contrib import ARS

    torch.set_num_threads(1)
    model = ARS("LinearPolicy", IDS[env], n_delta=DIRECTIONS, delta_std=STDEV, learning_rate=STEP, seed=0)
    began = time.perf_counter(), time.process_time()
    model.learn(steps)
    return model.num_timesteps, time.perf_counter() - began[0], time.process_time() - began[1]


WHO = {"rlplug": rlplug, "sb3": sb3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("envs", nargs="*", default=[*IDS], help="; ".join(IDS))
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=WHO, help="measure this one here, and print the result")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(WHO[args.one](args.envs[0], args.steps)))
        return
    found = {}
    for env in args.envs:
        speeds: dict[str, list[tuple[float, float]]] = {who: [] for who in WHO}
        for _ in range(args.rounds):
            for who in WHO:
                words = [sys.executable, __file__, env, "--steps", str(args.steps), "--one", who]
                done = subprocess.run(
                    words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True
                )
                steps, wall, cpu = json.loads(done.stdout.splitlines()[-1])
                speeds[who].append((steps / wall, steps / cpu))
        found[env] = {
            who: {"per_s": [round(x) for x, _ in s], "per_cpu_s": [round(x) for _, x in s]} for who, s in speeds.items()
        }
        for name in ("per_s", "per_cpu_s"):
            ours, theirs = (statistics.median(found[env][who][name]) for who in WHO)
            found[env][f"ratio_{name}"] = round(ours / theirs, 2)
            print(f"{env}: rlplug {ours:,.0f}, SB3-contrib {theirs:,.0f} steps {name}, {ours / theirs:.2f} x")
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
