"""Tianshou, by its own trainers."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from cases import Stamps, run
from tianshou.algorithm import DQN, PPO, SAC
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, PrioritizedVectorReplayBuffer, ReplayBuffer, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

torch.set_num_threads(1)


def collector_of(algorithm: Any, case: dict[str, Any], buffer: ReplayBuffer, stamps: Stamps) -> Collector:
    """Return a collector, every call of which is counted."""
    envs = DummyVectorEnv([lambda: gymnasium.make(case["env"]) for _ in range(case["envs"])])
    collector = Collector(algorithm, envs, buffer, exploration_noise=True)
    collect = collector.collect

    def counting(*args: Any, **options: Any) -> Any:
        stats = collect(*args, **options)
        stamps.count(stats.n_collected_steps)
        stamps.returns += stats.returns.tolist()
        return stats

    collector.collect = counting  # type: ignore[method-assign]
    collector.reset()
    return collector


def spaces(case: dict[str, Any]) -> Any:
    env = gymnasium.make(case["env"])
    return env.observation_space, env.action_space


def ppo(case: dict[str, Any], steps: int, stamps: Stamps) -> None:
    obs, action = spaces(case)

    def net() -> Net:
        return Net(state_shape=obs.shape, hidden_sizes=case["hidden"], activation=torch.nn.Tanh)

    actor = DiscreteActor(preprocess_net=net(), action_shape=action.n, softmax_output=False)
    algorithm = PPO(
        policy=DiscreteActorPolicy(actor=actor, action_space=action, observation_space=obs),
        critic=DiscreteCritic(preprocess_net=net()),
        optim=AdamOptimizerFactory(lr=case["lr"], eps=1e-5),
        eps_clip=case["clip"],
        vf_coef=case["value_coeff"],
        ent_coef=case["entropy_coeff"],
        max_grad_norm=case["grad_clip"],
        gae_lambda=case["lambda"],
        gamma=case["gamma"],
    )
    rows = case["envs"] * case["rollout"]
    params = OnPolicyTrainerParams(
        training_collector=collector_of(algorithm, case, VectorReplayBuffer(rows, case["envs"]), stamps),
        max_epochs=1,
        epoch_num_steps=steps,
        collection_step_num_env_steps=rows,
        update_step_num_repetitions=case["epochs"],
        batch_size=rows // case["minibatches"],
        test_step_num_episodes=0,
        verbose=False,
        show_progress=False,
    )
    algorithm.run_training(params)


def off_policy(algorithm: Any, case: dict[str, Any], steps: int, every: int, stamps: Stamps) -> None:
    size = case["capacity"], case["envs"]
    priorities = {"alpha": case["alpha"], "beta": case["beta"]} if "alpha" in case else None
    buffer = PrioritizedVectorReplayBuffer(*size, **priorities) if priorities else VectorReplayBuffer(*size)
    collector = collector_of(algorithm, case, buffer, stamps)
    collector.collect(n_step=case["learning_starts"], random=True)
    params = OffPolicyTrainerParams(
        training_collector=collector,
        max_epochs=1,
        epoch_num_steps=steps,
        collection_step_num_env_steps=every,
        update_step_num_gradient_steps_per_sample=1 / every,
        batch_size=case["batch"],
        test_step_num_episodes=0,
        verbose=False,
        show_progress=False,
    )
    algorithm.run_training(params)


def dqn(case: dict[str, Any], steps: int, stamps: Stamps) -> None:
    """Without the limit of the gradient: Tianshou's DQN has none."""
    obs, action = spaces(case)
    net = Net(state_shape=obs.shape, action_shape=action.n, hidden_sizes=case["hidden"])
    optim = AdamOptimizerFactory(lr=case["lr"])
    algorithm = DQN(
        policy=DiscreteQLearningPolicy(
            model=net, action_space=action, observation_space=obs, eps_training=case["epsilon"]
        ),
        optim=optim,
        gamma=case["gamma"],
        target_update_freq=case["target_every"] // case["train_every"],
        is_double=False,
        huber_loss_delta=1.0,
    )
    off_policy(algorithm, case, steps, case["train_every"], stamps)


def sac(case: dict[str, Any], steps: int, stamps: Stamps) -> None:
    obs, action = spaces(case)
    hidden, optim = case["hidden"], AdamOptimizerFactory(lr=case["lr"])
    actor = ContinuousActorProbabilistic(
        preprocess_net=Net(state_shape=obs.shape, hidden_sizes=hidden),
        action_shape=action.shape,
        unbounded=True,
        conditioned_sigma=True,
    )

    def critic() -> ContinuousCritic:
        return ContinuousCritic(
            preprocess_net=Net(state_shape=obs.shape, action_shape=action.shape, hidden_sizes=hidden, concat=True)
        )

    algorithm = SAC(
        policy=SACPolicy(actor=actor, action_space=action, observation_space=obs),
        policy_optim=optim,
        critic=critic(),
        critic_optim=optim,
        critic2=critic(),
        critic2_optim=optim,
        tau=case["tau"],
        gamma=case["gamma"],
        alpha=AutoAlpha(-float(np.prod(action.shape)), 0.0, optim),
    )
    off_policy(algorithm, case, steps, 1, stamps)


if __name__ == "__main__":
    run({"ppo": ppo, "dqn": dqn, "sac": sac}, ("tianshou", "torch", "gymnasium"))
