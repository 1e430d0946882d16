"""The golden runs. Every hyper-parameter is pinned here, so that defaults may be tuned without touching a curve."""

from __future__ import annotations

from pathlib import Path

from rlplug import testing

UPDATES = 20
FEWER = {"dreamerv3_cartpole": 10, "dreamerv3_pendulum": 10}
"""updates of cases with thousands of sampled categories, one of which another rounding changes sooner or later"""
VECTORS = ("linear_bandit", "bitflip", "knapsack", "tictactoe", "two_carts", "spread_torch", "chase")
VECTORS += ("interest_evolution", "point_goals", "cartpole_torch")
"""environments that are vectors by themselves"""
RECORDED = Path(testing.__file__).parent / "cartpole.npz"


def words(text: str) -> dict[str, str]:
    """Return the settings of a command line, by their keys."""
    return dict(word.split("=", 1) for word in text.split())


def without(settings: dict[str, str], *prefixes: str) -> dict[str, str]:
    return {key: value for key, value in settings.items() if not key.startswith(prefixes)}


ALWAYS = words(
    """
    tuned=none seed=0 total_steps=100000 hardware=cpu hardware.threads=1 hardware.float32_matmul_precision=highest
    logger.only=[] eval.every=0 compile=off env.vectorization=list
    """
)
MODEL = words("model=mlp model.hidden=[32,32] model.activation=tanh model.layer_norm=false model.init=orthogonal")
ON_POLICY = words("buffer=rollout loop=alternate replay_ratio=null num_envs=4")
PPO = ON_POLICY | words(
    """
    algo=ppo rollout_fragment_length=32 algo.gamma=0.99 algo.lambda_=0.95 algo.lr=0.0003
    algo.sgd_minibatch_size=64 algo.num_sgd_iter=2 algo.clip_param=0.2 algo.vf_loss_coeff=0.5
    algo.vf_clip_param=1.0 algo.vf_share_layers=false algo.entropy_coeff=0.01 algo.kl_coeff=0.2
    algo.kl_target=0.01 algo.kl_stop=null algo.normalize_advantage=true algo.grad_clip=0.5
    algo.grad_clip_by=global_norm algo.initial_log_std=-0.5
    """
)
SAC = words(
    """
    algo=sac env=pendulum buffer=replay buffer.capacity=1000 num_envs=2 loop=alternate rollout_fragment_length=1
    train_batch_size=32 replay_ratio=0.5 num_steps_sampled_before_learning_starts=64 algo.gamma=0.98 algo.n_step=1
    algo.twin_q=true algo.tau=0.05 algo.target_update_period=2 algo.initial_alpha=0.5
    algo.target_entropy=auto algo.actor_lr=0.001 algo.critic_lr=0.001 algo.alpha_lr=0.001 algo.grad_clip=10.0
    algo.grad_clip_by=global_norm
    """
)
DQN = words(
    """
    algo=dqn env=cartpole buffer=replay buffer.capacity=1000 exploration=[epsilon_greedy]
    exploration.epsilon_greedy.epsilon=0.2 exploration.epsilon_greedy.ape_x_alpha=null num_envs=2 loop=alternate
    rollout_fragment_length=4 train_batch_size=32 replay_ratio=0.25 num_steps_sampled_before_learning_starts=64
    algo.gamma=0.98 algo.n_step=1 algo.double_q=false algo.dueling=false algo.noisy=false algo.sigma0=0.5
    algo.num_atoms=1 algo.v_min=0.0 algo.v_max=50.0 algo.hiddens=[16] algo.td_error_loss_fn=huber algo.tau=1.0
    algo.target_update_period=5 algo.lr=0.001 algo.adam_epsilon=1e-05 algo.grad_clip=10.0
    algo.grad_clip_by=global_norm algo.value_rescaling=null algo.sequence_length=8 algo.burn_in=4 algo.stride=4
    algo.eta=0.9 algo.worker_side_prioritization=false algo.conservative_weight=0.0
    """
)
RAINBOW = DQN | words(
    """
    buffer=prioritized buffer.alpha=0.6 buffer.beta=0.4 buffer.epsilon=1e-06 buffer.num_shards=null algo.n_step=3
    algo.double_q=true algo.dueling=true algo.noisy=true algo.num_atoms=21 algo.tau=0.5
    """
)
R2D2 = RAINBOW | words(
    """
    buffer=sequence model=lstm model.hidden=16 model.layer_norm=false model.init=orthogonal
    model.torso.hidden=[16] model.torso.activation=tanh model.torso.layer_norm=false model.torso.init=orthogonal
    train_batch_size=8 algo.noisy=false algo.num_atoms=1 algo.value_rescaling=0.001
    """
)
LSTM = words(
    """
    model=lstm model.hidden=16 model.layer_norm=false model.init=orthogonal model.torso.hidden=[16]
    model.torso.activation=tanh model.torso.layer_norm=false model.torso.init=orthogonal
    """
)
RECURRENT_SAC = (
    SAC
    | LSTM
    | words(
        """
    buffer=sequence buffer.alpha=0.6 buffer.beta=0.4 buffer.epsilon=1e-06 buffer.num_shards=null
    train_batch_size=8 algo.n_step=2 algo.sequence_length=8 algo.burn_in=4 algo.stride=4
    """
    )
)
A2C = ON_POLICY | words(
    """
    algo=a2c env=cartpole rollout_fragment_length=16 algo.gamma=0.99 algo.lambda_=0.95 algo.lr=0.001
    algo.opt_type=rmsprop algo.epsilon=1e-05 algo.decay=0.99 algo.vf_loss_coeff=0.5 algo.vf_share_layers=false
    algo.entropy_coeff=0.01 algo.grad_clip=0.5 algo.grad_clip_by=global_norm algo.initial_log_std=0.0
    """
)
DDPG = without(SAC, "algo.") | words(
    """
    algo=ddpg exploration=[ornstein_uhlenbeck] exploration.ornstein_uhlenbeck.sigma=0.2
    exploration.ornstein_uhlenbeck.theta=0.15 exploration.ornstein_uhlenbeck.ape_x_ratio=null
    algo.worker_side_prioritization=false algo.gamma=0.98 algo.n_step=1 algo.twin_q=false algo.policy_delay=1
    algo.target_noise=0.0 algo.noise_clip=0.5 algo.tau=0.05 algo.target_update_period=2
    algo.td_error_loss_fn=huber algo.huber_threshold=0.5 algo.actor_lr=0.001 algo.critic_lr=0.002
    algo.l2_reg=0.001 algo.bc_alpha=null algo.grad_clip=10.0 algo.grad_clip_by=global_norm algo.sequence_length=8
    algo.burn_in=4 algo.stride=4
    """
)
TD3 = without(DDPG, "exploration") | words(
    """
    algo=td3 exploration=[gaussian] exploration.gaussian.std=0.1 exploration.gaussian.ape_x_ratio=null
    buffer=prioritized buffer.alpha=0.6 buffer.beta=0.4 buffer.epsilon=1e-06 buffer.num_shards=null algo.n_step=3
    algo.twin_q=true algo.policy_delay=2 algo.target_noise=0.2 algo.target_update_period=1
    algo.td_error_loss_fn=mse algo.l2_reg=0.0
    """
)
APEX = words(
    """
    loop=async loop.shards=1 loop.in_flight=2 loop.broadcast_interval=2 loop.max_weight_sync_delay=null
    loop.max_staleness=null num_envs=4 rollout_fragment_length=8 train_batch_size=32 replay_ratio=0.0625
    num_steps_sampled_before_learning_starts=64 buffer=prioritized buffer.capacity=400 buffer.alpha=0.6
    buffer.beta=0.4 buffer.epsilon=1e-06 buffer.num_shards=2 algo.n_step=3 algo.worker_side_prioritization=true
    """
)
APEX_DQN = (
    RAINBOW
    | APEX
    | words(
        """
    algo=apex_dqn exploration.epsilon_greedy.epsilon=0.4 exploration.epsilon_greedy.ape_x_alpha=7.0
    algo.noisy=false algo.num_atoms=1
    """
    )
)
APEX_DDPG = (
    DDPG
    | APEX
    | words(
        """
    algo=apex_ddpg exploration.ornstein_uhlenbeck.sigma=0.4 exploration.ornstein_uhlenbeck.ape_x_ratio=0.01
    """
    )
)
ASYNC = words(
    """
    loop=async loop.in_flight=3 loop.broadcast_interval=1 num_envs=4 rollout_fragment_length=16
    train_batch_size=64 replay_ratio=null algo.gamma=0.98 algo.lambda_=0.9 algo.vtrace_clip_rho_threshold=1.0
    algo.vtrace_clip_c_threshold=1.0 algo.vtrace_clip_pg_rho_threshold=1.0 algo.lr=0.003 algo.vf_loss_coeff=0.5
    algo.vf_share_layers=false algo.entropy_coeff=0.01 algo.grad_clip=10.0 algo.grad_clip_by=global_norm
    algo.initial_log_std=-0.5
    """
)
IMPALA = ASYNC | words(
    """
    algo=impala buffer=queue buffer.capacity=16 buffer.replay_proportion=0.5 buffer.replay_capacity=8
    algo.opt_type=adam algo.epsilon=1e-05
    """
)
APPO = ASYNC | words(
    """
    algo=appo buffer=circular buffer.num_batches=3 buffer.num_uses=2 algo.vtrace=true algo.clip_param=0.2
    algo.target_worker_clipping=2.0 algo.target_update_period=3 algo.tau=1.0 algo.kl_coeff=0.2
    algo.kl_target=0.01 algo.epsilon=1e-05 algo.opt_type=adam algo.decay=0.99 algo.momentum=0.0
    algo.normalize_advantage=true
    """
)
A3C = without(A2C, *ON_POLICY) | words(
    """
    loop=async loop.in_flight=3 loop.broadcast_interval=1 num_envs=4 replay_ratio=null algo=a3c buffer=queue
    buffer.capacity=16 buffer.replay_proportion=0.0 buffer.replay_capacity=8 train_batch_size=32
    algo.grad_clip=10.0
    """
)
BANDIT = ON_POLICY | words(
    """
    env=linear_bandit env.num_actions=4 env.feature_dim=3 env.per_arm=false env.reward_noise_std=0.25
    env.world_seed=0 env.max_episode_steps=10 model=linear num_envs=2 rollout_fragment_length=4 algo.disjoint=null
    algo.lambda_=1.0
    """
)
REINFORCE = ON_POLICY | words(
    """
    algo=reinforce env=cartpole rollout_fragment_length=32 algo.gamma=0.99 algo.lr=0.001 algo.vf_loss_coeff=0.5
    algo.entropy_coeff=0.01
    """
)
OFFLINE = words(
    f"""
    env=cartpole buffer=episodes buffer.capacity=2000 loop=offline loop.stream=false num_envs=1
    data.path={RECORDED} data.shuffle=true rollout_fragment_length=100 train_batch_size=3 replay_ratio=null
    algo.lr=0.001 algo.sgd_minibatch_size=16 algo.bc_logstd_coeff=0.0 algo.grad_clip=1.0
    algo.grad_clip_by=global_norm algo.initial_log_std=0.0
    """
)
MARWIL = OFFLINE | words(
    """
    algo=marwil algo.gamma=0.99 algo.beta=2.0 algo.vf_coeff=0.5 algo.vf_share_layers=false
    algo.moving_average_sqd_adv_norm_start=100.0 algo.moving_average_sqd_adv_norm_update_rate=0.01
    """
)
CQL = without(SAC, "algo.target_update_period") | words(
    """
    algo=cql algo.conservative_weight=2.0 algo.temperature=0.5 algo.num_actions=3 algo.lagrangian_thresh=0.7
    algo.bc_iters=8 algo.deterministic_backup=false
    """
)
WINDOWS = without(OFFLINE, "algo.") | words("buffer=replay train_batch_size=16")
IQL = WINDOWS | words(
    """
    algo=iql algo.gamma=0.98 algo.n_step=2 algo.tau=0.05 algo.expectile=0.8 algo.beta=2.0 algo.max_weight=1.2
    algo.actor_lr=0.001 algo.critic_lr=0.002 algo.value_lr=0.003 algo.grad_clip=10.0 algo.grad_clip_by=global_norm
    algo.initial_log_std=0.0
    """
)
DISCRETE_CQL = (
    {key: value for key, value in RAINBOW.items() if key.startswith("algo.")}
    | WINDOWS
    | words(
        """
    algo=discrete_cql algo.noisy=false algo.num_atoms=1 algo.conservative_weight=0.5
    """
    )
)
TD3_BC = without(TD3, "buffer", "exploration") | words(
    """
    algo=td3_bc buffer=replay buffer.capacity=1000 preprocess.normalize_obs=true algo.bc_alpha=2.5
    """
)
TEAM = words(
    """
    env=spread_torch env.agents=3 env.local_ratio=0.5 env.max_episode_steps=5 num_envs=4 loop=alternate
    rollout_fragment_length=4 num_steps_sampled_before_learning_starts=64
    """
)
QMIX = TEAM | words(
    """
    algo=qmix buffer=episodes buffer.capacity=1000 exploration=[epsilon_greedy] train_batch_size=8
    exploration.epsilon_greedy.epsilon=0.3 exploration.epsilon_greedy.ape_x_alpha=null replay_ratio=0.125
    algo.mixer=qmix algo.mixing_embed_dim=8 algo.hypernet_hiddens=[] algo.agent_ids=true algo.last_action=true
    algo.batch_mode=complete_episodes algo.gamma=0.95 algo.n_step=1 algo.double_q=true algo.tau=1.0
    algo.target_network_update_freq=40 algo.opt_type=rmsprop algo.lr=0.001 algo.optim_alpha=0.99
    algo.optim_eps=1e-05 algo.grad_clip=10.0 algo.grad_clip_by=global_norm algo.worker_side_prioritization=false
    algo.sequence_length=4 algo.burn_in=2 algo.stride=2 algo.eta=0.9
    """
)
GRU = words("model=gru model.hidden=16 model.layer_norm=false model.init=orthogonal model.torso.hidden=[16]")
MADDPG = TEAM | words(
    """
    algo=maddpg buffer=replay buffer.capacity=1000 exploration=[] train_batch_size=32 replay_ratio=0.125
    algo.gamma=0.95 algo.tau=0.05 algo.target_update_period=1 algo.td_error_loss_fn=mse algo.actor_lr=0.003
    algo.critic_lr=0.01 algo.relaxation=straight_through algo.temperature=1.0 algo.output_reg=0.001
    algo.action_noise=0.1 algo.infer_policies=false algo.inference_entropy=0.001 algo.grad_clip=0.5
    algo.grad_clip_by=norm
    """
)
CHILD = {key.replace("algo.", "algo.algo.", 1): value for key, value in PPO.items() if key != "algo"}
CARTS = words("env=two_carts env.agents=2 env.max_episode_steps=30")
INDEPENDENT = CHILD | CARTS | words("algo=independent algo.algo.name=ppo algo.one_per=agent")
SHARED = CHILD | CARTS | words("algo=shared algo.algo.name=ppo algo.agent_ids=true")
LEAGUE = CHILD | words(
    """
    algo=league env=tictactoe algo.algo.name=ppo algo.opponents=pfsp algo.pfsp_power=2.0 algo.self_play=0.35 algo.size=3
    algo.every=4 algo.decay=0.9 algo.elo_k=4.0
    """
)
MAPPO = (
    ON_POLICY
    | CARTS
    | words(
        """
    algo=mappo rollout_fragment_length=32 algo.critic_sees=observations algo.agent_ids=true algo.gamma=0.99
    algo.lambda_=0.95 algo.lr=0.0007 algo.critic_lr=0.001 algo.adam_epsilon=1e-05 algo.sgd_minibatch_size=128
    algo.num_sgd_iter=2 algo.clip_param=0.2 algo.vf_clip_param=0.2 algo.huber_threshold=10.0
    algo.normalize_value=0.99999 algo.entropy_coeff=0.01 algo.normalize_advantage=true algo.grad_clip=10.0
    algo.grad_clip_by=global_norm algo.initial_log_std=0.0
    """
    )
)

