"""What is compared: the hyper-parameters of every case, which every runner gives its library. Plain Python, no imports
beyond the standard library, as every runner has an environment of its own."""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

PPO = {"algo": "ppo", "gamma": 0.99, "lambda": 0.95, "clip": 0.2, "value_coeff": 0.5, "entropy_coeff": 0.0}
PPO |= {"grad_clip": 0.5, "lr": 3e-4, "epochs": 4, "minibatches": 4, "hidden": (64, 64), "rollout": 128}
PONG = PPO | {"clip": 0.1, "entropy_coeff": 0.01, "lr": 2.5e-4, "hidden": (512,)}
SAC = {"algo": "sac", "gamma": 0.99, "lr": 1e-3, "tau": 0.005, "batch": 256, "hidden": (256, 256), "envs": 1}
SAC |= {"learning_starts": 100, "capacity": 1_000_000}
DQN = {"algo": "dqn", "env": "CartPole-v1", "envs": 1, "gamma": 0.99, "lr": 1e-3, "batch": 32, "hidden": (64, 64)}
DQN |= {"learning_starts": 100, "capacity": 50_000, "epsilon": 0.1, "target_every": 500, "grad_clip": 10.0}
SPREAD = PPO | {"algo": "mappo", "env": "simple_spread_v3", "envs": 8, "entropy_coeff": 0.01, "lr": 5e-4}
IMPALA = {"algo": "impala", "actors": 2, "envs": 16, "rollout": 50, "batch": 400, "gamma": 0.99, "lr": 5e-4}
IMPALA |= {"hidden": (64, 64), "value_coeff": 0.5, "entropy_coeff": 0.01, "grad_clip": 40.0}

CASES: dict[str, dict[str, Any]] = {
    "ppo_cartpole": PPO | {"env": "CartPole-v1", "envs": 8, "steps": 120 * 1024, "learns": 100},
    "ppo_acrobot": PPO | {"env": "Acrobot-v1", "envs": 16, "steps": 30 * 2048, "learns": -450},
    "dqn_cartpole": DQN | {"train_every": 1, "steps": 10_000, "learns": 60},
    "dqn_cartpole_4": DQN | {"train_every": 4, "steps": 30_000, "learns": 60},
    "dqn_prioritized": DQN | {"train_every": 1, "steps": 10_000, "learns": 60, "alpha": 0.6, "beta": 0.4},
    "sac_pendulum": SAC | {"env": "Pendulum-v1", "steps": 3_000, "learns": -1000, "start": 500},
    "sac_halfcheetah": SAC | {"env": "HalfCheetah-v5", "steps": 3_000, "learns": None, "start": 500},
    "ppo_cartpole_64": PPO | {"env": "CartPole-v1", "envs": 64, "steps": 60 * 8192, "learns": 60, "start": 8192},
    "ppo_pong": PONG | {"env": "PongNoFrameskip-v4", "envs": 8, "steps": 6 * 1024, "learns": None},
    "mappo_spread": SPREAD | {"steps": 12 * 1024, "learns": None},
    "impala_cartpole": IMPALA | {"env": "CartPole-v1", "steps": 30_000, "learns": None},
    "impala_pong": IMPALA
    | {"env": "PongNoFrameskip-v4", "envs": 8, "hidden": (512,), "steps": 12_000, "learns": None, "start": 800},
}
"""``steps``: of the environment in one measurement; ``learns``: what its last episodes have to return, None where that
takes longer; ``start``: after how many steps start-up ends, 2,048 where it is not said; ``actors``: processes that
collect, on all cores"""

LAST = 5
"""episodes of which the return is told"""


class Stamps:
    """When how many steps had been made, and the returns of the episodes that ended.

    Args:
        every: steps between two stamps.
    """

    def __init__(self, every: int = 100) -> None:
        self.every, self.steps, self.returns = every, 0, list[float]()
        self.times: list[tuple[int, float]] = []

    def count(self, steps: int) -> None:
        """Count steps that were made."""
        before, self.steps = self.steps, self.steps + steps
        if self.steps // self.every > before // self.every:
            self.times.append((self.steps, time.perf_counter()))


def counted(vector: type, stamps: Stamps) -> None:
    """Let every ``step`` of a gymnasium vector environment of this class be counted, and its episodes."""
    step, totals = vector.step, {}

    def counting(self: Any, actions: Any) -> Any:
        result = step(self, actions)
        _, reward, terminated, truncated, _ = result
        total = totals.setdefault(id(self), [0.0] * len(reward))
        for i, (r, over) in enumerate(zip(reward.tolist(), (terminated | truncated).tolist(), strict=True)):
            total[i] += r
            if over:
                stamps.returns.append(total[i])
                total[i] = 0.0
        stamps.count(len(reward))
        return result

    vector.step = counting  # type: ignore[method-assign]


def run(runners: dict[str, Callable[[dict[str, Any], int, Stamps], None]], packages: tuple[str, ...]) -> None:
    """Make one measurement in this process, as the command line says, and print what was seen as JSON.

    Args:
        runners: by algorithm; called with the case, the steps, and what counts them.
        packages: whose versions are told.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--steps", type=int)
    args, _ = parser.parse_known_args()
    case, stamps = CASES[args.case], Stamps()
    steps = args.steps or case["steps"]
    runners[case["algo"]](case, steps, stamps)
    said = {"stamps": stamps.times, "returns": stamps.returns[-LAST:]}
    said["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    said["versions"] = {name: metadata.version(name) for name in packages}
    print(json.dumps(said))
