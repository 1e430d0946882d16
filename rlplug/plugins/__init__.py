"""Built-in plugins, registered like any other plugin: by an entry point and a manifest."""

from pathlib import Path

from rlplug.registry import Component, hookimpl

SMALL_DATA = f"data.path='{Path(__file__).parents[1] / 'testing' / 'cartpole.npz'}'"
PLAYED = (
    "loop=alternate",
    "rollout_fragment_length=8",
    "total_steps=4_000",
)  # offline algorithms are off-policy
TEAM = ("env=two_step",)
# such short episodes would make other environments bandits; only one of two rows is then a final observation
BANDIT = ("env=linear_bandit", "env.max_episode_steps=1", "rollout_fragment_length=2")
SLATES = ("algo=slateq",)
AGENTS = ("algo=independent",)
SIMULATED = ("env.entry_point=rlplug.testing.simulators:Points",)
CUSTOM = ("model.entry_point=rlplug.testing.nets:Net",)
TWO_CARTS = ("env=two_carts", "env.max_episode_steps=20")

SHORT = "env.max_episode_steps=30"
GENERATION = ("algo.episodes_per_batch=8", SHORT)
SEARCH = ("env=knapsack", "env=tictactoe", "algo.num_simulations=6", "num_envs=4", "train_batch_size=8", "model=mlp")

GOALS = (
    "env=point_goals",
    "env.max_episode_steps=8",
    "algo.meta_batch_size=4",
    "algo.eval_tasks=3",
    "loop.episodes=3",
)
IMAGINED = (
    "env=cartpole_torch",
    "env.max_episode_steps=8",
    "algo.ensemble_size=2",
    "algo.fc_net_hiddens=[8]",
    "algo.train_epochs=2",
    "algo.num_maml_steps=1",
    "algo.horizon=4",
    "algo.imagined_episodes=2",
    "algo.maml_optimizer_steps=2",
    "train_batch_size=16",
    "buffer.capacity=2_000",
    "loop.episodes=2",
)
LAKES = ("env=frozenlake_tasks", "num_envs=2", "env.max_episode_steps=8")
RAMP = ("curriculum.start=2", "curriculum.end=5", "curriculum.steps=200")
STAGES = ("curriculum.stages=[2,3,4]", "curriculum.level=0.1", "log.every=64")
SMALL_DREAMS = (
    "train_batch_size=4",
    "algo.batch_length=8",
    "algo.imagination_length=3",
    "num_steps_sampled_before_learning_starts=64",
    "buffer.capacity=2_000",
    "model=rssm",
    "buffer=sequence",
    "buffer.alpha=0.0",
)


