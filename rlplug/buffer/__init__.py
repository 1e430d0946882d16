"""Building blocks of buffers: a ring of rows per shard, in which each row is stored once, and windows of rows.

``Windows`` is the base class of replays; docs/buffers.md shows how to write one.
"""

from rlplug.buffer.options import Storage, check_first_sequence
from rlplug.buffer.shards import Rings, check_feedback
from rlplug.buffer.storage import Ring
from rlplug.buffer.windows import Windows

__all__ = ["Ring", "Rings", "Storage", "Windows", "check_feedback", "check_first_sequence"]
