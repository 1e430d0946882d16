"""Estimates from recorded episodes of a chain that is solved by hand; see ``tests/functional/test_off_policy.py``."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlplug import testing
from rlplug.api import Algorithm, Needs
from rlplug.config import compose
from rlplug.config.schema import Estimate, typed
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.estimation.estimation import Estimation
from rlplug.types import Batch, ConfigError, EnvSpec, RunError
from tests.data.episodes import write_parquet

METHODS = ["episode_is", "step_is", "episode_wis", "step_wis", "dm", "dr", "wdr"]
SPEC = testing.spec(2, 2)
FAST = {"iterations": 24, "updates": 20, "batch_size": 64, "lr": 1e-2, "gamma": 0.9}


class Biased(Algorithm):
    """Takes action 1 with probability 4/5 (of a Box: a uniform action in [0, 1])."""

    def __init__(self, ctx: Any) -> None:
        super().__init__()
        self.ctx = ctx

    def act(self, step: Batch, carry: Batch, mode: Any) -> tuple[Batch, Batch]:
        return {"action": self.ctx.rand(len(step["is_first"]), 1)}, {}

    def logp(self, batch: Batch) -> torch.Tensor:
        if batch["action"].is_floating_point():
            return torch.where(batch["action"] >= 0, 0.0, -3e38).squeeze(-1)
        return torch.where(batch["action"] == 1, 0.8, 0.2).log()


def episode(actions: list[int]) -> Batch:
    """One column of the chain: observation is the state, one-hot."""
    n, steps = len(actions) + 1, len(actions)
    valid, over = np.arange(n) < steps, np.arange(n) == steps - 1
    action = np.array([*actions, 0])
    return {
        "obs": np.eye(2, dtype=np.float32)[np.minimum(np.arange(n), 1)],
        "action": action,
        "reward": np.where(valid, action, 0).astype(np.float32),
        "terminated": over,
        "truncated": over & False,
        "is_first": np.arange(n) == 0,
        "valid": valid,
        "logp": np.full(n, np.log(0.5), np.float32),
    }


CHAIN = [[0], [0], [1, 0], [1, 1]]


def estimator(
    path: Path, rows: list[Batch], spec: EnvSpec = SPEC, algorithm=Biased, needs=None, methods=METHODS, **changes
) -> Estimation:
    write_parquet(path / "a.parquet", rows, spec)
    recording = Recording([str(path)], Reading(spec))
    ctx = testing.context(spec, overrides=["model.hidden=[16]"], needs=needs or Needs())
    config = compose([f"estimator=[{','.join(methods)}]"])
    cfg = typed(Estimate, config.raw["estimate"] | FAST | changes)
    return Estimation(cfg, recording, algorithm(ctx), ctx, config.estimator)


def test_importance_sampling_says_the_truth(tmp_path):
    made = estimator(tmp_path, [episode(actions) for actions in CHAIN], methods=METHODS[:4])
    out = made.estimate()
    assert out["estimate/step_is"] == pytest.approx(1.376)
    assert out["estimate/episode_is"] == pytest.approx(1.376)
    assert out["estimate/step_wis"] == pytest.approx(1.376)
    assert out["estimate/episode_wis"] == pytest.approx(5.504 / 4)
    assert out["estimate/behavior"] == pytest.approx((1 + 1.9) / 4)
    assert out["estimate/effective_sample_size"] == pytest.approx(16 / (0.16 * 2 + 0.64**2 + 2.56**2))
    half = 3.182446 * np.std([0, 0, 1.6, 3.904], ddof=1) / 2
    assert out["estimate/step_is_high"] - 1.376 == pytest.approx(half, rel=5e-3)


def test_fitted_action_values_are_those_of_the_chain(tmp_path):
    """As a linear solve has them: V(0) = 1.376, while the behavior's is 0.725."""
    made = estimator(tmp_path, [episode(actions) for actions in CHAIN * 25])
    out = made.estimate()
    assert out["estimate/behavior"] == pytest.approx(0.725)
    for method in ("dm", "dr", "wdr"):
        assert out[f"estimate/{method}"] == pytest.approx(1.376, abs=0.05)
    width = {method: out[f"estimate/{method}_high"] - out[f"estimate/{method}_low"] for method in ("step_is", "dr")}
    assert width["dr"] < width["step_is"] / 4


