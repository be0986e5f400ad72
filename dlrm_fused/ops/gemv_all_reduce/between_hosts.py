"""Product + AllReduce where no kernel stores at all ranks: between GPUs of several hosts, and between processes on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_fused.ops.common.exchanges import halves_of
from dlrm_fused.ops.common.products import product_in_fp32
from dlrm_fused.ops.gemv_all_reduce.workspace import GemvWorkspace, Inputs

# Two H200s were faster so from this size of the result on.
_BYTES_IN_HALVES = 64 << 20


class SumsByNccl:
    """Calls of one layout between GPUs: while NCCL adds up some rows, the next ones are multiplied."""

    def __init__(self, inputs: Inputs) -> None:
        rows, self._columns, _ = inputs.shape
        self._pieces = halves_of(rows, self._columns * inputs.x.element_size(), _BYTES_IN_HALVES)

    def __call__(self, workspace: GemvWorkspace, inputs: Inputs) -> Tensor:
        """Return the sum over ranks [m, N], plus bias and residual."""
        x, factor, channel = inputs.x, inputs.weight.T, workspace.channel
        out, summand = x.new_empty(x.shape[0], self._columns), _summand(inputs) if workspace.rank == 0 else None
        sums = []
        for rows in self._pieces:
            if summand is None:
                torch.mm(x[rows], factor, out=out[rows])
            else:
                torch.addmm(summand[rows], x[rows], factor, out=out[rows])
            sums.append(channel.all_reduce(out[rows], beside=rows is not self._pieces[-1]))
        for begun in sums:
            begun.finish()
        return out


def _summand(inputs: Inputs) -> Tensor | None:
    """[m, N]: residual and bias, which one rank adds to its product, so that nothing has to read the sums again."""
    _, _, bias, residual, *_ = inputs
    if bias is None:
        return residual
    return bias.expand(inputs.shape[:2]) if residual is None else residual + bias


def sum_by_hosts(workspace: GemvWorkspace, inputs: Inputs) -> Tensor:
    """:class:`SumsByNccl` for CPU processes, and for GPUs of several hosts without NCCL: in fp32, rounded between hosts."""
    total = product_in_fp32(inputs.x, inputs.weight)
    workspace.sums.sum(total, inputs.fingerprint("hosts"))
    for part in (inputs.bias, inputs.residual):
        if part is not None:
            total += part.float()
    return total.to(inputs.x.dtype)
