"""``algo=league``: who plays whom, what counts as a result, and whose rows are learned from."""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from rlplug import load, tree
from rlplug.agents import probabilities
from rlplug.api import Algorithm, Segment
from rlplug.cli import main
from rlplug.config import compose
from rlplug.config.schema import parse
from rlplug.context import EnvShard
from rlplug.envs.matrix_games import rock_paper_scissors
from rlplug.plugins.algo.league import ITSELF, League, Pool
from rlplug.run import launch
from rlplug.run.build import build, start
from rlplug.testing.comparing import compare_runs
from rlplug.testing.rank_pool import ranks
from rlplug.trainer.trainer import Trainer
from rlplug.types import Batch

RUN = ["algo=league", "hardware=cpu", "compile=off", "logger.only=[]", "model.hidden=[8]", "eval.every=0"]
RUN += ["num_envs=4", "rollout_fragment_length=16", "algo.algo.sgd_minibatch_size=64", "algo.algo.num_sgd_iter=1"]
TEAM = ["algo.algo={name: independent, one_per: group, algo: {name: ppo, sgd_minibatch_size: 64, num_sgd_iter: 1}}"]


def trainer(folder: Path, *words: str, env: str = "tictactoe") -> Trainer:
    made = build(compose([*RUN, f"env={env}", *words]), folder)
    start(made)
    return made


@pytest.fixture
def run(tmp_path):
    with closing(trainer(tmp_path, "algo.self_play=0.25", "algo.size=3")) as made:
        yield made


def league(run: Trainer) -> League:
    assert isinstance(run.algorithm, League)
    return run.algorithm


def test_names_of_policies_survive_a_checkpoint(run):
    own = league(run).pool
    for name in ("a/b", "c"):
        own.keep(name, league(run).learner.state_dict())
    other = league(run).pool.__class__(league(run).learner, 3)
    other.load_state_dict(own.state_dict())
    assert other.titles == ["a/b", "c"]


def test_a_league_around_dqn_meets_opponents_before_it_learns(tmp_path: Path):
    words = [
        "algo=league",
        "algo.algo=dqn",
        "buffer=replay",
        "env=rock_paper_scissors",
        "env.rounds=2",
        "model.hidden=[8]",
    ]
    words += ["hardware=cpu", "logger.only=[]", "num_envs=4", "num_steps_sampled_before_learning_starts=64"]
    with closing(build(compose(words), tmp_path)) as made:
        start(made)
        league(made).pool.add(0.9)
        for mode in ("random", "explore") * 20:
            made.collect(mode)
        assert league(made).pool.results.sum() > 0  # games against the copy ended


def grid(n: int) -> torch.Tensor:
    return (torch.arange(n) + 0.5) / n


@pytest.mark.parametrize(
    ("opponents", "shares"),
    [
        ("pfsp", [0.0, 0.75 * 0.9, 0.75 * 0.1]),
        ("uniform", [0.25] * 3),
        ("latest", [0.0, 0.75, 0.0]),
        ("named", [0.75, 0.0, 0.0]),
    ],
)
def test_opponents_are_drawn_as_configured(run, opponents, shares):
    own = league(run)
    own.cfg = type(own.cfg)(**vars(own.cfg) | {"opponents": opponents, "pfsp_power": 2.0})
    for _ in range(5):  # the newest is in place 1 of 3
        own.pool.add(decay=1.0)
    own.pool.names.append("champion")
    # win rates 1, 1/4 and 3/4, whose weights are 0, 9/16 and 1/16
    own.pool.results[:] = torch.tensor([[1e9, 0.0, 0.0], [250e6, 0.0, 750e6], [750e6, 0.0, 250e6]])
    drawn, seats = own.match(grid(10_000), grid(10_000), "explore")
    found = [(drawn == place).float().mean().item() for place in range(ITSELF, 3)]
    assert found == pytest.approx([0.25, *shares], abs=2e-4)
    assert seats.float().mean() == 0.5


