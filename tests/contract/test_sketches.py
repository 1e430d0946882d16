"""The contracts of ``rlplug.api``, tried on algorithms that stretch them: the sketches type-check, and step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gymnasium import spaces

from rlplug.api import Segment
from rlplug.types import ConfigError, EnvSpec, Group
from tests.contract import worlds
from tests.contract.sketches import alphazero, dreamerv3

FOLDER = Path(__file__).with_name("sketches")
SOLO = EnvSpec({"agent": Group(worlds.box(3), spaces.Discrete(2))})
DREAMER = {"deter": 6, "stoch": 2, "classes": 3, "horizon": 4, "gamma": 0.99, "lambda_": 0.95}


# ---- types -----------------------------------------------------------------------------------------------------------


def pyright(*files: Path) -> dict:
    """The report on files that say ``# pyright: strict`` themselves."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, check=False)
    return json.loads(done.stdout[done.stdout.index("{") :])


def test_every_sketch_keeps_to_the_contracts():
    files = [path for path in FOLDER.glob("*.py") if path.stem != "__init__"]
    assert len(files) >= 2
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


def test_wrong_sketches_are_reported(tmp_path):
    for mistake, (body, _) in WRONG.items():
        (tmp_path / f"{mistake}.py").write_text(
            "# pyright: strict\nfrom collections.abc import Sequence\nfrom torch import Tensor\n"
            "from rlplug.api import Algorithm, Learner, Losses, Needs\nfrom rlplug.types import Batch, EnvSpec\n\n"
            f"_ = (Sequence, Tensor, Learner, Losses, Needs, Batch, EnvSpec)\n\n\nclass Wrong(Algorithm):\n{body}"
        )
    found = {(Path(error["file"]).stem, error.get("rule")) for error in pyright(tmp_path)["generalDiagnostics"]}
    assert {(mistake, rule) for mistake, (_, rule) in WRONG.items()} <= found


# ---- one step of each ------------------------------------------------------------------------------------------------


def a_dreamer():
    ctx = worlds.context(SOLO, worlds.Layer)
    algorithm = dreamerv3.DreamerV3(
        dreamerv3.DreamerV3.Config(**DREAMER, window=8, entropy=3e-4, tau=0.02, lr=1e-3), ctx
    )
    batch = worlds.stream(9, 4)
    batch["carry"] = {"deter": torch.randn(9, 4, 6), "stoch": torch.randn(9, 4, 2, 3)}
    return ctx, algorithm, batch


def test_microbatches_change_no_gradient():
    ctx, algorithm, batch = a_dreamer()
    with torch.no_grad():
        batch = algorithm.prepare(batch)
    whole = worlds.learner(ctx, algorithm).gradients(batch, algorithm)
    parts = worlds.learner(ctx, algorithm, microbatches=2).gradients(batch, algorithm)
    assert whole.keys() == parts.keys()
    assert sum(float(g.abs().sum()) for g in whole.values()) > 0
    for key, gradient in whole.items():
        torch.testing.assert_close(parts[key], gradient, atol=1e-6, rtol=1e-4, msg=key)


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
