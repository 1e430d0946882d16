"""ES, ARS and CEM: exact steps on small problems, and updates that do not depend on who plays the candidates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from rlplug import testing
from rlplug.api import Needs
from rlplug.checkpointing.format import find
from rlplug.cli import main
from rlplug.config import compose, parse
from rlplug.functional.evolution import ars_weights, centered_ranks, elite
from rlplug.nn.direct import noise_of
from rlplug.plugins.algo.ars import ARS
from rlplug.plugins.algo.cem import CEM
from rlplug.plugins.algo.es import ES
from rlplug.plugins.loop.population import Population
from rlplug.run.build import build, start
from rlplug.testing.rank_pool import ranks

SMALL = ("env=cartpole", "tuned=none", "logger.only=[]", "eval.every=0", "eval.episodes=2", "hardware=cpu", "seed=1")
RUNS = {
    "es": ("algo=es", "algo.episodes_per_batch=12", "model.hidden=[8]", "preprocess.normalize_obs=true"),
    "ars": ("algo=ars", "algo.num_rollouts=6", "algo.rollouts_used=3", "algo.eval_prob=0.2"),
    "cem": ("algo=cem", "algo.population=9", "algo.elite_share=0.3", "loop.episodes=2"),
}


class Learner:
    """Steps the optimizers with the gradients that it is given, and keeps them."""

    def apply(self, grads: Any, who: Any) -> None:
        self.grads = {name: g.clone() for name, g in grads.items()}
        for name, p in who.named_parameters():
            p.grad = grads[name]
        for part in who.optimizers().values():
            part.optimizer.step()


def of(cls: Any, name: str, **options: Any) -> Any:
    ctx = testing.context(testing.spec(obs=3, action=2), overrides=[f"algo={name}", "model=linear"])
    return cls(testing.config(f"algo/{name}", **options), ctx)


def flat(weights: Any) -> torch.Tensor:
    return torch.cat([x.detach().flatten() for x in weights.values()])


# ---- functional ------------------------------------------------------------------------------------------------------


def test_equal_returns_have_equal_ranks():
    assert centered_ranks(torch.tensor([10.0, -5.0, 3.0, 7.0])).tolist() == pytest.approx([0.5, -0.5, -1 / 6, 1 / 6])
    assert centered_ranks(torch.tensor([500.0, 9.0, 500.0])).tolist() == [0.25, -0.5, 0.25]
    assert centered_ranks(torch.full((4,), 500.0)).tolist() == [0.0] * 4


def test_ars_takes_the_best_directions_and_divides_by_the_deviation_of_their_returns():
    best, weights = ars_weights(torch.tensor([1.0, 9.0, 2.0]), torch.tensor([8.0, 0.0, 3.0]), 2)
    assert best.tolist() == [1, 0]
    deviation = math.sqrt(sum((x - 4.5) ** 2 for x in (9, 1, 0, 8)) / 4)
    assert weights.tolist() == pytest.approx([9 / (2 * deviation), -7 / (2 * deviation)], rel=1e-6)
    _, none = ars_weights(torch.full((3,), 500.0), torch.full((3,), 500.0), 2)
    assert none.tolist() == [0.0, 0.0]


def test_the_elite_are_the_highest():
    assert elite(torch.tensor([1.0, 5.0, 5.0, 2.0]), 3).tolist() == [1, 2, 3]


# ---- updates ---------------------------------------------------------------------------------------------------------


def test_the_gradient_of_es_on_a_quadratic_is_exact_in_the_mean():
    """Of -|w - c|^2, the expected value under noise has the gradient -2 (w - c); a mirrored pair gives it projected."""
    algorithm = of(ES, "es", episodes_per_batch=4000, noise_stdev=0.1, l2_coeff=0.0, return_proc_mode="raw")
    center = {name: torch.full_like(w, 0.3) for name, w in algorithm.named_parameters()}
    asked = algorithm.ask()
    played = asked["sign"] != 0
    asked = {key: x[played] for key, x in asked.items()}
    returns, projected = [], torch.zeros_like(flat(center))
    gradient = -2.0 * (flat(dict(algorithm.named_parameters())) - flat(center))
    for seed, sign in zip(asked["seed"], asked["sign"], strict=True):
        weights = algorithm.candidate_weights({"seed": seed, "sign": sign})
        returns.append(-(flat(weights) - flat(center)).double().square().sum())
        if sign > 0:
            noise = flat(noise_of(int(seed), center))
            projected += noise * (noise @ gradient) / 2000
    learner = Learner()
    algorithm.update(asked | {"return": torch.stack(returns), "length": torch.ones(4000)}, learner)
    torch.testing.assert_close(-flat(learner.grads), projected, atol=1e-4, rtol=1e-4)
    assert torch.nn.functional.cosine_similarity(-flat(learner.grads), gradient, 0) > 0.99


def test_weight_decay_pulls_to_zero_where_all_candidates_are_equal():
    algorithm = of(
        ES, "es", episodes_per_batch=2, l2_coeff=0.5, optimizer="sgd", stepsize=0.1, momentum=0.0, eval_prob=0.0
    )
    before = flat(dict(algorithm.named_parameters()))
    learner = Learner()
    losses = algorithm.update(algorithm.ask() | {"return": torch.ones(2), "length": torch.ones(2)}, learner)
    torch.testing.assert_close(flat(dict(algorithm.named_parameters())), before * (1 - 0.1 * 0.5))
    assert "return_unperturbed" not in losses.metrics


def test_the_step_of_ars_is_exact():
    algorithm = of(ARS, "ars", num_rollouts=3, rollouts_used=2, sgd_stepsize=0.5, offset=1.0, eval_prob=0.0)
    before, asked = flat(dict(algorithm.named_parameters())), algorithm.ask()
    assert not before.any()
    returns = torch.tensor([1.0, 9.0, 2.0, 8.0, 0.0, 3.0], dtype=torch.float64)
    length = torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0, 1.0], dtype=torch.float64)
    algorithm.update(asked | {"return": returns, "length": length}, Learner())
    above, below = [0.0, 7.0, 1.0], [5.0, -1.0, 2.0]  # less 1 for each step
    used = torch.tensor([above[1], above[0], below[1], below[0]], dtype=torch.float64)
    noise = [flat(noise_of(int(seed), dict(algorithm.named_parameters()))) for seed in asked["seed"][:3]]
    step = (above[1] - below[1]) * noise[1] + (above[0] - below[0]) * noise[0]
    expected = 0.5 / (2 * float(used.std(correction=0))) * step
    torch.testing.assert_close(flat(dict(algorithm.named_parameters())), expected, atol=1e-5, rtol=1e-5)


def test_lincem_fits_its_elite():
    algorithm = of(CEM, "cem", population=8, elite_share=0.25, extra_std=0.3)
    asked = algorithm.ask()
    drawn = [algorithm.candidate_weights({"seed": seed}) for seed in asked["seed"]]
    returns = torch.tensor([0.0, 4.0, 1.0, 9.0, 2.0, 3.0, 3.0, 1.0])
    algorithm.update(asked | {"return": returns, "length": torch.ones(8)}, Learner())
    for name, mean in algorithm.named_parameters():
        a, b = drawn[3][name], drawn[1][name]
        torch.testing.assert_close(mean.data, (a + b) / 2)
        std = algorithm.get_buffer(algorithm._std(name))
        torch.testing.assert_close(std, ((a - b).square() / 4 + 0.09).sqrt())


@pytest.mark.parametrize("name", RUNS)
def test_a_candidate_needs_its_seed_only(name):
    cls = {"es": ES, "ars": ARS, "cem": CEM}[name]
    a, b = of(cls, name), of(cls, name)
    b.load_state_dict(a.state_dict())
    one = {key: x[0] for key, x in a.ask().items()}
    assert torch.equal(flat(a.candidate_weights(one)), flat(b.candidate_weights(one)))
    assert not torch.equal(flat(a.candidate_weights(one)), flat(dict(a.named_parameters())))


# ---- runs ------------------------------------------------------------------------------------------------------------


def updated(fabric: Any, raw: Any, kill: Callable[[], None] = lambda: None) -> Any:
    """Return weights and returns after two updates; ``kill`` is called before the first."""
    trainer: Any = build(parse(raw), Path(), fabric)
    with closing(trainer):
        start(trainer)
        metrics = []
        update = trainer.update

        def counted(batch: Any) -> Any:
            metrics.append(batch["return"].tolist())
            losses = update(batch)
            trainer.agreement.stop = 15 * (len(metrics) == 2)
            return losses

        trainer.update, trainer.reports.report = counted, lambda run: None  # without files
        kill()
        trainer.loop.run(trainer)
        state = {key: x.clone() for key, x in trainer.algorithm.state_dict().items()}
        return state, metrics, trainer.progress.env_steps


def assert_same(a: Any, b: Any) -> None:
    assert a[1:] == b[1:]
    assert a[0].keys() == b[0].keys()
    assert all(torch.equal(x, b[0][key]) for key, x in a[0].items())


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_make_the_update_of_one_to_the_bit(name):
    words = (*SMALL, *RUNS[name], "num_envs=2")
    alone = updated(None, compose(words).raw)
    assert len({*alone[1][0]}) > 3
    both = ranks(2)(updated, compose([*words[:-1], "num_envs=2", "hardware=2cpu"]).raw)
    for one in both:
        assert_same(alone, one)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    """Those of CEM have deviations, too; the kit resumes the loop with ES."""

    def run(folder: Path, *more: str) -> Any:
        assert main([*SMALL, *RUNS["cem"], *more, f"hydra.run.dir={folder}"]) == 0
        summary = json.loads((folder / "summary.json").read_text())
        return summary["env_steps"], find(folder).tree("weights")["algorithm"]

    short, _ = run(tmp_path / "run", "total_steps=400")
    assert 400 <= short < 1500
    assert main(["resume", str(tmp_path / "run"), "total_steps=1500"]) == 0
    longer, weights = run(tmp_path / "undisturbed", "total_steps=1500")
    resumed = find(tmp_path / "run").tree("weights")["algorithm"]
    assert longer >= 1500
    assert all(torch.equal(x, resumed[key]) for key, x in weights.items())


@pytest.mark.parametrize(
    "words",
    [(*RUNS["es"], "train_batch_size=1_000"), ("algo=ppo", "loop=episodes", "rollout_fragment_length=300")],
    ids=["population", "episodes"],
)
def test_all_episodes_of_an_update_see_one_filter(words):
    """And the next update another one; PPO's log-probabilities are those of the filter that acted."""
    trainer: Any = build(compose([*SMALL, *words, "preprocess.normalize_obs=true"]), Path())
    with closing(trainer):
        start(trainer)
        seen, updates, play, update = [], [], trainer.play, trainer.update

        def played(*args: Any, **options: Any) -> Any:
            seen[-1].append(trainer.policy.normalizer.obs["obs"].mean.tolist())
            return play(*args, **options)

        def counted(batch: Any) -> Any:
            updates.append(update(batch))
            seen.append([])
            trainer.agreement.stop = 15 * (len(updates) == 3)
            return updates[-1]

        seen.append([])
        trainer.play, trainer.update = played, counted
        trainer.reports.report = lambda run: None
        trainer.loop.run(trainer)
        assert all(len(of) > 1 and of == of[:1] * len(of) for of in seen[:3]), seen
        assert seen[0][0] != seen[1][0] != seen[2][0]


