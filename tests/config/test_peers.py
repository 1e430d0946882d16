"""Names that other libraries have for settings: each leads to what the run has of them, and to nothing else."""

import pytest

from rlplug import ConfigError, compose
from rlplug.config import option_names
from rlplug.config.errors import no_such_key, peers, value_at
from rlplug.config.explain import unknown_option
from rlplug.registry.discovery import unknown
from tests.installing import install, site  # noqa: F401  fixtures

NAMES = """
ppo ddppo a2c a3c impala appo dqn sac ddpg td3 apex_dqn apex_ddpg linucb lints bc marwil cql discrete_cql iql td3_bc
maml mbmpo
"""


@pytest.fixture(scope="module")
def runs():
    made = {name: compose([f"algo={name}"]).raw for name in NAMES.split()}
    made["qmix"] = compose(["algo=qmix", "env=two_step"]).raw
    return made | {"her": compose(["algo=dqn", "buffer=her"]).raw}


@pytest.mark.parametrize("word", peers("keys"))
def test_a_word_leads_to_those_of_its_meanings_that_the_run_has(word: str, runs):
    meanings = peers("keys")[word]
    assert all(any(value_at(raw, key, raw) is not raw for raw in runs.values()) for key in meanings), "no run has it"
    for prefix in ("", "algo.", "nothing.of.that."):
        for raw in runs.values():
            key, there = prefix + word, [meant for meant in meanings if value_at(raw, meant, raw) is not raw]
            if there and value_at(raw, key, raw) is raw:  # it is no key of this run itself
                assert no_such_key(raw, key).message == f"unknown key; did you mean {' or '.join(there)}?"


@pytest.mark.parametrize(
    ("run", "line", "meant"),
    [
        ("algo=ppo", "+algo.n_steps=5", "rollout_fragment_length"),
        ("algo=sac", "algo.optimizer.lr=0.1", "algo.actor_lr or algo.critic_lr"),
        ("algo=ddpg", "algo.exploration_theta=0.2", "exploration.ornstein_uhlenbeck.theta"),
        ("algo=bc", "input_=data", "data.path"),
    ],
)
def test_on_a_command_line(run: str, line: str, meant: str):
    with pytest.raises(ConfigError) as error:
        compose([run, line])
    assert error.value.key == line.lstrip("+").partition("=")[0]
    assert error.value.message == f"unknown key; did you mean {meant}?"


def test_an_option_by_another_name():
    for group, words in peers("options").items():
        for word, meant in words.items():
            assert meant in option_names(group)
            assert f"did you mean {meant}? There are: " in unknown_option(f"{group}/{word}", []).message


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("SAC", ["ppo", "sac"], "sac"),
        ("sca", ["ppo", "sac"], "sac"),
        ("CartPole-v1", ["cartpole", "stateless_cartpole"], "cartpole"),
        ("ALE/Pong-v5", ["pong", "ant"], "pong"),
        ("n_steps", ["kl_stop", "n_envs"], None),
        ("tau", ["eta", "lr"], None),
        ("n_epochs", ["preprocess"], None),
        ("lambda_", ["gamma"], None),
        ("", ["gamma"], None),
        ("-", ["gamma"], None),
    ],
)
def test_a_guess_by_spelling_keeps_the_meaning(name: str, known: list[str], meant: str | None):
    start = "there are: " if meant is None else f"did you mean {meant}? There are: "
    assert unknown(name, known).startswith(start)
