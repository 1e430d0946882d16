"""Prove that algorithms learn: final evaluations over several seeds, against the number to reach.

    python benchmarks/learning.py                    # everything below: hours
    python benchmarks/learning.py ppo_cartpole       # one proof
    python benchmarks/learning.py --seeds 1,2,3 --jobs 2 'dqn_cartpole*' --keep runs/proofs

A proof is an experiment of ``conf/experiment``, maybe with further settings. ``--keep`` keeps the run folders; runs
that are there already and have finished are not run again. Results, also of some of the seeds, are kept in
``benchmarks/results`` beside those of other seeds. The command exits with 1 if a mean falls short.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "learning.json"


@dataclass(frozen=True)
class Proof:
    """The mean over seeds of the final evaluation: 20 episodes, deterministic.

    Args:
        experiment: a file of ``conf/experiment``.
        reach: the mean that is to be reached.
        overrides: what is changed about the experiment.
        at_most: the mean that may not be exceeded, where something is left out that learning rests on.
        above: the name of a proof whose mean is to be exceeded.
    """

    experiment: str
    reach: float | None = None
    overrides: tuple[str, ...] = ()
    at_most: float | None = None
    above: str | None = None

    def goal(self) -> str:
        said = [(">=", self.reach), ("<=", self.at_most), (">", self.above)]
        return ", ".join(f"{sign} {bound}" for sign, bound in said if bound is not None)

    def holds(self, mean: float, means: dict[str, float]) -> bool:
        return (
            (self.reach is None or mean >= self.reach)
            and (self.at_most is None or mean <= self.at_most)
            and (self.above is None or (self.above in means and mean > means[self.above]))
        )


RAINBOW = {
    "double": ("algo.double_q=true",),
    "dueling": ("algo.dueling=true",),
    "n_step": ("algo.n_step=3",),
    "prioritized": ("buffer=prioritized", "buffer.capacity=50_000"),
    "noisy": ("algo.noisy=true", "exploration=[]"),
    "distributional": ("algo.num_atoms=51",),
}
"""the switches of DQN, each alone"""

ACTORS = ("hardware.actors.count=2", "hardware.actors.num_cpus=0.5")
SHAPES = {"2cpu": ("hardware=2cpu",), "actors": ("hardware=cpu", *ACTORS), "2cpu_actors": ("hardware=2cpu", *ACTORS)}
"""hardware on which runs reach what they reach in one process"""

PROOFS = {
    "ppo_cartpole": Proof("ppo_cartpole", 475),
    "ppo_pendulum": Proof("ppo_pendulum", -250),
    "sac_pendulum": Proof("sac_pendulum", -180),
    **{f"ppo_cartpole_{shape}": Proof("ppo_cartpole", 475, words) for shape, words in SHAPES.items()},
    "sac_pendulum_2cpu": Proof("sac_pendulum", -180, (*SHAPES["2cpu"], "num_envs=1")),
    "sac_pendulum_actors": Proof("sac_pendulum", -180, (*SHAPES["actors"], "num_envs=2")),
    "sac_pendulum_2cpu_actors": Proof(
        "sac_pendulum", -180, (*SHAPES["2cpu_actors"], "num_envs=2", "rollout_fragment_length=8")
    ),
    "sac_mountaincar_continuous": Proof("sac_mountaincar_continuous", 90),
    "reinforce_cartpole": Proof("reinforce_cartpole", 450),
    "dqn_cartpole": Proof("dqn_cartpole", 475),
    **{f"dqn_cartpole_{name}": Proof("dqn_cartpole", 450, words) for name, words in RAINBOW.items()},
    "rainbow_cartpole": Proof("rainbow_cartpole", 450),
    "dqn_masked_cartpole": Proof("dqn_masked_cartpole", 450),
    "dqn_taxi": Proof("dqn_taxi", 7),
    "ppo_blackjack": Proof("ppo_blackjack", -0.08),
    "sac_cartpole": Proof("sac_cartpole", 400),
    "ppo_lstm_stateless_cartpole": Proof("ppo_lstm_stateless_cartpole", 400),
    "r2d2_stateless_cartpole": Proof("r2d2_stateless_cartpole", 400),
    "sac_lstm_pendulum_no_velocity": Proof("sac_lstm_pendulum_no_velocity", -400),
    "ppo_icm_frozenlake": Proof("ppo_icm_frozenlake", 0.9),
    "ppo_icm_frozenlake_without": Proof("ppo_icm_frozenlake", overrides=("exploration=[]",), at_most=0),
    "dqn_icm_frozenlake_without": Proof("dqn_icm_frozenlake", overrides=("exploration=[epsilon_greedy]",)),
    "dqn_icm_frozenlake": Proof("dqn_icm_frozenlake", above="dqn_icm_frozenlake_without"),
    "sac_icm_frozenlake_without": Proof("sac_icm_frozenlake", overrides=("exploration=[]",)),
    "sac_icm_frozenlake": Proof("sac_icm_frozenlake", above="sac_icm_frozenlake_without"),
    "ppo_rnd_minigrid_without": Proof("ppo_rnd_minigrid", overrides=("exploration=[]",)),
    "ppo_rnd_minigrid": Proof("ppo_rnd_minigrid", above="ppo_rnd_minigrid_without"),
    "ppo_doorkey": Proof("ppo_doorkey", 0.9),
    "ppo_lunarlander": Proof("ppo_lunarlander", 200),
    "dqn_lunarlander": Proof("dqn_lunarlander", 200),
    **{name: Proof(name) for name in ("ppo_halfcheetah", "sac_halfcheetah", "ppo_pong", "dqn_pong")},
}


def with_seed(
    result: dict[str, Any] | None, proof: Proof, overrides: list[str], seed: str, summary: dict[str, Any]
) -> dict[str, Any]:
    """What is known of a proof, and one more seed. Seeds of other settings are left out."""
    (experiment,) = ROOT.glob(f"**/experiment/{proof.experiment}.yaml")
    words = " ".join((experiment.read_text(), *proof.overrides, *overrides))
    settings = hashlib.sha256(words.encode()).hexdigest()[:12]
    known = result if result is not None and result.get("settings") == settings else {"scores": {}}
    scores = dict(sorted((known["scores"] | {seed: summary["eval/return_mean"]}).items()))
    return {
        "scores": scores,
        "mean": statistics.mean(scores.values()),
        "goal": proof.goal(),
        "env_steps": max(known.get("env_steps", 0), summary["env_steps"]),
        "wall_s": max(known.get("wall_s", 0.0), summary["wall_s"]),
        "settings": settings,
    }


def run(name: str, seed: str, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One run in a process of its own.

    Returns:
        Its ``summary.json``.
    """
    target, proof = folder / f"{name}-s{seed}", PROOFS[name]
    summary = target / "summary.json"
    if not summary.exists():
        command = [sys.executable, "-m", "rlplug", f"experiment={proof.experiment}", *proof.overrides, f"seed={seed}"]
        done = subprocess.run([*command, f"hydra.run.dir={target}", *overrides], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(summary.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("proofs", nargs="*", metavar="proof", help=", ".join(PROOFS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--keep", type=Path, help="keep the run folders here, to draw curves of them")
    parser.add_argument("--override", action="append", default=[], help="a further override, e.g. algo.lr=1e-4")
    args = parser.parse_args()
    asked = args.proofs or ["*"]
    if unknown := [word for word in asked if not any(fnmatch(name, word) for name in PROOFS)]:
        parser.error(f"no such proof: {', '.join(unknown)}; there are {', '.join(PROOFS)}")
    results, short = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}, False
    overrides = ["logger=[]", *([] if args.keep else ["eval.every=0"]), *args.override]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        folder = args.keep.absolute() if args.keep else Path(temporary)
        names, seeds = [name for name in PROOFS if any(fnmatch(name, word) for word in asked)], args.seeds.split(",")
        futures = {name: {s: pool.submit(run, name, s, folder, overrides) for s in seeds} for name in names}
        for name in names:
            for seed, future in futures[name].items():
                results[name] = with_seed(results.get(name), PROOFS[name], args.override, seed, future.result())
                RESULTS.write_text(json.dumps(results, indent=2) + "\n")
            result = results[name]
            reached = PROOFS[name].holds(result["mean"], {name: result["mean"] for name, result in results.items()})
            short |= not reached
            listed = ", ".join(f"{seed}: {score:.2f}" for seed, score in result["scores"].items())
            print(
                f"{name:<32} mean {result['mean']:8.2f}  {result['goal']:<12} {'ok' if reached else 'SHORT'}"
                f"  seeds [{listed}]  {result['env_steps']} steps  {result['wall_s']:.0f} s",
                flush=True,
            )
    return int(short)


if __name__ == "__main__":
    sys.exit(main())
