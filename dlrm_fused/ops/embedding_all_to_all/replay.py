"""Small lookups and exchanges, replayed as two CUDA graphs, forward and backward.

The operator launches some twenty kernels, copies and waits between streams. Where a batch has few indices, to launch these
takes the host several times as long as the GPU needs to run them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.ops.embedding_all_to_all.op import embedding_all_to_all
from dlrm_fused.ops.embedding_all_to_all.prefetch_sort import FEW_INDICES
from dlrm_fused.ops.embedding_all_to_all.workspace import EmbeddingWorkspace

# What is compiled, tuned or loaded at the first steps cannot be captured.
_STEPS_BEFORE = 2
# A training loop has batches of one size, and perhaps a last one of another. Each capture keeps an output's memory.
_MOST_CAPTURES = 2

_Key = tuple[Any, ...]


class ReplayedEmbeddingAllToAll:
    """:func:`embedding_all_to_all` for a training loop: from the third step of some shapes on, it is replayed.

    It is run as it is where replays would not do the same or would not be faster: without gradients, with weights of samples,
    ``check_indices`` or stochastic rounding, for many indices, on the CPU, within a capture of the caller's, and while an
    earlier output waits for its backward pass.

    Args:
        workspace: with tables attached, which stay.
    """

    def __init__(self, workspace: EmbeddingWorkspace) -> None:
        self._workspace = workspace
        self._outputs: object = None  # the memory that was captured
        self._captures: dict[_Key, _Capture] = {}
        self._steps: Counter[_Key] = Counter()

    def __call__(
        self,
        indices: Sequence[Tensor],
        offsets: Sequence[Tensor],
        per_sample_weights: Sequence[Tensor],
        batch_sizes: Sequence[int],
    ) -> Tensor:
        """As :func:`embedding_all_to_all`. Collective."""
        workspace = self._workspace
        if per_sample_weights or not self._can_be_captured(indices):
            return embedding_all_to_all(workspace, indices, offsets, per_sample_weights, batch_sizes)
        if self._outputs is not workspace.outputs:  # all ranks have got more memory, for larger batches
            self._captures.clear()
            self._outputs = workspace.outputs
        key = (tuple(batch_sizes), workspace.gradient_scale, *((t.shape, t.dtype) for t in (*indices, *offsets)))
        capture = self._captures.get(key)
        if capture is None and self._steps[key] >= _STEPS_BEFORE and len(self._captures) < _MOST_CAPTURES:
            capture = self._captures[key] = _Capture(workspace, indices, offsets, batch_sizes)
        if capture is not None and not capture.is_lent:
            return _Replay.apply(workspace.anchor, capture, *indices, *offsets)
        output = embedding_all_to_all(workspace, indices, offsets, (), batch_sizes)
        if capture is None and len(self._captures) < _MOST_CAPTURES:
            self._count_step(key, output)
        return output

    def _can_be_captured(self, indices: Sequence[Tensor]) -> bool:
        workspace = self._workspace
        return (
            workspace.device.type == "cuda"
            and workspace.has_memory
            and torch.is_grad_enabled()
            and not workspace.check_indices
            and not any(tables.stochastic_rounding for tables in workspace.tables)
            and sum(map(Tensor.numel, indices)) <= FEW_INDICES
            and not torch.compiler.is_compiling()
            and not torch.cuda.is_current_stream_capturing()
        )

    def _count_step(self, key: _Key, output: Tensor) -> None:
        if len(self._steps) > 1000:  # each batch has another number of indices
            self._steps.clear()

        def count(_: Tensor) -> None:
            self._steps[key] += 1

        output.register_hook(count)  # which kernels the backward pass needs is known only then


class _Capture:
    """The two graphs for inputs of some shapes, and the memory that they read and write."""

    def __init__(
        self, workspace: EmbeddingWorkspace, indices: Sequence[Tensor], offsets: Sequence[Tensor], batch_sizes: Sequence[int]
    ) -> None:
        self.workspace, self.batch_sizes = workspace, list(batch_sizes)
        self.inputs = [tensor.clone() for tensor in (*indices, *offsets)]
        self._lent: weakref.ref[_Loan] | None = None
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(workspace.device)
        # Threads of NCCL and of readers go on meanwhile, and may make calls that a capture of all threads would forbid.
        settings: dict[str, Any] = {
            "pool": torch.cuda.graph_pool_handle(), "stream": stream, "capture_error_mode": "thread_local"
        }  # fmt: skip
        count = len(indices)
        stream.wait_stream(torch.cuda.current_stream(workspace.device))
        with torch.cuda.graph(self._forward, **settings):
            output = embedding_all_to_all(workspace, self.inputs[:count], self.inputs[count:], (), batch_sizes)
        self.gradient = torch.empty_like(output)
        with torch.cuda.graph(self._backward, **settings):
            torch.autograd.grad(output, workspace.anchor, self.gradient)
        torch.cuda.current_stream(workspace.device).wait_stream(stream)
        self._output = output.detach()

    @property
    def is_lent(self) -> bool:
        """Whether a backward pass is still to read what its forward pass has left in the graphs' memory."""
        return self._lent is not None and self._lent() is not None

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, _Loan]:
        """The output, and what is to be kept until the backward pass."""
        self.workspace.forward_channel.raise_fault()
        if inputs:
            torch._foreach_copy_(self.inputs, list(inputs))
        self._forward.replay()
        loan = _Loan()
        self._lent = weakref.ref(loan)
        return self._output.clone(), loan

    def backward(self, gradient: Tensor) -> None:
        self.workspace.raise_fault()
        self.gradient.copy_(gradient)
        for tables in self.workspace.tables:
            if tables.on_device.rate is not None:
                tables.on_device.rate.refresh()
        self._backward.replay()


class _Loan:
    """The graphs' memory is in use as long as this lives."""


class _Replay(torch.autograd.Function):
    """Arguments: the anchor, a capture, the indices and the offsets of its lookups."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, capture: _Capture, *inputs: Tensor) -> Tensor:
        output, ctx.loan = capture.forward(inputs)
        ctx.capture = capture
        ctx.save_for_backward(*inputs)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        capture, inputs = ctx.capture, ctx.saved_tensors
        if ctx.loan is not None:
            capture.backward(gradient)
            ctx.loan = None
        else:  # a graph that is kept updates the tables once more; another forward pass may have used the memory since
            count = len(inputs) // 2
            torch.ops.dlrm_fused.embedding_all_to_all_backward(
                gradient, inputs[:count], inputs[count:], [], capture.batch_sizes, capture.workspace.handle
            )
        return None, None, *(None for _ in inputs)
