"""The built-ins, entered by the same door as everybody else's plugins: an entry point and a manifest."""

from rlplug.registry import Component, hookimpl


@hookimpl
def rlplug_components() -> list[Component]:
    return [
        Component("algo", "ppo", "rlplug.plugins.algo.ppo:PPO"),
        Component("algo", "sac", "rlplug.plugins.algo.sac:SAC"),
        Component("buffer", "rollout", "rlplug.plugins.buffer.rollout:Rollout"),
        Component("buffer", "replay", "rlplug.plugins.buffer.replay:Replay"),
        Component("env", "gymnasium", "rlplug.plugins.env.gymnasium:Gymnasium"),
        Component("exploration", "gaussian", "rlplug.plugins.exploration.noise:Gaussian"),
        Component("exploration", "ornstein_uhlenbeck", "rlplug.plugins.exploration.noise:OrnsteinUhlenbeck"),
        Component("hardware", "cpu", "rlplug.plugins.hardware.single:CPU"),
        Component("hardware", "gpu", "rlplug.plugins.hardware.single:GPU"),
        Component("hardware", "auto", "rlplug.plugins.hardware.single:Auto"),
        Component("logger", "csv", "rlplug.plugins.logger.csv:CSV"),
        Component("logger", "progress", "rlplug.plugins.logger.progress:ProgressLine"),
        Component("logger", "tensorboard", "rlplug.plugins.logger.tensorboard:TensorBoard"),
        Component("logger", "wandb", "rlplug.plugins.logger.wandb:WandB"),
        Component("loop", "alternate", "rlplug.plugins.loop.alternate:Alternate"),
        Component("model", "mlp", "rlplug.plugins.model.mlp:MLP"),
    ]


@hookimpl
def rlplug_conf() -> str:
    return "rlplug"
