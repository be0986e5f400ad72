"""Slices that go between hosts: pooled embeddings, sums of partial results, and gradients.

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
from dlrm_fused.ops.embedding_all_to_all.byte_layout import Tile
from dlrm_fused.ops.embedding_all_to_all.distinct import DistinctRows
from dlrm_fused.ops.embedding_all_to_all.plan import BatchPlan, tensor_in
from dlrm_fused.ops.embedding_all_to_all.reduce import add_up
from dlrm_fused.ops.embedding_all_to_all.scatter import store_tiles
from dlrm_fused.ops.embedding_all_to_all.workspace import EmbeddingWorkspace
from dlrm_fused.symmetric import SymmetricMemory
from dlrm_fused.symmetric.channel import ChannelExchange
from dlrm_fused.symmetric.device import uses_kernels


class PooledSlices:
    """One forward pass, between hosts. Collective, in the order of the methods; on GPUs nothing waits for the device."""

    def __init__(
        self,
        workspace: EmbeddingWorkspace,
        plan: BatchPlan,
        slices: Mapping[int, Tensor],
        distinct: DistinctRows | None = None,
        *,
        beside: bool = True,
    ) -> None:
        """Begin to send this rank's slice for each rank of another host, or its distinct rows.

        Args:
            distinct: these rows are sent only.
            beside: as of :meth:`~dlrm_fused.symmetric.Channel.exchange`.
        """
        self._workspace, self._plan, self._distinct = workspace, plan, distinct
        self._rows: Tensor | None = None
        self._sums: ChannelExchange | None = None
        wire, device = workspace.forward_wire, workspace.device
        if distinct is None:
            self._buffer = plan.slices.received_results.new_buffer(device)
            received = plan.slices.received_results.of(self._buffer)
        else:
            counts = distinct.received_counts
            self._rows = torch.empty(sum(counts), _row_dim(workspace), dtype=wire, device=device)
            received = dict(zip(plan.hosts.remote, self._rows.split(counts), strict=True))
        self._slices = workspace.forward_channel.exchange(slices, received, fingerprint=plan.fingerprint, beside=beside)

    def send_sums(self) -> None:
        """Add up what this host has for the ranks of other hosts that this one serves; once the epoch inside the host ended."""
        plan, workspace = self._plan, self._workspace
        if not workspace.layout.row_wise_columns:
            return
        staging = workspace.staging()
        sent = {rank: _summed(plan.host_parts_view(staging, rank)) for rank in plan.hosts.served}
        received = {rank: plan.host_sum_view(staging, rank) for rank in plan.hosts.counterparts()}
        self._sums = workspace.forward_channel.exchange(sent, received, fingerprint=plan.fingerprint)

    def receive(self, offset: int) -> None:
        """Receive from all other hosts.

        Args:
            offset: in bytes, of this rank's output in ``workspace.outputs``.
        """
        plan, workspace = self._plan, self._workspace
        memory, begin = (workspace.staging(), 0) if plan.places.is_staged else (workspace.outputs.memory, offset)
        output = plan.staged_view(memory) if plan.places.is_staged else plan.output_view(memory, offset)
        if self._rows is not None:
            self._slices.wait_arrivals()
            assert self._distinct is not None
            rows = self._rows.index_select(0, self._distinct.received.flatten())
            output.view(-1, _row_dim(workspace)).index_copy_(0, plan.slices.remote_places, rows)
        elif uses_kernels(workspace.device):
            self._slices.wait_arrivals()
            table, wire = plan.slices.pooled_spread_table, workspace.forward_wire
            store_tiles(self._buffer.view(wire), table, plan.local_batch, memory.addresses, begin, wire)
        else:
            for rank, slice_ in self._slices.arrivals():
                for source, column, width in plan.slices.runs[rank]:
                    output[:, column : column + width] = slice_[:, source : source + width]
        if self._sums is not None:
            self._sums.complete()
        self._slices.finish()


def packed_slices(workspace: EmbeddingWorkspace, plan: BatchPlan, pooled: Sequence[Tensor]) -> dict[int, Tensor]:
    """By rank of another host, its slice of this rank's results.

    Args:
        pooled: [global batch, width] of each lookup.
    """
    own = [result for result, lookup in zip(pooled, workspace.own_lookups, strict=True) if not lookup.row_wise]
    width, wire = plan.slices.width, workspace.forward_wire
    return {rank: _packed([result[plan.bags_of(rank)] for result in own], width, wire) for rank in plan.hosts.remote}


def packed_rows(
    workspace: EmbeddingWorkspace, plan: BatchPlan, pooled: Sequence[Tensor], distinct: DistinctRows
) -> dict[int, Tensor]:
    """By rank of another host, the distinct rows [rows, dim] of this rank's results; ``pooled`` as above."""
    own = [result for result, lookup in zip(pooled, workspace.own_lookups, strict=True) if not lookup.row_wise]
    results = own[0] if len(own) == 1 else torch.cat([torch.empty(plan.global_batch, 0, device="cpu"), *own], dim=1)
    rows = results.reshape(-1, _row_dim(workspace)).index_select(0, distinct.sent)
    rows = within_range(rows, workspace.forward_wire).to(workspace.forward_wire)
    return dict(zip(plan.hosts.remote, rows.split(distinct.sent_counts), strict=True))