@hookimpl
def rlplug_components() -> list[Component]:
    return [
        Component("algo", "a2c", "rlplug.plugins.algo.a2c:A2C"),
        Component("algo", "a3c", "rlplug.plugins.algo.a2c:A3C"),
        Component("algo", "alphazero", "rlplug.plugins.algo.alphazero:AlphaZero", SEARCH),
        Component("algo", "apex_ddpg", "rlplug.plugins.algo.ddpg:DDPG"),
        Component("algo", "apex_dqn", "rlplug.plugins.algo.dqn:DQN"),
        Component("algo", "apex_qmix", "rlplug.plugins.algo.qmix:QMIX", TEAM),
        Component("algo", "appo", "rlplug.plugins.algo.appo:APPO"),
        Component("algo", "ars", "rlplug.plugins.algo.ars:ARS", ("algo.num_rollouts=4", "algo.rollouts_used=3", SHORT)),
        Component("algo", "bc", "rlplug.plugins.algo.marwil:BC", PLAYED),
        Component("algo", "cem", "rlplug.plugins.algo.cem:CEM", ("algo.population=8", "algo.elite_share=0.5", SHORT)),
        Component("algo", "cql", "rlplug.plugins.algo.cql:CQL", PLAYED),
        Component("algo", "ddpg", "rlplug.plugins.algo.ddpg:DDPG"),
        Component("algo", "discrete_cql", "rlplug.plugins.algo.dqn:DQN", PLAYED),
        Component("algo", "dqn", "rlplug.plugins.algo.dqn:DQN"),
        Component("algo", "es", "rlplug.plugins.algo.es:ES", GENERATION),
        Component(
            "algo",
            "dreamer",
            "rlplug.plugins.algo.dreamer:Dreamer",
            (
                *("algo.units=32", "algo.hidden=32", "algo.deter=16", "algo.mean_scale=1.0", "algo.initial_std=0.3"),
                *(*SMALL_DREAMS, "train_batch_size=16"),
            ),
        ),
        Component(
            "algo",
            "dreamerv3",
            "rlplug.plugins.algo.dreamerv3:DreamerV3",
            ("algo.warmup=1", "algo.lr=1.0e-3", "algo.entropy=0.1", *SMALL_DREAMS),
        ),
        Component("algo", "impala", "rlplug.plugins.algo.impala:IMPALA"),
        Component("algo", "independent", "rlplug.plugins.algo.independent:Independent", TWO_CARTS),
        Component("algo", "iql", "rlplug.plugins.algo.iql:IQL", PLAYED),
        Component("algo", "league", "rlplug.plugins.algo.league:League", ("env=tictactoe",)),
        Component("algo", "lingreedy", "rlplug.plugins.algo.linear_bandit:LinGreedy", BANDIT),
        Component("algo", "lints", "rlplug.plugins.algo.linear_bandit:LinTS", BANDIT),
        Component("algo", "linucb", "rlplug.plugins.algo.linear_bandit:LinUCB", BANDIT),
        Component("algo", "maddpg", "rlplug.plugins.algo.maddpg:MADDPG", TEAM),
        Component("algo", "maml", "rlplug.plugins.algo.maml:MAML", GOALS),
        Component("algo", "mbmpo", "rlplug.plugins.algo.mbmpo:MBMPO", IMAGINED),
        Component("algo", "mappo", "rlplug.plugins.algo.mappo:MAPPO", TWO_CARTS),
        Component("algo", "marwil", "rlplug.plugins.algo.marwil:MARWIL", PLAYED),
        Component("algo", "ppo", "rlplug.plugins.algo.ppo:PPO"),
        Component("algo", "qmix", "rlplug.plugins.algo.qmix:QMIX", TEAM),
        Component("algo", "sac", "rlplug.plugins.algo.sac:SAC"),
        Component("algo", "shared", "rlplug.plugins.algo.shared:Shared", TWO_CARTS),
        Component("algo", "slateq", "rlplug.plugins.algo.slateq:SlateQ", ("env=interest_evolution",)),
        Component("algo", "td3", "rlplug.plugins.algo.ddpg:DDPG"),
        Component("algo", "td3_bc", "rlplug.plugins.algo.ddpg:DDPG", PLAYED),
        Component("buffer", "circular", "rlplug.plugins.buffer.circular:Circular"),
        Component("buffer", "episodes", "rlplug.plugins.buffer.episodes:Episodes"),
        Component("buffer", "her", "rlplug.plugins.buffer.her:HER"),
        Component("buffer", "prioritized", "rlplug.plugins.buffer.prioritized:Prioritized"),
        Component("buffer", "queue", "rlplug.plugins.buffer.queue:Queue"),
        Component("buffer", "rollout", "rlplug.plugins.buffer.rollout:Rollout"),
        Component("buffer", "replay", "rlplug.plugins.buffer.replay:Replay"),
        Component("buffer", "sequence", "rlplug.plugins.buffer.sequence:Sequence"),
        Component("curriculum", "linear", "rlplug.plugins.curriculum.stages:Linear", LAKES + RAMP),
        Component("curriculum", "plr", "rlplug.plugins.curriculum.plr:PLR", LAKES),
        Component("curriculum", "threshold", "rlplug.plugins.curriculum.stages:Threshold", LAKES + STAGES),
        Component("env", "acrobot_torch", "rlplug.plugins.env.classic_torch:Acrobot"),
        Component("env", "cartpole_torch", "rlplug.plugins.env.classic_torch:CartPole"),
        Component("env", "chase", "rlplug.plugins.env.teams:Chase", AGENTS),
        Component("env", "climbing", "rlplug.plugins.env.games:Climbing", AGENTS),
        Component("env", "connect_four", "rlplug.plugins.env.games:ConnectFour", AGENTS),
        Component("env", "dm_control", "rlplug.plugins.env.dm_control:DMControl"),
        Component("env", "gymnasium", "rlplug.plugins.env.gymnasium:Gymnasium"),
        Component("env", "interest_evolution", "rlplug.plugins.env.interest_evolution:InterestEvolution", SLATES),
        Component("env", "knapsack", "rlplug.plugins.env.combinatorial:Knapsack"),
        Component("env", "kuhn", "rlplug.plugins.env.games:Kuhn", AGENTS),
        Component("env", "linear_bandit", "rlplug.plugins.env.bandit:LinearBandit"),
        Component("env", "logged_bandit", "rlplug.plugins.env.bandit:LoggedBandit"),
        Component("env", "minigrid", "rlplug.plugins.env.minigrid:MiniGrid"),
        Component("env", "mountaincar_continuous_torch", "rlplug.plugins.env.classic_torch:MountainCarContinuous"),
        Component("env", "multi", "rlplug.plugins.env.agents:Multi", AGENTS),
        Component("env", "penalty", "rlplug.plugins.env.games:Penalty", AGENTS),
        Component("env", "pendulum_torch", "rlplug.plugins.env.classic_torch:Pendulum"),
        Component("env", "pettingzoo", "rlplug.plugins.env.agents:PettingZoo", AGENTS),
        Component("env", "point_goals", "rlplug.plugins.env.point_goals:PointGoals"),
        Component("env", "recorded", "rlplug.plugins.env.recorded:Recorded"),
        Component("env", "rock_paper_scissors", "rlplug.plugins.env.games:RockPaperScissors", AGENTS),
        Component("env", "sparse_cartpole", "rlplug.plugins.env.classic_torch:SparseCartPole"),
        Component("env", "spread_torch", "rlplug.plugins.env.teams:Spread", AGENTS),
        Component("env", "tensors", "rlplug.plugins.env.tensors:Tensors", SIMULATED),
        Component("env", "tictactoe", "rlplug.plugins.env.games:TicTacToe", AGENTS),
        Component("env", "tsp", "rlplug.plugins.env.combinatorial:TSP"),
        Component("env", "two_carts", "rlplug.plugins.env.teams:TwoCarts", AGENTS),
        Component("env", "two_step", "rlplug.plugins.env.games:TwoStep", AGENTS),
        Component("estimator", "direct_method", "rlplug.plugins.estimator.modeled:DirectMethod"),
        Component("estimator", "doubly_robust", "rlplug.plugins.estimator.modeled:DoublyRobust"),
        Component("estimator", "importance_sampling", "rlplug.plugins.estimator.sampling:ImportanceSampling"),
        Component("exploration", "boltzmann", "rlplug.plugins.exploration.discrete:Boltzmann"),
        Component("exploration", "epsilon_greedy", "rlplug.plugins.exploration.discrete:EpsilonGreedy"),
        Component("exploration", "gaussian", "rlplug.plugins.exploration.noise:Gaussian"),
        Component("exploration", "icm", "rlplug.plugins.exploration.icm:ICM"),
        Component("exploration", "ornstein_uhlenbeck", "rlplug.plugins.exploration.noise:OrnsteinUhlenbeck"),
        Component("exploration", "parameter_noise", "rlplug.plugins.exploration.parameter_noise:ParameterNoise"),
        Component("exploration", "rnd", "rlplug.plugins.exploration.rnd:RND"),
        Component("hardware", "cpu", "rlplug.plugins.hardware.machine:CPU"),
        Component("hardware", "gpu", "rlplug.plugins.hardware.machine:GPU"),
        Component("hardware", "ray", "rlplug.plugins.hardware.machine:OnRay"),
        Component("hardware", "slurm", "rlplug.plugins.hardware.machine:Slurm"),
        Component("hardware", "auto", "rlplug.plugins.hardware.machine:Auto"),
        Component("logger", "csv", "rlplug.plugins.logger.csv:CSV"),
        Component("logger", "mlflow", "rlplug.plugins.logger.mlflow:MLflow"),
        Component("logger", "progress", "rlplug.plugins.logger.progress:ProgressLine"),
        Component("logger", "tensorboard", "rlplug.plugins.logger.tensorboard:TensorBoard"),
        Component("logger", "wandb", "rlplug.plugins.logger.wandb:WandB"),
        Component("loop", "alternate", "rlplug.plugins.loop.alternate:Alternate"),
        Component("loop", "async", "rlplug.plugins.loop.asynchronous:Async", ("algo=impala",)),
        Component("loop", "episodes", "rlplug.plugins.loop.episodes:Episodes", ("loop.episodes=2", SHORT)),
        Component("loop", "meta", "rlplug.plugins.loop.meta:Meta", ("algo=maml", *GOALS)),
        Component("loop", "population", "rlplug.plugins.loop.population:Population", ("algo=es", *GENERATION)),
        Component("loop", "offline", "rlplug.plugins.loop.offline:Offline", ("algo=bc", SMALL_DATA)),
        Component("model", "attention", "rlplug.plugins.model.recurrent:Attention"),
        Component("model", "custom", "rlplug.plugins.model.custom:Custom", CUSTOM),
        Component("model", "gru", "rlplug.plugins.model.recurrent:GRU"),
        Component("model", "impala_cnn", "rlplug.plugins.model.cnn:ImpalaCNN"),
        Component("model", "lstm", "rlplug.plugins.model.recurrent:LSTM"),
        Component("model", "mlp", "rlplug.plugins.model.mlp:MLP"),
        Component("model", "multi_input", "rlplug.plugins.model.multi_input:MultiInput"),
        Component("model", "nature_cnn", "rlplug.plugins.model.cnn:NatureCNN"),
        Component("model", "rssm", "rlplug.plugins.model.rssm:RSSM", ("algo=dreamerv3", *SMALL_DREAMS)),
    ]


@hookimpl
def rlplug_conf() -> str:
    return "rlplug"
