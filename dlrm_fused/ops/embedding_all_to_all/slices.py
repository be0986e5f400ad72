"""What goes between hosts: slices of pooled embeddings, sums of partial results, and gradients.

A rank packs what its lookups have for a rank of another host into one matrix, whose rows are that rank's bags. Row-wise tables
cross between two hosts once: the ranks of a host add up their partial results before, and a gradient is spread by its receiver
to the ranks of its host. Who does so for a rank of another host is its counterpart,
:meth:`~dlrm_fused.symmetric.hosts.Hosts.counterpart`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dlrm_fused.ops.common.dtypes import within_range
from dlrm_fused.ops.common.meeting import meet
from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.ops.embedding_all_to_all.plan import BatchPlan, Tile
from dlrm_fused.ops.embedding_all_to_all.put_tiles import put_gradient, spread_slice
from dlrm_fused.ops.embedding_all_to_all.workspace import EmbeddingWorkspace
from dlrm_fused.symmetric import SymmetricMemory
from dlrm_fused.symmetric.channel import ChannelExchange


class PooledSlices:
    """One forward pass, between hosts. Collective, in the order of the methods; on GPUs nothing waits for the device.

    Without :meth:`send`, the kernel that has looked up the slices has put them.
    """

    def __init__(self, workspace: EmbeddingWorkspace, plan: BatchPlan) -> None:
        self._workspace, self._plan = workspace, plan
        self._slices: ChannelExchange | None = None
        self._sums: ChannelExchange | None = None

    def send(self, sent: Mapping[int, Tensor]) -> None:
        """Begin to send this rank's slice for each rank of another host."""
        plan, workspace = self._plan, self._workspace
        received = {
            rank: torch.empty(plan.local_batch, plan.slice_width(rank), dtype=workspace.forward_wire, device=workspace.device)
            for rank in plan.hosts.remote
        }
        self._slices = workspace.forward_channel.exchange(sent, received, fingerprint=plan.fingerprint)

    def send_sums(self) -> None:
        """Add up what this host has for the ranks of other hosts that this one serves; once the epoch inside the host ended."""
        plan, workspace = self._plan, self._workspace
        if not workspace.layout.row_wise_columns:
            return
        staging = workspace.staging()
        sent = {rank: _sum(plan.host_parts_view(staging, rank)) for rank in plan.hosts.served}
        received = {rank: plan.host_sum_view(staging, rank) for rank in plan.hosts.counterparts()}
        self._sums = workspace.forward_channel.exchange(sent, received, fingerprint=plan.fingerprint)

    def receive(self, offset: int) -> None:
        """Receive from all other hosts.

        Args:
            offset: in bytes, of this rank's output in ``workspace.outputs``.
        """
        plan, workspace = self._plan, self._workspace
        memory, begin = (workspace.staging(), 0) if plan.is_staged else (workspace.outputs.memory, offset)
        if self._slices is None:
            assert workspace.pooled_puts is not None
            for rank, table in plan.pooled_spread_tables.items():
                window = ReceiveWindow(memory, workspace.forward_channel, begin, plan.fingerprint)
                width, wire = plan.slice_width(rank), workspace.forward_wire
                spread_slice(workspace.pooled_puts, rank, width, table, plan.local_batch, window, wire)
        else:
            output = plan.staged_view(memory) if plan.is_staged else plan.output_view(memory, offset)
            for rank, slice_ in self._slices.arrivals():
                for source, column, width in plan.slice_runs(rank):
                    output[:, column : column + width] = slice_[:, source : source + width]
        if self._sums is not None:
            for _ in self._sums.arrivals():
                pass  # where they belong
            self._sums.finish()
        if self._slices is not None:
            self._slices.finish()


def packed_slices(workspace: EmbeddingWorkspace, plan: BatchPlan, pooled: Sequence[Tensor]) -> dict[int, Tensor]:
    """By rank of another host, its slice of this rank's results.

    Args:
        pooled: [global batch, width] of each lookup.
    """
    own = [result for result, lookup in zip(pooled, workspace.own_lookups, strict=True) if not lookup.row_wise]
    width, wire = plan.slice_width(workspace.rank), workspace.forward_wire
    return {rank: _packed([result[plan.bags_of(rank)] for result in own], width, wire) for rank in plan.hosts.remote}


