"""Speed, start-up and memory beside peers: equal hyper-parameters, one thread each, the processor.

    pip install -c constraints.txt matplotlib           # for the picture
    python benchmarks/peers.py                          # every case, every peer, five rounds; most of an hour
    python benchmarks/peers.py ppo_cartpole --rounds 9
    python benchmarks/peers.py --who rlplug sb3 --neighbour      # beside another process that takes a core
    python benchmarks/peers.py ppo_cartpole --override hardware.float32_matmul_precision=medium

The first call makes an environment for each peer (in ``benchmarks/.peers``), with the versions below and our torch and
gymnasium (RLlib with the gymnasium that it asks for). Peers take turns, each measurement in a process of its own on one
core, or on all of them where a case has actors, so that a busy machine disturbs all alike. Set-up, warm-up (the first
30 % of the steps) and evaluation are not part of the speed. Start-up is another process, from its start to the end of
2,048 steps, 500 of SAC. rlplug runs by its defaults; ``by hand`` is a loop of torch for one experiment, without what a
framework is for. Results go to ``results/peers.json``, the table to ``docs/results.md``, and bars to
``docs/img/peers.svg``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "runners"))
from cases import CASES  # noqa: E402

RESULTS, PAGE, PICTURE = HERE / "results" / "peers.json", HERE.parent / "docs" / "results.md", "img/peers.svg"
WARM_UP, START = 0.3, 2048
SHARED = ("torch", "gymnasium", "mujoco", "imageio", "packaging", "ale-py", "opencv-python-headless")
TITLES = {
    "ppo_cartpole": "PPO, CartPole-v1: 8 environments x 128, 4 epochs x 4 minibatches, two 64x64 tanh networks",
    "ppo_acrobot": "PPO, Acrobot-v1: 16 environments x 128, else as on CartPole",
    "dqn_cartpole": "DQN, CartPole-v1: batch 32, 64x64, one update a step",
    "dqn_cartpole_4": "DQN, CartPole-v1: batch 32, 64x64, one update in four steps",
    "dqn_prioritized": "DQN, CartPole-v1: one update a step, prioritized replay (alpha 0.6, beta 0.4)",
    "sac_pendulum": "SAC, Pendulum-v1: batch 256, 256x256, one update a step",
    "sac_halfcheetah": "SAC, HalfCheetah-v5: batch 256, 256x256, one update a step",
    "ppo_cartpole_64": "PPO, CartPole-v1: 64 environments x 128, else as with 8",
    "ppo_pong": "PPO, Pong: 8 environments x 128, 4 epochs x 4 minibatches, the network of Mnih et al. 2015",
    "mappo_spread": "MAPPO, simple_spread: 8 environments x 128, 4 epochs x 4 minibatches, 64x64 tanh networks",
    "impala_cartpole": "IMPALA, CartPole-v1: 2 actors x 8 environments x 50, batch 400, two 64x64 tanh networks",
    "impala_pong": "IMPALA, Pong: 2 actors x 4 environments x 50, batch 400, the network of Mnih et al. 2015",
}


ACTORS = ("impala_cartpole", "impala_pong")
AGENTS_OR_ACTORS = ("mappo_spread", *ACTORS)
NOT_BY_HAND = ("dqn_prioritized", "sac_pendulum", "sac_halfcheetah", *AGENTS_OR_ACTORS)
NO_IMAGES = tuple(case for case in TITLES if not case.endswith("pong"))
NOT_SAC = tuple(case for case in TITLES if not case.startswith("sac"))
NOT_SHEEPRL = tuple(case for case in TITLES if case.startswith(("dqn", "impala", "mappo")) or case == "ppo_pong")
NOT_BENCHMARL = tuple(case for case in TITLES if case != "mappo_spread")
BENCHMARL = ("benchmarl==1.5.2", "torchrl==0.11.1", "tensordict==0.11.0", "pettingzoo==1.24.3", "pygame==2.6.1")
BF16 = "hardware.precision=bf16-mixed"
NOT_RLLIB = tuple(case for case in TITLES if case not in ("ppo_cartpole", "ppo_cartpole_64", "ppo_acrobot", *ACTORS))


class Peer(NamedTuple):
    """Who is measured: by which runner, with which words behind the case, and what pip installs for it."""

    title: str
    runner: str
    words: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    """cases that it has no runner for, or no such feature"""
    shared: tuple[str, ...] = SHARED
    """what it has in our versions"""


PEERS = {
    "rlplug": Peer("rlplug", "with_rlplug"),
    "rlplug_compiled": Peer("rlplug, compile=max", "with_rlplug", ("compile=max",)),
    "rlplug_bf16": Peer("rlplug, bf16-mixed", "with_rlplug", (BF16,), lacks=NO_IMAGES),
    "rlplug_bf16_compiled": Peer(
        "rlplug, bf16-mixed, compile=max", "with_rlplug", (BF16, "compile=max"), lacks=NOT_SAC
    ),
    "sb3": Peer(
        "Stable-Baselines3",
        "with_sb3",
        requirements=("stable-baselines3==2.9.2",),
        lacks=("dqn_prioritized", *AGENTS_OR_ACTORS),
    ),
    "sbx": Peer(
        "SBX (JAX)", "with_sb3", ("--jax",), ("sbx-rl==0.28.0",), ("dqn_prioritized", "ppo_pong", *AGENTS_OR_ACTORS)
    ),
    "tianshou": Peer(
        "Tianshou", "with_tianshou", requirements=("tianshou==2.0.1",), lacks=("ppo_pong", *AGENTS_OR_ACTORS)
    ),
    "sheeprl": Peer("SheepRL", "with_sheeprl", requirements=("sheeprl==0.8.4",), lacks=NOT_SHEEPRL),
    "rllib": Peer("RLlib", "with_rllib", (), ("ray[rllib]==2.60.0",), NOT_RLLIB, ("torch", *SHARED[-2:])),
    "benchmarl": Peer("BenchMARL", "with_benchmarl", (), BENCHMARL, NOT_BENCHMARL, ("torch",)),
    "by_hand": Peer("by hand", "by_hand", lacks=NOT_BY_HAND),
    "by_hand_compiled": Peer("by hand, compiled", "by_hand", ("--compiled",), lacks=NOT_BY_HAND),
}


def python_of(name: str) -> str:
    """Return the interpreter of a peer; the first call makes its environment."""
    peer = PEERS[name]
    if not peer.requirements:
        return sys.executable
    folder = HERE / ".peers" / name
    python, done = folder / "bin" / "python", folder / "done"
    wanted = [*_pins(peer.shared), *peer.requirements]
    if not done.exists() or done.read_text().split() != wanted:
        print(f"making an environment for {peer.title}: {' '.join(wanted)}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        for requirements in (wanted[:1], wanted):  # torch first, and no other build of it afterwards
            subprocess.run([python, "-m", "pip", "install", "-q", *requirements], check=True)
        done.write_text(" ".join(wanted))
    return str(python)


def _pins(names: Sequence[str]) -> list[str]:
    pins = (HERE.parent / "constraints.txt").read_text().splitlines()
    return [pin for name in names for pin in pins if pin.startswith(f"{name}==")]


def one_core() -> None:
    """Let this process have one core alone: some libraries take more, whatever they are told."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def turn(name: str, case: str, steps: int, words: Sequence[str]) -> tuple[dict[str, Any], float]:
    """Make one measurement in a fresh process; return what it says, and how many seconds it took in all."""
    core = one_core if hasattr(os, "sched_setaffinity") and "actors" not in CASES[case] else None
    runner = HERE / "runners" / f"{PEERS[name].runner}.py"
    command = [python_of(name), str(runner), case, *PEERS[name].words, *words, "--steps", str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, preexec_fn=core)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1]), seconds


