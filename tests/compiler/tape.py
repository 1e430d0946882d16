"""A graph backend for the CPU: operations are kept with the memory that they read and wrote, and run again on it.

It shares with a CUDA graph what matters: addresses and numbers of Python are those of the recording, nothing has run
when it is made, and an operation for which the host has to wait cannot be recorded.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlplug.compiler.parity import Writes

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero}


class Tape:
    def __init__(self):
        self.recorded = 0

    def capture(self, function, generators):
        drawn = [(generator, generator.get_state()) for generator in generators]
        operations, writes = Operations(), Writes()
        try:
            with writes, operations:
                function()
        finally:
            with torch.no_grad():
                for x, before in writes.before.values():
                    x.copy_(before)
            for generator, state in drawn:
                generator.set_state(state)
        self.recorded += 1
        return operations.replay

    @contextmanager
    def waits(self):
        found = []
        with Waiting(found):
            yield found


class Waiting(TorchDispatchMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in WAITS:
            self.found.append(f"the host waits for {func}")
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.every = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in WAITS:
            raise RuntimeError(f"{func} cannot be recorded")
        returned = func(*args, **(kwargs or {}))
        self.every.append((func, args, kwargs or {}, returned))
        return returned

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, returned in self.every:
                outs = [x for x in tree_leaves(returned) if isinstance(x, torch.Tensor)]
                read = {
                    x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
                }
                if outs and all(x.untyped_storage().data_ptr() in read for x in outs) and not func._schema.is_mutable:
                    continue  # a view
                again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, torch.Tensor)]
                for x, y in zip(outs, again, strict=True):
                    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
                        x.copy_(y)
