import ast
import json
from pathlib import Path

import pytest
import rlplug
import torch
import yaml
from rlplug import testing

from rlplug_reinforce.algo import Reinforce

PACKAGE = Path(__file__).parent.parent / "rlplug_reinforce"
PUBLIC = {"rlplug", "rlplug.functional", "rlplug.nn", "rlplug.settings"}


def build(action=2, obs=4, overrides=(), **options):
    """Make the algorithm for observations of size ``obs``."""
    ctx = testing.context(testing.spec(obs, action), overrides=["algo=reinforce", *overrides])
    return Reinforce(testing.config("algo/reinforce", **options), ctx)


def segment(algo, length=6, columns=5):
    """Return a prepared segment ``[T+1, B]`` with the algorithm's actions, and random rewards and ends."""
    draw = torch.Generator().manual_seed(0)
    ends = torch.rand(length + 1, columns, generator=draw) < 0.2
    valid = ~torch.cat((torch.zeros_like(ends[:1]), ends[:-1]))
    valid[-1] = False
    obs = torch.randn(length + 1, columns, 4, generator=draw)
    with torch.no_grad():
        action = torch.stack([act(algo, row) for row in obs])
        reward = torch.randn(length + 1, columns, generator=draw)
        return algo.prepare(
            {"obs": obs, "action": action, "reward": reward, "terminated": ends & valid, "valid": valid}
        )


def act(algo, obs, mode="explore"):
    return algo.act({"obs": obs, "is_first": torch.zeros(len(obs), dtype=torch.bool)}, {}, mode)[0]["action"]


def test_the_yaml_has_every_option_and_no_other():
    node = yaml.safe_load((PACKAGE / "conf" / "algo" / "reinforce.yaml").read_text())["algo"]
    assert list(node) == ["name", *Reinforce.Config.__pydantic_fields__]
    assert vars(testing.config("algo/reinforce")) == {key: node[key] for key in node if key != "name"}


def test_composing_chooses_the_data_plane():
    config = rlplug.compose(["algo=reinforce", "env=pendulum", "algo.gamma=0.9"])
    assert (config.algo.cls, config.algo.cfg.gamma) == (Reinforce, 0.9)
    assert (config.buffer.name, config.replay_ratio) == ("rollout", None)


def test_prepare_gives_the_reward_to_go():
    """Use rewards 1, 2, 3 and a termination, then rewards 4, 8 of an episode that continues with value 16."""
    column = {
        "reward": [1.0, 2.0, 3.0, 7.0, 4.0, 8.0, 0.0],
        "value": [0.5, 0.5, 0.5, 9.0, 0.5, 0.5, 16.0],
        "terminated": [False, False, True, False, False, False, False],
        "valid": [True, True, True, False, True, True, False],
    }
    algo = build(obs=1, overrides=["model.hidden=[]"], gamma=0.5)
    with torch.no_grad():
        algo.baseline.weight.fill_(1.0)  # the value is the observation
        algo.baseline.bias.zero_()
    batch = {key: torch.tensor(values)[:, None] for key, values in column.items()}
    batch = algo.prepare(batch | {"obs": batch["value"][..., None]})
    ended, open_ended = [1 + 0.5 * 2 + 0.25 * 3, 2 + 0.5 * 3, 3], [4 + 0.5 * 8 + 0.25 * 16, 8 + 0.5 * 16]
    valid = batch["valid"]
    assert batch["returns"][valid].tolist() == ended + open_ended
    assert torch.equal(batch["advantage"][valid], batch["returns"][valid] - 0.5)


@pytest.mark.parametrize("action", [3, testing.box(2)], ids=["discrete", "continuous"])
def test_the_policy_loss_has_the_policy_gradient(action):
    """Check that its gradient is minus the mean of ``A grad log pi(a)``, without the baseline."""
    algo = build(action)
    batch = segment(algo)
    assert batch["valid"].sum() > 10
    policy = [*algo.model.parameters(), *algo.policy.parameters()]
    dist, valid = algo.dist(batch), batch["valid"]
    score = (dist.logp(batch["action"]) * batch["advantage"])[valid].mean()
    expected = torch.autograd.grad(-score, policy)
    algo.forward(batch, ("policy",)).terms["policy"][valid].mean().backward()
    torch.testing.assert_close([p.grad for p in policy], list(expected))
    assert all(p.grad is None for p in [*algo.value_model.parameters(), *algo.baseline.parameters()])


def test_one_step_makes_good_actions_likelier_and_bad_ones_less_likely():
    algo = build(entropy_coeff=0.0, lr=1e-2)
    obs = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    batch = {
        "obs": obs,
        "action": torch.tensor([0, 0]),
        "advantage": torch.tensor([1.0, -1.0]),
        "returns": torch.ones(2),
    }

    def logp():
        return algo.dist({"obs": obs}).logp(batch["action"]).detach()

    before, (optim,) = logp(), algo.optimizers().values()
    losses = algo.forward(batch, ("policy",))
    sum(term.mean() for term in losses.terms.values()).backward()
    optim.optimizer.step()
    assert logp()[0] > before[0]
    assert logp()[1] < before[1]


def test_greedy_actions_are_the_most_likely_ones():
    algo = build(5)
    obs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(act(algo, obs, "greedy"), algo.dist({"obs": obs}).params.argmax(-1))


def test_forbidden_actions_are_neither_taken_nor_learned():
    algo = build(3)
    obs = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
    step = {"obs": obs, "action_mask": torch.tensor([True, False, True]).expand(256, 3)}
    step["is_first"] = torch.zeros(256, dtype=torch.bool)
    for mode in ("explore", "greedy"):
        assert (algo.act(step, {}, mode)[0]["action"] != 1).all()
    batch = step | {
        "action": torch.zeros(256, dtype=torch.long),
        "advantage": torch.ones(256),
        "returns": torch.ones(256),
    }
    sum(term.mean() for term in algo.forward(batch, ("policy",)).terms.values()).backward()
    assert (algo.policy.linear.weight.grad[1] == 0).all()
    assert (algo.policy.linear.weight.grad[[0, 2]] != 0).all()


@pytest.mark.parametrize("env", ["cartpole", "pendulum"])
def test_it_trains_and_two_runs_are_equal(env, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    budget = ["tuned=none", "total_steps=2048", "eval.every=0", "eval.episodes=2", "logger.only=[]"]
    scores = [rlplug.train(["algo=reinforce", f"env={env}", *budget, f"hydra.run.dir={run}"]) for run in ("a", "b")]
    assert scores[0] == scores[1]
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert (summary["status"], summary["updates"]) == ("finished", 4)
    assert (
        json.loads((tmp_path / "a" / "manifest.json").read_text())["plugins"]["algo"]["distribution"]
        == "rlplug-reinforce"
    )


def test_it_learns_to_balance(tmp_path, monkeypatch):
    """Compare with a random policy, which balances the pole for 22 steps."""
    monkeypatch.chdir(tmp_path)
    assert rlplug.train(["algo=reinforce", "env=cartpole", "total_steps=30_000", "eval.every=0", "logger.only=[]"]) > 80


def test_the_package_is_small_and_uses_the_public_api():
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".yaml")]
    lines = [line for path in files for line in path.read_text().splitlines()]
    assert len(files) == 4
    assert len([line for line in lines if line.strip() and not line.strip().startswith("#")]) < 80
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Import)
            if isinstance(node, ast.ImportFrom):
                assert node.module in PUBLIC