def test_the_greedy_learner_plays_both_seats_unless_an_evaluation_names_opponents(run):
    own = league(run)
    for _ in range(3):
        own.pool.add(decay=1.0)
    drawn, _ = own.match(grid(900), grid(900), "greedy")
    assert (drawn == ITSELF).all()
    own.pool.odds[:3] = torch.tensor([1.0, 0.0, 1.0])
    drawn, _ = own.match(grid(900), grid(900), "greedy")
    assert [(drawn == place).sum().item() for place in range(ITSELF, 3)] == [0, 450, 0, 450]


def last_free_cell(policy: Algorithm, sign: float) -> None:
    """Let a policy play the last free cell, or, with -1, the first."""
    head = dict(policy.named_parameters())
    with torch.no_grad():
        next(x for x in head.values() if x.shape == (9,)).copy_(sign * 10 * torch.arange(9.0))


def test_an_evaluation_plays_all_policies_and_those_that_stay_and_pairs(tmp_path):
    with closing(trainer(tmp_path, "algo.size=3", "algo.payoff=2", "eval.episodes=4")) as made:
        own = league(made)
        last_free_cell(own.learner, 1.0)
        own.pool.keep("last", own.learner.state_dict())
        last_free_cell(own.learner, -1.0)
        own.pool.add(decay=1.0)
        jobs, player = dict[int, Batch](), made.policy.player()

        def play(asked, weights):
            for job in asked:
                (batch,) = player.play([job], weights)
                jobs[job.number] = batch
                yield job, batch

        metrics = own.evaluate(play, 8)
    assert {*jobs[0]["opponent"][0, :, 0].tolist()} == {0, 1}
    assert (jobs[1]["opponent"] == 0).all()
    assert {key for key in metrics if "/" in key.removeprefix("eval/")} == {
        *("eval/against/last", "eval/payoff/last/1", "eval/return/first", "eval/return/second")
    }
    assert jobs[2]["return"].shape == (2,)
    for number, first, second in ((1, -1.0, 1.0), (2, 1.0, -1.0)):  # the learner is the one from the front, or "last"
        batch = jobs[number]
        free = batch["action_mask"].float()
        front, back = free.argmax(-1), 8 - free.flip(-1).argmax(-1)
        acted, mine = batch["alive"] & batch["valid"][..., None], batch["mine"]
        for who, sign in ((mine, first), (~mine, second)):
            assert (batch["action"] == (front if sign < 0 else back))[acted & who].all()


def test_policies_that_stay_are_not_replaced(run):
    pool = league(run).pool
    pool.keep("champion", league(run).learner.state_dict())
    champion = next(pool.members[0].parameters()).clone()
    for i in range(3):
        with torch.no_grad():
            next(league(run).learner.parameters()).fill_(float(i))
        pool.add(decay=1.0)
        assert pool.latest == 1 + i % 2
    assert torch.equal(next(pool.members[0].parameters()), champion)
    assert [next(one.parameters()).flatten()[0].item() for one in pool.members[1:]] == [2.0, 1.0]
    assert pool.titles == ["champion", "1", "2"]
    again = Pool(league(run).learner, 3)
    again.set_extra_state(pool.get_extra_state())
    again.load_state_dict(pool.state_dict())
    assert again.titles == pool.titles


def test_a_full_pool_replaces_its_oldest_copy_and_results_fade(run):
    pool = league(run).pool
    for i in range(4):
        with torch.no_grad():
            next(league(run).learner.parameters()).fill_(float(i))
        pool.rating.fill_(100.0 * i)
        pool.add(decay=0.5)
        pool.results[i % 3, 0] = 8.0
    assert [next(one.parameters()).flatten()[0].item() for one in pool.members] == [3.0, 1.0, 2.0]
    assert pool.elo.tolist() == [300.0, 100.0, 200.0]
    assert pool.results[:, 0].tolist() == [8.0, 2.0, 4.0]


