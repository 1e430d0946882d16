"""What a buffer is made of: rings of rows that are kept once, a ring for every shard, and windows of them.

``Windows`` is the base of replays; the page docs/buffers.md writes one.
"""

from rlplug.buffer.options import Storage
from rlplug.buffer.shards import Rings, check_feedback
from rlplug.buffer.storage import Ring
from rlplug.buffer.windows import Windows

__all__ = ["Ring", "Rings", "Storage", "Windows", "check_feedback"]
