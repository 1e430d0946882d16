"""The store that the ranks of a run share."""

from __future__ import annotations

import itertools

from torch.distributed import PrefixStore, Store, distributed_c10d

_stores = itertools.count()


def shared_store() -> Store:
    """Return a store shared by the ranks; all must call this equally often, because the n-th stores match."""
    return PrefixStore(f"rlplug/{next(_stores)}", distributed_c10d._get_default_store())
