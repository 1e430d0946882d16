"""Detection of a lost machine by heartbeats, which ranks count in the store of their process group.

A process that ends closes its connections, but a machine without power or network does not, and collectives wait for
it until their timeout, which has to exceed the longest collection.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed import DistError

from rlplug.distributed.fabric import AnyFabric, shared_store

BEAT_S = 2.0
SILENCE_S = 120.0
"""seconds without a heartbeat; no environment and no compiler holds the interpreter lock, which stops it, as long"""
LEFT = 2**32  # beats of a rank that has left its block


@contextmanager
def watch_ranks(fabric: AnyFabric, on_lost: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, call ``on_lost(reason)`` from another thread when a rank ends without leaving its block.

    Rank 0 watches all others, and they watch rank 0, whose process or launcher holds the store.
    """
    own, closing = fabric.global_rank, threading.Event()
    others = [0] if own else [*range(1, fabric.world_size)]
    shared: Any = shared_store()
    store = shared.clone()  # a connection of its own, because this rank may wait for another one in the store
    store.set(f"host {own}", platform.node())

    def beat(number: int) -> list[int]:
        store.add(f"{own}", number)
        return [store.add(f"{rank}", 0) for rank in others]

    def watch() -> None:
        thread = ThreadPoolExecutor(1, "heartbeat")  # a request to a lost machine does not return
        names = [f"rank {rank} ({store.get(f'host {rank}').decode()})" for rank in others]
        counts, since = [0] * len(others), [time.monotonic()] * len(others)
        while not closing.wait(BEAT_S):
            with suppress(DistError, TimeoutError):
                before, counts = counts, thread.submit(beat, 1).result(SILENCE_S)
                since = [
                    time.monotonic() if now >= LEFT or now != then else at
                    for now, then, at in zip(counts, before, since, strict=True)
                ]
            silent = min(since)
            if time.monotonic() - silent > SILENCE_S:
                lost = names[since.index(silent)]
                on_lost(f"{lost} does not answer: it has ended, or its machine or network is down")
                return

    threading.Thread(target=watch, name="watch ranks", daemon=True).start()
    try:
        yield
        with suppress(DistError):  # rank 0 may have ended after it has left
            beat(LEFT)
    finally:
        closing.set()
