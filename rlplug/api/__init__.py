"""The contracts that plugin authors write against; docs/contracts.md walks through one step of a run.

Every component is built by ``Class(cfg, ctx)``: ``cfg`` is its validated ``Config``, ``ctx`` a ``Context``.
"""

from rlplug.api.data import Buffer as Buffer
from rlplug.api.data import Collector as Collector
from rlplug.api.data import Goals as Goals
from rlplug.api.data import RowLog as RowLog
from rlplug.api.data import Simulator as Simulator
from rlplug.api.data import Source as Source
from rlplug.api.data import VecEnv as VecEnv
from rlplug.api.learning import Algorithm as Algorithm
from rlplug.api.learning import Context as Context
from rlplug.api.learning import Curriculum as Curriculum
from rlplug.api.learning import Exploration as Exploration
from rlplug.api.learning import Learner as Learner
from rlplug.api.learning import Model as Model
from rlplug.api.learning import Reduction as Reduction
from rlplug.api.learning import Trainable as Trainable
from rlplug.api.records import Clip as Clip
from rlplug.api.records import Data as Data
from rlplug.api.records import Job as Job
from rlplug.api.records import Losses as Losses
from rlplug.api.records import Needs as Needs
from rlplug.api.records import Optim as Optim
from rlplug.api.records import Play as Play
from rlplug.api.records import Rollout as Rollout
from rlplug.api.records import Segment as Segment
from rlplug.api.records import SegmentSpec as SegmentSpec
from rlplug.api.records import Window as Window
from rlplug.api.running import Loop as Loop
from rlplug.api.running import Preemption as Preemption
from rlplug.api.running import Run as Run
from rlplug.api.running import Tempo as Tempo
from rlplug.plan import Hardware as Hardware
from rlplug.plan import Plan as Plan
from rlplug.types import EnvTraits as EnvTraits
