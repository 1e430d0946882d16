"""``algo.critic_lr``: policy and value with optimizers and step sizes of their own."""

import pytest
import torch

import rlplug

SMALL = ["env=cartpole", "tuned=none", "hardware=cpu", "logger.only=[]", "eval.every=0", "checkpoint.every=0"]
SMALL += ["model.hidden=[8]", "num_envs=2", "rollout_fragment_length=8", "algo.grad_clip=null", "seed=1"]
RUNS = {
    "ppo": ["algo.sgd_minibatch_size=8", "algo.num_sgd_iter=2"],
    "a2c": [],
    "a3c": ["train_batch_size=8"],
    "impala": ["train_batch_size=16"],
    "appo": ["train_batch_size=16"],
}


def moved(algo, folder, *words):
    """Return the weights after some rounds, and which of them have changed, by name."""
    with rlplug.Session([f"algo={algo}", *SMALL, *RUNS[algo], *words], folder=folder) as run:
        module = run.algorithm
        before = {name: x.detach().clone() for name, x in module.named_parameters() if not name.startswith("target.")}
        for _ in range(4):
            run.step()
        after = {name: module.get_parameter(name).detach().clone() for name in before}
    return after, {name for name, x in before.items() if not torch.equal(x, after[name])}


def of_value(name):
    return name.removeprefix("net.").startswith("value")


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("algo", RUNS)
def test_each_part_moves_by_its_own_step_size(algo, shared, tmp_path):
    words = [f"algo.vf_share_layers={str(shared).lower()}"]
    every, policy = moved(algo, tmp_path / "policy", *words, "algo.critic_lr=0")
    _, value = moved(algo, tmp_path / "value", *words, "algo.lr=0", "algo.critic_lr=0.01")
    assert policy
    assert value == {name for name in every if of_value(name)}
    assert policy == every.keys() - value
    assert len(value) == (2 if shared else 4)


@pytest.mark.parametrize("algo", RUNS)
def test_equal_step_sizes_are_those_of_one_optimizer(algo, tmp_path):
    words = ["algo.lr=0.003", "algo.vf_share_layers=false"]
    one, _ = moved(algo, tmp_path / "one", *words)
    two, _ = moved(algo, tmp_path / "two", *words, "algo.critic_lr=0.003")
    assert all(torch.equal(x, two[name]) for name, x in one.items())
