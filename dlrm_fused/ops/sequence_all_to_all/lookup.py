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
from dlrm_fused.ops.sequence_all_to_all.op import check_call, receive_gradient, send
from dlrm_fused.ops.sequence_all_to_all.workspace import SequenceWorkspace


def sequence_lookup_all_to_all(
    workspace: SequenceWorkspace,
    indices: Tensor,
    order: Tensor,
    counts: Sequence[Sequence[int]],
    gradient_divisor: float = 1.0,
) -> Tensor:
    """Look up rows of this rank's tables, and deliver them to the ranks that asked for them. Collective.

    Differentiable: the backward pass applies the optimizer of the workspace's tables.

    Args:
        workspace: with tables attached, but on a rank that has none.
        indices: int64 [n]: for each id that this rank was asked for, in any order, its row, counted on over all tables.
        order, counts, gradient_divisor: as of :func:`~dlrm_fused.ops.sequence_all_to_all.sequence_all_to_all`.

    Returns, Raises:
        As :func:`~dlrm_fused.ops.sequence_all_to_all.sequence_all_to_all`.
    """
    flat = [count for of_rank in counts for count in of_rank]
    output, _ = _sequence_lookup(workspace.anchor, indices, order, flat, float(gradient_divisor), workspace.handle)
    return output


_ARGUMENTS = "Tensor indices, Tensor order, int[] counts, float gradient_divisor, int handle"
# The second result is as that of sequence_all_to_all. The backward pass updates the tables of the workspace.
torch.library.define("dlrm_fused::sequence_lookup_all_to_all", f"(Tensor anchor, {_ARGUMENTS}) -> (Tensor, Tensor)")
torch.library.define(
    "dlrm_fused::sequence_lookup_all_to_all_backward", f"(Tensor gradient, Tensor destinations, {_ARGUMENTS}) -> Tensor"
)


def _look_up(
    anchor: Tensor, indices: Tensor, order: Tensor, flat: list[int], gradient_divisor: float, handle: int
) -> tuple[Tensor, Tensor]:
    workspace = SequenceWorkspace.of(handle)
    workspace.begin_call()
    with workspace.checks(flat):
        counts = check_call(workspace, order, flat, gradient_divisor)
        check_tensor(workspace, "indices", indices, torch.int64, (counts.sent[-1],))
        if workspace.table is None and len(indices):
            raise UsageError(f"{workspace.name}: {len(indices)} indices, but no tables; attach them first")
    if workspace.table is None:
        source = torch.empty(0, workspace.width, dtype=workspace.forward_wire, device=workspace.device)
    else:
        begin, rows = workspace.table.offsets[0], workspace.table.total_rows
        source = workspace.table.weights[begin : begin + rows * workspace.width].view(rows, workspace.width)
    return send(workspace, counts, order, source, indices)


def _update(
    gradient: Tensor,
    destinations: Tensor,
    indices: Tensor,
    order: Tensor,
    flat: list[int],
    gradient_divisor: float,
    handle: int,
) -> Tensor:
    workspace = SequenceWorkspace.of(handle)
    workspace.begin_call()
    arrived = receive_gradient(workspace, gradient, destinations, order, flat)
    table = workspace.table
    if table is not None and table.optimizer is not None:
        # Bags of one, so that each row of the gradient belongs to one index.
        offsets = torch.arange(len(indices) + 1, device=indices.device)
        in_order = sort_lookup(table, indices, offsets)
        # Gradients that a peer has failed to send must not reach the tables.
        apply_gradients(
            table, in_order, arrived, indices, offsets, None, 1 / gradient_divisor, cancelled=workspace.channel.fault
        )
    return torch.empty(0, device=workspace.device)


torch.library.impl("dlrm_fused::sequence_lookup_all_to_all_backward", ["cpu", "cuda"], _update)


@torch.library.register_fake("dlrm_fused::sequence_lookup_all_to_all")
def _fake_forward(
    anchor: Tensor, indices: Tensor, order: Tensor, flat: list[int], _: float, handle: int
) -> tuple[Tensor, Tensor]:
    workspace = SequenceWorkspace.of(handle)
    count = sum(flat[workspace.rank * workspace.world_size : (workspace.rank + 1) * workspace.world_size])
    output = anchor.new_empty((count, workspace.width), dtype=workspace.output_dtype)
    return output, indices.new_empty(count, dtype=torch.int32)


@torch.library.register_fake("dlrm_fused::sequence_lookup_all_to_all_backward")
def _fake_backward(gradient: Tensor, *_: Any) -> Tensor:
    return gradient.new_empty(0, dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, indices, order, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], indices, order)


def _differentiate(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    assert gradient is not None, "the destinations have no gradient"
    backward = torch.ops.dlrm_fused.sequence_lookup_all_to_all_backward
    return backward(gradient, *ctx.saved_tensors, *ctx.rest), None, None, None, None, None


_sequence_lookup = Operator("dlrm_fused::sequence_lookup_all_to_all", _look_up, _differentiate, _save_for_backward)
