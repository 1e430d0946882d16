"""Pure torch functions, each with its source. They know no network, no environment and no run."""

from rlplug.functional.policy_gradient import adapt_kl_coeff, clipped_surrogate, clipped_value_loss
from rlplug.functional.returns import gae, n_step, reverse_scan
from rlplug.functional.schedule import piecewise_linear
from rlplug.functional.targets import polyak_

__all__ = [
    "adapt_kl_coeff",
    "clipped_surrogate",
    "clipped_value_loss",
    "gae",
    "n_step",
    "piecewise_linear",
    "polyak_",
    "reverse_scan",
]
