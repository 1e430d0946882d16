"""Measure Ray actors: their speed, their cost, and runs in which they fail. Results go to ``results/actors.json``.

    python benchmarks/actors.py scaling    # environments that sleep 5 ms a step, played by 1, 2, 4 and 8 actors
    python benchmarks/actors.py cost       # CartPole, by 2 actors and by the same samplers as bare processes
    python benchmarks/actors.py weights    # 1, 10 and 100 MB to 8 actors
    python benchmarks/actors.py faults     # PPO while actors are killed and hang, and environments raise
    python benchmarks/actors.py population # ES by 1 and 4 actors, steps of 5 ms; then one is killed every 10 s
    python benchmarks/actors.py memory     # IMPALA with a learner that is too slow for its actors, for 30 minutes

Samplers that are compared take turns in one run; medians are printed.
"""

from __future__ import annotations

import argparse
import atexit
import csv
import json
import os
import pickle
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from multiprocessing import get_context, shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import rlplug
from rlplug import tree
from rlplug.actors import copies
from rlplug.actors.actor import Actor
from rlplug.api import Plan
from rlplug.config import compose
from rlplug.host import on_host
from rlplug.registry.discovery import installed
from rlplug.run.build import build, start
from rlplug.run.launch import train
from rlplug.testing.comparing import differences_of_runs
from rlplug.trainer.trainer import Trainer
from rlplug.types import Batch

RESULTS = Path(__file__).parent / "results" / "actors.json"
NEW = {"address": None, "object_store_memory": None, "num_cpus": 1, "num_gpus": 0, "placement_strategy": "PACK"}
QUIET = ("hardware=cpu", "logger.only=[]", "tuned=none")


def actors(count: int) -> tuple[str, ...]:
    return f"hardware.actors.count={count}", "hardware.actors.num_cpus=0.1"  # there may be more actors than cores


def started(stack: ExitStack, words: tuple[str, ...]) -> Trainer:
    trainer = stack.enter_context(closing(build(compose(words), Path())))
    start(trainer)
    return trainer


def rate(collect: Callable[[], Any], steps: int) -> float:
    """Return environment steps per second."""
    began = time.perf_counter()
    collect()
    return steps / (time.perf_counter() - began)