def rated(fabric: Any, raw: Any) -> list[float]:
    made = build(parse(raw), Path(), fabric)
    with closing(made):
        made.loop.run(made)
        pool = league(made).pool
        return [pool.rating.item(), *pool.elo.tolist(), *pool.results.flatten().tolist()]


def test_two_ranks_rate_the_games_of_one():
    """Ratings depend on the order of games."""
    words = [*RUN, "env=tictactoe", "tuned=none", "algo.every=1", "algo.size=3", "total_steps=512"]
    alone = rated(None, compose(words).raw)
    assert len({*alone}) > 6
    assert ranks(2)(rated, compose([*words, "hardware=2cpu"]).raw) == [alone, alone]


def test_elo_rises_by_what_a_result_surprises(run):
    pool = league(run).pool
    pool.add(decay=1.0)
    pool.rating.fill_(400.0)
    pool.record([[0, -1]], k=11.0)
    assert pool.rating.item() == pytest.approx(400 - 11 * 10 / 11)  # expected: 10 wins of 11
    assert pool.results[0].tolist() == [0, 0, 1]
    pool.record([[0, 1], [0, 0]], k=11.0)
    assert pool.results[0].tolist() == [1, 1, 1]
    assert pool.winrates().tolist() == [0.5]


def test_copies_play_the_other_seat_and_only_the_learners_rows_are_learned(run):
    own = league(run)
    own.pool.add(decay=1.0)
    last_free_cell(own.learner, -1.0)
    last_free_cell(own.pool.members[0], 1.0)
    run.collect()
    segment = run.buffer.sample()
    mine, acted = segment["mine"], segment["alive"] & segment["valid"][..., None]
    free = segment["action_mask"].float()
    first, last = free.argmax(-1), 8 - free.flip(-1).argmax(-1)
    assert (segment["action"] == first)[acted & mine].all()
    assert (segment["action"] == last)[acted & ~mine].all()
    assert 0 < (~mine).float().mean() < 0.5  # a quarter of the games is self-play
    rows = own.sides.rows(segment)
    assert rows["valid"].sum() == (acted & mine).sum()
    # the learner fills from the front, its copy from the back: results are counted for the learner
    ended = segment["valid"][:-1] & ~segment["alive"][1:].any(-1)
    played = ended & (segment["opponent"][:-1, :, 0] >= 0)
    paid = torch.where(segment["mine"], segment["reward"], 0.0).sum(-1)[:-1][played]
    counted = [(paid > 0).sum().item(), (paid == 0).sum().item(), (paid < 0).sum().item()]
    assert own.pool.results[0].tolist() == counted
    assert sum(counted) > 3


def test_draws_do_not_depend_on_who_plays(run):
    """A row's actions are those of its opponent, as if it were the opponent of all rows; so are later draws."""
    own, ctx = league(run), run.ctx
    for _ in range(3):
        own.pool.add(decay=1.0)
    for one in own.pool.members:
        for p in one.parameters():
            torch.nn.init.normal_(p)
    step = {"obs": torch.zeros(4, 2, 2, 3, 3), "action_mask": torch.ones(4, 2, 9, dtype=torch.bool)}
    step |= {"is_first": torch.zeros(4, dtype=torch.bool), "prev_reward": torch.zeros(4, 2)}
    step |= {"alive": torch.ones(4, 2, dtype=torch.bool)}
    before, mixed, after, actions = ctx.generators["actor"].get_state(), [0, 1, 2, 0], [], []
    for opponents in ([ITSELF] * 4, mixed, [0] * 4, [1] * 4, [2] * 4):
        ctx.generators["actor"].set_state(before)
        with ctx.acting(EnvShard("actor", 4, range(4))):
            carry = own.initial_carry(4) | {"opponent": torch.tensor(opponents)}
            actions.append(own.act(step, carry, "explore")[0]["action"])
        after.append(ctx.generators["actor"].get_state())
    assert all(torch.equal(after[0], state) for state in after)
    itself, found, *each = actions
    assert found[:, 0].tolist() == itself[:, 0].tolist()  # the learner plays the first seat
    assert found[:, 1].tolist() == [each[k][b, 1].item() for b, k in enumerate(mixed)]
    assert len({tuple(one[:, 1].tolist()) for one in each}) == 3


