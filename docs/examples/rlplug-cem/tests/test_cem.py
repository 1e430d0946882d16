import pytest
import torch
from rlplug import testing

from rlplug_cem.algo import Cem


def build(action=2, **options):
    """The algorithm alone, for observations `[4]`: no run is needed."""
    ctx = testing.context(testing.spec(obs=4, action=action), overrides=["algo=cem"])
    return Cem(testing.config("algo/cem", **options), ctx)


@pytest.mark.parametrize("action", [3, testing.box(2)], ids=["discrete", "continuous"])
def test_the_policy_loss_has_the_policy_gradient(action):
    algo = build(action)
    batch = {"obs": torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))}
    with torch.no_grad():
        batch["action"] = algo.dist(batch).mode()
        batch["advantage"] = batch["returns"] = batch["obs"].sum(-1)
    weights = [*algo.policy_model.parameters(), *algo.policy.parameters()]
    expected = torch.autograd.grad(-(algo.dist(batch).logp(batch["action"]) * batch["advantage"]).mean(), weights)
    algo.forward(batch, ("policy",)).terms["policy"].mean().backward()
    torch.testing.assert_close([p.grad for p in weights], list(expected))
