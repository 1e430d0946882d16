"""The contracts that plugin authors write against; docs/contracts.md walks through one step of a run.

Every component is built by ``Class(cfg, ctx)``: ``cfg`` is its validated ``Config``, ``ctx`` a ``Context``.
"""
# pyright: reportUnusedImport=false

from rlplug.api.data import Buffer, Collector, Goals, RowLog, Simulator, Source, VecEnv
from rlplug.api.learning import Algorithm, Context, Exploration, Learner, Model, Reduction, Trainable
from rlplug.api.records import Clip, Data, Job, Losses, Needs, Optim, Play, Rollout, Segment, SegmentSpec, Window
from rlplug.api.running import Loop, Preemption, Run, Tempo
from rlplug.plan import Hardware, Plan
from rlplug.types import EnvTraits