def steady(stamps: list[tuple[int, float]], total: int) -> float:
    """Return steps per second between the end of the warm-up and the last stamp, from (steps, seconds)."""
    warm = [stamp for stamp in stamps if stamp[0] >= WARM_UP * total]
    (first, began), (last, ended) = warm[0], warm[-1]
    return (last - first) / (ended - began)


def processor() -> str:
    """Return what the processor calls itself."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def compare(case: str, names: Sequence[str], rounds: int, words: Sequence[str]) -> dict[str, Any]:
    """Measure all peers in turn; return every round of each."""
    settings = CASES[case]
    seen: dict[str, dict[str, Any]] = {
        name: {"steps_per_s": [], "start_s": [], "peak_mb": [], "returns": []}
        for name in names
        if case not in PEERS[name].lacks
    }
    for name in seen:
        python_of(name)
    for number in range(rounds):
        for name in [*seen] if number % 2 == 0 else [*reversed(seen)]:
            own = words if PEERS[name].runner == "with_rlplug" else ()
            said, _ = turn(name, case, settings["steps"], own)
            _, start = turn(name, case, settings.get("start", START), own)
            seen[name]["steps_per_s"].append(round(steady(said["stamps"], settings["steps"]), 1))
            seen[name]["start_s"].append(round(start, 2))
            seen[name]["peak_mb"].append(round(said["peak_mb"]))
            seen[name]["returns"].append(round(statistics.mean(said["returns"]), 1) if said["returns"] else None)
            seen[name]["versions"] = said["versions"]
        print(f"{case} round {number + 1}: " + ", ".join(f"{k} {v['steps_per_s'][-1]:,.0f}" for k, v in seen.items()))
    machine = {"processor": processor(), "python": platform.python_version(), "cpus": os.cpu_count()}
    machine |= {"load": round(os.getloadavg()[0], 2)}
    return {"steps": settings["steps"], "machine": machine, "overrides": [*words], "peers": seen}


@contextmanager
def neighbour(wanted: bool) -> Iterator[None]:
    """Keep a core busy for as long as the block runs."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        yield
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()


