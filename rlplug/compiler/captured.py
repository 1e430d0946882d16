"""Functions of a batch as CUDA graphs: kernels are captured once and replayed by one launch.

The kernels are those of the eager function, so results are bit-identical. A graph uses static memory, at the addresses
of its capture.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from rlplug import tree
from rlplug.compiler.compiled import Compiled, Function, restored, without
from rlplug.types import Batch

Generators = Iterable[torch.Generator]


class Captured(Compiled):
    """``function(batch)`` as a captured graph.

    Inputs, which may be on the host, are copied into static memory, and results are copied out of it, 0-d tensors
    together. Tensors that the function closes over are read, and updated in place, at their address. Generators advance
    as in eager mode. All other state is constant from the capture.

    Args:
        device: device of the graph.
        generators: generators that it may draw from.

    Raises:
        Exception: see ``CudaGraphs.capture``.
    """

    def __init__(
        self, function: Function, batch: Batch, device: torch.device, generators: Generators, graphs: CudaGraphs
    ) -> None:
        super().__init__(batch, 0)
        leaves = [*tree.leaves(batch)]
        with torch.inference_mode(False):  # replays may be outside of inference mode
            self._static = Static(leaves, device)
        self._static.fill(leaves)
        inputs = self._static.tensors
        self._outputs, self._is_number = list[Tensor](), list[bool]()
        self._numbers = torch.empty(0, device=device)

        def recorded() -> None:
            static, outputs = iter(inputs), list[Tensor]()
            self.template = without(function(tree.map(lambda _: next(static), batch)), inputs, outputs)
            self._outputs, self._is_number = outputs, [x.ndim == 0 and x.dtype == torch.float32 for x in outputs]
            if numbers := [x for x, is_number in zip(outputs, self._is_number, strict=True) if is_number]:
                self._numbers = torch.stack(numbers)

        self._replay = graphs.capture(recorded, generators)

    def run(self, inputs: list[Tensor]) -> Any:
        self._static.fill(inputs)
        self._replay()
        numbers = iter(self._numbers.clone().unbind())
        outputs = zip(self._outputs, self._is_number, strict=True)
        return restored(self.template, inputs, (next(numbers) if own else x.clone() for x, own in outputs))


class Static:
    """Static device memory for tensors like the given ones. Tensors from the host are copied together.

    The copy uses two pinned buffers, so the host is at most one call ahead.
    """

    ALIGNED = 64  # bytes

    def __init__(self, like: Sequence[Tensor], device: torch.device) -> None:
        far = [x.device != device for x in like]
        sizes = [-(-x.nbytes // self.ALIGNED) * self.ALIGNED if own else 0 for x, own in zip(like, far, strict=True)]
        cuda, self._size = device.type == "cuda", sum(sizes)
        self._flat = torch.empty(self._size, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.current_stream(device) if cuda else None

        def views(flat: Tensor) -> list[Tensor | None]:
            pieces = zip(like, flat.split(sizes), far, strict=True)
            return [piece[: x.nbytes].view(x.dtype).view(x.shape) if own else None for x, piece, own in pieces]

        self._pieces = list[tuple[Tensor, list[Tensor | None], Any]]()  # pinned memory, views, last read
        for _ in range(2):
            flat = torch.empty(self._size, dtype=torch.uint8, pin_memory=cuda)
            self._pieces.append((flat, views(flat), torch.cuda.Event() if cuda else None))
        own = zip(like, views(self._flat), strict=True)
        self.tensors = [torch.empty(x.shape, dtype=x.dtype, device=device) if mine is None else mine for x, mine in own]

    def fill(self, values: Sequence[Tensor]) -> None:
        """Copy ``values`` into ``tensors`` asynchronously."""
        flat, staged, read = self._pieces[0]
        if read is not None and self._size:
            read.synchronize()
        near = list[Tensor](), list[Tensor]()
        for x, own, stage in zip(values, self.tensors, staged, strict=True):
            if stage is None or x.device == own.device:
                near[0].append(own)
                near[1].append(x)
            else:
                stage.copy_(x)
        if self._size:
            self._flat.copy_(flat, non_blocking=True)
            if read is not None:
                read.record(self._stream)
            self._pieces.reverse()
        if near[0]:
            torch._foreach_copy_(*near)


class CudaGraphs:
    """Captures CUDA graphs in a shared memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._pool, self._stream = device, None, torch.cuda.Stream(device)

    def capture(self, function: Callable[[], Any], generators: Generators) -> Callable[[], None]:
        """Capture a function without running its operations; return a function that replays them on the same memory.

        Raises:
            Exception: of various types, if an operation cannot be captured; state is unchanged.
        """
        graph, every = torch.cuda.CUDAGraph(), [g for g in generators if g.device.type == "cuda"]
        for generator in every:
            graph.register_generator_state(generator)
        torch.cuda.synchronize(self.device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                self._recover(every)
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                self._recover(every)
                raise
        return graph.replay

    def _recover(self, generators: list[torch.Generator]) -> None:
        """Restore generators and allocator after a failed capture."""
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index or 0, self._pool)  # pyright: ignore
        self._pool = None
        for generator in (*generators, torch.cuda.default_generators[self.device.index or 0]):
            generator.graphsafe_set_state(generator.clone_state())
        torch.cuda.synchronize(self.device)

    @contextmanager
    def waits(self) -> Iterator[list[str]]:
        """Yield a list that, after the block, has the operations inside that synchronized with the host."""
        found, before = list[str](), torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for one in said:
            if "synchronizing CUDA operation" in str(one.message):
                found.append(f"the host waits for the device at {one.filename}:{one.lineno}")
            elif "Synchronization debug mode" not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
