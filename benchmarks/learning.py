"""Prove that algorithms learn: final evaluations over several seeds, against the number to reach.

    python benchmarks/learning.py                    # everything below: hours
    python benchmarks/learning.py ppo_cartpole       # one proof
    python benchmarks/learning.py --seeds 1,2,3,4,5 --jobs 2 'dqn_cartpole*' --keep runs/proofs

A proof is a line that a user types, ``algo=ppo env=cartpole``, or an experiment of ``conf/experiment``. ``--keep``
keeps the run folders; runs that are there already and have finished are not run again. Results, also of some of the
seeds, are kept in ``benchmarks/results`` beside those of other seeds, and ``docs/results.md`` shows them. The command
exits with 1 if a mean falls short.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import datasets
from shared import trained, write_table

import rlplug

RESULTS = Path(__file__).parent / "results" / "learning.json"
PAGE = Path(__file__).parents[1] / "docs" / "results.md"
DATA = "runs/datasets"


@dataclass(frozen=True)
class Proof:
    """The mean over seeds of the final evaluation: 20 episodes, deterministic.

    Args:
        line: what is typed behind ``python -m rlplug``.
        reach: the mean that is to be reached.
        gain: the share of its data's mean return by which that mean is to be exceeded.
        above: the name of a proof whose mean is to be exceeded.
        blind: its settings were chosen by runs of none of the seeds 1 to 5.
        package: a distribution that has to be installed for it, as ``pip install -e plugins/rlplug-reinforce`` does.
    """

    line: str
    reach: float | None = None
    above: str | None = None
    blind: bool = False
    gain: float | None = None
    package: str = ""

    @property
    def data(self) -> tuple[str, str] | None:
        """The environment and the name of the set of ``benchmarks/datasets.py`` it learns from; made if need be."""
        found = re.search(rf"data\.path={DATA}/(\w+)/(\w+)", self.line)
        return (found[1], found[2]) if found else None

    def beside(self, data_mean: float) -> Proof:
        """With the mean return of its data, by which ``gain`` becomes a number to reach."""
        return self if self.gain is None else replace(self, reach=round(data_mean + self.gain * abs(data_mean), 1))

    def goal(self) -> str:
        said = [(">=", self.reach), (">", self.above)]
        return ", ".join(f"{sign} {bound}" for sign, bound in said if bound is not None)

    def holds(self, mean: float, means: dict[str, float]) -> bool:
        return (self.reach is None or mean >= self.reach) and (
            self.above is None or (self.above in means and mean > means[self.above])
        )


PPO, SAC, DQN, DDPG, TD3, A2C, IMPALA, APPO, APEX_DQN, APEX_DDPG = (
    f"algo={algo} env="
    for algo in ("ppo", "sac", "dqn", "ddpg", "td3", "a2c", "impala", "appo", "apex_dqn", "apex_ddpg")
)

CQL = f"algo=cql env=pendulum data.path={DATA}/pendulum/medium"
DISCRETE_CQL = f"algo=discrete_cql env=cartpole data.path={DATA}/cartpole/mixed"
WITHOUT = "algo.conservative_weight=0 algo.bc_iters=0 algo.deterministic_backup=false"
"""what makes SAC of CQL"""

RAINBOW = {
    "single": "algo.double_q=false",
    "dueling": "algo.dueling=true",
    "n_step": "algo.n_step=3",
    "prioritized": "buffer=prioritized buffer.capacity=50_000 replay_ratio=0.5",
    "noisy": "algo.noisy=true exploration=[] replay_ratio=0.5",
    "distributional": "algo.num_atoms=51 replay_ratio=0.5",
}
"""the switches of DQN, each by itself on top of the double target, which is on"""

MAML = "algo=maml env=point_goals algo.eval_tasks=40"
LAKE = (
    "algo=ppo env=frozenlake_tasks num_envs=8 rollout_fragment_length=128 total_steps=300_000 algo.lr=1e-3 "
    "algo.entropy_coeff=0.02 algo.num_sgd_iter=4 algo.sgd_minibatch_size=256 eval.every=20_000"
)
ACTORS, THREE_ACTORS = (f"hardware.actors.count={count} hardware.actors.num_cpus=0.5" for count in (2, 3))
SHAPES = {"2cpu": "hardware=2cpu", "actors": f"hardware=cpu {ACTORS}", "2cpu_actors": f"hardware=2cpu {ACTORS}"}
"""hardware on which runs reach what they reach in one process"""

PROOFS = {
    "ppo_cartpole": Proof(PPO + "cartpole", 475),
    "ppo_pendulum": Proof(PPO + "pendulum", -250),
    "ppo_cartpole_critic_lr": Proof(f"{PPO}cartpole algo.critic_lr=0.003", 475),
    "ppo_cartpole_torch": Proof(PPO + "cartpole_torch", 475, blind=True),
    "ppo_pendulum_torch": Proof(PPO + "pendulum_torch", -250, blind=True),
    "ppo_acrobot_torch": Proof(PPO + "acrobot_torch", -100),
    "ppo_mountaincar_continuous_torch": Proof(PPO + "mountaincar_continuous_torch", 90),
    "sac_pendulum": Proof(SAC + "pendulum", -180),
    **{f"ppo_cartpole_{shape}": Proof(f"{PPO}cartpole {words}", 475) for shape, words in SHAPES.items()},
    "ddppo_cartpole": Proof("algo=ddppo env=cartpole", 475),
    "ddppo_cartpole_2cpu": Proof(f"algo=ddppo env=cartpole {SHAPES['2cpu']}", 475),
    "sac_pendulum_2cpu": Proof(f"{SAC}pendulum {SHAPES['2cpu']} num_envs=1", -180),
    "sac_pendulum_actors": Proof(f"{SAC}pendulum {SHAPES['actors']} num_envs=2", -180),
    "sac_pendulum_2cpu_actors": Proof(
        f"{SAC}pendulum {SHAPES['2cpu_actors']} num_envs=2 rollout_fragment_length=8", -180
    ),
    "sac_mountaincar_continuous": Proof(SAC + "mountaincar_continuous", 90),
    "ddpg_pendulum": Proof(DDPG + "pendulum", -180, blind=True),
    "td3_pendulum": Proof(TD3 + "pendulum", -180, blind=True),
    "ddpg_mountaincar_continuous": Proof(DDPG + "mountaincar_continuous", 90, blind=True),
    "a2c_cartpole": Proof(A2C + "cartpole", 475, blind=True),
    "a3c_cartpole": Proof("algo=a3c env=cartpole", 475, blind=True),
    "a3c_cartpole_actors": Proof(f"algo=a3c env=cartpole {ACTORS}", 475, blind=True),
    "impala_cartpole": Proof(IMPALA + "cartpole", 475),
    "impala_cartpole_actors": Proof(f"{IMPALA}cartpole {ACTORS}", 475),
    "appo_cartpole": Proof(APPO + "cartpole", 475, blind=True),
    "appo_cartpole_actors": Proof(f"{APPO}cartpole {ACTORS}", 475, blind=True),
    "apex_dqn_cartpole": Proof(APEX_DQN + "cartpole", 475, blind=True),
    "apex_dqn_cartpole_actors": Proof(f"{APEX_DQN}cartpole {ACTORS}", 475, blind=True),
    "apex_ddpg_pendulum": Proof(APEX_DDPG + "pendulum", -180, blind=True),
    "apex_ddpg_pendulum_actors": Proof(f"{APEX_DDPG}pendulum {THREE_ACTORS}", -180, blind=True),
    "bc_cartpole": Proof(f"algo=bc env=cartpole data.path={DATA}/cartpole/expert", 450, blind=True),
    "bc_pendulum": Proof(f"algo=bc env=pendulum data.path={DATA}/pendulum/expert", -200, blind=True),
    "bc_cartpole_mixed": Proof(f"algo=bc env=cartpole data.path={DATA}/cartpole/mixed", blind=True),
    "marwil_cartpole_mixed": Proof(
        f"algo=marwil env=cartpole data.path={DATA}/cartpole/mixed", above="bc_cartpole_mixed", blind=True, gain=0.0
    ),
    "cql_pendulum_without": Proof(f"{CQL} {WITHOUT}", blind=True),
    "cql_pendulum": Proof(CQL, above="cql_pendulum_without", blind=True, gain=0.2),
    "bc_pendulum_medium": Proof(CQL.replace("cql", "bc"), blind=True),
    **{f"{algo}_pendulum_medium": Proof(CQL.replace("cql", algo), blind=True, gain=0.0) for algo in ("iql", "td3_bc")},
    "discrete_cql_cartpole_without": Proof(f"{DISCRETE_CQL} algo.conservative_weight=0", blind=True),
    "discrete_cql_cartpole": Proof(DISCRETE_CQL, above="discrete_cql_cartpole_without", blind=True, gain=0.0),
    **{
        f"{algo}_halfcheetah_medium": Proof(
            f"algo={algo} env=halfcheetah data.path={DATA}/halfcheetah/medium",
            blind=algo in ("bc", "td3_bc"),  # runs of seed 1 were seen before the settings of the others were chosen
        )
        for algo in ("bc", "cql", "iql", "td3_bc")
    },
    "reinforce_cartpole": Proof("algo=reinforce env=cartpole", 450, blind=True, package="rlplug-reinforce"),
    "dqn_cartpole": Proof(DQN + "cartpole", 475, blind=True),
    **{f"dqn_cartpole_{name}": Proof(f"{DQN}cartpole {words}", 450, blind=True) for name, words in RAINBOW.items()},
    "rainbow_cartpole": Proof("experiment=rainbow_cartpole", 450),
    "dqn_masked_cartpole": Proof(DQN + "masked_cartpole", 450, blind=True),
    "dqn_taxi": Proof(DQN + "taxi", 7),
    "sac_her_fetchreach": Proof(SAC + "fetchreach buffer=her", -2.5, blind=True, package="gymnasium-robotics"),
    **{
        f"dqn_{name}bitflip_{size}": Proof(
            f"{DQN}bitflip env.size={size}{words} total_steps={steps}",
            reach,
            blind=size != 30,  # a run of seed 1 was seen before its settings were chosen
            package="rlplug-bitflip",
        )
        for size, steps, best in ((10, "30_000", -5.0), (20, "80_000", -10.5), (30, "150_000", -16.0))
        for name, words, reach in (("her_", " buffer=her", best), ("", "", None))
    },
    "qmix_two_step": Proof("algo=qmix env=two_step", 8),
    "qmix_vdn_two_step": Proof("algo=qmix env=two_step algo.mixer=vdn", 7, blind=True),
    "qmix_none_two_step": Proof("algo=qmix env=two_step algo.mixer=none", blind=True),  # at most 7
    "independent_two_step": Proof("algo=independent env=two_step total_steps=20_000", blind=True),
    **{
        f"{algo}_{game}": Proof(f"algo={line} env={game}")  # 275 and 250 at best
        for game in ("climbing", "penalty")
        for algo, line in (
            *((algo, f"{algo} total_steps=20_000") for algo in ("independent", "mappo")),
            ("maddpg", "maddpg total_steps=50_000"),
            *((f"qmix_{mixer}", f"qmix algo.mixer={mixer} total_steps=5_000") for mixer in ("qmix", "vdn", "none")),
        )
    },
    "qmix_spread_torch": Proof("algo=qmix env=spread_torch", -18),  # random: -27.4
    **{f"{algo}_simple_spread": Proof(f"algo={algo} env=simple_spread", -18) for algo in ("qmix", "maddpg", "mappo")},
    "maddpg_spread_torch": Proof("algo=maddpg env=spread_torch", -18),
    "mappo_spread_torch": Proof("algo=mappo env=spread_torch", -18),
    "mappo_two_carts": Proof("algo=mappo env=two_carts", 450),  # of each of the two
    "independent_two_carts": Proof("algo=independent env=two_carts", 450),
    "shared_two_carts": Proof("algo=shared env=two_carts", 450),
    "es_cartpole": Proof("algo=es env=cartpole", 450),
    "ars_cartpole": Proof("algo=ars env=cartpole", 475),
    "cem_cartpole": Proof("algo=cem env=cartpole", 475),
    "ars_swimmer": Proof("algo=ars env=swimmer", 340),
    "maml_point_goals_without": Proof(f"{MAML} algo.inner_adaptation_steps=0"),
    "maml_point_goals_first_order": Proof(f"{MAML} algo.first_order=true", above="maml_point_goals_without"),
    "maml_point_goals": Proof(MAML, above="maml_point_goals_first_order"),
    "ppo_frozenlake_tasks_without": Proof(LAKE),
    "ppo_frozenlake_tasks": Proof(
        f"{LAKE} curriculum=threshold curriculum.stages=[{','.join(map(str, range(2, 13)))}] curriculum.level=0.8", 1.0
    ),
    "mbmpo_pendulum_torch": Proof("algo=mbmpo env=pendulum_torch", -500),
    "mbmpo_cartpole_torch": Proof("algo=mbmpo env=cartpole_torch", 190),  # of 500
    "dreamerv3_cartpole": Proof("algo=dreamerv3 env=cartpole", 450),
    "dreamerv3_frozenlake": Proof("algo=dreamerv3 env=frozenlake +env.kwargs.is_slippery=false", 1.0),
    "dreamerv3_pendulum_pixels": Proof("algo=dreamerv3 env=pendulum_pixels", -500),  # random: -1,256
    "dreamer_pendulum": Proof("algo=dreamer env=pendulum", -500),
    "dreamer_pendulum_pixels": Proof("algo=dreamer env=pendulum_pixels", -1058),  # random: -1,256, standard error 66
    "alphazero_sparse_cartpole": Proof("algo=alphazero env=sparse_cartpole", 450),
    # minus the percentage by which tours are longer than the shortest
    "alphazero_tsp": Proof("algo=alphazero env=tsp eval.function=benchmarks.planning:excess eval.episodes=200", -3),
    "linucb_linear_bandit": Proof("algo=linucb env=linear_bandit", 57, blind=True),  # 58.18 is the optimum
    "lints_linear_bandit": Proof("algo=lints env=linear_bandit", 57, blind=True),
    "lingreedy_linear_bandit": Proof("algo=lingreedy env=linear_bandit", blind=True),
    "ppo_blackjack": Proof(PPO + "blackjack", -0.08),
    "sac_cartpole": Proof(SAC + "cartpole", 400),
    "ppo_lstm_stateless_cartpole": Proof(PPO + "stateless_cartpole model=lstm", 400),
    "ppo_attention_stateless_cartpole": Proof(PPO + "stateless_cartpole model=attention", 400),
    "impala_lstm_stateless_cartpole": Proof(IMPALA + "stateless_cartpole model=lstm", 400, blind=True),
    "impala_lstm_stateless_cartpole_actors": Proof(f"{IMPALA}stateless_cartpole model=lstm {ACTORS}", 400, blind=True),
    "r2d2_stateless_cartpole": Proof("experiment=r2d2_stateless_cartpole", 400),
    "r2d2_stateless_cartpole_actors": Proof(f"experiment=r2d2_stateless_cartpole loop=async {ACTORS}", 400),
    "sac_lstm_pendulum_no_velocity": Proof("experiment=sac_lstm_pendulum_no_velocity", -400),
    "ppo_icm_frozenlake": Proof(PPO + "frozenlake_12x12 exploration=icm", 0.9),
    "ppo_icm_frozenlake_without": Proof(PPO + "frozenlake_12x12"),
    "dqn_icm_frozenlake_without": Proof(DQN + "frozenlake_12x12"),
    "dqn_icm_frozenlake": Proof(
        DQN + "frozenlake_12x12 exploration=[epsilon_greedy,icm]", above="dqn_icm_frozenlake_without"
    ),
    "sac_icm_frozenlake_without": Proof(SAC + "frozenlake_12x12"),
    "sac_icm_frozenlake": Proof(
        SAC + "frozenlake_12x12 exploration=icm", above="sac_icm_frozenlake_without", blind=True
    ),
    "ppo_rnd_minigrid_without": Proof("experiment=ppo_rnd_minigrid exploration=[]"),
    "ppo_rnd_minigrid": Proof("experiment=ppo_rnd_minigrid", above="ppo_rnd_minigrid_without"),
    "ppo_doorkey": Proof("experiment=ppo_doorkey", 0.9),
    "ppo_lunarlander": Proof(PPO + "lunarlander", 200),
    "dqn_lunarlander": Proof(DQN + "lunarlander", 200),
    "ppo_halfcheetah": Proof(PPO + "halfcheetah"),
    "sac_halfcheetah": Proof(SAC + "halfcheetah"),
    "td3_halfcheetah": Proof(TD3 + "halfcheetah", blind=True),
    "ddpg_halfcheetah": Proof(DDPG + "halfcheetah"),
    **{name: Proof(f"experiment={name}") for name in ("ppo_pong", "dqn_pong")},
}
COMPILED = ("ppo_cartpole", "dqn_cartpole", "sac_pendulum")
COMPILED += ("ddppo_cartpole_2cpu", "dqn_masked_cartpole", "ppo_lstm_stateless_cartpole", "sac_icm_frozenlake")
BF16 = "hardware.precision=bf16-mixed"
PROOFS |= {
    "sac_pendulum_bf16": Proof(f"{SAC}pendulum {BF16} compile=max", -180),
    "sac_halfcheetah_bf16": Proof(f"{SAC}halfcheetah {BF16}"),
}
PROOFS |= {f"{name}_compiled": replace(PROOFS[name], line=f"{PROOFS[name].line} compile=max") for name in COMPILED}


def with_seed(
    result: dict[str, Any] | None,
    proof: Proof,
    overrides: list[str],
    seed: str,
    summary: dict[str, Any],
    data_mean: float | None,
) -> dict[str, Any]:
    """What is known of a proof, and one more seed. Seeds of other settings, and of other data, are left out."""
    raw = rlplug.compose([*proof.line.split(), *overrides]).raw
    if data_mean is not None:  # a set that was made again, elsewhere, is another one
        raw = raw | {"data_mean": data_mean}
    settings = hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:12]
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


def require(package: str) -> None:
    """Raise SystemExit unless a distribution is installed: a folder on PYTHONPATH brings no entry point."""
    try:
        version(package)
    except PackageNotFoundError:
        here = Path(__file__).parents[1] / "plugins" / package
        raise SystemExit(f"first: pip install {f'-e {here}' if here.exists() else package}") from None


def run(name: str, seed: str, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One run in a process of its own.

    Returns:
        Its ``summary.json``.
    """
    words = [*PROOFS[name].line.split(), f"seed={seed}", *overrides]
    return json.loads((trained(folder / f"{name}-s{seed}", words) / "summary.json").read_text())


