"""Candidates of one round act together in lanes, and no bit of a result depends on which others there are."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from rlplug import hookimpl, tree
from rlplug.api import Job
from rlplug.collection.play import MOST_COLUMNS, rounds
from rlplug.config import compose, parse
from rlplug.nn.lanes import Lanes, without_identities
from rlplug.run.build import build
from rlplug.testing.rank_pool import ranks
from rlplug.types import RunError
from tests.collection.test_play import NUMBERED, POLE, equal, made

NUMBERS = ("return", "length")


def candidates(trainer: Any, numbers: Any, **options: Any) -> list[Job]:
    """Return jobs whose candidates are weights with noise from their numbers."""
    algorithm = trainer.algorithm

    def weights(candidate: Any) -> Any:
        source, own = torch.Generator().manual_seed(int(candidate["seed"])), {*algorithm.actor_keys()}
        named = algorithm.named_parameters()
        return {name: p + 0.3 * torch.randn(p.shape, generator=source) for name, p in named if name in own}

    algorithm.candidate_weights = weights
    return [Job(n, candidate={"seed": torch.tensor(n)}, **options) for n in numbers]


def by_number(trainer: Any, jobs: list[Job], **options: Any) -> dict[int, Any]:
    return {job.number: batch for job, batch in trainer.play(jobs, **options)}


@pytest.mark.parametrize("how", ["greedy", "explore"])
@pytest.mark.parametrize("words", [POLE, (*POLE, "env.vectorization=list")], ids=["native", "list"])
def test_no_bit_of_a_candidate_depends_on_the_others(words, how):
    with closing(made(*words)) as trainer:
        every = by_number(trainer, candidates(trainer, range(40), episodes=1, mode=how))
        assert len({float(batch["return"]) for batch in every.values()}) > 5
        for some in ([7], [8, 7], range(3, 39, 5), range(30, 36)):
            for number, batch in by_number(trainer, candidates(trainer, some, mode=how)).items():
                assert equal(batch, every[number]), number
        several = by_number(trainer, candidates(trainer, range(20), episodes=3, mode=how))
        for number, batch in by_number(trainer, candidates(trainer, (9, 12), episodes=3, mode=how)).items():
            assert equal(batch, several[number]), number


def test_lanes_give_what_each_candidate_gives_by_itself(monkeypatch):
    """To rounding: a batched product may round differently."""
    with closing(made(*POLE)) as trainer:
        together = by_number(trainer, candidates(trainer, range(6), mode="greedy"))
        monkeypatch.setattr(type(trainer.algorithm), "traceable", False)
        apart = by_number(trainer, candidates(trainer, range(6), mode="greedy"))
    for number, batch in together.items():
        assert batch["length"].tolist() == apart[number]["length"].tolist()
        torch.testing.assert_close(batch["obs"], apart[number]["obs"])


def test_a_lane_acts_with_its_weights_in_its_place():
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = torch.nn.Parameter(torch.ones(()))

        def act(self, step: Any, carry: Any, mode: str) -> Any:
            return {"action": step["obs"] * self.by}, {"count": carry["count"] + 1}

    lanes = Lanes(Scale(), [{"by": torch.tensor(2.0)}, {"by": torch.tensor(10.0)}], [5, 1], 8)
    out, carry = lanes.act({"obs": torch.arange(4.0)}, {"count": torch.zeros(4)}, "greedy")
    assert out["action"].tolist() == [0.0, 2.0, 20.0, 30.0]
    assert carry["count"].tolist() == [1.0] * 4


@pytest.mark.parametrize("places", [[2, 0, 3], [0, 1, 2]], ids=["some", "all"])
def test_greedy_lanes_are_traced_once_and_equal_vmap(places):
    """To the bit; the weights, and a tensor that the module reads from elsewhere, are read at every call."""
    elsewhere, programs, calls = torch.zeros(3), dict[Any, Any](), list[str]()

    class Policy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def act(self, step: Any, carry: Any, mode: str) -> Any:
            calls.append(mode)
            return {"action": (self.layer(step["obs"]).tanh() + elsewhere).argmax(-1)}, {"sum": carry["sum"] + 1}

    for seed in range(3):
        torch.manual_seed(seed)
        elsewhere.normal_()
        policy = Policy()
        weights = [{name: torch.randn_like(x) for name, x in policy.named_parameters()} for _ in range(3)]
        step, carry = {"obs": torch.randn(6, 4)}, {"sum": torch.zeros(6)}
        found = [
            Lanes(policy, weights, places, max(places) + 1, programs=programs).act(step, carry, m)
            for m in ("greedy", "explore")
        ]
        tree.map(torch.testing.assert_close, *({"out": out, "carry": carry} for out, carry in found))
    assert calls.count("greedy") == len(programs) == 1
    assert calls.count("explore") == 3


def test_a_traced_program_has_no_views_of_the_same_shape():
    from torch.fx.experimental.proxy_tensor import make_fx

    def viewed(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.view(2, 3).expand(2, 3).view(3, 2) + 1, x.view(2, 3)]

    x = torch.arange(6.0).reshape(2, 3)
    program = without_identities(make_fx(viewed)(x))
    assert sum("view" in str(node.target) or "expand" in str(node.target) for node in program.graph.nodes) == 1
    for found, expected in zip(program(x), viewed(x), strict=True):
        assert torch.equal(found, expected)


def test_rounds_hold_what_may_act_together():
    plain, some = Job(3), {"seed": torch.zeros(1)}
    jobs = [*(Job(n, candidate=some) for n in range(30, 35)), plain, Job(40, candidate=some, mode="greedy")]
    jobs += [Job(41, candidate=some), Job(42, candidate=some, episodes=MOST_COLUMNS + 1)]
    numbers = [[job.number for job in group] for group in rounds(jobs)]
    assert numbers == [[30, 31], [32, 33, 34], [3], [40], [41], [42]]
    assert [len(group) for group in rounds([Job(n, candidate=some) for n in range(10)], 4)] == [4, 4, 2]
    assert [len(group) for group in rounds([Job(n, candidate=some, episodes=8) for n in range(8)])] == [4, 4]


def test_only_the_keys_asked_for_come_back_and_all_rows_are_observed():
    words = (*NUMBERED, "preprocess.normalize_obs=true")
    with closing(made(*words)) as trainer:
        ((_, batch),) = trainer.play([Job(0, episodes=2, keys=())])
        assert batch.keys() == {*NUMBERS}
        assert batch["return"].tolist() == [7, 7]
        ((_, batch),) = trainer.play([Job(1, episodes=2, keys=("reward", "valid"))])
        assert batch.keys() == {*NUMBERS, "reward", "valid"}
        assert trainer.policy.normalizer.obs["obs"].seen[0] == 28
        assert trainer.progress.env_steps == 28
        assert next(iter(trainer.collector.play([Job(2, keys=())], {})))[1].keys() == {*NUMBERS}  # nothing else is sent


def test_a_hook_sees_every_job_with_its_rows():
    class Seen:
        def __init__(self) -> None:
            self.jobs: list[Any] = []

        @hookimpl
        def rlplug_played(self, run: Any, job: Job, batch: Any) -> None:
            self.jobs.append((job.number, [*batch["reward"].shape], run.progress.env_steps))

    with closing(made(*NUMBERED)) as trainer:
        trainer.hooks.register(seen := Seen())
        assert [batch.keys() for _, batch in trainer.play([Job(n, episodes=2, keys=()) for n in (4, 2)])] == [
            {*NUMBERS}
        ] * 2
    assert seen.jobs == [(4, [8, 2], 14), (2, [8, 2], 28)]


def test_two_jobs_with_one_number_are_refused():
    with closing(made(*NUMBERED)) as trainer, pytest.raises(RunError, match=r"^two jobs have one number"):
        list(trainer.play([Job(1), Job(1)]))


# ---- modes of submodules -------------------------------------------------------------------------------------------


def test_a_submodule_acts_in_its_own_mode():
    with closing(made(*POLE)) as trainer:
        algorithm, modes = trainer.algorithm, list[Any]()

        class Opponent(torch.nn.Module):
            def act(self, step: Any, carry: Any, mode: str) -> Any:
                modes.append(("opponent", mode))
                return algorithm_act(step, carry, mode)

        algorithm.opponent, algorithm_act = Opponent(), algorithm.act

        def act(step: Any, carry: Any, mode: str) -> Any:
            modes.append(("learner", mode))
            return algorithm.opponent.act(step, carry, mode)

        algorithm.act = act
        list(trainer.play([Job(0, mode={"": "greedy", "opponent": "random"})]))
        assert {*modes} >= {("learner", "greedy"), ("opponent", "random")}
        assert ("opponent", "greedy") not in modes
        modes.clear()
        list(trainer.play([Job(0, mode="greedy")]))
        assert ("opponent", "greedy") in modes
        assert "act" not in vars(algorithm.opponent)
        with pytest.raises(ValueError, match=r"^job 3 has a mode for 'rival', which is no submodule that acts$"):
            list(trainer.play([Job(3, mode={"rival": "greedy"})]))


# ---- storing -------------------------------------------------------------------------------------------------------

DQN = (
    *("algo=dqn", "env=gymnasium", "env.id=tests.contract.tenants.asynchronous:Numbered-v0", "model.hidden=[8]"),
    *("logger.only=[]", "buffer.capacity=200", "train_batch_size=64", "exploration=[]", "rollout_fragment_length=5"),
)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_stored_episodes_are_sampled_like_collected_ones(num_envs):
    with closing(made(*DQN, "buffer=replay", f"num_envs={num_envs}")) as trainer:
        jobs = [Job(n, episodes=1 + n % 3, mode="random") for n in range(5)]
        total = sum(int(batch["length"].sum()) for _, batch in trainer.play(jobs, store=True))
        assert len(trainer.buffer) == total == 7 * 9
        seen = set()
        for _ in range(20):
            batch = trainer.buffer.sample()
            assert batch["valid"][0].all()
            assert torch.equal(batch["obs"][1, :, 0], batch["obs"][0, :, 0] + 1)  # the observation counts steps
            assert torch.equal(batch["terminated"][0], batch["obs"][0, :, 0] == 6)
            seen |= {int(x) for x in batch["obs"][0, :, 0]}
        assert seen == {*range(7)}
        trainer.update()
        with pytest.raises(RunError, match=r"^the loop collects, and stores episodes of jobs in the same buffer"):
            trainer.collect()


def test_a_buffer_of_rollouts_stores_no_episodes():
    with closing(made(*NUMBERED)) as trainer, pytest.raises(RunError, match=r"^store=True: needs a buffer of windows"):
        list(trainer.play([Job(0)], store=True))


def stored_on_a_rank(fabric: Any, raw: Any) -> Any:
    trainer: Any = build(parse(raw), Path(), fabric)
    with closing(trainer):
        got = len(list(trainer.play([Job(n, mode="random", keys=()) for n in range(5)], store=True)))
        return got, len(trainer.buffer), trainer.progress.env_steps


def test_a_rank_stores_what_it_played():
    raw = compose([*DQN, "buffer=replay", "num_envs=2", "hardware=2cpu"]).raw
    assert ranks(2)(stored_on_a_rank, raw) == [(5, 14, 35), (5, 21, 35)]


# ---- evaluations ---------------------------------------------------------------------------------------------------


def adapted(fabric: Any, raw: Any) -> Any:
    """Return the metrics of an evaluation with weights of its own for every job."""
    trainer: Any = build(parse(raw), Path(), fabric)

    def evaluate(self: Any, play: Any, episodes: int) -> dict[str, float]:
        weights = {str(n): {name: (1 + 0.1 * n) * x for name, x in self.state_dict().items()} for n in range(3)}
        jobs = [Job(n, {"": str(n)}, episodes=episodes, mode="explore") for n in range(3)]
        sums = [float(batch["obs"].double().sum()) for _, batch in play(jobs, weights)]
        return {"eval/return_mean": sum(sums), **{str(n): x for n, x in enumerate(sums)}}

    with closing(trainer):
        trainer.algorithm.__class__ = type("Own", (type(trainer.algorithm),), {"evaluate": evaluate})
        evaluation = trainer.reports.evaluation
        evaluation.evaluator.player.keys = ("obs",)
        return evaluation.run(trainer)


def test_an_evaluation_of_adapted_policies_is_the_same_to_the_bit_on_two_ranks():
    words = (*POLE, "num_envs=2", "eval.episodes=5")
    alone = adapted(None, compose(words).raw)
    assert ranks(2)(adapted, compose([*words, "hardware=2cpu"]).raw) == [alone, alone]
