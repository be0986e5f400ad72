"""The operator that looks rows up as well, ``torch.ops.dlrm_fused.sequence_lookup_all_to_all``.

One kernel reads a row of a table and stores it in its place at the rank that asked for it. Backward, the tables' optimizer is
applied to the gradients that arrive.

Kernels need a GPU, or Triton's interpreter (``TRITON_INTERPRET=1``) on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.dispatch import Operator
from dlrm_fused.ops.common.workspace import check_tensor
from dlrm_fused.ops.embedding_all_to_all.update import apply_gradients, sort_lookup
from dlrm_fused.ops.sequence_all_to_all.op import (
    ARGUMENTS,
    SequenceCall,
    differentiate_by,
    numbers_in,
    receive_gradient,
    save_for_backward,
    send,
)
from dlrm_fused.ops.sequence_all_to_all.workspace import Counts, SequenceWorkspace


def sequence_lookup_all_to_all(
    workspace: SequenceWorkspace,
    indices: Tensor,
    offsets: Tensor,
    batch_sizes: Sequence[int],
    counts: Counts | Sequence[Sequence[int]],
    gradient_divisor: float = 1.0,
    places: Tensor | None = None,
) -> Tensor:
    """Look up rows of this rank's tables, and deliver them to the ranks that asked for them. Collective.

    Differentiable: the backward pass applies the optimizer of the workspace's tables.

    Args:
        workspace: with tables attached, but on a rank that has none.
        indices: int32 or int64 [n]: the ids that this rank was asked for, rows of their feature's table, in the order of
            ``offsets``.
        offsets, batch_sizes, counts, gradient_divisor, places: as of
            :func:`~dlrm_fused.ops.sequence_all_to_all.sequence_all_to_all`.

    Returns, Raises:
        As :func:`~dlrm_fused.ops.sequence_all_to_all.sequence_all_to_all`.
    """
    call = places, list(batch_sizes), numbers_in(workspace, counts), float(gradient_divisor), workspace.handle
    output, *_ = _sequence_lookup(workspace.anchor, indices, offsets, *call)
    return output


# The second result is as that of sequence_all_to_all; the third has the rows that were looked up, counted on over all tables.
# The backward pass updates the tables of the workspace.
torch.library.define(
    "dlrm_fused::sequence_lookup_all_to_all", f"(Tensor anchor, Tensor indices, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)
torch.library.define(
    "dlrm_fused::sequence_lookup_all_to_all_backward",
    f"(Tensor gradient, Tensor destinations, Tensor rows, {ARGUMENTS}) -> Tensor",
)


def _look_up(anchor: Tensor, indices: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = SequenceCall.begin(*arguments)
    workspace, counts, offsets = call.workspace, call.counts, call.offsets
    with workspace.checks(counts):
        call.check()
        dtype = torch.int32 if indices.dtype == torch.int32 else torch.int64
        check_tensor(workspace, "indices", indices, dtype, (counts.sent_bounds[-1],))
        if workspace.table is None and len(indices):
            raise UsageError(f"{workspace.name}: {len(indices)} indices, but no tables; attach them first")
        features = len(workspace.feature_first_rows)
        if len(indices) and offsets.numel() - 1 != features * sum(call.batch_sizes):
            raise UsageError(f"{workspace.name}: {offsets.numel()} offsets; needed: those of {features} features, and the end")
        placed = call.placed(indices, workspace.feature_first_rows)
    assert placed.rows is not None
    if workspace.table is None:
        source = torch.empty(0, workspace.width, dtype=workspace.forward_wire, device=workspace.device)
    else:
        begin, of_tables = workspace.table.offsets[0], workspace.table.total_rows
        source = workspace.table.weights[begin : begin + of_tables * workspace.width].view(of_tables, workspace.width)
    return *send(call, source, placed), placed.rows


def _update(gradient: Tensor, destinations: Tensor, rows: Tensor, *arguments: Any) -> Tensor:
    call = SequenceCall.begin(*arguments)
    workspace = call.workspace
    arrived = receive_gradient(call, gradient, destinations)
    table = workspace.table
    if table is not None and table.optimizer is not None:
        # Bags of one, so that each row of the gradient belongs to one index.
        of_rows = torch.arange(len(rows) + 1, device=rows.device)
        in_order = sort_lookup(table, rows, of_rows)
        # Gradients that a peer has failed to send must not reach the tables.
        apply_gradients(
            table, in_order, arrived, rows, of_rows, None, 1 / call.gradient_divisor, cancelled=workspace.channel.fault
        )
    return torch.empty(0, device=workspace.device)


torch.library.impl("dlrm_fused::sequence_lookup_all_to_all_backward", ["cpu", "cuda"], _update)


@torch.library.register_fake("dlrm_fused::sequence_lookup_all_to_all")
def _fake_forward(anchor: Tensor, indices: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, numbers, _, handle = call
    workspace, count = SequenceWorkspace.of(handle), sum(Counts.of(numbers).asked)
    output = anchor.new_empty((count, workspace.width), dtype=workspace.output_dtype)
    return output, indices.new_empty(count, dtype=torch.int32), indices.new_empty(len(indices), dtype=torch.int64)


@torch.library.register_fake("dlrm_fused::sequence_lookup_all_to_all_backward")
def _fake_backward(gradient: Tensor, *_: Any) -> Tensor:
    return gradient.new_empty(0, dtype=torch.float32)


_differentiate = differentiate_by("sequence_lookup_all_to_all_backward")
_sequence_lookup = Operator("dlrm_fused::sequence_lookup_all_to_all", _look_up, _differentiate, save_for_backward)