def test_a_regression_of_action_values_on_the_chain(tmp_path):
    """Weighted returns are those of the policy: V(0) = 1.376, as for the fitted values."""
    made = estimator(tmp_path, [episode(actions) for actions in CHAIN * 25], model="q_regression")
    out = made.estimate()
    for method in ("dm", "dr", "wdr"):
        assert out[f"estimate/{method}"] == pytest.approx(1.376, abs=0.05)


def test_nothing_else_that_is_drawn_changes(tmp_path):
    made = estimator(tmp_path, [episode(actions) for actions in CHAIN], iterations=1)
    torch.manual_seed(3)
    first = torch.rand(2), made.ctx.generators["eval"].get_state(), made.ctx.generators["learner"].get_state()
    torch.manual_seed(3)
    out = made.estimate()
    then = torch.rand(2), made.ctx.generators["eval"].get_state(), made.ctx.generators["learner"].get_state()
    assert all(torch.equal(a, b) for a, b in zip(first, then, strict=True))
    assert made.estimate() == out != made.estimate(1)


def test_a_limit_of_time_is_part_of_the_task(tmp_path):
    """Nothing but the step tells how much is still to come: 1 + 0.9 + 0.81."""
    rows = []
    for actions in ([0, 1, 0], [1, 0, 1], [1, 1, 1], [0, 0, 0]):
        one = episode(actions) | {"obs": np.ones((4, 2), np.float32), "reward": np.float32([1, 1, 1, 0])}
        rows.append(one | {"truncated": one["terminated"], "terminated": one["truncated"]})
    out = estimator(tmp_path, rows * 3, methods=["dm"]).estimate()
    assert out["estimate/dm"] == pytest.approx(2.71, abs=0.1)


def test_continuous_actions_are_sampled(tmp_path):
    """The reward is the action. The behavior is uniform in [-1, 1], and the policy in [0, 1]: 0.5."""
    rng = np.random.default_rng(0)
    spec = testing.spec(2, spaces.Box(-1.0, 1.0, (1,), np.float32))
    rows = []
    for _ in range(200):
        action = rng.uniform(-1, 1, (2, 1)).astype(np.float32)
        rows.append(episode([1]) | {"action": action, "reward": action[:, 0], "logp": np.full(2, -np.log(2), "f4")})
    out = estimator(tmp_path, rows, spec).estimate()
    for method in METHODS:
        assert out[f"estimate/{method}"] == pytest.approx(0.5, abs=0.12)
    assert out["estimate/dr_high"] - out["estimate/dr_low"] < 0.05


class Gaussian(Biased):
    def logp(self, batch: Batch) -> torch.Tensor:
        return -batch["action"].square().squeeze(-1)


def test_actions_beyond_the_bounds(tmp_path):
    """A Gaussian policy takes them, and one that keeps within bounds would judge them by its density at these."""
    spec = testing.spec(2, spaces.Box(-1.0, 1.0, (1,), np.float32))
    action = np.array([[1.5], [0.0]], np.float32)
    rows = [episode([1]) | {"action": action, "logp": np.zeros(2, np.float32)} for _ in range(3)]
    made = estimator(tmp_path, rows, spec, algorithm=Gaussian, methods=["step_is"])
    assert made.estimate()["estimate/step_is"] == pytest.approx(np.exp(-(1.5**2)))
    with pytest.raises(ConfigError, match=r"data.path: .*a.parquet has actions beyond the bounds.*estimator=\[dm\]"):
        estimator(tmp_path, rows, spec, methods=["step_is"]).estimate()
    estimator(tmp_path, rows, spec, methods=["dm"], iterations=1).estimate()


# ---- what is refused ------------------------------------------------------------------------------------------------


def without(key: str) -> list[Batch]:
    return [{name: x for name, x in episode(actions).items() if name != key} for actions in CHAIN]


