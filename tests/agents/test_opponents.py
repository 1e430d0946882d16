"""Policies of other runs: ``init_from.policies``, ``evaluate against=``, and a league outside of its run."""

from __future__ import annotations

import json
import shutil
from contextlib import closing

import numpy as np
import pytest
import torch

from rlplug import load
from rlplug.cli import main
from rlplug.config import compose
from rlplug.plugins.algo.league import League
from rlplug.results.evaluate import evaluate
from rlplug.run.build import build
from rlplug.types import ConfigError

SMALL = ["hardware=cpu", "compile=off", "logger.only=[]", "eval.every=0", "eval.episodes=4", "model.hidden=[8]"]
SMALL += ["num_envs=2", "rollout_fragment_length=8", "total_steps=32", "tuned=none"]
LEAGUE = ["algo=league", "env=tictactoe", "algo.algo.sgd_minibatch_size=16", "algo.every=1", "algo.size=3"]
CHASE = ["algo=independent", "env=chase", "algo.one_per=group", "algo.algo.sgd_minibatch_size=16"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, words in (("league", LEAGUE), ("chase", CHASE), ("alone", ["algo=ppo", "env=cartpole"])):
        seed = [*SMALL, "seed=1", "algo.sgd_minibatch_size=16"] if name == "alone" else SMALL
        assert main([*words, *seed, f"hydra.run.dir={folder / name}"]) == 0
    return folder


def test_a_loaded_league_is_its_learner_in_both_seats(runs):
    team = load(runs / "league")
    obs = np.zeros((3, 2, 2, 3, 3), np.float32)
    mask = np.ones((3, 2, 9), np.bool_)
    for reward in (None, {"players": np.zeros((3, 2))}):
        actions = team.act({"players": obs}, action_mask={"players": mask}, reward=reward)["players"]
        rows = {"obs": torch.zeros(1, 2, 3, 3), "action_mask": torch.ones(1, 9, dtype=torch.bool)}
        with torch.no_grad():
            expected = team.algorithm.learner.act(rows, {}, "greedy")[0]["action"]
        assert (actions == expected.numpy()).all()
    with pytest.raises(ValueError, match="reads the rewards of the last actions"):
        team.act({"players": obs}, action_mask={"players": mask})


def test_a_league_is_evaluated_against_another_run(runs, capsys):
    assert main(["evaluate", str(runs / "league"), f"against={runs / 'league'}", "eval.episodes=40", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["eval/return_mean"] == pytest.approx(result["eval/wins"] - result["eval/losses"])
    assert result["eval/wins"] + result["eval/losses"] > 0  # in self-play, the mean of both seats would be 0
    assert not [key for key in result if key.startswith("eval/against/")]


@pytest.mark.parametrize("how", ["explore", "random", "record"])
def test_the_other_run_is_the_opponent_of_every_evaluation(runs, tmp_path, monkeypatch, how):
    opponents = set[int]()
    match = League.match

    def noted(self, *args):
        drawn, seats = match(self, *args)
        opponents.update(drawn.tolist())
        return drawn, seats

    monkeypatch.setattr(League, "match", noted)
    words = [f"record.path={tmp_path}"] if how == "record" else []
    mode = "greedy" if how == "record" else how
    result = evaluate(runs / "league", ["eval.episodes=40", *words], mode=mode, against={"": str(runs / "league")})
    assert opponents == {0}
    assert (result["eval/return_std"] > 0) == (how != "record")  # what is recorded has the return of both players


def test_a_video_has_no_opponent_of_another_run(runs, capsys):
    assert main(["evaluate", str(runs / "league"), f"against={runs / 'league'}", "--record"]) == 2
    assert "against: does not apply to --record" in capsys.readouterr().err
    assert not (runs / "league/videos").exists()


def test_an_evaluation_that_explores_meets_every_policy_alike(runs):
    result = evaluate(runs / "league", ["eval.episodes=40"], mode="explore")
    assert result["eval/wins"] + result["eval/losses"] > 0
    assert "eval/return_min" not in result  # that of both seats would be 0


def test_opponents_of_an_evaluation_are_those_that_it_names(runs):
    team = load(runs / "league").algorithm
    team.pool.odds[1] = 1.0
    uniform = (torch.arange(300) + 0.5) / 300
    for mode in ("greedy", "explore", "random"):
        assert team.match(uniform, uniform, mode)[0].unique().tolist() == [1]


@pytest.mark.parametrize(
    ("of", "words", "said"),
    [
        ("league", {"": "nowhere"}, "against: "),
        ("league", {"": "alone"}, "does not fit"),
        ("league", {"fox": "league"}, "against.fox: a league plays against all policies of another run: against=<run>"),
        ("chase", {"": "chase"}, "against: name the policy that the other run plays"),
        ("chase", {"wolves": "chase"}, "against.wolves: there is no policy 'wolves'; the policies are "),
        ("alone", {"": "alone"}, "against: PPO has no policies that play against others"),
    ],
)
def test_opponents_that_do_not_fit_are_refused(runs, of, words, said):
    with pytest.raises(ConfigError) as caught:
        evaluate(runs / of, against={policy: str(runs / name) for policy, name in words.items()})
    assert said in str(caught.value)


def test_one_policy_begins_from_another_run_and_stays_frozen(runs, tmp_path):
    prey, *others = load(runs / "chase").algorithm.table
    words = [*CHASE, f"algo.train=[{','.join(others)}]", f"+init_from.policies.{prey}={tmp_path / 'first'}", "seed=5"]
    shutil.copytree(runs / "chase", tmp_path / "first")
    assert main([*words, *SMALL, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    early = shutil.copytree(tmp_path / "run", tmp_path / "early")  # killed before its first checkpoint
    shutil.rmtree(early / "checkpoints")
    (early / "summary.json").unlink()
    assert main(["resume", str(early)]) == 0
    mine = load(early).algorithm.named_policy(prey).parameters()
    assert all(map(torch.equal, mine, load(runs / "chase").algorithm.named_policy(prey).parameters()))
    shutil.rmtree(tmp_path / "first")  # the checkpoint has the weights
    assert main(["resume", str(tmp_path / "run"), "total_steps=64"]) == 0
    ours, theirs = (load(path).algorithm for path in (tmp_path / "run", runs / "chase"))
    same = {
        name: all(map(torch.equal, ours.named_policy(name).parameters(), theirs.named_policy(name).parameters()))
        for name in ours.table
    }
    assert same == {prey: True} | dict.fromkeys(others, False)


def test_a_league_begins_with_policies_of_other_runs(runs, tmp_path, capsys):
    words = [
        *LEAGUE,
        f"init_from={{policies: {{learner: {runs / 'league'}, rival: {runs / 'league'}}}}}",
        "algo.every=100",
    ]
    assert main([*words, *SMALL, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    pool, before = load(tmp_path / "run").algorithm.pool, load(runs / "league").algorithm.learner
    assert pool.titles == ["rival"]
    assert all(map(torch.equal, pool.members[0].parameters(), before.parameters()))
    capsys.readouterr()
    assert main(["check", *words, *SMALL, "algo.size=1"]) == 0
    assert main(["check", *words, *SMALL, "algo.size=1", f"+init_from.policies.more={runs / 'league'}"]) == 2
    assert "algo.size: 1 is too small" in capsys.readouterr().err
    assert main(["check", *LEAGUE, *SMALL, "+init_from.policies.rival=nowhere"]) == 2
    assert "init_from.policies.rival: " in capsys.readouterr().err


def test_every_policy_has_its_return(runs):
    assert main(["check", *CHASE, *SMALL, "hardware.actors.count=1", "hardware.actors.evaluation=1"]) == 0
    words = [*CHASE, *SMALL, "algo.policy_of={hunter_0: a, hunter_1: b, prey: b}", "algo.one_per=agent"]
    words = [word for word in words if not word.startswith("algo.one_per=group")]
    with pytest.raises(ConfigError, match="different spaces"):
        build(compose(words), runs / "none")
    words = [word.replace("prey: b", "prey: c") for word in words]
    with closing(build(compose(words), runs / "none")) as trainer:
        reward = torch.tensor([[[1.0, 5.0]], [[2.0, 6.0]], [[100.0, 100.0]]])  # [3, 1, 2]
        rows = {"alive": torch.tensor([[[True, True]], [[True, False]], [[False, False]]]), "reward": reward}
        prey = {key: x[..., :1] for key, x in rows.items()}
        valid, first = torch.tensor([[True], [True], [False]]), torch.tensor([[True], [False], [False]])
        batch = {"valid": valid, "is_first": first, "hunters": rows, "prey": prey}
        batch |= {"return": torch.zeros(1), "length": torch.tensor([2])}
        metrics = trainer.algorithm.episode_metrics(batch)
    assert [metrics[f"eval/return/{name}"] for name in "abc"] == [3.0, 5.0, 3.0]