SEARCH = words("env=cartpole loop=population loop.episodes=1 buffer=rollout num_envs=1 rollout_fragment_length=1")
SEARCH |= words("train_batch_size=1 replay_ratio=null")
ALPHAZERO = words(
    """
    algo=alphazero buffer=episodes buffer.capacity=2000 loop=alternate num_envs=4 rollout_fragment_length=4
    train_batch_size=4 replay_ratio=0.0625 algo.gamma=0.98 algo.lambda_=0.9 algo.num_simulations=8
    algo.puct_coefficient=1.25 algo.value_bounds=null algo.value_scale=1.0 algo.dirichlet_noise=0.3
    algo.dirichlet_epsilon=0.25 algo.temperature=1.0 algo.temperature_moves=3 algo.reuse_tree=true
    algo.ranked_rewards=false algo.percentile=0.75 algo.num_returns=8 algo.best_return=null algo.opponents=[random]
    algo.past_every=100 algo.lr=0.001 algo.l2_coeff=0.0001 algo.vf_loss_coeff=1.0 algo.vf_share_layers=true
    algo.sgd_minibatch_size=16 algo.num_sgd_iter=1 algo.grad_clip=10.0 algo.grad_clip_by=global_norm
    """
)
SLATEQ = words(
    """
    algo=slateq env=interest_evolution env.num_documents=6 env.slate_size=2 env.num_topics=2 env.num_levels=3
    env.resample=false env.choice_scale=1.0 env.no_click=0.0 env.drift=0.8 env.persistence=0.9 env.world_seed=0
    env.max_episode_steps=50 buffer=replay buffer.capacity=1000 loop=alternate num_envs=2 rollout_fragment_length=4
    train_batch_size=32 replay_ratio=0.25 num_steps_sampled_before_learning_starts=64 algo.gamma=0.98
    algo.choice_model=multinomial_logit algo.slate=exact algo.target_slate=greedy algo.strategy=q_learning
    algo.null_item=true algo.double_q=true algo.td_error_loss_fn=mse algo.epsilon=0.2 algo.tau=1.0
    algo.target_update_period=5 algo.lr=0.001 algo.lr_choice_model=0.01 algo.adam_epsilon=1e-08
    algo.grad_clip=10.0 algo.grad_clip_by=global_norm
    """
)
WORLD_MODEL = words(
    """
    model=rssm model.size=1m critic_model=null num_envs=2 loop=alternate rollout_fragment_length=2 train_batch_size=2
    replay_ratio=0.5 num_steps_sampled_before_learning_starts=32 buffer=sequence buffer.capacity=200 buffer.alpha=0.0
    buffer.beta=0.4 buffer.epsilon=1e-06 buffer.num_shards=null algo.batch_length=4 algo.stride=1
    algo.imagination_length=2 algo.open_loop_every=10
    """
)
DREAMER = WORLD_MODEL | words(
    """
    algo=dreamer env=pendulum algo.deter=16 algo.stoch=6 algo.hidden=16 algo.units=16 algo.activation=elu
    algo.gamma=0.98 algo.lambda_=0.9 algo.free_nats=1.0 algo.kl_scale=0.8 algo.predict_discount=true
    algo.discount_scale=5.0 algo.mean_scale=5.0 algo.initial_std=2.0 algo.least_std=0.0001 algo.explore_noise=0.3
    algo.model_lr=0.001 algo.actor_lr=0.0005 algo.critic_lr=0.0008 algo.adam_epsilon=1e-07 algo.grad_clip=10.0
    """
)
DREAMERV3 = WORLD_MODEL | words(
    """
    algo=dreamerv3 env=cartpole algo.horizon=100 algo.lambda_=0.9 algo.entropy=0.001 algo.unimix=0.02
    algo.free_nats=0.5 algo.dyn_scale=0.9 algo.rep_scale=0.2 algo.replay_value_scale=0.4 algo.slow_critic_scale=0.7
    algo.slow_critic_rate=0.05 algo.return_percentiles=[0.1,0.9] algo.return_rate=0.2 algo.return_limit=0.01
    algo.bins=63 algo.std_bounds=[0.1,1.0] algo.lr=0.001 algo.warmup=5 algo.agc=0.3 algo.betas=[0.9,0.99]
    algo.epsilon=1e-15
    """
)

