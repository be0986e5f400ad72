"""Checks of the operators' inputs. A rank whose inputs are wrong tells the others, which would wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.workspace import asked_of_all_ranks, check_tensor
from dlrm_fused.ops.embedding_all_to_all.plan import BatchPlan
from dlrm_fused.ops.embedding_all_to_all.workspace import EmbeddingWorkspace
from dlrm_fused.symmetric import abort_peers_on_error
from dlrm_fused.symmetric.device import uses_kernels

_INDEX_DTYPES = (torch.int32, torch.int64)


def checks_of_call(
    workspace: EmbeddingWorkspace, batch_sizes: Sequence[int], *, with_all: bool = False
) -> AbstractContextManager[None]:
    """Return a context for the checks of a forward pass. When one of them raises UsageError, no rank goes on.

    Where there is memory for the batch, the other ranks find the error while they wait for this one. Otherwise memory is
    allocated next, which is collective: all ranks are asked first, and raise what is wrong on one of them.

    Args:
        with_all: ask all ranks even if there is memory. Slow.
    """
    if with_all or not workspace.has_room(batch_sizes):
        return asked_of_all_ranks(workspace, "batch_sizes", list(batch_sizes))
    return abort_peers_on_error(workspace.forward_channel)


def check_pooled(workspace: EmbeddingWorkspace, plan: BatchPlan, pooled: Sequence[Tensor]) -> None:
    """Raise UsageError unless there is a pooled tensor of the right shape and dtype for each lookup of this rank."""
    if len(pooled) != len(workspace.own_lookups):
        raise UsageError(
            f"{workspace.name}: {len(pooled)} pooled tensors for {len(workspace.own_lookups)} lookups of rank {workspace.rank}"
        )
    for number, (tensor, lookup) in enumerate(zip(pooled, workspace.own_lookups, strict=True)):
        shape = (plan.global_batch, lookup.width)
        check_tensor(workspace, f"pooled[{number}]", tensor, workspace.output_dtype, shape, rows=True)


def check_lookups(
    workspace: EmbeddingWorkspace,
    plan: BatchPlan,
    weights: list[Tensor],
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
) -> None:
    """Raise UsageError for inputs of wrong number, shape, dtype or device; with ``check_indices`` also for wrong indices."""
    name, count = workspace.name, len(workspace.own_lookups)
    if not uses_kernels(workspace.device):
        raise UsageError(
            f"{name}: embedding_all_to_all on {workspace.device}: its kernels need a GPU or TRITON_INTERPRET=1; on the CPU use "
            "pooled_all_to_all with a lookup of your own"
        )
    if len(workspace.tables) != count:
        raise UsageError(f"{name}: no tables for its {count} lookups; call attach_tables first")
    given = {"weights": weights, "indices": indices, "offsets": offsets}
    if per_sample_weights:
        given["per_sample_weights"] = per_sample_weights
    for key, tensors in given.items():
        if len(tensors) != count:
            raise UsageError(f"{name}: {len(tensors)} {key} for {count} lookups of rank {workspace.rank}; give one for each")
    for number in range(count):
        attached = workspace.tables[number].weights
        if weights[number].dtype != attached.dtype or weights[number].shape != attached.shape:
            raise UsageError(
                f"{name}: weights[{number}] is {weights[number].dtype} {list(weights[number].shape)}, the attached tables "
                f"{attached.dtype} {list(attached.shape)}"
            )
        _check_tensor(workspace, f"indices[{number}]", indices[number], _INDEX_DTYPES)
        _check_tensor(workspace, f"offsets[{number}]", offsets[number], _INDEX_DTYPES)
        expected = len(workspace.own_lookups[number].dims) * plan.global_batch + 1
        if offsets[number].numel() != expected:
            raise UsageError(
                f"{name}: offsets[{number}] has {offsets[number].numel()} entries; needed: features * sum(batch_sizes) + 1 = "
                f"{expected}"
            )
        if per_sample_weights and per_sample_weights[number].numel():
            _check_tensor(workspace, f"per_sample_weights[{number}]", per_sample_weights[number], (torch.float32,))
            if per_sample_weights[number].numel() != indices[number].numel():
                raise UsageError(
                    f"{name}: per_sample_weights[{number}] has {per_sample_weights[number].numel()} entries for "
                    f"{indices[number].numel()} indices"
                )
    if workspace.check_indices:
        for number in range(count):
            _check_indices(workspace, plan, number, indices[number], offsets[number])


def _check_tensor(workspace: EmbeddingWorkspace, key: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise UsageError(f"{workspace.name}: {key} is {tensor.dtype}; allowed: {', '.join(str(dtype) for dtype in dtypes)}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise UsageError(
            f"{workspace.name}: {key} has shape {list(tensor.shape)}, strides {tensor.stride()}; needed: 1-D, contiguous"
        )
    if tensor.device != workspace.device:
        raise UsageError(f"{workspace.name}: {key} is on {tensor.device}, the workspace on {workspace.device}")


def _check_indices(workspace: EmbeddingWorkspace, plan: BatchPlan, number: int, indices: Tensor, offsets: Tensor) -> None:
    where, bounds = workspace.name, offsets.long().cpu()
    if bounds[0] != 0 or bounds[-1] != indices.numel() or bool((bounds[1:] < bounds[:-1]).any()):
        raise UsageError(f"{where}: offsets[{number}] must rise from 0 to {indices.numel()}, the number of indices")
    tables = workspace.tables[number]
    for feature, table in enumerate(tables.feature_tables):
        own = indices[bounds[feature * plan.global_batch] : bounds[(feature + 1) * plan.global_batch]]
        if own.numel() and (own.min() < 0 or own.max() >= tables.rows[table]):
            wrong = own[(own < 0) | (own >= tables.rows[table])][0].item()
            raise UsageError(
                f"{where}: indices[{number}] holds {wrong} for feature {feature}, whose table has {tables.rows[table]} rows"
            )