def show(results: dict[str, Any]) -> None:
    """Write the table of ``docs/results.md``: every proof of which more than one seed is known."""
    lines = ["| `python -m rlplug` | steps | mean | seeds | to reach |", "|---|---|---|---|---|"]
    for name, proof in PROOFS.items():
        if len(scores := results.get(name, {}).get("scores", {})) > 1:
            mean, above = results[name]["mean"], proof.above and results[proof.above]["mean"]
            goal = f"more than {_number(above)}" if above is not None else results[name]["goal"] or "nothing"
            seeds = " ".join(f"{seed}: {_number(score)}" for seed, score in scores.items())
            steps = f"{results[name]['env_steps']:,}"
            lines.append(f"| `{proof.line}`{' °' * proof.blind} | {steps} | **{_number(mean)}** | {seeds} | {goal} |")
    write_table(PAGE, "learning", lines)


def _number(score: float) -> str:
    return f"{score:.2f}" if abs(score) < 10 else f"{score:.1f}"


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
    overrides = ["logger.only=[]", *([] if args.keep else ["eval.every=0"]), *args.override]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        folder = args.keep.absolute() if args.keep else Path(temporary)
        names, seeds = [name for name in PROOFS if any(fnmatch(name, word) for word in asked)], args.seeds.split(",")
        for package in {PROOFS[name].package for name in names} - {""}:
            require(package)
        data = {name: datasets.make(*PROOFS[name].data)["return_mean"] for name in names if PROOFS[name].data}
        futures = {name: {s: pool.submit(run, name, s, folder, overrides) for s in seeds} for name in names}
        for name in names:
            proof, data_mean = PROOFS[name], data.get(name)
            proof = proof if data_mean is None else proof.beside(data_mean)
            for seed, future in futures[name].items():
                results[name] = with_seed(results.get(name), proof, args.override, seed, future.result(), data_mean)
                RESULTS.write_text(json.dumps(results, indent=2) + "\n")
            result = results[name]
            reached = proof.holds(result["mean"], {name: result["mean"] for name, result in results.items()})
            short |= not reached
            listed = ", ".join(f"{seed}: {score:.2f}" for seed, score in result["scores"].items())
            print(
                f"{name:<32} mean {result['mean']:8.2f}  {result['goal']:<12} {'ok' if reached else 'SHORT'}"
                f"  seeds [{listed}]  {result['env_steps']} steps  {result['wall_s']:.0f} s",
                flush=True,
            )
    show(results)
    return int(short)


if __name__ == "__main__":
    sys.exit(main())