class GradientSlices:
    """One backward pass, between hosts. Collective, in the order of the methods; on GPUs nothing waits for the device."""

    def __init__(
        self, workspace: EmbeddingWorkspace, plan: BatchPlan, gradient: Tensor, distinct: DistinctRows | None = None
    ) -> None:
        """Send the output's gradient [local batch, columns] to ranks of other hosts.

        Args:
            distinct: the rows of the forward pass.
        """
        self._workspace, self._plan, self._distinct = workspace, plan, distinct
        sent = self._whole(gradient) if distinct is None else self._compressed(gradient, distinct)
        received = self._places() if distinct is None else self._compressed_places(distinct)
        self._slices = workspace.backward_channel.exchange(sent, received, fingerprint=plan.fingerprint)

    def _places(self) -> dict[int, Tensor]:
        """By sender, where its slice [bags, width] is received: where it belongs, if it lies there as it comes."""
        plan, workspace = self._plan, self._workspace
        self._buffer = plan.slices.received_gradients.new_buffer(workspace.device)
        places = plan.slices.received_gradients.of(self._buffer)
        for sender, begin in plan.slices.gradient_begins.items():
            sizes = plan.batch_sizes[sender], plan.slices.gradient_width(sender, workspace.rank)
            places[sender] = tensor_in(workspace.gradients, begin, sizes, workspace.backward_wire)
        return places

    def _compressed_places(self, distinct: DistinctRows) -> dict[int, Tensor]:
        """By sender, where what :meth:`_compressed` makes is received."""
        plan, workspace = self._plan, self._workspace
        places = {}
        for sender, rows in zip(plan.hosts.remote, distinct.sent_counts, strict=True):
            row_wise = plan.slices.gradient_width(sender, workspace.rank) - plan.slices.width
            size = rows * _row_dim(workspace) + plan.batch_sizes[sender] * row_wise
            places[sender] = torch.empty(size, dtype=workspace.backward_wire, device=workspace.device)
        return places

    def _whole(self, gradient: Tensor) -> dict[int, Tensor]:
        """By rank of another host, the columns [bags, width] of the gradient that go there."""
        plan, device = self._plan, self._workspace.device
        if uses_kernels(device):
            buffer = plan.slices.gradients.new_buffer(device)
            store_tiles(gradient, plan.slices.gradient_buffer_table, plan.local_batch, buffer, 0, self._workspace.backward_wire)
            return plan.slices.gradients.of(buffer)
        return {rank: self._packed_runs(gradient, runs) for rank, runs in plan.slices.gradient_runs.items()}

    def _packed_runs(self, gradient: Tensor, runs: Sequence[tuple[int, int, int]]) -> Tensor:
        parts = [gradient[:, column : column + columns] for _, column, columns in runs]
        return _packed(parts, sum(columns for *_, columns in runs), self._workspace.backward_wire)

    def _compressed(self, gradient: Tensor, distinct: DistinctRows) -> dict[int, Tensor]:
        """Return the slices flat: the gradients of distinct rows, then the columns of row-wise tables."""
        plan, wire = self._plan, self._workspace.backward_wire
        of_places = gradient.reshape(-1, _row_dim(self._workspace)).index_select(0, plan.slices.remote_places)
        rows = [within_range(own, wire).to(wire).flatten() for own in distinct.gradient_of_rows(of_places)]
        sent = dict(zip(plan.hosts.remote, rows, strict=True))
        if self._workspace.layout.row_wise_columns:
            row_wise = self._packed_runs(gradient, plan.places.row_wise_runs).flatten()
            sent.update({rank: torch.cat([sent[rank], row_wise]) for rank in plan.hosts.counterparts()})
        return sent

    def _expanded(self, sender: int, flat: Tensor) -> Tensor:
        """[bags, width] from :meth:`_compressed`."""
        assert self._distinct is not None
        plan, dim = self._plan, _row_dim(self._workspace)
        number, rows = plan.hosts.remote.index(sender), plan.slices.width // dim
        end = self._distinct.sent_counts[number] * dim
        own = self._distinct.gradient_of_slice(number, flat[:end].view(-1, dim), plan.bags_of(sender), rows)
        return own if end == len(flat) else torch.cat([own, flat[end:].view(len(own), -1)], dim=1)

    def receive(self) -> None:
        """Receive from all other hosts, and spread what belongs to several ranks of this one. After the epoch in the host."""
        plan, workspace = self._plan, self._workspace
        wire = workspace.backward_wire
        if uses_kernels(workspace.device) and self._distinct is None:
            self._slices.wait_arrivals()
            most_bags = max(plan.batch_sizes)
            store_tiles(self._buffer.view(wire), plan.slices.spread_table, most_bags, workspace.gradients.addresses, 0, wire)
        else:
            for rank, slice_ in self._slices.arrivals():
                if rank in plan.slices.gradient_begins and self._distinct is None:
                    continue
                expanded = slice_ if self._distinct is None else self._expanded(rank, slice_)
                for tile in plan.slices.spread_tiles[rank]:
                    copy_tile(expanded, tile, workspace.gradients, 0, wire)
        self._slices.finish()
        if workspace.layout.row_wise_columns:
            # Ends when all ranks of the host have spread theirs.
            meet(workspace.backward_channel, plan.fingerprint)


def _row_dim(workspace: EmbeddingWorkspace) -> int:
    dim = workspace.layout.row_dim
    assert dim is not None, "the output does not divide into rows"
    return dim


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
        return torch.empty(0, width, dtype=wire, device="cpu")
    packed = parts[0].new_empty(len(parts[0]), width, dtype=wire)
    for part, columns in zip(parts, packed.split([part.shape[1] for part in parts], dim=1), strict=True):
        columns.copy_(within_range(part, wire))
    return packed


def _summed(parts: Tensor) -> Tensor:
    """The sum over the first dimension, in its order, in fp32 and rounded once; a single part as it is."""
    if len(parts) == 1:
        return parts[0]
    total = torch.empty_like(parts[0])
    add_up(parts, total)
    return total
