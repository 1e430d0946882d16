"""The contracts of ``rlplug.api`` are types: pyright accepts what keeps to them, and reports what does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rlplug.plugins.algo import dqn

RIGHT = Path(str(dqn.__file__)).read_text()


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


def test_right_code_is_accepted_and_wrong_code_reported(tmp_path):
    right = tmp_path / "right.py"
    right.write_text(f"# pyright: strict\n{RIGHT}")
    for mistake, (body, _) in WRONG.items():
        (tmp_path / f"{mistake}.py").write_text(
            "# pyright: strict\nfrom collections.abc import Sequence\nfrom torch import Tensor\n"
            "from rlplug.api import Algorithm, Learner, Losses, Needs\nfrom rlplug.types import Batch, EnvSpec\n\n"
            f"_ = (Sequence, Tensor, Learner, Losses, Needs, Batch, EnvSpec)\n\n\nclass Wrong(Algorithm):\n{body}"
        )
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--pythonpath",
        sys.executable,
        "--outputjson",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report["summary"]["filesAnalyzed"] == 1 + len(WRONG)
    found = {(Path(error["file"]).stem, error.get("rule")) for error in report["generalDiagnostics"]}
    assert {(mistake, rule) for mistake, (_, rule) in WRONG.items()} <= found
    assert [error["message"] for error in report["generalDiagnostics"] if error["file"] == str(right)] == []
