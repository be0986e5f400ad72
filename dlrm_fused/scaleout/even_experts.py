"""Experts whose tokens are evenly spread: what the trainer computes and sends then, with sizes that a tracer can know."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_fused.models.expert_parallel import ExpertComputation
from dlrm_fused.models.moe import MixtureOfExperts
from dlrm_fused.models.tensor_parallel import group_size
from dlrm_fused.ops.common.all_to_all import all_to_all
from dlrm_fused.ops.moe.activations import Activation


def spread_evenly(layer: MixtureOfExperts) -> None:
    """Have the layer compute as if each expert had as many tokens."""
    own = layer.computation
    layer.computation = EvenExperts(own.group, activation=own.activation)


class EvenExperts(ExpertComputation):
    """The steps of :func:`dlrm_fused.ops.moe.reference`, whose sizes depend on what the router says; here they do not.

    The products of all experts of a rank are one kernel, as they are on GPUs. For shapes and dtypes only: values are not those
    of experts.
    """

    def with_slots(
        self, x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Returns None for the slots of the group, as the unfused computation does."""
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        x, w_in, w_out = x.to(dtype), w_in.to(dtype), w_out.to(dtype)
        (tokens, top_k), local = experts.shape, len(w_in)
        count = local * group_size(self.group)
        slots = -(-tokens * top_k // count) * count

        all_to_all(experts.new_zeros(count), self.group)
        experts.flatten().argsort()
        to_slots, to_tokens = experts.new_empty(slots), experts.new_empty(tokens * top_k)
        rows = all_to_all(x.index_select(0, to_slots), self.group).index_select(0, to_slots)
        hidden = torch.bmm(rows.view(local, -1, x.shape[1]), w_in.transpose(1, 2))
        hidden = Activation.named(self.activation, "EvenExperts").of(hidden)
        rows = torch.bmm(hidden, w_out.transpose(1, 2)).flatten(0, 1)
        rows = all_to_all(rows.index_select(0, to_slots), self.group).index_select(0, to_tokens)
        return torch.bmm(gates[:, None], rows.view(tokens, top_k, -1).float())[:, 0].to(dtype), None
