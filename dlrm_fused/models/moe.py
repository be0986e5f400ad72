"""A Mixture of Experts: a feed-forward layer of which every token takes the few experts that a router finds for it.

No token is dropped, whatever the router does. Two losses keep its work even and its logits small.

Sources: Shazeer et al., *Outrageously Large Neural Networks*, arXiv 1701.06538; Fedus et al., *Switch Transformers*, arXiv
2101.03961 (balance loss); Zoph et al., *ST-MoE*, arXiv 2202.08906 (router z-loss); Jiang et al., *Mixtral of Experts*, arXiv
2401.04088 (softmax gates); DeepSeek-AI, *DeepSeek-V3*, arXiv 2412.19437 (sigmoid gates, shared expert).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from dlrm_fused.config import Config, ExpertsConfig, Gate
from dlrm_fused.errors import UsageError
from dlrm_fused.models.expert_parallel import ExpertComputation, choose_computations
from dlrm_fused.models.tensor_parallel import group_size, sharded_parameter
from dlrm_fused.ops.moe.activations import ACTIVATIONS, Activation


class Routing(NamedTuple):
    """A router's decisions for T tokens; float32.

    Attributes:
        experts: [T, k] int64, the experts of each token, best first.
        gates: [T, k], their weights.
        logits, probabilities: [T, E]; probabilities sum to 1.
    """

    experts: Tensor
    gates: Tensor
    logits: Tensor
    probabilities: Tensor


class Router(nn.Module):
    """Finds the k best of E experts for each token; in float32, since small differences decide. On GPUs the product is in TF32
    where ``torch.get_float32_matmul_precision`` allows it.

    A score is the softmax over all experts, or the sigmoid, of a logit; the gates of a token are the scores of its experts
    divided by their sum. With k = 1, the gate is the score itself: the quotient, 1, would teach the router nothing.
    """

    def __init__(self, width: int, experts: int, top_k: int, gate: Gate) -> None:
        super().__init__()
        self._top_k, self._gate = top_k, gate
        self.linear = nn.Linear(width, experts, bias=False)

    def forward(self, x: Tensor) -> Routing:
        """x: [T, d]."""
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.linear.weight)
        scores = logits.softmax(-1) if self._gate is Gate.softmax else logits.sigmoid()
        gates, experts = scores.topk(self._top_k)
        if self._top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        return Routing(experts, gates, logits, scores / scores.sum(-1, keepdim=True))


def balance_loss(probabilities: Tensor, slots: Tensor) -> Tensor:
    """Switch Transformer's loss, 1 where all experts have as much to do: E * sum over experts of f * P.

    Args:
        probabilities: [E], P, the mean over tokens.
        slots: [E], tokens of each expert; f is the part of all, and has no gradient.
    """
    fractions = slots / slots.sum().clamp(min=1)
    return len(slots) * (fractions * probabilities).sum()


class MixtureOfExperts(nn.Module):
    """A feed-forward layer of experts, each silu(x @ w_in.T) @ w_out.T; with all ranks' help where they share the experts.

    With ``activation=swiglu`` an expert is (silu(x @ gate.T) * (x @ up.T)) @ w_out.T, and w_in holds gate and up, one below the
    other.

    Args:
        width: d, of tokens and results; a multiple of 8, as ``experts.hidden`` must be.
        experts: their number, sizes, gates and losses.
        computation: how they are computed, and the ranks that they are spread over; these must divide their number.

    Attributes:
        computation: as the argument says.
        w_in: [E / ranks, f, d], with SwiGLU [E / ranks, 2 * f, d]; rank r of n has experts r * E / n and following.
        w_out: [E / ranks, d, f].
        load: [E] int64, tokens that this rank has sent to each expert in training, since somebody set it to zero.

    Raises:
        UsageError: if a number does not divide another as it must.
    """

    load: Tensor

    def __init__(self, width: int, experts: ExpertsConfig, computation: ExpertComputation | None = None) -> None:
        super().__init__()
        self.computation = computation or ExpertComputation(activation=experts.activation.name)
        group = self.computation.group
        _check_shape(width, experts, group_size(group))
        self._settings = experts
        self.router = Router(width, experts.count, experts.top_k, experts.gate)
        activation = ACTIVATIONS[experts.activation.name]
        self.w_in = _expert_weights(experts.count, activation.parts * experts.hidden, width, group)
        self.w_out = _expert_weights(experts.count, width, experts.hidden, group)
        self.shared = _SharedExpert(width, experts.shared_hidden, activation) if experts.shared_hidden else None
        self.register_buffer("load", torch.zeros(experts.count, dtype=torch.int64), persistent=False)
        self._auxiliary_loss: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Collective over the ranks that share the experts; in training, over all ranks.

        Args:
            x: [T, d].
            mask: [T] bool; a token without it (padding) has no experts of its own, and counts nowhere.

        Returns:
            [T, d], in autocast's dtype where it is enabled.
        """
        routing: Routing = self.router(x)
        experts = routing.experts if mask is None else routing.experts.masked_fill(~mask[:, None], -1)
        result, of_group = self.computation.with_slots(x, experts, routing.gates, self.w_in, self.w_out)
        if self.shared is not None:
            result = result + self.shared(x)
        if self.training:
            slots = _count(experts, self._settings.count)
            self.load += slots
            self._auxiliary_loss = self._losses(routing, mask, slots, of_group)
        return result

    def take_auxiliary_loss(self) -> Tensor | None:
        """Return the last forward pass's part of this rank's loss, once; None after that, or if the pass was not in training.

        Like the loss of :class:`~dlrm_fused.models.RankingTask`, it is this rank's share: the mean over ranks is that of
        the global batch.
        """
        loss, self._auxiliary_loss = self._auxiliary_loss, None
        return loss

    def _losses(self, routing: Routing, mask: Tensor | None, slots: Tensor, of_group: Tensor | None) -> Tensor | None:
        """Collective over all ranks, if this one has not been told the slots of all.

        Slots are [E], those of this rank, and of the ranks that share the experts.
        """
        settings = self._settings
        if not settings.balance_loss and not settings.z_loss:
            return None
        if of_group is None or group_size(self.computation.group) != _world_size():
            of_group = _sum_over_ranks(slots)
        per_token = _world_size() * settings.top_k / of_group.sum().clamp(min=1)
        squares, probabilities = routing.logits.logsumexp(-1).square(), routing.probabilities
        if mask is not None:
            squares, probabilities = squares * mask, probabilities * mask[:, None]
        balance = balance_loss(probabilities.sum(0) * per_token, of_group)
        return settings.balance_loss * balance + settings.z_loss * squares.sum() * per_token


