"""Building blocks for networks. They know no algorithm and no run."""

from rlplug.nn.cnn import CNN, Pixels, ResidualCNN, is_image
from rlplug.nn.distributions import Bernoulli, Categorical, DiagGaussian, Distribution, MultiCategorical, TanhGaussian
from rlplug.nn.ensemble import Ensemble
from rlplug.nn.heads import (
    BernoulliHead,
    CategoricalHead,
    DiagGaussianHead,
    Head,
    MultiCategoricalHead,
    TanhGaussianHead,
    head_for,
)
from rlplug.nn.mlp import MLP, Activation, Init, LayerNorm, Linear, precise
from rlplug.nn.optim import Adam
from rlplug.nn.recurrent import GRU, LSTM, Recurrent
from rlplug.nn.spaces import Flatten, choices_of, flat_size, flatten

__all__ = [
    "CNN",
    "GRU",
    "LSTM",
    "MLP",
    "Activation",
    "Adam",
    "Bernoulli",
    "BernoulliHead",
    "Categorical",
    "CategoricalHead",
    "DiagGaussian",
    "DiagGaussianHead",
    "Distribution",
    "Ensemble",
    "Flatten",
    "Head",
    "Init",
    "LayerNorm",
    "Linear",
    "MultiCategorical",
    "MultiCategoricalHead",
    "Pixels",
    "Recurrent",
    "ResidualCNN",
    "TanhGaussian",
    "TanhGaussianHead",
    "choices_of",
    "flat_size",
    "flatten",
    "head_for",
    "is_image",
    "precise",
]
