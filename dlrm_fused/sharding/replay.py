"""Small lookups and exchanges, replayed as two CUDA graphs, forward and backward.

The operator launches some twenty kernels, copies and waits between streams. Where a batch has few indices, to launch these
takes the host several times as long as the GPU needs to run them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dlrm_fused.cuda_graphs import RUNS_BEFORE_CAPTURE, CapturedCall, Captures, Generation
from dlrm_fused.errors import UsageError
from dlrm_fused.ops.embedding_all_to_all.op import embedding_all_to_all, update_tables
from dlrm_fused.ops.embedding_all_to_all.prefetch_sort import PrefetchedSort
from dlrm_fused.ops.embedding_all_to_all.workspace import EmbeddingWorkspace
from dlrm_fused.symmetric import abort_peers_on_error
from dlrm_fused.symmetric.launches import Remembered

# A training loop has batches of one size, and perhaps a last one of another. Each capture keeps memory for all that a step
# reads and makes.
_MOST_CAPTURES = 2
# Most indices of a rank: the kernels of more take longer than their launches.
_MOST_INDICES = 2**22
# Most bytes of an output, which a replay copies, and of its gradient.
_MOST_BYTES = 2**26
# Calls with the same batch sizes after which hosts agree: each rank has then seen whether its shapes come again.
_CALLS_BEFORE_AGREEMENT = RUNS_BEFORE_CAPTURE + 4

# Batch sizes and factor of gradients, and the shapes of this rank's batch.
_Key = tuple[Any, ...]
# Maps indices and offsets of the lookups, as they are given, to those that the operator reads.
Prepare = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Sequence[Tensor], Sequence[Tensor]]]


class ReplayedEmbeddingAllToAll:
    """:func:`embedding_all_to_all` for a training loop: from the fourth step of some shapes on, it is replayed.

    It is run as it is while an earlier output waits for its backward pass, and for more shapes than two.

    Args:
        workspace: with tables attached. When others are, with other numbers of the optimizer or at other addresses, all is
            captured again.
        prepare: launches the same kernels whatever the values are, and does not wait for the device; is captured, too.
        fixed_shapes: the shapes of each rank's batches follow from the batch sizes. Between hosts others are not replayed, as
            are those with row-wise tables, for which the ids decide the shapes.
    """

    def __init__(
        self,
        workspace: EmbeddingWorkspace,
        prepare: Prepare = lambda indices, offsets: (indices, offsets),
        *,
        fixed_shapes: bool = False,
    ) -> None:
        self._workspace = workspace
        if len(set(workspace.group.gather(lambda: fixed_shapes))) > 1:
            raise UsageError(f"{workspace.name}: fixed_shapes={fixed_shapes}, other ranks have another; give all the same")
        row_wise = any(lookup.row_wise for of_rank in workspace.layout.lookups for lookup in of_rank)
        self._has_fixed_shapes = fixed_shapes and not row_wise
        self._prepare = prepare
        self._tables: object = None  # the tables whose steps are counted
        self._captures: Captures[_Capture] = Captures(_MOST_CAPTURES)
        self._steps: Remembered[int] = Remembered()
        self._calls: Remembered[int] = Remembered()  # by what all ranks know alike, as are the keys of agreements
        self._agreed: Remembered[_Key | None] = Remembered()  # this rank's shapes that are replayed

    def takes(
        self,
        is_covered: bool,
        indices: Sequence[Tensor],
        offsets: Sequence[Tensor],
        batch_sizes: Sequence[int],
        gradient_scale: float | None,
    ) -> bool:
        """Return whether a batch is to be run by this, and not by the operator. Collective.

        Between hosts a call is captured and replayed on all ranks or on none, as NCCL wants it (its user guide, "Using NCCL
        with CUDA Graphs"). Not all ranks may be covered, so they agree, once for the batch sizes.

        Args:
            is_covered: whether this rank's batch is, by :meth:`covers`, and has no weights.

        Raises:
            UsageError: with ``fixed_shapes``, once ranks have agreed to replay: for a batch of another shape, or with weights,
                or after a change of the tables or of the optimizer's numbers but the learning rate.
        """
        workspace, group = self._workspace, self._workspace.group
        if not group.hosts.are_many or not group.calls_can_be_captured or not torch.is_grad_enabled() or _is_traced():
            return is_covered
        if not self._has_fixed_shapes:
            return False
        call, key = (tuple(batch_sizes), gradient_scale), _key(indices, offsets, batch_sizes, gradient_scale)
        self._calls[call] = self._calls.get(call, 0) + 1
        if call not in self._agreed:
            if self._calls[call] < _CALLS_BEFORE_AGREEMENT:
                return is_covered
            is_known = self._tables is workspace.tables and self._steps.get(key, 0) > RUNS_BEFORE_CAPTURE
            workspace.forward_channel.assemble()
            self._agreed[call] = key if all(group.gather(lambda: is_covered and is_known)) else None
        agreed = self._agreed[call]
        broken = ""
        if agreed is not None and (key != agreed or not is_covered):
            broken = f"a batch of {list(batch_sizes)} samples for the ranks has weights, or other ids than those before"
        elif agreed is not None and self._tables is not workspace.tables:
            broken = "tables, or numbers of their optimizer, have changed"
        if broken:
            with abort_peers_on_error(workspace.forward_channel):
                raise UsageError(f"{workspace.name}: fixed_shapes=True, but {broken}; shard the model without fixed_shapes")
        return agreed is not None

    def covers(self, indices: Sequence[Tensor], batch_sizes: Sequence[int]) -> bool:
        """Return whether replays of a batch do the same as the operator, and are faster.

        They are not without gradients, with ``check_indices`` or stochastic rounding, with messages by TCP, for many indices or
        large outputs, on the CPU, and within a capture of the caller's.
        """
        workspace = self._workspace
        output_bytes = batch_sizes[workspace.rank] * workspace.layout.columns * workspace.output_dtype.itemsize
        return (
            workspace.group.calls_can_be_captured
            and workspace.has_memory
            and torch.is_grad_enabled()
            and not workspace.check_indices
            and not any(tables.rounds_stochastically for tables in workspace.tables)
            and sum(map(Tensor.numel, indices)) <= _MOST_INDICES
            and output_bytes <= _MOST_BYTES
            and not _is_traced()
        )

    def __call__(
        self,
        indices: Sequence[Tensor],
        offsets: Sequence[Tensor],
        batch_sizes: Sequence[int],
        gradient_scale: float | None = None,
    ) -> Tensor:
        """Run :func:`embedding_all_to_all` of a batch that is covered, replayed where it can be. Collective."""
        workspace, batch = self._workspace, _Batch(indices, offsets, list(batch_sizes), gradient_scale)
        # All ranks get other outputs when they get more memory, for larger batches.
        self._captures.renew(Generation((), (workspace.outputs, workspace.tables)))
        if self._tables is not workspace.tables:
            self._steps.clear()  # numbers that change at every step are not worth a capture
            self._tables = workspace.tables
        key = _key(indices, offsets, batch_sizes, gradient_scale)
        if key not in self._captures and self._captures.has_room:
            agreed = self._agreed.get((tuple(batch_sizes), gradient_scale)) if workspace.group.hosts.are_many else key
            if agreed is None or self._steps.get(key, 0) <= RUNS_BEFORE_CAPTURE:
                return self._rehearse(key, batch)
            if key == agreed:
                self._captures[key] = _Capture(workspace, self._prepare, batch)
        capture = self._captures.get(key)
        if capture is None or capture.is_lent:
            return _run(workspace, self._prepare, batch)
        return _Replay.apply(workspace.anchor, capture, *indices, *offsets)

    def _rehearse(self, key: tuple[Any, ...], batch: _Batch) -> Tensor:
        """Run as it is; if the shapes come again, with copies, as a capture will: Triton compiles kernels by the alignment and
        the strides of the memory that they read."""
        comes_again = self._steps.get(key, 0) > 0
        if comes_again:
            indices, offsets = ([tensor.clone() for tensor in tensors] for tensors in (batch.indices, batch.offsets))
            batch = batch._replace(indices=indices, offsets=offsets)

        def count(gradient: Tensor) -> Tensor | None:
            self._steps[key] = self._steps.get(key, 0) + 1  # not before: only then it is known what the backward pass needs
            return gradient.clone(memory_format=torch.contiguous_format) if comes_again else None

        output = _run(self._workspace, self._prepare, batch)
        output.register_hook(count)
        return output


def _is_traced() -> bool:
    """Return whether a compiler, or a capture of the caller's, takes the call."""
    return torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()


def _key(
    indices: Sequence[Tensor], offsets: Sequence[Tensor], batch_sizes: Sequence[int], gradient_scale: float | None
) -> _Key:
    return (tuple(batch_sizes), gradient_scale, *((t.shape, t.dtype) for t in (*indices, *offsets)))


class _Batch(NamedTuple):
    """Arguments of :func:`embedding_all_to_all`, with indices and offsets as they are given."""

    indices: Sequence[Tensor]
    offsets: Sequence[Tensor]
    batch_sizes: list[int]
    gradient_scale: float | None


def _run(workspace: EmbeddingWorkspace, prepare: Prepare, batch: _Batch) -> Tensor:
    inputs = prepare(batch.indices, batch.offsets)
    return embedding_all_to_all(workspace, *inputs, (), batch.batch_sizes, batch.gradient_scale)


class _Capture:
    """The two graphs for inputs of some shapes; they read and update ``tables``."""

    def __init__(self, workspace: EmbeddingWorkspace, prepare: Prepare, batch: _Batch) -> None:
        self.workspace, self.prepare = workspace, prepare
        self.batch_sizes, self.gradient_scale = batch.batch_sizes, batch.gradient_scale
        self._outputs, self.tables = workspace.outputs, workspace.tables
        self._graphs = graphs = CapturedCall(workspace.device, (*batch.indices, *batch.offsets))
        self._lent: weakref.ref[_Loan] | None = None
        copies, count = cast(list[Tensor], graphs.copies), len(batch.indices)
        self._plan = workspace.plan(batch.batch_sizes)
        copied = batch._replace(indices=copies[:count], offsets=copies[count:])
        with workspace.captures_until_growth(), workspace.other_anchor() as anchor, graphs.on_its_stream():
            (output,) = graphs.record_forward(lambda: (_run(workspace, prepare, copied),))
            graphs.record_backward(lambda gradient: torch.autograd.grad(output, anchor, gradient))

    @property
    def is_of_today(self) -> bool:
        """Whether the workspace still has the memory that was captured, as all ranks know."""
        return self.workspace.has_memory and self._outputs is self.workspace.outputs

    @property
    def is_lent(self) -> bool:
        """Whether a backward pass is still to read what its forward pass has left in the graphs' memory."""
        return self._lent is not None and self._lent() is not None

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, _Loan]:
        """Replay the forward pass; return the output, and the loan that the caller keeps until the backward pass."""
        self.workspace.forward_channel.begin_call()
        (output,) = self._graphs.forward(inputs)
        self.workspace.watch()
        loan = _Loan()
        self._lent = weakref.ref(loan)
        return output, loan

    def backward(self, gradient: Tensor) -> None:
        """Replay the backward pass, which updates the tables."""
        self.workspace.begin_call()
        for tables in self.tables:
            if tables.on_device.rate is not None:
                tables.on_device.rate.refresh()
        self._graphs.backward(gradient)
        self.workspace.watch()


class _Loan:
    """Marks the graphs' memory as in use, as long as it lives."""


class _Replay(torch.autograd.Function):
    """Replays a capture; arguments are the anchor, the capture, the indices and the offsets of its lookups."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, capture: _Capture, *inputs: Tensor) -> Tensor:
        output, ctx.loan = capture.forward(inputs)
        ctx.capture = capture
        ctx.save_for_backward(*inputs)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        capture, inputs = ctx.capture, ctx.saved_tensors
        if ctx.loan is not None and capture.is_of_today:
            capture.backward(gradient)
            ctx.loan = None
        else:  # once more for a graph that is kept, whose memory may have been used since; or in the memory of larger batches
            count = len(inputs) // 2
            indices, offsets = capture.prepare(inputs[:count], inputs[count:])
            order = PrefetchedSort(capture.tables, indices, offsets, None)
            call = capture.batch_sizes, capture.workspace.handle, capture.gradient_scale
            update_tables(gradient, indices, offsets, [], *call, order)
        return None, None, *(None for _ in inputs)
