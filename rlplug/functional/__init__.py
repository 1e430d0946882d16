"""Pure torch functions, each with its source. They depend on no network, environment or run."""

from rlplug.functional.bins import symexp, symexp_bins, symlog, two_hot, two_hot_loss, two_hot_mean
from rlplug.functional.distributional import kl_divergence, project
from rlplug.functional.mixing import present, team_reward
from rlplug.functional.policy_gradient import adapt_kl_coeff, clipped_surrogate, clipped_value_loss
from rlplug.functional.priorities import sequence_priority
from rlplug.functional.returns import discounted_sum, gae, n_step, reverse_scan
from rlplug.functional.schedule import piecewise_linear
from rlplug.functional.sequences import chunks, n_step_rows, n_step_segment, n_step_sequences, n_step_transitions
from rlplug.functional.targets import polyak_
from rlplug.functional.td import dueling, forbid, gather_action, greedy, huber, inverse_rescale, rescale, retrace
from rlplug.functional.vtrace import vtrace
from rlplug.functional.world_models import balanced_kl, lambda_returns

__all__ = [
    "adapt_kl_coeff",
    "balanced_kl",
    "chunks",
    "clipped_surrogate",
    "clipped_value_loss",
    "discounted_sum",
    "dueling",
    "forbid",
    "gae",
    "gather_action",
    "greedy",
    "huber",
    "inverse_rescale",
    "kl_divergence",
    "lambda_returns",
    "n_step",
    "n_step_rows",
    "n_step_segment",
    "n_step_sequences",
    "n_step_transitions",
    "piecewise_linear",
    "polyak_",
    "present",
    "project",
    "rescale",
    "retrace",
    "reverse_scan",
    "sequence_priority",
    "symexp",
    "symexp_bins",
    "symlog",
    "team_reward",
    "two_hot",
    "two_hot_loss",
    "two_hot_mean",
    "vtrace",
]
