"""The backward exchange of both operators: the output's gradient goes to the ranks that have the tables."""

from __future__ import annotations

from torch import Tensor

from dlrm_fused.ops.common.workspace import ReceiveWindow, check_tensor
from dlrm_fused.ops.embedding_all_to_all.distinct import DistinctRows
from dlrm_fused.ops.embedding_all_to_all.plan import BatchPlan
from dlrm_fused.ops.embedding_all_to_all.scatter import scatter_tiles
from dlrm_fused.ops.embedding_all_to_all.slices import GradientSlices, copy_tile
from dlrm_fused.ops.embedding_all_to_all.workspace import EmbeddingWorkspace
from dlrm_fused.symmetric import abort_peers_on_error
from dlrm_fused.symmetric.device import uses_kernels


def send_gradient(
    workspace: EmbeddingWorkspace, plan: BatchPlan, gradient: Tensor, distinct: DistinctRows | None = None
) -> list[Tensor]:
    """Bring the output's gradient to the owners of the tables. Collective.

    Args:
        gradient: [batch_sizes[rank], layout.columns] of the output's dtype.
        distinct: of the forward pass.

    Returns:
        For each lookup of this rank the gradient [global batch, width] of its result, unscaled, in the wire's dtype: views of
        memory that the next backward pass writes to.
    """
    channel = workspace.backward_channel
    workspace.begin_call()
    with abort_peers_on_error(channel):
        if not _can_be_read_in_tiles(gradient):
            gradient = gradient.contiguous()  # an error, if it is sparse
        shape = (plan.local_batch, workspace.layout.columns)
        check_tensor(workspace, "the gradient", gradient, workspace.output_dtype, shape, rows=True)
    workspace.reserve(plan.batch_sizes)
    slices = GradientSlices(workspace, plan, gradient, distinct) if plan.hosts.are_many else None
    memory = workspace.gradients
    if uses_kernels(workspace.device):
        window = ReceiveWindow(memory, channel, 0, plan.fingerprint)
        scatter_tiles(gradient, plan.gradient_table, plan.local_batch, window, wire=workspace.backward_wire, relative=False)
    else:
        _send_gradient_by_host(workspace, plan, gradient)
    if slices is not None:
        slices.receive()
    return [plan.gradients_view(memory, number) for number in range(len(workspace.own_lookups))]


def _send_gradient_by_host(workspace: EmbeddingWorkspace, plan: BatchPlan, gradient: Tensor) -> None:
    tiles = plan.places.gradient_tiles

    def store(peer: int, _: int) -> None:
        for tile in tiles:
            if tile.peer == peer:
                copy_tile(gradient, tile, workspace.gradients, 0, workspace.backward_wire)

    workspace.backward_channel.run_epoch(store, fingerprint=plan.fingerprint)


def _can_be_read_in_tiles(gradient: Tensor) -> bool:
    """Whether it need not be copied: some columns of a wider tensor, as the dense part leaves them, will do."""
    alignment = 4 * gradient.element_size()
    return gradient.stride()[1:] == (1,) and gradient.stride(0) % 4 == 0 and gradient.data_ptr() % alignment == 0
