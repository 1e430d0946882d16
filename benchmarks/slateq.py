"""SlateQ with 10 candidates: choices of slates and targets of the paper, and tabular Q-learning of the same problem.

    pip install -c constraints.txt matplotlib           # for the picture
    python benchmarks/slateq.py                         # minutes; results/slateq.json and docs/img/slateq.svg
    python benchmarks/slateq.py --plot                  # only draw the picture

The environment is ``env=interest_evolution``: 125 users, 45 slates of 2 of 10 documents. The value of a policy is
exact: that of the slates that it shows to all users, by ``InterestEvolution.solve``. Every run has as many environment
steps. The table has a value for each user and document, and knows how users choose; SlateQ learns that, too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlplug import testing
from rlplug.config import compose
from rlplug.functional.slates import exact_slate, slate_value
from rlplug.plugins.env.interest_evolution import InterestEvolution
from rlplug.run.build import build, start

HERE = Path(__file__).parent
RESULTS, PICTURE = HERE / "results" / "slateq.json", HERE.parent / "docs" / "img" / "slateq.svg"
STEPS, EVERY, ENVS = 20_000, 4_000, 32
WORDS = (
    *("algo=slateq", "env=interest_evolution", "hardware=cpu", "logger.only=[]", "compile=off", "algo.gamma=1.0"),
    *("model.hidden=[64]", f"num_envs={ENVS}", "replay_ratio=0.05", "train_batch_size=128", f"total_steps={STEPS}"),
    *(f"algo.epsilon=[[0,1.0],[{STEPS // 2},0.2]]", f"algo.lr=[[0,3e-3],[{STEPS},1e-4]]"),
)
METHODS = {
    "exact": ("algo.slate=exact", "algo.target_slate=exact"),
    "greedy": ("algo.slate=greedy", "algo.target_slate=greedy"),
    "top-k": ("algo.slate=top_k", "algo.target_slate=top_k"),
    "SARSA": ("algo.strategy=sarsa",),
    "myopic": ("algo.strategy=myopic",),
}
Show = Callable[[], NDArray[np.int64]]
"""returns the slates of all users, ``[users, k]``"""


def learned(env: InterestEvolution, words: tuple[str, ...], seed: int) -> Iterator[tuple[int, Show]]:
    """Train SlateQ, and yield the steps and the policy every ``EVERY`` steps."""
    obs = {"user": torch.from_numpy(env.levels[env.users]).float()}
    obs["documents"] = torch.from_numpy(env.fixed).expand(len(env.users), -1, -1)
    with closing(build(compose([*WORDS, *words, f"seed={seed}"]), Path())) as trainer:
        algorithm: Any = trainer.algorithm

        def show() -> NDArray[np.int64]:
            with torch.inference_mode():
                return algorithm.chosen(algorithm.online, obs, algorithm.cfg.slate).numpy()

        start(trainer)
        loop: Any = trainer.loop
        progress, due = trainer.progress, EVERY
        while progress.env_steps < STEPS:
            trainer.collect("explore" if progress.env_steps >= loop.learning_starts else "random")
            while trainer.ready() and progress.updates < loop.updates(progress.env_steps):
                trainer.update()
            if progress.env_steps >= due:
                yield progress.env_steps, show
                due += EVERY


def tabular(env: InterestEvolution, seed: int) -> Iterator[tuple[int, Show]]:
    """Learn a table ``Q(user, item)`` with the same target, by steps of ``1 / visits^0.7``."""
    rng, (users, documents), k = np.random.default_rng(seed), (env.users, env.fixed), env.cfg.slate_size
    place = {tuple(user): i for i, user in enumerate(users.tolist())}
    q, visits = (
        torch.zeros(len(users), len(documents) + 1, dtype=torch.float64),
        np.zeros((len(users), len(documents) + 1)),
    )
    v = torch.from_numpy(np.exp(env.cfg.choice_scale * env.levels[users] @ documents[:, :-1].T))
    none = torch.full((len(users),), float(np.exp(env.cfg.no_click)), dtype=torch.float64)
    n, due = env.num_envs, EVERY
    env.reset([seed * 1000 + i for i in range(n)])
    steps = 0

    def show() -> NDArray[np.int64]:
        return exact_slate(v, q[:, :-1], none, q[:, -1], k).numpy()

    while steps < STEPS:
        at, over = np.array([place[tuple(user)] for user in env.user.tolist()]), env.over.copy()
        best = show()
        epsilon = max(0.2, 1.0 - 0.8 * steps / (STEPS // 2))
        random = np.argsort(rng.random((n, len(documents))), 1)[:, :k]
        slate = np.where(rng.random((n, 1)) < epsilon, random, best[at])
        row = env.step(slate)
        value = slate_value(v, q[:, :-1], none, q[:, -1], torch.from_numpy(best)).numpy()
        for i in np.flatnonzero(~over):
            click = int(row["obs"]["response"]["click"][i])
            item = slate[i, click] if click < k else len(documents)
            later = 0.0 if row["terminated"][i] else value[place[tuple(env.user[i].tolist())]]
            visits[at[i], item] += 1
            q[at[i], item] += (row["reward"][i] + later - q[at[i], item]) / visits[at[i], item] ** 0.7
        steps += int((~over).sum())
        if steps >= due:
            yield steps, show
            due += EVERY


def worth(env: InterestEvolution, shown: NDArray[np.int64]) -> float:
    """Return the mean value of slates shown to all users."""
    index = {tuple(slate): i for i, slate in enumerate(env.slates.tolist())}
    policy = np.array([index[tuple(slate)] for slate in np.sort(shown, -1).tolist()])
    return float(env.solve(policy=policy)[np.arange(len(policy)), policy].mean())


def plot(found: dict[str, Any]) -> None:
    """Draw the values of all methods against environment steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "rlplug"
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for name, runs in found["values"].items():
        values = np.array([run["values"] for run in runs])
        axes.plot(runs[0]["steps"], values.mean(0), label=name, marker="o", markersize=3)
    for name in ("optimum", "random"):
        axes.axhline(found[name], color="gray", linestyle="--" if name == "optimum" else ":", label=name)
    axes.set_xlabel("environment steps")
    axes.set_ylabel("exact value, mean over users")
    axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--plot", action="store_true")
    args = parser.parse_args()
    if not args.plot:
        torch.set_num_threads(1)
        env = InterestEvolution(testing.config("env/interest_evolution"), testing.context(num_envs=ENVS))
        best, slates = env.solve().max(1).mean(), env.slates
        rng = np.random.default_rng(0)
        some = [worth(env, slates[rng.integers(len(slates), size=len(env.users))]) for _ in range(20)]
        found: dict[str, Any] = {"optimum": float(best), "random": float(np.mean(some)), "values": {}}
        for name, words in {**METHODS, "table": None}.items():
            for seed in args.seeds:
                began, run = time.process_time(), {"seed": seed, "steps": [], "values": []}
                for steps, show in learned(env, words, seed) if words is not None else tabular(env, seed):
                    run["steps"].append(steps)
                    run["values"].append(round(worth(env, show()), 4))
                run["cpu_s"] = round(time.process_time() - began, 1)
                found["values"].setdefault(name, []).append(run)
                print(name, seed, run["values"], f"of {best:.4f}", f"{run['cpu_s']} s", flush=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    plot(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