def test_log_probabilities_are_missing(tmp_path):
    with pytest.raises(ConfigError) as refused:
        estimator(tmp_path, without("logp"))
    said = "no key 'logp', the behavior's log-probabilities, needed by episode_is, step_is"
    assert str(refused.value).startswith(f"data.path: {tmp_path / 'a.parquet'} has ")
    assert said in str(refused.value)
    assert str(refused.value).endswith("estimator=[dm] with estimate.model=fqe does not need it")
    out = estimator(tmp_path, without("logp"), methods=["dm"]).estimate()
    assert set(out) == {"estimate/dm", "estimate/dm_low", "estimate/dm_high", "estimate/behavior"}


class Odd:
    """A chosen estimator that reads some keys, and whose result has a shape."""

    def __init__(self, reads: tuple[str, ...] = (), shape: int = 4) -> None:
        self.keys, self.shape = reads, shape

    def build(self, ctx: Any) -> "Odd":
        return self

    def reads(self, spec: EnvSpec) -> tuple[str, ...]:
        return self.keys

    def estimate(self, episodes: Batch, gamma: float) -> torch.Tensor:
        return torch.ones(self.shape)


def test_mistakes_of_an_estimator(tmp_path):
    made = estimator(tmp_path, [episode(one) for one in CHAIN], methods=["dm"])
    given = made.cfg, made.recording, made.algorithm, made.ctx
    said = r"^estimator\.mine: reads 'weight', but episodes have log_weight, logp, target_logp, q, value, obs, action$"
    with pytest.raises(ConfigError, match=said):
        Estimation(*given, {"mine": Odd(("weight",))})
    with pytest.raises(
        RunError, match=r"Odd\.estimate returned a tensor of shape \[2\]; return one number per episode"
    ):
        Estimation(*given, {"mine": Odd(shape=2)}).estimate()


def test_an_undefined_estimate_is_left_out(tmp_path):
    class Undefined(Odd):
        def estimate(self, episodes: Batch, gamma: float) -> torch.Tensor:
            return torch.full((4,), torch.nan)

    made = estimator(tmp_path, [episode(one) for one in CHAIN], methods=["dm"])
    given = made.cfg, made.recording, made.algorithm, made.ctx
    out = Estimation(*given, {"mine": Odd(), "undefined": Undefined()}).estimate()
    assert set(out) == {"estimate/mine", "estimate/mine_low", "estimate/mine_high", "estimate/behavior"}


REFUSED = {
    "one episode": (CHAIN[:1], {}, "data.path: has 1 episode; an interval needs 2 or more"),
    "folds": (CHAIN, {"folds": 5}, "estimate.folds: 5 folds, but there are 4 episodes; use fewer"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what, tmp_path):
    actions, changes, said = REFUSED[what]
    with pytest.raises(ConfigError) as refused:
        estimator(tmp_path, [episode(one) for one in actions], **changes)
    assert str(refused.value) == said


def test_an_algorithm_that_does_not_say_how_likely_actions_are(tmp_path):
    class Silent(Algorithm):
        def __init__(self, ctx: Any) -> None:
            super().__init__()

    with pytest.raises(ConfigError, match=r"algo: Silent does not implement logp\(\)"):
        estimator(tmp_path, [episode(one) for one in CHAIN], algorithm=Silent)


def test_a_log_probability_that_is_no_number(tmp_path):
    rows = [episode(one) for one in CHAIN]
    rows[2]["logp"][0] = np.nan
    with pytest.raises(ConfigError, match=r"data\.path: logp, the behavior's log-probability, is not a finite number"):
        estimator(tmp_path, rows).estimate()

    class Broken(Biased):
        def logp(self, batch: Batch) -> torch.Tensor:
            return super().logp(batch) * np.nan

    (tmp_path / "b").mkdir()
    with pytest.raises(RunError, match="the policy's log-probability of a recorded action is not a finite number"):
        estimator(tmp_path / "b", [episode(one) for one in CHAIN], algorithm=Broken).estimate()
