"""The places of all data for given batch sizes, as tensors for kernels and as views of memory."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dlrm_fused.lasting import lasting_property
from dlrm_fused.ops.embedding_all_to_all.byte_layout import ByteLayout
from dlrm_fused.ops.embedding_all_to_all.host_slices import HostSlices, tile_table
from dlrm_fused.ops.embedding_all_to_all.layout import ExchangeLayout
from dlrm_fused.symmetric import SymmetricMemory
from dlrm_fused.symmetric.hosts import Hosts


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The places of all data for given batch sizes; a plan serves many batches.

    Attributes:
        layout: of the exchange.
        hosts: of the ranks, and which of them this one is.
        batch_sizes: bags of each rank.
        output_dtype, forward_wire, backward_wire: of the output, and of results and gradients that travel.
        device: of the tables.
    """

    layout: ExchangeLayout
    hosts: Hosts
    batch_sizes: tuple[int, ...]
    output_dtype: torch.dtype
    forward_wire: torch.dtype
    backward_wire: torch.dtype
    device: torch.device

    @cached_property
    def places(self) -> ByteLayout:
        """All places, as numbers alone."""
        return ByteLayout(
            self.layout,
            self.hosts,
            self.batch_sizes,
            output_item=self.output_dtype.itemsize,
            wire_item=self.forward_wire.itemsize,
            gradient_item=self.backward_wire.itemsize,
            is_staged=self.forward_wire != self.output_dtype,
        )

    @cached_property
    def slices(self) -> HostSlices:
        """The slices for ranks of other hosts."""
        return HostSlices(self.places, self.forward_wire, self.backward_wire, self.device)

    @cached_property
    def fingerprint(self) -> int:
        """Equal on ranks that agree on the batch sizes: 30 bits, so that a kernel's argument has the same type for all."""
        return zlib.crc32(repr(self.batch_sizes).encode()) >> 2

    @property
    def local_batch(self) -> int:
        """Bags of this rank."""
        return self.batch_sizes[self.hosts.rank]

    @property
    def global_batch(self) -> int:
        """Bags of all ranks."""
        return self.places.starts[-1]

    def bags_of(self, rank: int) -> slice:
        """A rank's bags in the global batch."""
        return slice(*self.places.starts[rank : rank + 2])

    @lasting_property
    def pooled_tables(self) -> list[Tensor]:
        """:attr:`ByteLayout.pooled_tiles` for the kernel."""
        return [tile_table(tiles, self.device) for tiles in self.places.pooled_tiles]

    @lasting_property
    def gradient_table(self) -> Tensor:
        """:attr:`ByteLayout.gradient_tiles` for the kernel."""
        return tile_table(self.places.gradient_tiles, self.device)

    @lasting_property
    def bag_tables(self) -> list[Tensor]:
        """Return for each lookup of this rank the facts about ranks that the lookup kernel needs.

        int64 [2 * ranks + 1]: the first bag of each rank and the end, and the byte where each rank receives the lookup. On one
        host [3 * ranks + 1]: also the byte where it is told which partial sums are not empty.
        """
        places, peers = self.places, range(len(self.batch_sizes))
        told = () if self.hosts.are_many else peers
        tables = []
        for lookup in range(len(self.layout.lookups[self.hosts.rank])):
            first = self.layout.first_row_wise_feature(self.hosts.rank, lookup)
            bases = [places.destination(lookup, peer)[0] for peer in peers]
            presence = [places.presence_destination(peer) + first * places.presence_stride(peer) for peer in told]
            tables.append(torch.tensor([*places.starts, *bases, *presence]).to(self.device, non_blocking=True))
        return tables

    @lasting_property
    def receiver_tables(self) -> list[Tensor]:
        """To whom the lookup kernel stores, for each lookup of this rank.

        int64 [n, 3]: whose bags, at which rank, and that rank's number within the host.
        """
        tables = []
        for lookup in range(len(self.layout.lookups[self.hosts.rank])):
            rows = [[rank, at, self.hosts.local.index(at)] for rank, at in self.places.receivers(lookup).items()]
            tables.append(torch.tensor(rows).to(self.device, non_blocking=True))
        return tables

    def host_parts_view(self, staging: SymmetricMemory, rank: int) -> Tensor:
        """[ranks of this host, bags of a rank of another one, row-wise columns]: partial sums that this rank adds up for it."""
        shape = (len(self.hosts.local), self.batch_sizes[rank], self.layout.row_wise_columns)
        return tensor_in(staging, self.places.host_parts_offset(self.hosts.rank, rank), shape, self.forward_wire)

    def host_sum_view(self, staging: SymmetricMemory, sender: int) -> Tensor:
        """[local batch, row-wise columns]: where the sum of the sender's host is received, from this rank's counterpart."""
        return self.partial_sums_view(staging)[self.places.source(sender, self.hosts.rank)]

    def partial_sums_view(self, staging: SymmetricMemory) -> Tensor:
        """[sources, local batch, row-wise columns] as received by this rank, in the wire's dtype."""
        shape = (self.places.sources(self.hosts.rank), self.local_batch, self.layout.row_wise_columns)
        return tensor_in(staging, self.places.partial_sums_offset(self.hosts.rank), shape, self.forward_wire)

    def presence_view(self, staging: SymmetricMemory) -> Tensor:
        """uint8 [sources, row-wise features, bags, rounded up] as received by this rank: 1 where a partial sum was sent."""
        places = self.places
        shape = (places.sources(self.hosts.rank), self.layout.row_wise_features, places.presence_stride(self.hosts.rank))
        return tensor_in(staging, places.presence_offset(self.hosts.rank), shape, torch.uint8)

    def output_view(self, outputs: SymmetricMemory, offset: int) -> Tensor:
        """[local batch, columns] of the output's dtype, from byte ``offset`` on."""
        return tensor_in(outputs, offset, (self.local_batch, self.layout.columns), self.output_dtype)

    def staged_view(self, staging: SymmetricMemory) -> Tensor:
        """[local batch, columns] as received by this rank, in the wire's dtype; nothing in the row-wise columns."""
        return tensor_in(staging, 0, (self.local_batch, self.layout.columns), self.forward_wire)

    def gradients_view(self, gradients: SymmetricMemory, lookup: int) -> Tensor:
        """[global batch, width] of a lookup of this rank, in the wire's dtype."""
        shape = (self.global_batch, self.layout.lookups[self.hosts.rank][lookup].width)
        return tensor_in(gradients, self.places.gradients_offset(self.hosts.rank, lookup), shape, self.backward_wire)


def tensor_in(memory: SymmetricMemory, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the tensor that begins at a byte of this rank's memory."""
    size = math.prod(shape) * dtype.itemsize
    return memory.local[offset : offset + size].view(dtype).view(shape)
