"""Tells a tracer when a backward pass or an optimizer step begins and ends.

Responsible for the places in torch that every framework passes; adapters give finer names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.autograd.graph
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from prism_sdk.runtime.oncuda.values import late_value
from prism_sdk.runtime.tracer import Tracer


def follow_training(
    tracer: Tracer, is_active: Callable[[], bool], at_boundary: Callable[[int], None] | None = None
) -> None:
    """Install the hooks for the life of the process; they do nothing while `is_active()` is False (forked workers).

    `at_boundary(step)` is called where an optimizer has ended a step, with the number of the one that begins.
    """
    depth = 0

    def make_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        # one function object for each name it is bound to: dynamo refuses two torch names that share one
        def engine_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            # a checkpoint's recomputation runs a backward inside a backward, and a compiler one to see what it does
            if depth or not is_active() or _is_traced():
                return original(t_outputs, *args, **kwargs)
            depth += 1
            tracer.backward_begins(_losses(t_outputs))
            try:
                return original(t_outputs, *args, **kwargs)
            finally:
                depth -= 1
                tracer.backward_ends()

        return engine_run_backward

    graph = torch.autograd.graph
    graph._engine_run_backward = make_wrapper(graph._engine_run_backward)
    autograd: Any = torch.autograd
    autograd._engine_run_backward = make_wrapper(autograd._engine_run_backward)

    run_backward = torch._C._ImperativeEngine.run_backward
    asked = make_wrapper(lambda _, engine, *args, **kwargs: run_backward(engine, *args, **kwargs))

    class Engine(torch._C._ImperativeEngine):
        """For those who ask the engine itself, as Megatron does once it has freed the outputs of a stage."""

        def run_backward(self, tensors: Any, grad_tensors: Any = (), *args: Any, **kwargs: Any) -> Any:
            whole = [one for one, gradient in zip(tensors, grad_tensors, strict=False) if _fits(one, gradient)]
            return asked(whole, self, tensors, grad_tensors, *args, **kwargs)

    autograd.Variable._execution_engine = Engine()

    def before(*_: Any) -> None:
        if is_active():
            tracer.optimizer_begins()

    def after(*_: Any) -> None:
        if is_active():
            tracer.optimizer_ends()
            if at_boundary is not None:
                at_boundary(tracer.next_step)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _is_traced() -> bool:
    """Whether what runs only becomes a graph."""
    keys = torch._C._TorchDispatchModeKey
    mode = torch._C._get_dispatch_mode
    return mode(keys.PROXY) is not None or mode(keys.FUNCTIONAL) is not None


def _fits(root: Any, gradient: Any) -> bool:
    """Whether a root still has its value: of one that was freed a single element is left, and nothing stands in it."""
    if gradient is None or not isinstance(root, torch.Tensor):  # an edge of the graph has no value anyway
        return True
    return bool(gradient.numel() == root.numel())


def _is_inference_of_shapes() -> bool:
    """Whether this backward is torch.distributed.pipelining's own, over uninitialised tensors, to find out shapes."""
    frame: FrameType | None = sys._getframe(3)
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_name == "_backward_metadata_inference":
            return True
        frame = frame.f_back
    return False


def _losses(roots: Any) -> list[float | Callable[[], float]]:
    """Values of the scalar roots. On an accelerator the value is fetched later, so that no synchronisation is added."""
    values: list[float | Callable[[], float]] = []
    if _is_inference_of_shapes():
        return values
    for root in roots:
        if type(root) is torch.Tensor and root.numel() == 1 and root.is_floating_point():
            if root.is_cuda and torch.cuda.is_current_stream_capturing():
                continue  # has no value; a copy to the host would become part of the graph
            kept = root.detach()
            values.append(kept.item() if kept.device.type == "cpu" else late_value(kept))
    return values