def test_scores_of_games_with_several_rounds_are_summed(tmp_path):
    words = ("algo.self_play=0.0", "env.rounds=5")
    with closing(trainer(tmp_path, *words, env="rock_paper_scissors")) as run:
        league(run).pool.add(decay=1.0)
        run.collect()
        segment = run.buffer.sample()
        for b in range(4):
            total = torch.zeros(2)
            for t in range(len(segment["valid"]) - 1):
                total = torch.zeros(2) if segment["is_first"][t, b] else total
                assert torch.allclose(segment["score"][t, b], total)
                total = total + segment["reward"][t, b] * segment["valid"][t, b]


SMALL = ["tuned=none", "algo.every=1", "algo.algo.lr=0.02", "total_steps=512"]


def exploitabilities(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics by what follows ``eval/exploitability``."""
    name = "eval/exploitability"
    return {key.removeprefix(name): float(value) for key, value in metrics.items() if key.startswith(name) and value}


def test_a_run_logs_the_exploitability_of_learner_and_pool(tmp_path):
    words = [*RUN, *SMALL, "env=rock_paper_scissors", "env.variant=weighted", "algo.size=3", "eval.every=256"]
    launch.train(compose(words), tmp_path / "run", tell=lambda line: None)
    payoff, league = rock_paper_scissors("weighted"), load(tmp_path / "run").algorithm
    one, actions = torch.ones(1, 1), torch.ones(1, 3, dtype=torch.bool)
    with torch.no_grad():
        policies = [league.learner, *league.pool.members]
        learner, *pool = (policy.net.dist({"obs": one}, {})[0].params.exp()[0] for policy in policies)
    assert torch.allclose(probabilities(league.learner, one, actions)[0], learner)
    gains = {"": learner, "_greedy": torch.eye(3)[learner.argmax()], "_pool": torch.stack(pool).mean(0)}
    expected = {name: (payoff @ strategy.numpy()).max() for name, strategy in gains.items()}
    assert len({*expected.values()}) == 3
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = [found for row in csv.DictReader(file) if (found := exploitabilities(row))]
    assert len(rows) == 2
    assert rows[1] == pytest.approx(expected, abs=1e-5)
    assert exploitabilities(json.loads((tmp_path / "run" / "summary.json").read_text())) == rows[1]


@pytest.mark.parametrize(
    ("env", "words", "names"),
    [
        ("kuhn", [], ["", "_greedy", "_pool"]),
        ("tictactoe", [], ["", "_greedy"]),
        ("connect_four", [], []),  # too large
        ("rock_paper_scissors", ["env.rounds=101"], []),  # too long
        ("kuhn", ["preprocess.normalize_obs=true"], []),  # a simulator has raw observations
        ("kuhn", ["model=gru", "model.hidden=8"], []),  # has a memory
    ],
)
def test_games_whose_exploitability_is_known(tmp_path, env, words, names):
    with closing(trainer(tmp_path, "tuned=none", *words, env=env)) as run:
        own = league(run)
        assert [*exploitabilities(own.exploitability(own.learner, []))] == names[:2]
        own.pool.add(decay=1.0)
        generators = {role: one.get_state() for role, one in run.ctx.generators.items()}
        found = own.exploitability(own.learner, own.pool.members)
        assert [*exploitabilities(found)] == names
        assert all(torch.equal(state, run.ctx.generators[role].get_state()) for role, state in generators.items())


def test_a_learner_without_a_distribution_is_not_measured(run, monkeypatch):
    own = league(run)
    monkeypatch.setattr(type(own.learner), "distribution", Algorithm.distribution)
    assert own.exploitability(own.learner, []) == {}


def measured(fabric: Any, raw: Any) -> dict[str, float]:
    made = build(parse(raw), Path(), fabric)
    with closing(made):
        made.loop.run(made)
        return exploitabilities(made.reports.evaluate(made))


def test_two_ranks_measure_the_exploitability_of_one():
    words = [*RUN, *SMALL, "env=kuhn", "algo.size=3"]
    alone = measured(None, compose(words).raw)
    assert len({*alone.values()}) == 3
    assert ranks(2)(measured, compose([*words, "hardware=2cpu"]).raw) == [pytest.approx(alone, abs=1e-5)] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env=cartpole"], "env: has one agent, but a league needs"),
        (["env=cartpole", "algo.algo=independent"], "env: has one agent, but a league needs"),
        (["env=chase"], "but ppo in a league needs players with equal spaces; independent, shared and mappo have"),
        (["env=tictactoe", "algo.algo=cem"], "algo.algo: cem trains a single policy, by a loop of its own"),
        (["env=tictactoe", "algo.algo=qmix"], "algo.algo: qmix learns for all agents at once"),
        (["env=chase", "algo.algo=maddpg"], "algo.algo: maddpg learns for all agents at once"),
        (
            ["env=chase", *TEAM, "algo.algo.train=[hunters]"],
            "algo.algo.train: leaves out prey, but all policies",
        ),
        (["env=tictactoe", "algo.opponents=named"], "algo.opponents: named, but init_from.policies names no policy"),
        (["env=tictactoe", "algo.opponents=best"], "algo.opponents: 'best' is none of the options"),
        (["env=tictactoe", "algo.size=0"], "algo.size: 0 is out of range"),
    ],
)
def test_what_is_no_league_is_refused(capsys, words, said):
    assert main(["check", *RUN, *words]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def teams(tmp_path):
    """A league of hunters and prey, of which the learner plays one side, with a memory."""
    words = [word for word in RUN if not word.startswith(("algo.algo.", "model."))]
    words += [*TEAM, "env=chase", "env.size=3", "model=gru", "model.hidden=8", "algo.self_play=0.0", "algo.size=3"]
    with closing(build(compose(words), tmp_path)) as made:
        start(made)
        yield made


def test_a_side_is_played_by_one_policy_with_its_own_memory(teams):
    """Hunters act as those of the learner or of a copy that play the whole game, and so does the prey."""
    own, ctx = league(teams), teams.ctx
    for _ in range(2):
        own.pool.add(decay=1.0)
    for policy in (own.learner, *own.pool.members):
        for p in policy.parameters():
            torch.nn.init.normal_(p)
    step = {"is_first": torch.zeros(4, dtype=torch.bool), "valid": torch.ones(4, dtype=torch.bool)}
    for name, n in (("hunters", 2), ("prey", 1)):
        obs = torch.rand(4, n, *ctx.spec.groups[name].obs.shape)
        step[name] = {"obs": obs, "alive": torch.ones(4, n, dtype=torch.bool), "prev_reward": torch.zeros(4, n)}
    carry, state = own.initial_carry(4), ctx.generators["actor"].get_state()
    carry["policy"] = tree.map(torch.randn_like, carry["policy"])
    carry |= {"opponent": torch.tensor([0, 1, ITSELF, 1]), "seat": torch.tensor([0, 1, 0, 0])}
    played = [["learner", 0], [1, "learner"], ["learner", "learner"], ["learner", 1]]  # by column: hunters, prey
    with ctx.acting(EnvShard("actor", 4, range(4))):
        out, after = own.act(step, carry, "explore")
        alone = dict[Any, Any]()
        for name, policy in [("learner", own.learner), *enumerate(own.pool.members)]:
            ctx.generators["actor"].set_state(state)
            ctx.rand(4, 2)
            alone[name] = policy.act(step, carry["policy"], "explore")
    for column, sides in enumerate(played):
        for group, who in zip(("hunters", "prey"), sides, strict=True):
            acted, memory = alone[who]
            assert torch.equal(out[group]["action"][column], acted[group]["action"][column])
            assert torch.allclose(out[group]["logp"][column], acted[group]["logp"][column])
            for found, expected in zip(tree.leaves(after["policy"][group]), tree.leaves(memory[group]), strict=True):
                assert torch.allclose(found[column], expected[column], atol=1e-6)
            assert (out[group]["mine"][column] == (who == "learner")).all()
    hidden = (next(iter(tree.leaves(memory["hunters"]))) for _, memory in alone.values())
    assert len({tuple(one.flatten().tolist()) for one in hidden}) == 3


def test_a_policy_learns_from_the_games_in_which_it_is_the_learners(teams):
    own = league(teams)
    own.pool.add(decay=1.0)
    for _ in range(3):
        teams.collect()
    batch = teams.buffer.sample()
    mine = {name: batch[name]["mine"] for name in ("hunters", "prey")}
    assert (mine["hunters"][..., 0] != mine["prey"][..., 0])[batch["valid"]].all()
    assert 0 < mine["prey"].float().mean() < 1
    for name, rows in own.prepare(batch).items():
        acted = batch[name]["alive"] & mine[name] & batch["valid"][..., None]
        assert rows["valid"].sum() == acted[:-1].sum() == acted.sum() > 0
    over = batch["valid"][:-1] & ~torch.cat([batch[name]["alive"] for name in mine], -1)[1:].any(-1)
    paid = {name: batch[name]["score"][1:].mean(-1)[over] for name in mine}
    ahead = torch.where(mine["prey"][:-1, :, 0][over], paid["prey"] - paid["hunters"], paid["hunters"] - paid["prey"])
    assert own.pool.results[0].sum() >= len(ahead) > 0
    before = own.pool.results.clone()
    own.observe(Segment(batch), teams.learner)
    counted = [(ahead > 0).sum().item(), (ahead == 0).sum().item(), (ahead < 0).sum().item()]
    assert (own.pool.results - before)[0].tolist() == counted


def test_ranks_and_a_resumed_run_equal_one_run_of_teams(tmp_path):
    words = ["algo=league", *TEAM, "env=chase", "env.size=3", "hardware=cpu", "compile=off", "logger.only=[]"]
    words += [
        "num_envs=4",
        "rollout_fragment_length=16",
        "algo.every=1",
        "algo.size=3",
        "eval.episodes=8",
        "log.every=64",
    ]
    runs = {name: [f"hydra.run.dir={tmp_path / name}"] for name in ("whole", "half", "ranks")}
    assert main([*words, "total_steps=512", *runs["whole"]]) == 0
    assert main([*words, "total_steps=512", "stop={env_steps: 256}", *runs["half"]]) == 0
    assert main(["resume", str(tmp_path / "half"), "stop=null"]) == 0
    parts = compare_runs(tmp_path / "whole", tmp_path / "half")
    assert parts["weights"][0] > 10
    assert parts["weights"][1] == []
    assert main([*words, "total_steps=512", "hardware=2cpu", *runs["ranks"]]) == 0
    found = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "ranks")]
    assert found[0]["eval/elo"] == found[1]["eval/elo"] != 0
    assert {"eval/return/hunters", "eval/return/prey"} <= {*found[0]}


def test_policies_of_teams_are_those_of_other_runs(teams):
    own = league(teams)
    other = copy.deepcopy(own)
    for p in other.learner.parameters():
        torch.nn.init.normal_(p)
    own.learner.adopt("prey", other)  # as a run of the learner's algorithm does
    mine, theirs = (dict(run.learner.named_parameters()) for run in (own, other))
    assert {name: torch.equal(mine[name], theirs[name]) for name in mine} == {name: ".prey." in name for name in mine}
    for run in (other, other.learner):
        own.adopt("", run)
        assert [*own.pool.titles] == ["opponent"]
        assert all(torch.equal(w, theirs[name]) for name, w in own.pool.members[0].named_parameters())
