"""PPO and DQN in plain loops of torch, with nothing that a single experiment does not need: the floor of a framework.

On Pong the two networks of PPO share the convolutions of Mnih et al. 2015, and rewards are clipped to their sign.

``--compiled``: forward, backward, clipping and Adam's step on a minibatch are one graph of ``torch.compile``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from cases import Stamps, run
from torch import Tensor, nn

COMPILED = "--compiled" in sys.argv
torch.set_num_threads(1)


def network(inputs: int, hidden: tuple[int, ...], outputs: int, activation: type[nn.Module], gain: float) -> nn.Module:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(inputs, size), activation()]
        inputs = size
    net = nn.Sequential(*layers, nn.Linear(inputs, outputs))
    for layer in net:
        if isinstance(layer, nn.Linear) and activation is nn.Tanh:
            nn.init.orthogonal_(layer.weight, gain if layer is net[-1] else 2**0.5)
            nn.init.zeros_(layer.bias)
    return net


class Step:
    """A gradient step: of a loss, by Adam; as one graph, if ``--compiled``."""

    def __init__(
        self, loss: Callable[..., Tensor], params: list[nn.Parameter], case: dict[str, Any], eps: float
    ) -> None:
        self.loss, self.params, self.clip, self.lr, self.eps = loss, params, case["grad_clip"], case["lr"], eps
        if not COMPILED:
            self.optimizer = torch.optim.Adam(params, lr=case["lr"], eps=eps, fused=True)
            self.take: Callable[..., None] = self.eager
            return
        from torch._dynamo import config as dynamo
        from torch._inductor import config as inductor

        dynamo.trace_autograd_ops, inductor.cpp_wrapper = True, True
        self.first, self.second = ([torch.zeros_like(p) for p in params] for _ in range(2))
        self.steps = torch.zeros(())
        self.take = torch.compile(self.graph, fullgraph=True)

    def eager(self, *batch: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(*batch).backward()
        nn.utils.clip_grad_norm_(self.params, self.clip)
        self.optimizer.step()

    def graph(self, *batch: Tensor) -> None:
        grads = torch.autograd.grad(self.loss(*batch), self.params)
        with torch.no_grad():
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            scale = (self.clip / (norm + 1e-6)).clamp(max=1.0)
            self.steps += 1.0
            size, root = self.lr / (1.0 - 0.9**self.steps), (1.0 - 0.999**self.steps).sqrt()
            for p, grad, first, second in zip(self.params, grads, self.first, self.second, strict=True):
                first.lerp_(grad * scale, 0.1)
                second.lerp_((grad * scale).square(), 0.001)
                p -= size * first / (second.sqrt() / root + self.eps)


class Pixels(nn.Module):
    """Policy and value of stacks of images, ``[n, 4, 84, 84]`` bytes."""

    def __init__(self, actions: int, hidden: int) -> None:
        super().__init__()
        layers = [
            nn.Conv2d(4, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
        ]
        self.torso = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3136, hidden), nn.ReLU())
        self.heads = nn.Linear(hidden, actions + 1)
        for layer in (*self.torso, self.heads):
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.orthogonal_(layer.weight, 0.01 if layer is self.heads else 2**0.5)
                nn.init.zeros_(layer.bias)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        out = self.heads(self.torso(obs.float() / 255.0))
        return out[:, :-1], out[:, -1]

    def logits(self, obs: Tensor) -> Tensor:
        return self(obs)[0]

    def value(self, obs: Tensor) -> Tensor:
        return torch.stack([self(rows)[1] for rows in obs])


class Numbers(nn.Module):
    """Policy and value of observations ``[n, size]``, a network each."""

    def __init__(self, size: int, actions: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.actor = network(size, hidden, actions, nn.Tanh, 0.01)
        self.critic = network(size, hidden, 1, nn.Tanh, 1.0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(obs), self.critic(obs).squeeze(-1)

    def logits(self, obs: Tensor) -> Tensor:
        return self.actor(obs)

    def value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)


def vector(case: dict[str, Any]) -> Any:
    """Return the fastest vector that gymnasium has for the environment."""
    if "NoFrameskip" in case["env"]:
        import ale_py

        gymnasium.register_envs(ale_py)
        return gymnasium.make_vec("ALE/Pong-v5", case["envs"], vectorization_mode="vector_entry_point")
    native = gymnasium.spec(case["env"]).vector_entry_point is not None
    mode = "vector_entry_point" if native else "sync"
    return gymnasium.make_vec(case["env"], case["envs"], vectorization_mode=mode)


def ppo(case: dict[str, Any], steps: int, stamps: Stamps) -> None:
    envs, n, length = vector(case), case["envs"], case["rollout"]
    space, actions = envs.single_observation_space, int(envs.single_action_space.n)
    images = len(space.shape) > 1
    net = Pixels(actions, *case["hidden"]) if images else Numbers(space.shape[0], actions, case["hidden"])
    clip, rows = case["clip"], n * length

    def loss(obs: Tensor, action: Tensor, old: Tensor, advantage: Tensor, ret: Tensor) -> Tensor:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        logits, value = net(obs)
        logp = logits.log_softmax(-1)
        ratio = (logp.gather(-1, action.unsqueeze(-1)).squeeze(-1) - old).exp()
        policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
        error = (value - ret).square().mean()
        return policy + case["value_coeff"] * error - case["entropy_coeff"] * -(logp.exp() * logp).sum(-1).mean()

    step = Step(loss, [*net.parameters()], case, 1e-5)
    dtype = torch.uint8 if images else torch.float32
    seen = {
        "obs": torch.zeros(length + 1, n, *space.shape, dtype=dtype),
        "action": torch.zeros(length, n, dtype=torch.int64),
    }
    seen |= {key: torch.zeros(length, n) for key in ("logp", "reward", "terminated", "valid")}
    obs, over, totals = envs.reset(seed=0)[0], np.zeros(n, np.bool_), np.zeros(n)
    for _ in range(steps // rows):
        with torch.inference_mode():
            for t in range(length):
                seen["obs"][t] = torch.from_numpy(obs)
                logp = net.logits(seen["obs"][t]).log_softmax(-1)
                action = (logp - torch.empty_like(logp).exponential_().log()).argmax(-1)
                seen["action"][t], seen["logp"][t] = action, logp.gather(-1, action.unsqueeze(-1)).squeeze(-1)
                seen["valid"][t] = torch.from_numpy(~over)
                obs, reward, terminated, truncated, _ = envs.step(action.numpy())
                reward = np.sign(reward) if images else reward
                seen["reward"][t], seen["terminated"][t] = torch.from_numpy(reward), torch.from_numpy(terminated)
                totals += reward
                if (over := terminated | truncated).any():
                    stamps.returns += totals[over].tolist()
                    totals[over] = 0.0
            seen["obs"][length] = torch.from_numpy(obs)
            values = net.value(seen["obs"])
            goes_on, gae = 1.0 - seen["terminated"], torch.zeros(n)
            delta = seen["reward"] + case["gamma"] * values[1:] * goes_on - values[:-1]
            advantage = torch.zeros(length, n)
            following = torch.cat((seen["valid"][1:], torch.from_numpy(~over).float().unsqueeze(0)))
            for t in reversed(range(length)):  # a row that only resets the environment ends the sum before it
                advantage[t] = gae = delta[t] + case["gamma"] * case["lambda"] * goes_on[t] * following[t] * gae
            flat = [seen["obs"][:-1].flatten(0, 1), seen["action"].flatten(), seen["logp"].flatten()]
            flat += [advantage.flatten(), (advantage + values[:-1]).flatten()]
            flat = [x[seen["valid"].flatten().bool()] for x in flat]
        size = rows // case["minibatches"]
        for _ in range(case["epochs"]):
            order = torch.randperm(len(flat[0]))
            order = order[: len(order) // size * size] if COMPILED and len(order) >= size else order  # equal sizes
            for part in order.split(size):
                step.take(*(x[part] for x in flat))
        stamps.count(rows)


def dqn(case: dict[str, Any], steps: int, stamps: Stamps) -> None:
    env, rng = gymnasium.make(case["env"]), np.random.default_rng(0)
    inputs, actions = env.observation_space.shape[0], int(env.action_space.n)  # type: ignore[index,attr-defined]
    online, target = (network(inputs, case["hidden"], actions, nn.ReLU, 1.0) for _ in range(2))
    target.load_state_dict(online.state_dict())
    params = [*online.parameters()]
    capacity = case["capacity"]
    kept = {"obs": np.zeros((capacity, inputs), np.float32), "next": np.zeros((capacity, inputs), np.float32)}
    kept |= {"action": np.zeros(capacity, np.int64), "reward": np.zeros(capacity, np.float32)}
    kept["terminated"] = np.zeros(capacity, np.float32)

    def loss(obs: Tensor, following: Tensor, action: Tensor, reward: Tensor, terminated: Tensor) -> Tensor:
        with torch.no_grad():
            aim = reward + case["gamma"] * (1.0 - terminated) * target(following).max(-1).values
        return nn.functional.smooth_l1_loss(online(obs).gather(-1, action.unsqueeze(-1)).squeeze(-1), aim)

    step = Step(loss, params, case, 1e-8)
    obs, total = env.reset(seed=0)[0], 0.0
    for count in range(steps):
        if count < case["learning_starts"] or rng.random() < case["epsilon"]:
            action = int(rng.integers(actions))
        else:
            with torch.inference_mode():
                action = int(online(torch.from_numpy(obs)).argmax())
        following, reward, terminated, truncated, _ = env.step(action)
        for key, value in zip(kept, (obs, following, action, reward, terminated), strict=True):
            kept[key][count % capacity] = value
        obs, total = following, total + float(reward)
        if terminated or truncated:
            stamps.returns.append(total)
            obs, total = env.reset()[0], 0.0
        if count >= case["learning_starts"] and count % case["train_every"] == 0:
            index = rng.integers(min(count + 1, capacity), size=case["batch"])
            step.take(*(torch.from_numpy(x[index]) for x in kept.values()))
        if count % case["target_every"] == 0:
            target.load_state_dict(online.state_dict())
        stamps.count(1)


if __name__ == "__main__":
    run({"ppo": ppo, "dqn": dqn}, ("torch", "gymnasium"))
