"""Time gradient steps of SheepRL's DreamerV3 on random sequences of CartPole. Run by ``benchmarks/dreamerv3.py``."""

from __future__ import annotations

import json
import resource
import sys
import time

import torch
from gymnasium import spaces
from hydra import compose, initialize_config_module
from lightning.fabric import Fabric
from sheeprl.algos.dreamer_v3_5.agent import build_agent
from sheeprl.algos.dreamer_v3_5.dreamer_v3_5 import train
from sheeprl.algos.dreamer_v3_5.optim import LaProp
from sheeprl.algos.dreamer_v3_5.utils import Moments
from sheeprl.utils.utils import dotdict


def main(size: str, batch: int, length: int, steps: int, compiled: bool) -> None:
    torch.set_num_threads(1)
    with initialize_config_module("sheeprl.configs", version_base="1.3"):
        words = ["exp=dreamer_v3_5", f"algo=dreamer_v3_5_{size.upper()}", "env=gym", "env.id=CartPole-v1"]
        words += ["algo.cnn_keys.encoder=[]", "algo.mlp_keys.encoder=[vector]", f"algo.compile.enabled={compiled}"]
        cfg = compose("config", [*words, "fabric.accelerator=cpu"], return_hydra_config=False)
    from omegaconf import OmegaConf

    cfg = dotdict(OmegaConf.to_container(cfg, resolve=True))
    fabric = Fabric(accelerator="cpu", devices=1)
    space = spaces.Dict({"vector": spaces.Box(-10.0, 10.0, (4,))})
    model, actor, critic, target, _ = build_agent(fabric, (2,), False, cfg, space)
    parameters = [*model.parameters(), *actor.parameters(), *critic.parameters()]
    optimizer = fabric.setup_optimizers(LaProp(parameters, lr=4e-5))
    moments = Moments(0.99, 1.0, 0.05, 0.95)
    rows = length + cfg.algo.replay_context
    world = cfg.algo.world_model
    data = {
        "vector": torch.randn(rows, batch, 4),
        "actions": torch.nn.functional.one_hot(torch.randint(2, (rows, batch)), 2).float(),
        "rewards": torch.ones(rows, batch, 1),
        "terminated": torch.zeros(rows, batch, 1),
        "truncated": torch.zeros(rows, batch, 1),
        "is_first": torch.zeros(rows, batch, 1),
        "deter": torch.zeros(rows, batch, world.recurrent_model.recurrent_state_size).half(),
        "stoch": torch.zeros(rows, batch, world.stochastic_size, dtype=torch.uint8),
    }

    def step() -> None:
        train(fabric, cfg, model, actor, critic, target, optimizer, moments, dict(data), None, (2,))

    started = time.perf_counter()
    step()
    step()
    first, wall, spent = time.perf_counter() - started, time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    found = {"cpu_s": (time.process_time() - spent) / steps, "wall_s": (time.perf_counter() - wall) / steps}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(found | {"first_s": first, "memory_mb": memory, "parameters": sum(p.numel() for p in parameters)}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5] == "compiled")
