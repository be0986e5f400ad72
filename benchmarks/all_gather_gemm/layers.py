"""One cell of the benchmark: contestants, times, checks. See benchmark.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.all_gather_gemm.cells import Layer
from benchmarks.common.harness import Ceilings, Timing, World
from benchmarks.gemm_all_to_all.cells import DTYPE
from benchmarks.gemm_all_to_all.products import TIMEOUT_SECONDS, Multiply, ProductRun
from dlrm_fused.ops.all_gather_gemm import ShardWorkspace, all_gather_gemm, gemm_reduce_scatter
from dlrm_fused.ops.all_gather_gemm.schedule import NAMES
from dlrm_fused.ops.schedules import Pair


class LayerRun(ProductRun):
    """Every schedule of a pair against cuBLAS and NCCL. Everything is collective."""

    cell: Layer

    def __init__(
        self,
        world: World,
        cell: Layer,
        workspace: ShardWorkspace,
        seconds: float,
        tolerance: float,
        schedules: Sequence[str],
    ) -> None:
        self.workspace, self.tolerance, self.schedules = workspace, tolerance, schedules
        super().__init__(world, cell, seconds)

    def choose_contestants(self) -> dict[str, Multiply]:
        ranks, cell, device = self.world.size, self.cell, self.world.device
        travelling = torch.empty(cell.m, cell.travelling(), dtype=DTYPE, device=device)
        self.gathered = travelling if cell.pair.moves_first else self.operands[0][0]
        shard = torch.empty(cell.m // ranks, cell.n, dtype=DTYPE, device=device)

        def nccl(number: int) -> Tensor:
            x, weight = self.operands[number]
            if cell.pair.moves_first:
                dist.all_gather_into_tensor(travelling, x)
                return torch.mm(travelling, weight.t(), out=self.buffer)
            torch.mm(x, weight.t(), out=travelling)
            dist.reduce_scatter_tensor(shard, travelling)
            return shard

        def by_schedule(name: str, number: int) -> Tensor:
            return call(self.workspace, cell.pair, *self.operands[number], name)

        schedules = {name: partial(by_schedule, name) for name in self.schedules}
        return {"nccl": nccl, **schedules, "gemm": self.gemm}

    def new_result(self) -> Tensor:
        """[M, N], of the product of all rows."""
        return torch.empty(self.cell.m, self.cell.n, dtype=DTYPE, device=self.world.device)

    def gemm(self, number: int) -> Tensor:
        """cuBLAS alone, for all rows."""
        x, weight = self.operands[number]
        return torch.mm(self.gathered if self.cell.pair.moves_first else x, weight.t(), out=self.buffer)

    def times(self) -> tuple[dict[str, Timing], str]:
        times = super().times()
        self.workspace.raise_fault()
        return times

    def expected(self) -> Tensor:
        x, weight = self.operands[-1]
        if self.cell.pair.moves_first:
            gathered = torch.empty(self.cell.m, self.cell.k, dtype=DTYPE, device=x.device)
            dist.all_gather_into_tensor(gathered, x)
            return gathered.double() @ weight.double().t()
        product = x.double() @ weight.double().t()
        shard = product.new_empty(self.cell.m // self.world.size, self.cell.n)
        dist.reduce_scatter_tensor(shard, product)
        return shard

    def compared(self, us: Mapping[str, float], ceilings: Ceilings, teraflops: float) -> dict[str, Any]:
        work = self.cell.work(self.world.size)
        link_us, floor_us = ceilings.transfer_microseconds(0, work.link_bytes), work.least_microseconds(ceilings, teraflops)
        own = {name: us[name] for name in us if name not in ("nccl", "gemm")}
        best = min(own, key=lambda name: own[name])
        return {
            "best": best,
            "ratio": own[best] / us["nccl"],
            "link_bytes": work.link_bytes,
            "link_us": link_us,
            "overlap": own[best] / max(us["gemm"], link_us),
            "floor_us": floor_us,
            "over_floor": own[best] / floor_us,
        }


def schedules_of(pair: Pair, only: Sequence[str] | None = None) -> tuple[str, ...]:
    """All of the pair but the library's, which is the baseline; or only those of them that are named."""
    return tuple(name for name in NAMES[pair] if name != "library" and (only is None or name in only))


def call(workspace: ShardWorkspace, pair: Pair, x: Tensor, weight: Tensor, schedule: str) -> Tensor:
    operator = all_gather_gemm if pair.moves_first else gemm_reduce_scatter
    return operator(workspace, x, weight, schedule=schedule)


def new_workspace(world: World, name: str, cells: list[Layer]) -> ShardWorkspace:
    """For all of them. Collective."""
    return ShardWorkspace(
        world.symmetric,
        name=name,
        max_rows=max(cell.m for cell in cells),
        max_columns=max(cell.travelling() for cell in cells),
        dtype=DTYPE,
        timeout_seconds=TIMEOUT_SECONDS,
    )
