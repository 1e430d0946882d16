"""The contracts of ``rlplug.api``, tried on algorithms that stretch them: the sketches type-check, and step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gymnasium import spaces

from rlplug import tree
from rlplug.api import Segment
from rlplug.plugins.algo.ppo import PPO
from rlplug.types import ConfigError, EnvSpec, Group
from tests.contract import worlds
from tests.contract.sketches import alphazero, dreamerv3, independent, qmix, r2d2

FOLDER = Path(__file__).with_name("sketches")
SOLO = EnvSpec({"agent": Group(worlds.box(3), spaces.Discrete(2))})
TEAM = EnvSpec({"team": Group(worlds.box(3), spaces.Discrete(2), ("a", "b", "c"))}, {"state": worlds.box(5)})
R2D2 = {"gamma": 0.9, "n_step": 3, "sequence": 6, "stride": 3, "burn_in": 2, "beta": 0.6, "eta": 0.9, "lr": 1e-3}
DREAMER = {"deter": 6, "stoch": 2, "classes": 3, "horizon": 4, "gamma": 0.99, "lambda_": 0.95}
CHILD = {
    "gamma": 0.9,
    "lambda_": 0.9,
    "lr": 1e-2,
    "sgd_minibatch_size": 8,
    "num_sgd_iter": 2,
    "clip_param": 0.2,
    "vf_loss_coeff": 0.5,
    "vf_clip_param": None,
    "vf_share_layers": True,
    "entropy_coeff": 0.0,
    "kl_coeff": 0.0,
    "kl_target": 0.01,
    "kl_stop": 1.0,
    "normalize_advantage": True,
    "grad_clip": 0.5,
    "grad_clip_by": "global_norm",
    "initial_log_std": 0.0,
    "max_seq_len": 8,
}


# ---- types -----------------------------------------------------------------------------------------------------------


def pyright(*files: Path) -> dict:
    """The report on files that say ``# pyright: strict`` themselves."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, check=False)
    return json.loads(done.stdout[done.stdout.index("{") :])


def test_every_sketch_keeps_to_the_contracts():
    files = [path for path in FOLDER.glob("*.py") if path.stem != "__init__"]
    assert len(files) >= 4
    assert all(path.read_text().startswith("# pyright: strict\n") for path in files)
    report = pyright(*files)
    assert report["summary"]["filesAnalyzed"] >= len(files)
    assert [
        f"{e['file']}:{e['range']['start']['line'] + 1}: {e['message']}" for e in report["generalDiagnostics"]
    ] == []