def turns(samplers: Mapping[Any, Callable[[], float]], rounds: int) -> dict[Any, float]:
    """Return the median of each sampler; they take turns."""
    seen: dict[Any, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sample in samplers.items():
            seen[name].append(sample())
    return {name: statistics.median(values) for name, values in seen.items()}


def scaling(rounds: int) -> dict[str, Any]:
    """32 environments, and 8, one for each of eight actors; 128 rows a round, as in PPO."""
    return {str(envs): scaled(envs, rounds) for envs in (32, 8)}


def scaled(envs: int, rounds: int, rows: int = 128) -> dict[str, Any]:
    slow = ("env=cartpole", "env.id=rlplug.testing.worlds:SlowCartPole-v0", f"num_envs={envs}")
    samplers = {}
    with ExitStack() as stack:
        for count in (1, 2, 4, 8):
            words = (*QUIET, "algo=ppo", *slow, *actors(count), f"rollout_fragment_length={rows}")
            trainer = started(stack, words)

            def sample(trainer: Trainer = trainer) -> float:
                return rate(lambda: list(trainer.collector.collect(rows)), rows * envs)

            sample()
            samplers[count] = sample
        speed = turns(samplers, rounds)
    for count, steps in speed.items():
        print(f"{envs} environments, {count} actors: {steps:7.1f} steps/s, {steps / speed[1] / count:.3f} of linear")
    return {str(count): {"steps_per_s": s, "of_linear": s / speed[1] / count} for count, s in speed.items()}


# ---- the same samplers without Ray --------------------------------------------------------------------------------


def bare(raw: Any, spec: bytes, env_ids: range, rows: int, name: str, begin: Any, done: Any) -> None:
    """Collect into shared memory whenever ``begin`` is released; the main function of a process."""
    actor, memory = Actor(), shared_memory.SharedMemory(name)
    actor.build(raw, spec, env_ids, Plan(), sys.path, installed())
    statistics_ = copies.statistics(actor.policy) | {"env_steps": 0}
    done.release()
    while True:
        begin.acquire()
        segment, _ = actor.collect(rows, "explore", statistics_, None)
        for leaf, place in zip(tree.leaves(segment), places(segment, memory), strict=True):
            np.copyto(place, leaf)
        done.release()


def places(like: Batch, memory: shared_memory.SharedMemory) -> Iterator[np.ndarray]:
    offset = 0
    for leaf in tree.leaves(like):
        yield np.ndarray(leaf.shape, leaf.dtype, memory.buf, offset)
        offset += -(-leaf.nbytes // 64) * 64


class Bare:
    """Two such processes; ``collect`` concatenates their segments, as a learner needs them."""

    def __init__(self, trainer: Trainer, rows: int) -> None:
        raw, half, spawn = trainer.config.raw, trainer.config.num_envs // 2, get_context("spawn")
        spec = pickle.dumps(trainer.resolved.spec)
        self.whole: Batch = on_host(next(iter(trainer.collector.collect(rows))))
        self.like = {key: leaf[:, :half].copy() for key, leaf in self.whole.items()}
        size = sum(-(-leaf.nbytes // 64) * 64 for leaf in tree.leaves(self.like))
        self.memory = [shared_memory.SharedMemory(create=True, size=size) for _ in range(2)]
        self.begins, self.dones = [spawn.Semaphore(0) for _ in range(2)], [spawn.Semaphore(0) for _ in range(2)]
        self.processes = [
            spawn.Process(
                target=bare,
                args=(
                    raw,
                    spec,
                    range(i * half, (i + 1) * half),
                    rows,
                    self.memory[i].name,
                    self.begins[i],
                    self.dones[i],
                ),
                daemon=True,
            )
            for i in range(2)
        ]
        for process in self.processes:
            process.start()
        for done in self.dones:
            done.acquire()

    def collect(self) -> None:
        for begin in self.begins:
            begin.release()
        for i, done in enumerate(self.dones):
            done.acquire()
            half = next(tree.leaves(self.like)).shape[1]
            for whole, part in zip(tree.leaves(self.whole), places(self.like, self.memory[i]), strict=True):
                whole[:, i * half : (i + 1) * half] = part

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for memory in self.memory:
            memory.unlink()


def cost(rounds: int) -> dict[str, Any]:
    """Compare on CartPole's native vector, 64 environments, 128 rows a round."""
    rows, envs = 128, 64
    words = (*QUIET, "algo=ppo", "env=cartpole", f"num_envs={envs}", f"rollout_fragment_length={rows}")
    with ExitStack() as stack:
        trainer = started(stack, (*words, *actors(2)))
        processes = stack.enter_context(closing(Bare(trainer, rows)))
        samplers = {
            "actors": lambda: rate(lambda: list(trainer.collector.collect(rows)), rows * envs),
            "processes": lambda: rate(processes.collect, rows * envs),
        }
        turns(samplers, 3)
        speed = turns(samplers, rounds)
    speed["ratio"] = speed["actors"] / speed["processes"]
    print(f"2 actors {speed['actors']:,.0f}, 2 processes {speed['processes']:,.0f} steps/s: {speed['ratio']:.3f}")
    return speed


class Receiver:
    """Copy weights into a network's memory, as an actor does."""

    def __init__(self) -> None:
        self.own: dict[str, torch.Tensor] = {}

    def load(self, weights: dict[str, np.ndarray]) -> None:
        for key, value in weights.items():
            if key not in self.own:
                self.own[key] = torch.zeros(value.shape)
            self.own[key].numpy()[:] = value


def weights(rounds: int) -> dict[str, Any]:
    """Put weights once, and load them in eight actors."""
    from rlplug.actors.cluster import connected
    from rlplug.plan import RayCluster

    found: dict[str, Any] = {}
    with connected(Plan(ray=RayCluster(**NEW))):
        import ray

        receivers = [ray.remote(num_cpus=0.1)(Receiver).remote() for _ in range(8)]
        for megabytes in (1, 10, 100):
            part = {f"{megabytes} MB, layer {i}": np.ones(megabytes * 250_000 // 10, np.float32) for i in range(10)}

            def broadcast(part: dict[str, np.ndarray] = part) -> float:
                began = time.perf_counter()
                ref = ray.put(part)
                ray.get([receiver.load.remote(ref) for receiver in receivers])
                return time.perf_counter() - began

            for _ in range(2):
                broadcast()
            seconds = statistics.median(broadcast() for _ in range(rounds))
            found[str(megabytes)] = {"seconds": seconds, "gb_per_s": 8 * megabytes / 1000 / seconds}
            print(
                f"{megabytes:3d} MB to 8 actors: {1000 * seconds:.1f} ms, {found[str(megabytes)]['gb_per_s']:.1f} GB/s"
            )
    return found


# ---- faults -------------------------------------------------------------------------------------------------------


def kill_now_and_then(seconds: float, over: threading.Event, killed: list[int]) -> None:
    """Send SIGKILL to one of this process's actors every ``seconds``."""
    draws = random.Random()  # the global generator belongs to the run
    while not over.wait(seconds):
        mine = psutil.Process().children(recursive=True)
        found = list[psutil.Process]()
        for process in mine:
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                found += [process] * (process.cmdline()[:1] or [""])[0].startswith("ray::Actor")
        if found:
            victim = draws.choice(found)
            victim.kill()
            killed.append(victim.pid)


def faults(rounds: int, total_steps: int = 200_000, seconds: float = 10.0) -> dict[str, Any]:
    """Train PPO on CartPole that raises once in 2,000 steps; one actor hangs; every ten seconds one is killed."""
    over, killed = threading.Event(), []
    killer = threading.Thread(target=kill_now_and_then, args=(seconds, over, killed), daemon=True)
    with tempfile.TemporaryDirectory() as work:
        run, hung = Path(work) / "run", Path(work) / "hung"
        words = (
            *("algo=ppo", "env=cartpole", "env.id=rlplug.testing.worlds:FaultyCartPole-v0", "hardware=cpu", *actors(2)),
            *("+env.kwargs.raises=0.0005", f"+env.kwargs.hangs={hung}", "+env.kwargs.after=2000", "eval.every=0"),
            *(
                "env.restart_failed=true",
                "hardware.actors.timeout_s=10",
                "hardware.actors.max_restarts=100",
                f"total_steps={total_steps}",
                "logger.only=[]",
            ),
        )
        killer.start()
        score = train(compose(words), run)
        over.set()
        summary = json.loads((run / "summary.json").read_text())
        rows = (run / "metrics.csv").read_text().splitlines()
    found = {"kills": len(killed), "hung": hung.name, "return": score, "env_steps": summary["env_steps"]}
    found |= {"total_steps": total_steps, "rows": len(rows), "seconds": summary["wall_s"]}
    print(found)
    return found


# ---- population ---------------------------------------------------------------------------------------------------


def population(rounds: int, seconds: float = 10.0) -> dict[str, Any]:
    """Generations a second of ES by 1 and 4 actors; and a run whose actors are killed, compared with another."""
    slow = ("algo=es", "env=cartpole", "env.id=rlplug.testing.worlds:SlowCartPole-v0", "env.max_episode_steps=50")
    slow += ("num_envs=4", "eval.every=0")  # short episodes: a generation takes as long when the policy is better
    found: dict[str, Any] = {}
    samplers: dict[int, Callable[[], float]] = {}
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        for count in (1, 4):
            words = [*QUIET, *slow, *actors(count)]
            run = stack.enter_context(rlplug.Session(words, folder=Path(work) / str(count)))
            run.step()
            samplers[count] = lambda run=run: rate(run.step, 1)
        speed = turns(samplers, rounds)
    for count, generations in speed.items():  # the same generations, whose episodes are equal
        found[str(count)] = {"generations_per_s": generations, "ratio": generations / speed[1]}
    with tempfile.TemporaryDirectory() as work:
        words = (*QUIET, *slow, *actors(4), "hardware.actors.max_restarts=100", "total_steps=20_000", "eval.episodes=1")
        over, killed = threading.Event(), []
        train(compose([*words]), Path(work) / "one")
        threading.Thread(target=kill_now_and_then, args=(seconds, over, killed), daemon=True).start()
        train(compose([*words]), Path(work) / "two")
        over.set()
        found |= {"kills": len(killed), "differences": differences_of_runs(Path(work) / "one", Path(work) / "two")}
    print(found)
    return found


# ---- memory -------------------------------------------------------------------------------------------------------


def held(processes: Iterable[psutil.Process]) -> float:
    """Return the megabytes that processes have for themselves; what is under way lies in Ray's shared memory."""
    seen = [process.memory_info() for process in processes]
    return round(sum(info.rss - info.shared for info in seen) / 2**20, 1)


def memory(minutes: int) -> dict[str, Any]:
    """Let two actors play ten times as many segments as the learner takes, each of whose samples has eight old ones."""
    words = ("algo=impala", "env=cartpole", *QUIET, *actors(2), "num_envs=16", "eval.every=0", "checkpoint.every=1min")
    words = (*words, "loop.in_flight=8", "replay_ratio=0.00025", "buffer.replay_proportion=8", "log.every=50_000")
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as work:
        run = Path(work) / "run"
        command = [sys.executable, "-m", "rlplug", *words, "total_steps=1_000_000_000", f"hydra.run.dir={run}"]
        program = subprocess.Popen(command)
        atexit.register(program.terminate)  # also where this program is ended
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        learner = psutil.Process(program.pid)
        while not (run / "metrics.csv").exists():
            time.sleep(1.0)
        for minute in range(minutes + 1):
            found.append(
                {"minute": minute, "learner_mb": held([learner]), "shared_mb": learner.memory_info().shared / 2**20}
            )
            found[-1]["actors_mb"] = held(p for p in learner.children(recursive=True) if "ray::Actor" in p.name())
            print(found[-1], flush=True)
            time.sleep(60.0)
        program.send_signal(signal.SIGINT)
        program.wait()
        summary = json.loads((run / "summary.json").read_text())
        with (run / "metrics.csv").open() as file:
            dropped = [float(row["buffer/dropped_segments"]) for row in csv.DictReader(file)]
    told = {"env_steps": summary["env_steps"], "updates": summary["updates"], "dropped_segments": max(dropped)}
    print(told)
    return {"minutes": found} | told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scaling", "cost", "weights", "faults", "population", "memory"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minutes", type=int, default=30, help="of memory")
    options = parser.parse_args()
    much = options.minutes if options.what == "memory" else options.rounds
    found = {"machine": platform.machine(), "cores": os.cpu_count()} | globals()[options.what](much)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(known | {options.what: found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
