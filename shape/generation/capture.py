"""CUDA graphs: what none can hold is found out before a capture, and a capture that fails leaves nothing behind."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shape.errors import UnsupportedTarget
from shape.target.inference import on_device
from shape.target.loading import first_line
from shape.target.model import Target

_WARM_UPS = 3  # runs before a capture, as torch asks for: libraries allocate at their first
_ANSWERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # that depend on what tensors hold
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)


class Waits(RuntimeError):
    """An operation that waits for the device, or brings it something from the host."""


class NoWaiting(TorchDispatchMode):
    """Within it operations raise ``Waits`` that no CUDA graph can hold, on whatever device they are."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if _waits(operation, args, kwargs or {}):
            raise Waits(f"{operation.name()} in {_place()}")
        return operation(*args, **(kwargs or {}))


def _waits(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if operation in _INDEXING:
        masked = any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return masked and not (len(args) > 2 and args[2].numel() == 1)  # one number for all is filled in
    if operation in _COPIES:
        ends = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if kwargs.get("device") is not None:
            ends.add(torch.device(kwargs["device"]).type)
        return len(ends) > 1
    return bool(_ANSWERS.intersection(operation.tags)) and kwargs.get("output_size") is None


def _place() -> str:
    """File and line that asked, of the first frame that is neither torch's nor here."""
    own = os.path.dirname(torch.__file__), __file__
    for frame, line in walk_stack(sys._getframe(1)):
        if not frame.f_code.co_filename.startswith(own):
            return f"{os.path.basename(frame.f_code.co_filename)}, line {line}"
    return "torch"


def refuse_waiting(run: Callable[[], None], target: Target) -> None:
    """Run something that is to be captured, as it is.

    Raises:
        UnsupportedTarget: something in it waits for the host.
    """
    try:
        with NoWaiting():
            run()
    except Waits as error:
        raise UnsupportedTarget(
            f"a step of target {target.name} waits for the host ({error}), which no CUDA graph can hold; leave graphs "
            "off, or load a mixture of experts with experts_implementation='grouped_mm'"
        ) from error


class Pool:
    """Where graphs are captured that never run side by side: they share memory, and what libraries keep for a stream.

    Args:
        device: of CUDA, which need not be the current one.
    """

    def __init__(self, device: torch.device) -> None:
        with on_device(device):
            self.handle, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    @property
    def bytes(self) -> int:
        """Memory that is taken for the graphs' own tensors."""
        return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(self.handle))


@torch.no_grad()
def captured(run: Callable[[], None], target: Target, pool: Pool | None = None) -> Callable[[], None]:
    """A CUDA graph of the kernels that `run` launches, as a function; off CUDA `run` itself.

    Other threads may use the device meanwhile, but not capture.

    Args:
        pool: None is one for this graph alone.

    Raises:
        UnsupportedTarget: something in it cannot be captured.
        torch.OutOfMemoryError: there is no memory for it.
    """
    if target.device.type != "cuda":
        return run
    pool = pool or Pool(target.device)
    with on_device(target.device):
        outside = torch.cuda.current_stream()
        pool.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(pool.stream):
                for _ in range(_WARM_UPS):
                    run()
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                graph = torch.cuda.CUDAGraph()
                with _recording(graph, pool.handle):
                    run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UnsupportedTarget(
                f"target {target.name} cannot be captured as a CUDA graph ({first_line(error)}); leave graphs off"
            ) from error
        outside.wait_stream(pool.stream)
    return graph.replay


@contextmanager
def _recording(graph: "torch.cuda.CUDAGraph", handle: Any) -> Iterator[None]:
    """``torch.cuda.graph``, which leaves stream and allocator as they are while capturing where that fails."""
    collects = gc.isenabled()
    gc.disable()  # it might end an answer that was left half-way, which waits for its steps: no capture may do that
    try:
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            # What went wrong comes before what the end of the capture says about it.
            with suppress(RuntimeError):
                _end(graph, handle)
            raise
        _end(graph, handle)
    finally:
        if collects:
            gc.enable()


def _end(graph: "torch.cuda.CUDAGraph", handle: Any) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        device = torch.cuda.current_device()
        with suppress(RuntimeError, AttributeError):  # by names of torch's own, which may change
            torch._C._cuda_endAllocateToPool(device, handle)
            torch._C._cuda_releasePool(device, handle)
        raise
