"""The contracts that plugin authors write against; docs/contracts.md walks through one step of a run.

Every component is built by ``Class(cfg, ctx)``: ``cfg`` is its validated ``Config``, ``ctx`` a ``Context``.
"""

from rlplug.api.data import *
from rlplug.api.learning import *
from rlplug.api.records import *
from rlplug.api.running import *
from rlplug.plan import Hardware as Hardware
from rlplug.plan import Plan as Plan
from rlplug.types import EnvTraits as EnvTraits