CASES = {
    "alphazero_knapsack": ALPHAZERO
    | words("env=knapsack env.values=null env.weights=null env.capacity=null env.num_items=6 algo.ranked_rewards=true"),
    "alphazero_tictactoe": ALPHAZERO | words("env=tictactoe"),
    "slateq_interest_evolution": SLATEQ,
    "ppo_cartpole": PPO | words("env=cartpole"),
    "ppo_pendulum": PPO | words("env=pendulum algo.kl_coeff=0.0 algo.vf_clip_param=null"),
    "sac_pendulum": SAC,
    "sac_pendulum_n_step": SAC | words("algo.n_step=3 algo.twin_q=false algo.target_update_period=1"),
    "ppo_cartpole_recurrent": PPO | LSTM | words("env=cartpole algo.max_seq_len=8"),
    "sac_cartpole": SAC | words("env=cartpole algo.target_entropy_fraction=0.5"),
    "sac_pendulum_recurrent": RECURRENT_SAC,
    "ddpg_pendulum": DDPG,
    "td3_pendulum": TD3,
    "td3_pendulum_recurrent": TD3 | LSTM | words("buffer=sequence train_batch_size=8"),
    "a2c_cartpole": A2C,
    "a2c_cartpole_recurrent": A2C | LSTM | words("algo.opt_type=adam"),
    "apex_dqn_cartpole": APEX_DQN,
    "apex_ddpg_pendulum": APEX_DDPG,
    "a3c_cartpole": A3C,
    "dreamer_pendulum": DREAMER,
    "dreamerv3_cartpole": DREAMERV3,
    "dreamerv3_pendulum": DREAMERV3 | words("env=pendulum"),
    "bc_cartpole": OFFLINE | words("algo=bc"),
    "marwil_cartpole": MARWIL,
    "cql_pendulum": CQL,
    "discrete_cql_cartpole": DISCRETE_CQL,
    "iql_cartpole": IQL,
    "td3_bc_pendulum": TD3_BC,
    "dqn_cartpole": DQN,
    "dqn_cartpole_rainbow": RAINBOW,
    "dqn_cartpole_recurrent": R2D2,
    "impala_cartpole": IMPALA | words("env=cartpole"),
    "impala_pendulum": IMPALA
    | words("env=pendulum algo.opt_type=rmsprop algo.decay=0.99 algo.momentum=0.0 algo.epsilon=0.1"),
    "impala_cartpole_recurrent": IMPALA | LSTM | words("env=cartpole"),
    "appo_cartpole": APPO | words("env=cartpole"),
    "appo_pendulum": APPO | words("env=pendulum algo.vtrace=false algo.kl_coeff=0.0"),
    "appo_cartpole_recurrent": APPO | LSTM | words("env=cartpole algo.max_seq_len=8"),
    "linucb_linear_bandit": BANDIT | words("algo=linucb algo.alpha=0.5"),
    "lints_linear_bandit": BANDIT | words("algo=lints algo.v=0.25 env.per_arm=true"),
    "lingreedy_linear_bandit": BANDIT
    | words("algo=lingreedy exploration=[epsilon_greedy] exploration.epsilon_greedy.epsilon=0.2")
    | words("exploration.epsilon_greedy.ape_x_alpha=null"),
    "maml_point_goals": words(
        "algo=maml env=point_goals env.max_episode_steps=10 env.size=0.5 loop=meta loop.episodes=4"
    )
    | words("num_envs=1 rollout_fragment_length=1 replay_ratio=null algo.meta_batch_size=3 algo.inner_lr=0.2")
    | words("algo.inner_adaptation_steps=2 algo.first_order=false algo.gamma=0.98 algo.lambda_=0.95 algo.lr=0.003")
    | words("algo.maml_optimizer_steps=2 algo.clip_param=0.3 algo.entropy_coeff=0.01 algo.kl_coeff=0.1")
    | words("algo.kl_target=0.01 algo.grad_clip=1.0 algo.grad_clip_by=global_norm algo.initial_log_std=-0.5"),
    "mbmpo_cartpole": words("algo=mbmpo env=cartpole_torch env.max_episode_steps=20 buffer=replay buffer.capacity=2000")
    | words("loop=meta loop.episodes=1 num_envs=1 rollout_fragment_length=1 replay_ratio=null train_batch_size=32")
    | words("algo.ensemble_size=2 algo.fc_net_hiddens=[16] algo.fc_net_activation=silu algo.dynamics_lr=0.001")
    | words("algo.train_epochs=3 algo.valid_split_ratio=0.2 algo.valid_average=0.9 algo.normalize_data=true")
    | words("algo.num_maml_steps=1 algo.horizon=5 algo.imagined_episodes=3 algo.inner_adaptation_steps=1")
    | words("algo.inner_lr=0.1 algo.first_order=false algo.gamma=0.99 algo.lambda_=1.0 algo.lr=0.001")
    | words("algo.maml_optimizer_steps=2 algo.clip_param=0.5 algo.entropy_coeff=0.0 algo.kl_coeff=0.0005")
    | words("algo.kl_target=0.01 algo.grad_clip=null algo.grad_clip_by=global_norm algo.initial_log_std=0.0"),
    "es_cartpole": SEARCH
    | words("algo=es algo.episodes_per_batch=8 algo.noise_stdev=0.1 algo.stepsize=0.05 algo.optimizer=adam")
    | words("algo.momentum=0.9 algo.l2_coeff=0.005 algo.return_proc_mode=centered_rank algo.eval_prob=0.1"),
    "ars_cartpole": SEARCH
    | words(
        "algo=ars algo.num_rollouts=4 algo.rollouts_used=2 algo.noise_stdev=0.1 algo.sgd_stepsize=0.05 algo.offset=0.5"
    )
    | words("algo.zero_init=false algo.eval_prob=0.1 preprocess.normalize_obs=true"),
    "cem_cartpole": SEARCH
    | words(
        "algo=cem algo.population=6 algo.elite_share=0.34 algo.initial_std=0.5 algo.extra_std=0.1 algo.zero_init=true"
    ),
    "qmix_spread_recurrent": QMIX | GRU,
    "qmix_spread_vdn": QMIX
    | words("algo.mixer=vdn algo.batch_mode=windows buffer=replay algo.n_step=2 algo.opt_type=adam"),
    "qmix_spread_none": QMIX
    | GRU
    | words("algo.mixer=none algo.batch_mode=windows buffer=sequence buffer.alpha=0.9 buffer.beta=0.6")
    | words("buffer.epsilon=1e-06 buffer.num_shards=null"),
    "maddpg_spread": MADDPG,
    "maddpg_chase": without(MADDPG, "env.")
    | words("env=chase env.hunters=2 env.prey=1 env.size=7 env.max_episode_steps=50")
    | words("algo.infer_policies=true algo.relaxation=soft algo.td_error_loss_fn=huber"),
    "independent_two_carts": INDEPENDENT,
    "shared_two_carts": SHARED,
    "mappo_two_carts": MAPPO,
    "league_tictactoe": LEAGUE,
    "reinforce_cartpole": REINFORCE,
    "dqn_bitflip_her": DQN | words("env=bitflip env.size=4 buffer=her buffer.strategy=future buffer.k=4 algo.n_step=2"),
}


def overrides(case: str) -> list[str]:
    """The case as words of a command line."""
    settings = {**ALWAYS, **({} if "model" in CASES[case] else MODEL), **CASES[case]}
    if CASES[case]["env"] in VECTORS:
        del settings["env.vectorization"]
    return [f"{key}={value}" for key, value in settings.items()]