def build_experts(
    config: Config, group: ProcessGroup | None, *, layers: int, width: int, tokens: int, device: torch.device
) -> list[MixtureOfExperts]:
    """Layers of experts; arguments and errors are those of :func:`~dlrm_fused.models.expert_parallel.choose_computations`."""
    computations = choose_computations(config, group, layers, width, tokens, device)
    return [MixtureOfExperts(width, config.model.experts, computation) for computation in computations]


class _SharedExpert(nn.Module):
    """An expert that all tokens have, and every rank."""

    def __init__(self, width: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self._activation = activation
        self.into = nn.Linear(width, activation.parts * hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self._activation.of(self.into(x)))


def _count(experts: Tensor, count: int) -> Tensor:
    """Return [count], how often each expert occurs; -1 is none. Unlike bincount, does not wait for the device."""
    slots = torch.zeros(count + 1, dtype=torch.int64, device=experts.device)
    ids = experts.flatten() + 1
    return slots.scatter_add_(0, ids, torch.ones_like(ids))[1:]


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _sum_over_ranks(slots: Tensor) -> Tensor:
    if not dist.is_initialized():
        return slots
    total = slots.clone()
    dist.all_reduce(total)
    return total


def _expert_weights(experts: int, out_features: int, in_features: int, group: ProcessGroup | None) -> nn.Parameter:
    """Return this rank's experts of [experts, out_features, in_features]. An expert is drawn by its own seed, on the CPU, as
    nn.Linear draws: it depends neither on how many ranks there are nor on the device."""
    ranks, rank = group_size(group), 0 if group is None else group.rank()
    own = experts // ranks
    bound, seed = in_features**-0.5, int(torch.randint(2**31, ()))
    piece = torch.empty(own, out_features, in_features)
    for index, weight in enumerate(piece):
        weight.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed + rank * own + index))
    return sharded_parameter(piece, 0, group)


def _check_shape(width: int, experts: ExpertsConfig, ranks: int) -> None:
    for name, value in {"width": width, "hidden": experts.hidden}.items():
        if value < 8 or value % 8:
            raise UsageError(f"{name}={value}: must be a positive multiple of 8")
    if experts.count < 1 or experts.count % ranks:
        raise UsageError(f"count={experts.count}: must be a positive multiple of the {ranks} ranks that share the experts")
    if not 1 <= experts.top_k <= experts.count:
        raise UsageError(f"top_k={experts.top_k}: must be 1 to count={experts.count}")