REFUSED = {
    "changed rewards": (
        "algo=es",
        "preprocess.clip_reward=1",
        "preprocess.clip_reward: changes the environment's rows, but es compares their returns; use the default",
    ),
    "a pair is missing": (
        "algo=es",
        "algo.episodes_per_batch=7",
        "algo.episodes_per_batch: 7 candidates are no mirrored",
    ),
    "more used than played": ("algo=ars", "algo.rollouts_used=99", "algo.rollouts_used: 99 of num_rollouts=32"),
    "recurrent": ("algo=es", "model=lstm", "model: ES cannot learn with a recurrent model; use another model"),
    "too many": (
        "algo=es",
        "algo.episodes_per_batch=2000000",
        "algo.episodes_per_batch: 2000000 is out of range",
    ),
    "beyond memory": (
        "algo=cem",
        "model=mlp algo.population=500000 model.hidden=[4096,4096]",
        "algo.population: the weights of 62,500 elite candidates would need 3,914 GiB",
    ),
    "no elite": ("algo=cem", "algo.population=1", "algo.population: 1 candidate has no elite; use 2 or more"),
    "another loop": ("algo=ppo", "loop=population", "loop: population plays candidates, for which PPO cannot be asked"),
    "curiosity": (
        "algo=ars",
        "exploration=[icm]",
        "exploration.icm: rewards rows that the learner samples, but ars uses",
    ),
}


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(words, capsys, tmp_path):
    assert main([*SMALL, words[0], *words[1].split(), f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert words[2] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", RUNS)
def test_candidates_that_do_not_fit_into_memory_are_refused(name, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    assert main([*SMALL, *RUNS[name], f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert "model: the weights of 64 candidates that act together would need" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_curiosity_is_refused_for_a_loop_that_gives_no_rows(capsys, tmp_path, monkeypatch):
    """Also if the algorithm's needs do not say so; and at the first update if the loop does not say so either."""
    monkeypatch.setattr(ES, "needs", classmethod(lambda cls, cfg, spec: Needs()))
    words = (*SMALL, *RUNS["es"], "total_steps=300", "exploration=[icm]")
    assert main([*words, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    said = "exploration.icm: rewards rows that the learner samples, but es learns from no rows with loop=population"
    assert f"{said}; leave it out" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(Population, "gives_rows", True)
    assert main([*words, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert (
        "exploration.icm: rewards sampled rows, but the loop passes the learner seed, sign, " in capsys.readouterr().err
    )