WRONG = {
    "a hook with another signature": (
        "    def act(self, obs: Tensor) -> Tensor:\n        return obs\n",
        "reportIncompatibleMethodOverride",
    ),
    "a forward that returns a tensor": (
        "    def forward(self, batch: Batch, parts: Sequence[str]) -> Tensor:\n        return batch['obs']\n",
        "reportIncompatibleMethodOverride",
    ),
    "an option of the learner that is not there": (
        "    def update(self, batch: Batch, learner: Learner) -> Losses:\n"
        "        return learner.minimise(batch, self)\n",
        "reportAttributeAccessIssue",
    ),
    "a need that nobody can fulfil": (
        "    @classmethod\n    def needs(cls, cfg: object, spec: EnvSpec) -> Needs:\n        return Needs(horizon=3)\n",
        "reportCallIssue",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_sketch_is_reported(tmp_path, mistake):
    body, rule = WRONG[mistake]
    path = tmp_path / "wrong.py"
    path.write_text(
        "# pyright: strict\nfrom collections.abc import Sequence\nfrom torch import Tensor\n"
        "from rlplug.api import Algorithm, Learner, Losses, Needs\nfrom rlplug.types import Batch, EnvSpec\n\n"
        f"_ = (Sequence, Tensor, Learner, Losses, Needs, Batch, EnvSpec)\n\n\nclass Wrong(Algorithm):\n{body}"
    )
    assert rule in {error.get("rule") for error in pyright(path)["generalDiagnostics"]}


# ---- one step of each ------------------------------------------------------------------------------------------------


def an_r2d2():
    ctx = worlds.context(SOLO, worlds.Recurrent)
    batch = worlds.stream(12, 4)
    batch["carry"] = {"h": torch.randn(4, 4, 8)}  # before rows 0, 3, 6, 9
    return ctx, r2d2.R2D2(r2d2.R2D2.Config(**R2D2, target_update=10), ctx), batch


def a_qmix():
    """Episodes of 3, 5, 4 and 5 steps; agent 0 leaves the second one early; the rest is padding."""
    ctx = worlds.context(TEAM, worlds.Recurrent)
    t, length = torch.arange(6)[:, None], torch.tensor([3, 5, 4, 5])
    valid = t < length
    alive = valid[..., None].expand(6, 4, 3).clone()
    alive[2:, 1, 0] = False
    mask = (torch.rand(6, 4, 3, 2) > 0.5) | (torch.arange(2) == 0)
    batch = {
        "obs": torch.randn(6, 4, 3, 3),
        "state": torch.randn(6, 4, 5),
        "action_mask": mask & (t <= length)[..., None, None],
        "alive": alive,
        "action": torch.zeros(6, 4, 3, dtype=torch.long),
        "reward": torch.randn(6, 4, 3),
        "terminated": (t == length - 1)[..., None].expand(6, 4, 3),
        "is_first": (t == 0).expand(6, 4),
        "valid": valid,
    }
    return ctx, qmix.QMIX(qmix.QMIX.Config(gamma=0.9, lr=1e-3, mixer_hidden=4, target_update=10), ctx), batch


def a_dreamer():
    ctx = worlds.context(SOLO, worlds.Layer)
    algorithm = dreamerv3.DreamerV3(
        dreamerv3.DreamerV3.Config(**DREAMER, window=8, entropy=3e-4, tau=0.02, lr=1e-3), ctx
    )
    batch = worlds.stream(9, 4)
    batch["carry"] = {"deter": torch.randn(9, 4, 6), "stoch": torch.randn(9, 4, 2, 3)}
    return ctx, algorithm, batch


MAKERS = {"r2d2": an_r2d2, "qmix": a_qmix, "dreamerv3": a_dreamer}


@pytest.mark.parametrize("name", MAKERS)
def test_microbatches_change_no_gradient(name):
    ctx, algorithm, batch = MAKERS[name]()
    with torch.no_grad():
        batch = algorithm.prepare(batch)
    if name == "r2d2":
        batch["weight"] = torch.rand(4)
    whole = worlds.learner(ctx, algorithm).gradients(batch, algorithm)
    parts = worlds.learner(ctx, algorithm, microbatches=2).gradients(batch, algorithm)
    assert whole.keys() == parts.keys()
    assert sum(float(g.abs().sum()) for g in whole.values()) > 0
    for key, gradient in whole.items():
        torch.testing.assert_close(parts[key], gradient, atol=1e-6, rtol=1e-4, msg=key)


def test_r2d2_step_feeds_back_priorities():
    ctx, algorithm, batch = an_r2d2()
    learner = worlds.learner(ctx, algorithm, batch)
    losses = learner.update()
    assert losses.terms["td"].isfinite()
    priority = learner.buffer.received["priority"]
    assert priority.shape == (4,)
    assert (priority > 0).all()


def test_r2d2_acts_as_it_learns():
    _, algorithm, batch = an_r2d2()
    carry = tree.map(lambda x: x[0], batch["carry"])
    unrolled, _ = algorithm.online(batch, carry)
    for t in range(12):
        out, carry = algorithm.act({key: leaf[t] for key, leaf in batch.items() if key != "carry"}, carry, "greedy")
        torch.testing.assert_close(out["action"], unrolled[t].argmax(-1))


def test_r2d2_burn_in_has_no_gradient():
    _, algorithm, batch = an_r2d2()
    batch = algorithm.prepare(batch) | {"weight": torch.ones(4)}
    batch["obs"].requires_grad_()
    (algorithm(batch, ("q",)).terms["td"] * batch["valid"]).sum().backward()
    seen = batch["obs"].grad.abs().sum((1, 2))
    assert (seen[:2] == 0).all()
    assert (seen[2:8] > 0).all()


def test_r2d2_returns_equal_brute_force():
    _, algorithm, batch = an_r2d2()
    out = algorithm.prepare(batch)
    over, valid = batch["terminated"] | batch["truncated"], batch["valid"]
    assert (over & valid)[2:8].any()
    for t, b in valid[2:8].nonzero().tolist():
        t, ret, factor, at = t + 2, 0.0, 1.0, t + 2
        for at in range(t, t + 3):
            ret += factor * float(batch["reward"][at, b])
            factor *= 0.9 * (not batch["terminated"][at, b])
            if over[at, b]:
                break
        assert float(out["returns"][t, b]) == pytest.approx(ret, abs=1e-6)
        assert float(out["discount"][t, b]) == pytest.approx(factor)
        assert int(out["bootstrap"][t, b]) == at + 1


def test_qmix_ignores_padding_and_agents_that_left():
    ctx, algorithm, batch = a_qmix()
    before = worlds.learner(ctx, algorithm).gradients(batch, algorithm)
    junk = batch | {"obs": batch["obs"].clone(), "reward": batch["reward"].clone()}
    junk["obs"][4:, 0], junk["reward"][3:, 0], junk["obs"][3:, 1, 0] = 9.0, 9.0, 9.0
    after = worlds.learner(ctx, algorithm).gradients(junk, algorithm)
    for key, gradient in before.items():
        torch.testing.assert_close(after[key], gradient, msg=key)


def test_qmix_is_monotonic_and_acts_within_the_mask():
    ctx, algorithm, batch = a_qmix()
    q = torch.randn(6, 4, 3, requires_grad=True)
    algorithm.online.mixer(q, batch["state"]).sum().backward()
    assert (q.grad >= 0).all()
    step = tree.map(lambda x: x[0], batch)
    for mode in ("random", "greedy"):
        out, carry = algorithm.act(step, algorithm.initial_carry(4), mode)
        assert step["action_mask"].gather(-1, out["action"][..., None]).all()
        assert carry["h"].shape == (4, 3, 8)
    assert worlds.learner(ctx, algorithm, batch).update().terms["td"] > 0


def test_independent_children_update_themselves():
    ctx = worlds.context(TEAM, worlds.Layer, num_envs=4, rollout_length=8)
    both = independent.Independent.Config(algo=worlds.chosen(PPO, PPO.Config(**CHILD), "algo"))
    assert "alive" in independent.Independent.needs(both, TEAM).keys
    algorithm = independent.Independent(both, ctx)
    batch = {key: leaf for key, leaf in worlds.stream(9, 4).items() if not key.startswith("prev_")}
    for key in ("obs", "action", "reward", "terminated"):
        batch[key] = torch.stack([batch[key]] * 3, 2)
    batch["alive"] = torch.ones(9, 4, 3, dtype=torch.bool)
    batch["alive"][:, :, 1] = False  # never there
    step = tree.map(lambda x: x[0], {key: batch[key] for key in ("obs", "is_first", "alive")})
    with torch.no_grad():
        out, carry = algorithm.act(step, algorithm.initial_carry(4), "explore")
    assert out["action"].shape == out["logp"].shape == (4, 3)
    assert carry.keys() == {"a", "b", "c"}
    batch |= {key: leaf.expand(9, *leaf.shape) for key, leaf in out.items() if key != "action"}
    before = {key: leaf.clone() for key, leaf in algorithm.state_dict().items()}
    losses = worlds.learner(ctx, algorithm, batch, rollout=True).update()
    assert losses.terms.keys() == {"a/policy", "a/value", "c/policy", "c/value"}  # b had no rows
    moved = {key.split(".")[0] for key, leaf in algorithm.state_dict().items() if not torch.equal(leaf, before[key])}
    assert moved == {"a", "c"}


class Corridor:
    """Positions -2 to 2: the right end pays 1, the left end nothing."""

    def step(self, env_state, action):
        x = env_state + (2 * action - 1).float().unsqueeze(-1)
        over = x.abs().squeeze(-1) >= 2
        row = {"env_state": x, "obs": x.expand(-1, 3), "terminated": over, "truncated": torch.zeros_like(over)}
        return row | {"reward": self.reward(row)}

    def reward(self, batch):
        return (batch["env_state"].squeeze(-1) >= 2).float()


def test_alphazero_plans_and_ranks():
    spec = EnvSpec(SOLO.groups, {"env_state": worlds.box(1)}, offers=frozenset({"simulator"}))
    cfg = alphazero.AlphaZero.Config(simulations=24, c_puct=1.25, percentile=0.75, memory=4, noise=0.25, lr=1e-3)
    with pytest.raises(ConfigError, match="simulated"):
        alphazero.AlphaZero.needs(cfg, SOLO)
    ctx = worlds.context(spec, worlds.Layer)
    ctx.simulator = Corridor
    algorithm = alphazero.AlphaZero(cfg, ctx)
    learner = worlds.learner(ctx, algorithm)
    data = {"reward": torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), "obs": torch.randn(3, 2, 3)}
    data |= {"valid": torch.tensor([[True, True], [True, True], [False, False]]), "visits": torch.full((3, 2, 2), 0.5)}
    algorithm.observe(Segment(algorithm.postprocess(data)), learner)
    assert float(algorithm.threshold) == pytest.approx(0.75)  # between the scores 0 and 1
    segment = algorithm.postprocess(data)
    assert segment["returns"][0].tolist() == [-1.0, 1.0]
    start = torch.tensor([[0.0], [1.0], [-1.0]])
    step = {
        "env_state": start,
        "obs": start.expand(-1, 3),
        "is_first": torch.ones(3).bool(),
        "prev_reward": torch.zeros(3),
    }
    with torch.inference_mode():
        out, carry = algorithm.act(step, algorithm.initial_carry(3), "explore")
    torch.testing.assert_close(out["visits"].sum(-1), torch.ones(3))
    assert (out["visits"][:, 1] > 0.6).all()
    assert carry["score"].shape == (3,)
    losses = learner.minimize(segment, algorithm)
    assert losses.terms.keys() == {"policy", "value"}


def test_dreamer_step_feeds_back_states():
    ctx, algorithm, batch = a_dreamer()
    learner = worlds.learner(ctx, algorithm, batch)
    spread = algorithm.spread.clone()
    losses = learner.update()
    assert all(term.isfinite() for term in losses.terms.values())
    assert learner.buffer.received.keys() == {"carry"}
    carry = learner.buffer.received["carry"]
    assert {key: leaf.shape for key, leaf in carry.items()} == {"deter": (9, 4, 6), "stoch": (9, 4, 2, 3)}
    torch.testing.assert_close(carry["deter"][0], batch["carry"]["deter"][0])
    assert algorithm.spread != spread


def test_dreamer_imagination_leaves_the_model_alone():
    _, algorithm, batch = a_dreamer()
    algorithm(algorithm.prepare(batch), ("all",)).terms["actor"].sum().backward()
    assert {name.split(".")[0] for name, p in algorithm.named_parameters() if p.grad is not None} == {"actor"}