def table(results: dict[str, Any]) -> str:
    """Return a table of every case; rows by speed, the lost ones too."""
    lines: list[str] = []
    for case, title in TITLES.items():
        if case not in results:
            continue
        result = results[case]
        peers = {name: _medians(seen) for name, seen in result["peers"].items()}
        ours = peers["rlplug"]["steps_per_s"] if "rlplug" in peers else None
        machine = result["machine"]
        on = f"{machine['processor']}, " if "processor" in machine else ""
        lines += [f"**{title}** ({on}load {machine['load']})", ""]
        lines += [
            "| | steps/s | lowest to highest | of rlplug | start | peak memory | return |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, seen in sorted(peers.items(), key=lambda item: -item[1]["steps_per_s"]):
            spread = result["peers"][name]["steps_per_s"]
            of = f"{seen['steps_per_s'] / ours:.2f}" if ours else ""
            title = PEERS[name].title
            goal = CASES[case]["learns"]
            learns = goal is None or (seen["returns"] is not None and seen["returns"] >= goal)
            told = "none ended" if seen["returns"] is None else f"{seen['returns']:,.0f}"
            cells = [f"**{title}**" if name == "rlplug" else title, f"{seen['steps_per_s']:,.0f}"]
            cells += [f"{min(spread):,.0f} to {max(spread):,.0f}", of, f"{seen['start_s']:.1f} s"]
            cells += [f"{seen['peak_mb']:.0f} MB", told if learns else f"{told}, does not learn"]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _medians(seen: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {key: statistics.median(seen[key]) for key in ("steps_per_s", "start_s", "peak_mb")}
    returns = [x for x in seen["returns"] if x is not None]
    return found | {"returns": statistics.median(returns) if returns else None}


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw bars of every case: the median, and a line from the lowest to the highest round."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = [case for case in TITLES if case in results]
    figure, axes = plt.subplots(len(cases), 1, figsize=(8, 1.9 * len(cases)), squeeze=False)
    for case, axis in zip(cases, axes[:, 0], strict=True):
        peers = sorted(results[case]["peers"].items(), key=lambda item: _medians(item[1])["steps_per_s"])
        names = [PEERS[name].title for name, _ in peers]
        middles = [_medians(seen)["steps_per_s"] for _, seen in peers]
        low = [m - min(seen["steps_per_s"]) for m, (_, seen) in zip(middles, peers, strict=True)]
        high = [max(seen["steps_per_s"]) - m for m, (_, seen) in zip(middles, peers, strict=True)]
        colors = ["#2a6fb0" if name.startswith("rlplug") else "#b0b0b0" for name, _ in peers]
        axis.barh(names, middles, xerr=[low, high], color=colors, ecolor="#606060", height=0.7)
        axis.set_title(TITLES[case], fontsize=8, loc="left")
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("environment steps per second", fontsize=8)
    figure.tight_layout()
    matplotlib.rcParams["svg.hashsalt"] = "rlplug"
    figure.savefig(path, metadata={"Date": None})


def show(results: dict[str, Any]) -> None:
    """Write the table and the picture."""
    text = PAGE.read_text()
    new = re.sub(
        r"(?s)(<!-- peers -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{table(results)}\n{m[2]}", text, count=1
    )
    PAGE.write_text(new)
    draw(results, PAGE.parent / PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help=f"{', '.join(CASES)}; all if none is named")
    parser.add_argument("--who", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--neighbour", action="store_true", help="beside a process that takes a core; writes nothing")
    parser.add_argument("--override", action="append", default=[], help="a further override for rlplug; writes nothing")
    args = parser.parse_args()
    cases = args.case or list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    with neighbour(args.neighbour):
        for case in cases:
            result = compare(case, args.who, args.rounds, args.override)
            if args.neighbour or args.override:
                print(table({case: result}))
                continue
            known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            RESULTS.write_text(json.dumps(known | {case: result}, indent=1) + "\n")
            show(known | {case: result})


if __name__ == "__main__":
    main()