class GradientSlices:
    """One backward pass, between hosts. Collective, in the order of the methods; on GPUs nothing waits for the device."""

    def __init__(self, workspace: EmbeddingWorkspace, plan: BatchPlan, gradient: Tensor) -> None:
        """Send the output's gradient [local batch, columns] to ranks of other hosts."""
        self._workspace, self._plan = workspace, plan
        self._slices: ChannelExchange | None = None
        if workspace.gradient_puts is not None:
            window = ReceiveWindow(workspace.gradients, workspace.backward_channel, 0, plan.fingerprint)
            put_gradient(workspace.gradient_puts, gradient, plan, window, workspace.backward_wire)
        else:
            self._send(gradient)

    def _send(self, gradient: Tensor) -> None:
        plan, workspace = self._plan, self._workspace
        hosts, wire = plan.hosts, workspace.backward_wire
        sent = {}
        for rank in hosts.remote:
            runs = plan.gradient_slice_runs(rank)
            width = plan.gradient_slice_width(workspace.rank, rank)
            sent[rank] = _packed([gradient[:, column : column + width] for _, column, width in runs], width, wire)
        received = {
            rank: torch.empty(
                plan.batch_sizes[rank], plan.gradient_slice_width(rank, workspace.rank), dtype=wire, device=workspace.device
            )
            for rank in hosts.remote
        }
        self._slices = workspace.backward_channel.exchange(sent, received, fingerprint=plan.fingerprint)

    def receive(self) -> None:
        """Receive from all other hosts, and spread what belongs to several ranks of this one. After the epoch in the host."""
        plan, workspace = self._plan, self._workspace
        wire = workspace.backward_wire
        if self._slices is None:
            assert workspace.gradient_puts is not None
            window = ReceiveWindow(workspace.gradients, workspace.backward_channel, 0, plan.fingerprint)
            for rank, table in plan.spread_tables.items():
                width, rows = plan.gradient_slice_width(rank, workspace.rank), plan.batch_sizes[rank]
                spread_slice(workspace.gradient_puts, rank, width, table, rows, window, wire)
        else:
            for rank, slice_ in self._slices.arrivals():
                for tile in plan.spread_tiles(rank):
                    copy_tile(slice_, tile, workspace.gradients, 0, wire)
            self._slices.finish()
        if workspace.layout.row_wise_columns:
            # Ends when all ranks of the host have spread theirs.
            meet(workspace.backward_channel, plan.fingerprint)


def copy_tile(source: Tensor, tile: Tile, memory: SymmetricMemory, base: int, wire: torch.dtype) -> None:
    """Store a tile of a matrix in the memory of a rank of this host, from byte ``base`` on."""
    if not tile.rows:
        return
    first = (base + tile.offset) // wire.itemsize
    place = memory.peer(tile.peer).view(wire).as_strided((tile.rows, tile.width), (tile.stride, 1), first)
    values = source[tile.source_row : tile.source_row + tile.rows, tile.source_column : tile.source_column + tile.width]
    place.copy_(within_range(values, wire))


def _packed(parts: Sequence[Tensor], width: int, wire: torch.dtype) -> Tensor:
    """The columns of all parts side by side, contiguous, in the wire's dtype."""
    if len(parts) == 1 and parts[0].dtype == wire and parts[0].is_contiguous():
        return parts[0]
    if not parts:
        return torch.empty(0, width, dtype=wire)
    packed = parts[0].new_empty(len(parts[0]), width, dtype=wire)
    for part, columns in zip(parts, packed.split([part.shape[1] for part in parts], dim=1), strict=True):
        columns.copy_(within_range(part, wire))
    return packed


def _sum(parts: Tensor) -> Tensor:
    """The sum over the first dimension, in its order, in fp32 and rounded once."""
    total = parts[0].float()
    if total.data_ptr() == parts.data_ptr():
        total = total.clone()
    for part in parts[1:]:
        total += part
    return within_range(total, parts.dtype).to(parts.dtype)
