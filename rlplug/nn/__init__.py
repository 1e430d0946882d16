"""Building blocks for networks. They depend on no algorithm or run."""

from rlplug.nn.actor_critic import ActorCritic, Policy
from rlplug.nn.attention import GTrXL
from rlplug.nn.autoregressive import Autoregressive
from rlplug.nn.cnn import CNN, Pixels, ResidualCNN, is_image
from rlplug.nn.critic import Critic, DiscreteCritic, FeatureCritic, InputCritic, constant, critic_for, frozen
from rlplug.nn.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    DiagGaussian,
    Distribution,
    MultiCategorical,
    Product,
    TanhGaussian,
)
from rlplug.nn.ensemble import Ensemble
from rlplug.nn.heads import (
    AutoregressiveHead,
    BernoulliHead,
    BetaHead,
    CategoricalHead,
    DiagGaussianHead,
    Head,
    HybridHead,
    MultiCategoricalHead,
    TanhGaussianHead,
    head_for,
    soft_head,
)
from rlplug.nn.mixers import Mixing, MonotonicMixer, NoMixer, SumMixer, mixer_for
from rlplug.nn.mlp import MLP, Activation, Init, LayerNorm, Linear, precise
from rlplug.nn.module import Module
from rlplug.nn.optim import Adam, LaProp, adam_or_rmsprop
from rlplug.nn.recurrent import GRU, LSTM, Recurrent, unroll
from rlplug.nn.spaces import Flatten, as_executed, choices_of, flat_size, flatten, remarks

__all__ = [
    "CNN",
    "GRU",
    "LSTM",
    "MLP",
    "Activation",
    "ActorCritic",
    "Adam",
    "Autoregressive",
    "AutoregressiveHead",
    "Bernoulli",
    "BernoulliHead",
    "Beta",
    "BetaHead",
    "Categorical",
    "CategoricalHead",
    "Critic",
    "DiagGaussian",
    "DiagGaussianHead",
    "DiscreteCritic",
    "Distribution",
    "Ensemble",
    "FeatureCritic",
    "Flatten",
    "GTrXL",
    "Head",
    "HybridHead",
    "Init",
    "InputCritic",
    "LaProp",
    "LayerNorm",
    "Linear",
    "Mixing",
    "Module",
    "MonotonicMixer",
    "MultiCategorical",
    "MultiCategoricalHead",
    "NoMixer",
    "Pixels",
    "Policy",
    "Product",
    "Recurrent",
    "ResidualCNN",
    "SumMixer",
    "TanhGaussian",
    "TanhGaussianHead",
    "adam_or_rmsprop",
    "as_executed",
    "choices_of",
    "constant",
    "critic_for",
    "flat_size",
    "flatten",
    "frozen",
    "head_for",
    "is_image",
    "mixer_for",
    "precise",
    "remarks",
    "soft_head",
    "unroll",
]
