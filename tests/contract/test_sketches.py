"""The contracts of ``rlplug.api``, tried on algorithms that stretch them: the sketches type-check, and step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from gymnasium import spaces

from rlplug.types import EnvSpec, Group
from tests.contract import worlds
from tests.contract.sketches import dreamerv3
from tests.contract.tenants import population

STRICT = [Path(str(module.__file__)) for module in (dreamerv3, population)]
SOLO = EnvSpec({"agent": Group(worlds.box(3), spaces.Discrete(2))})
DREAMER = {"deter": 6, "stoch": 2, "classes": 3, "horizon": 4, "gamma": 0.99, "lambda_": 0.95}


# ---- types -----------------------------------------------------------------------------------------------------------


def pyright(*files: Path) -> dict:
    """The report on files that say ``# pyright: strict`` themselves."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, check=False)
    return json.loads(done.stdout[done.stdout.index("{") :])


def test_every_sketch_keeps_to_the_contracts():
    assert all(path.read_text().startswith("# pyright: strict\n") for path in STRICT)
    report = pyright(*STRICT)
    assert report["summary"]["filesAnalyzed"] >= len(STRICT)
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
    whole = worlds.gradients(worlds.learner(ctx, algorithm), batch, algorithm)
    parts = worlds.gradients(worlds.learner(ctx, algorithm, microbatches=2), batch, algorithm)
    assert whole.keys() == parts.keys()
    assert sum(float(g.abs().sum()) for g in whole.values()) > 0
    for key, gradient in whole.items():
        torch.testing.assert_close(parts[key], gradient, atol=1e-6, rtol=1e-4, msg=key)


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
