"""The computation of a Mixture of Experts' experts, and the ranks that they are spread over; ``comm`` chooses among ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlrm_fused.auto_choice import measure_both
from dlrm_fused.config import Comm, Config, Precision
from dlrm_fused.models.fused_communication import compute_dtype, decline, reachable_memory
from dlrm_fused.models.tensor_parallel import group_size
from dlrm_fused.ops.moe import ExpertWorkspace, expert_layer_with_slots, reference
from dlrm_fused.ops.moe.activations import ACTIVATIONS
from dlrm_fused.symmetric.device import uses_kernels


@dataclass(frozen=True)
class ExpertComputation:
    """The one place where ``comm`` matters to a Mixture of Experts.

    Attributes:
        group: the ranks that the experts are spread over; None: this rank alone.
        workspace: of the fused operator, over the same ranks and for one layer; None: All-to-Alls and grouped products in turn.
        activation: of the experts; the workspace's.
    """

    group: ProcessGroup | None = None
    workspace: ExpertWorkspace | None = None
    activation: str = "silu"

    def __call__(self, x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        """Return each token's sum over its experts. Collective over the group; in autocast's dtype where it is enabled.

        Backward, the gradients of w_in and w_out are the sums over the group's tokens, divided by its ranks: averaged over
        the groups, they are those of the mean of the ranks' losses.

        Args:
            x: [T, d], this rank's tokens. Ranks with more of them than the workspace has memory for make several calls: then T
                must not differ between them.
            experts: [T, k] int64, numbers of experts in the whole group; -1 for none.
            gates: [T, k] float32.
            w_in: [E / ranks, f, d], of this rank's experts; with SwiGLU [E / ranks, 2 * f, d].
            w_out: [E / ranks, d, f].

        Returns:
            [T, d]; zeros for a token without experts.
        """
        return self.with_slots(x, experts, gates, w_in, w_out)[0]

    def with_slots(
        self, x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the call's result and int64 [E]: the group's tokens of each expert; None if this rank has not been told."""
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        x, scale = x.to(dtype).contiguous(), 1 / group_size(self.group)
        most = len(x) if self.workspace is None else self.workspace.max_tokens
        takes_float32 = self.workspace is not None and w_in.dtype == w_out.dtype == torch.float32
        if not takes_float32 or len(x) > most:  # the operator would round them in each of several calls
            w_in, w_out = w_in.to(dtype), w_out.to(dtype)
        if self.workspace is None:
            return reference(self.group, x, experts, gates, w_in, w_out, scale, self.activation), None
        calls = zip(x.split(most), experts.split(most), gates.split(most), strict=True)
        results = [
            expert_layer_with_slots(self.workspace, x, experts, gates, w_in, w_out, scale) for x, experts, gates in calls
        ]
        if len(results) == 1:
            return results[0]
        outs, slots = zip(*results, strict=True)
        return torch.cat(outs), torch.stack(slots).sum(0)


def choose_computations(
    config: Config, group: ProcessGroup | None, layers: int, width: int, tokens: int, device: torch.device
) -> list[ExpertComputation]:
    """Return the computation of ``config.comm`` for each of the model's layers of experts. Collective over the group.

    With ``auto``, both ways are measured: one layer, forward and backward, with the tokens of a training batch, evenly spread.

    Args:
        group: ranks that share the experts; None for this rank alone.
        width: d, of the layers.
        tokens: of a sample.

    Raises:
        UsageError: on all ranks, with ``comm_strict``, if they cannot reach each other's memory, or on GPUs for fp32.
        CommunicationError: on all ranks, if one of them has too little memory left.
    """
    activation = config.model.experts.activation.name
    baseline = ExpertComputation(group, activation=activation)
    if group is None or config.comm is Comm.baseline:
        return [baseline] * layers
    if device.type == "cuda" and uses_kernels(device) and config.training.precision is Precision.fp32:
        # Triton multiplies fp32 without tensor cores, in ten times the library's time: nothing has to be measured.
        if config.comm is Comm.fused:
            decline(
                config, "experts", "training.precision=fp32, for which kernels are slow on GPUs; with tf32 or bf16 they run"
            )
        return [baseline] * layers
    memory = reachable_memory(config, group, device, "experts")
    if memory is None:
        return [baseline] * layers
    most = -(-config.training.global_batch_size // dist.get_world_size()) * tokens

    def workspace(layer: int) -> ExpertWorkspace:
        return ExpertWorkspace(
            memory,
            name=f"experts_{layer}",
            experts=config.model.experts.count,
            top_k=config.model.experts.top_k,
            max_tokens=most,
            width=width,
            dtype=compute_dtype(config),
            activation=activation,
        )

    first = workspace(0)
    if (
        config.comm is Comm.auto
        and not measure_both(
            _step_of_a_layer(ExpertComputation(group, first, activation), config, width, most, device),
            _step_of_a_layer(baseline, config, width, most, device),
            group,
            device,
            work=f"experts of {most} tokens",
            unfused_name="All-to-Alls and products",
        ).fused_is_faster
    ):
        first.release()
        return [baseline] * layers
    return [ExpertComputation(group, each, activation) for each in (first, *(workspace(layer) for layer in range(1, layers)))]


def _step_of_a_layer(
    computation: ExpertComputation, config: Config, width: int, tokens: int, device: torch.device
) -> Callable[[], None]:
    """Return a function that runs a layer's forward and backward pass. Collective."""
    settings, dtype = config.model.experts, compute_dtype(config)
    own = settings.count // group_size(computation.group)
    x = torch.ones(tokens, width, dtype=dtype, device=device, requires_grad=True)
    parts = ACTIVATIONS[settings.activation.name].parts
    w_in = torch.ones(own, parts * settings.hidden, width, device=device, requires_grad=True)
    w_out = torch.ones(own, width, settings.hidden, device=device, requires_grad=True)
    slots = torch.arange(tokens * settings.top_k, device=device).view(tokens, settings.top_k)
    gates = torch.ones(slots.shape, device=device, requires_grad=True)

    def step() -> None:
        out = computation(x, slots % settings.count, gates, w_in, w_out)
        torch.autograd.grad(out, (x, gates, w_in, w_out), torch.ones_like(out))

    return step
