"""Quality of binary predictions over all ranks, the loss of training steps, and how evenly experts are used, without stalling
the device.

AUC is the probability that a positive sample is ranked above a negative one, ties counted half (the Mann-Whitney
statistic). Both ways of computing it below are the same formula over groups of samples in ascending order of the
logit: groups of equal logits make it exact, groups of neighbouring logits bound the memory, with a known error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from dlrm_fused.lasting import lasting
from dlrm_fused.models.moe import MixtureOfExperts

# Bins of the histogram: logits in [-16, 16) in steps of 2**-16, and everything beyond in the outermost two. A power of
# two, so that scaling is exact and the bins keep the order of the logits. Two int64 counters a bin: 32 MiB.
_BINS_PER_UNIT = 2**16
_HALF_BINS = 16 * _BINS_PER_UNIT
_BINS = 2 * _HALF_BINS

_NEGATIVE, _POSITIVE, _PADDING = 0, 1, 2


@dataclass(frozen=True)
class BinaryMetricValues:
    """The results of :meth:`BinaryMetrics.compute`; a value that the data do not define (AUC of one class) is NaN."""

    auc: float
    # Bound on |auc - exact AUC|; 0 when auc is exact.
    auc_error: float
    # Mean cross-entropy in nats.
    log_loss: float
    # log_loss over the entropy of the base rate (He et al. 2014, Practical Lessons from Predicting Clicks on Ads at
    # Facebook, eq. 1): below 1 is better than always predicting the mean label.
    normalized_entropy: float
    # Mean prediction over mean label.
    calibration: float
    samples: int
    min_prediction: float
    max_prediction: float
    # The label of all samples that count, 0 or 1, if they have the same one; None if not, or without a sample.
    only_class: int | None = None

    @property
    def constant(self) -> bool:
        """Whether all predictions are the same number: the model tells no sample from another."""
        return self.samples > 1 and self.min_prediction == self.max_prediction


class BinaryMetrics:
    """AUC, log loss, normalized entropy and calibration of logits against labels of 0 and 1.

    Samples are kept (5 bytes each) as long as there are at most ``exact_samples``; then they are folded into a
    histogram of fixed size. Results are the same on all ranks; AUC does not depend on how samples are spread over them.

    With weights, a sample counts as if it were there so many times; this takes 4 bytes more for each, and sums have the
    rounding of float64.

    Args:
        device: where samples and sums are kept; the device of the tensors given to :meth:`update`.
        exact_samples: AUC is exact for up to this many samples over all ranks.
        weighted: whether samples have weights; otherwise each counts once.
    """

    def __init__(self, device: torch.device, exact_samples: int = 2**24, *, weighted: bool = False) -> None:
        self._device = device
        self._exact_samples = exact_samples
        self._weighted = weighted
        # Pairs are counted in integers where possible: the result then depends on no order of summation.
        self._count_dtype = torch.float64 if weighted else torch.int64
        self.reset()

    @lasting
    def reset(self) -> None:
        """Forget all samples."""
        self._logits: list[Tensor] = []
        self._codes: list[Tensor] = []
        self._weights: list[Tensor] = []  # empty without weights
        self._kept = 0  # samples in the lists, padding included
        self._histogram: Tensor | None = None  # [2, _BINS]: negatives, positives; None while samples are kept
        # samples; and weighted: samples, positives, sum of predictions, sum of losses
        self._sums = torch.zeros(5, dtype=torch.float64, device=self._device)
        self._min = torch.full((), math.inf, device=self._device)
        self._max = torch.full((), -math.inf, device=self._device)

    @torch.no_grad()
    def update(self, logits: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Add a batch without waiting for the device.

        (The device is waited for once in every ``exact_samples`` samples, to count those that are not padding.)

        Args:
            logits: [b] floating point; compared as float32.
            labels: [b], 0 or 1.
            weights: [b], 1 for a sample, 0 for padding; with ``weighted``, what each sample counts, where 0 is as padding.
        """
        shapes = [tuple(t.shape) for t in (logits, labels, weights)]
        if len(set(shapes)) > 1 or logits.dim() != 1:
            raise ValueError(f"shapes of logits, labels and weights: {shapes}; expected [b] each")
        # A copy: callers may reuse their tensors, as CUDA graphs and in-place operations do.
        logits = logits.detach().to(torch.float32, copy=True)
        if logits.numel() == 0:
            return
        real, positive = weights > 0, labels > 0.5
        self._add_sums(logits, positive, real, weights)
        self._min = torch.minimum(self._min, logits.where(real, math.inf).amin())
        self._max = torch.maximum(self._max, logits.where(real, -math.inf).amax())

        codes = positive.to(torch.uint8).masked_fill_(~real, _PADDING)
        if self._histogram is not None:
            _count(self._histogram, logits, codes, weights if self._weighted else None)
            return
        self._logits.append(logits)
        self._codes.append(codes)
        if self._weighted:
            self._weights.append(weights.to(torch.float32, copy=True))
        self._kept += logits.numel()
        if self._kept > 2 * self._exact_samples:
            self._bound_memory()

    def compute(self) -> BinaryMetricValues:
        """Return the metrics of the samples of all ranks so far, or of this process alone when torch.distributed is not
        initialized. Collective."""
        folded = float(self._histogram is not None)
        extremes = torch.stack([self._min, self._max]).double()
        state = torch.cat([self._sums, extremes, extremes.new_tensor([folded])])
        # Gathered and summed here, in order of rank: the same rounding everywhere.
        ranks = torch.stack(_all_gather(state)).cpu()
        samples_of_rank = [int(n) for n in ranks[:, 0].tolist()]
        samples = sum(samples_of_rank)
        total, positives, predicted, loss = ranks[:, 1:5].sum(0).tolist()
        exact = not bool(ranks[:, 7].any()) and samples <= self._exact_samples
        min_logit, max_logit = ranks[:, 5].amin(), ranks[:, 6].amax()

        auc, auc_error = math.nan, 0.0
        if 0 < positives < total and not min_logit.isnan():
            groups = self._equal_logits(samples_of_rank) if exact else self._total_histogram()
            auc, within = _area(groups[0], groups[1])
            auc_error = 0.0 if exact else within
        return BinaryMetricValues(
            auc=auc,
            auc_error=auc_error,
            **_means(total, positives, predicted, loss),
            samples=samples,
            min_prediction=float(min_logit.float().sigmoid()) if samples else math.nan,
            max_prediction=float(max_logit.float().sigmoid()) if samples else math.nan,
            only_class=int(positives > 0) if samples and not 0 < positives < total else None,
        )

    def _add_sums(self, logits: Tensor, positive: Tensor, real: Tensor, weights: Tensor) -> None:
        wide = logits.double()
        losses = functional.softplus(wide) - wide.where(positive, 0.0)
        ones = torch.ones_like(wide)
        columns = torch.stack([ones, positive.double(), wide.sigmoid(), losses])
        if self._weighted:
            columns = columns * weights.double()
        self._sums += torch.cat([ones.unsqueeze(0), columns]).where(real, 0.0).sum(1)

    def _bound_memory(self) -> None:
        self._keep_real_samples()
        if self._kept > self._exact_samples:
            self._fold()

    def _keep_real_samples(self) -> tuple[Tensor, Tensor, Tensor]:
        """Drop padding; return the real samples' logits, codes and weights, none if samples are not weighted."""
        logits = torch.cat([*self._logits, torch.empty(0, device=self._device)])
        codes = torch.cat([*self._codes, torch.empty(0, dtype=torch.uint8, device=self._device)])
        weights = torch.cat([*self._weights, torch.empty(0, device=self._device)])
        real = codes != _PADDING
        logits, codes = logits[real], codes[real]
        self._logits, self._codes, self._kept = [logits], [codes], logits.numel()
        if self._weighted:
            weights = weights[real]
            self._weights = [weights]
        return logits, codes, weights

    def _fold(self) -> Tensor:
        """Move the kept samples to the histogram."""
        if self._histogram is None:
            self._histogram = lasting(torch.zeros)(2, _BINS, dtype=self._count_dtype, device=self._device)
        weights = self._weights if self._weighted else [None] * len(self._logits)
        for logits, codes, of_samples in zip(self._logits, self._codes, weights, strict=True):
            _count(self._histogram, logits, codes, of_samples)
        self._logits, self._codes, self._weights, self._kept = [], [], [], 0
        return self._histogram

    def _total_histogram(self) -> Tensor:
        total = self._fold().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total

    def _equal_logits(self, samples_of_rank: list[int]) -> Tensor:
        """Negatives and positives of every distinct logit of all ranks, ascending: [2, distinct]."""
        logits, codes, weights = self._keep_real_samples()

        def of_all_ranks(tensor: Tensor) -> Tensor:
            padded = functional.pad(tensor, (0, max(samples_of_rank) - tensor.numel()))
            return torch.cat([t[:n] for t, n in zip(_all_gather(padded), samples_of_rank, strict=True)])

        logits, order = of_all_ranks(logits).sort()
        _, sizes = logits.unique_consecutive(return_counts=True)
        counts = of_all_ranks(codes)[order].to(self._count_dtype)
        if not self._weighted:
            positives = _sums_of_groups(counts, sizes)
            return torch.stack([sizes - positives, positives])
        weights = of_all_ranks(weights)[order].double()
        return torch.stack([_sums_of_groups(weights * (1 - counts), sizes), _sums_of_groups(weights * counts, sizes)])


def _sums_of_groups(values: Tensor, sizes: Tensor) -> Tensor:
    """Return the sum of each group of consecutive values; ``sizes`` are those of the groups."""
    so_far = values.cumsum(0)[sizes.cumsum(0) - 1]
    return so_far.diff(prepend=so_far.new_zeros(1))


def _count(histogram: Tensor, logits: Tensor, codes: Tensor, weights: Tensor | None) -> None:
    bins = (logits * _BINS_PER_UNIT).floor().clamp(-_HALF_BINS, _HALF_BINS - 1).nan_to_num().long() + _HALF_BINS
    for row, code in enumerate((_NEGATIVE, _POSITIVE)):
        counts = (codes == code).to(histogram.dtype)
        histogram[row].scatter_add_(0, bins, counts if weights is None else counts * weights)


def _area(negatives: Tensor, positives: Tensor) -> tuple[float, float]:
    """AUC when pairs inside a group count half, and by how much it can be off for that: half the share of such pairs.

    Both are [groups], in ascending order of the prediction: int64, or float64 of weighted samples; both sums are positive.
    """
    all_pairs = negatives.sum().item() * positives.sum().item()
    if 2 * all_pairs >= 2**63 and not negatives.is_floating_point():
        raise ValueError(f"AUC of {all_pairs} pairs of a positive and a negative sample: at most 2**62 can be counted in int64")
    negatives_below = negatives.cumsum(0) - negatives
    twice_won = (positives * (2 * negatives_below + negatives)).sum().item()
    return twice_won / (2 * all_pairs), (positives * negatives).sum().item() / (2 * all_pairs)


def _means(total: float, positives: float, predicted: float, loss: float) -> dict[str, float]:
    """Return the metrics that follow from sums over samples."""
    log_loss = loss / total if total else math.nan
    rate = positives / total if total else 0.0
    entropy = -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)
    return {
        "log_loss": log_loss,
        "normalized_entropy": log_loss / entropy if entropy else math.nan,
        "calibration": predicted / positives if positives else math.nan,
    }


def _all_gather(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks, which have one shape, in order of rank."""
    if not dist.is_initialized():
        return [tensor]
    gathered = tensor.new_empty(dist.get_world_size(), *tensor.shape)
    dist.all_gather(list(gathered.unbind(0)), tensor.contiguous())
    return list(gathered.unbind(0))


@dataclass(frozen=True)
class LossSummary:
    """The steps since the last :meth:`LossTracker.read`."""

    mean: float
    steps: int
    # The first step with a NaN or infinite loss on any rank.
    first_nonfinite_step: int | None


class LossTracker:
    """Keeps the losses of steps where they are; nothing is computed or transferred before they are read."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._losses: list[Tensor] = []

    def add(self, step: int, loss: Tensor) -> None:
        """Add this rank's loss (a scalar tensor) of a step; the loss of the step is the mean over ranks."""
        self._steps.append(step)
        self._losses.append(loss.detach())

    def read(self) -> LossSummary:
        """Sum up over all ranks and begin anew; all ranks must call it after the same steps."""
        steps, losses = self._steps, self._losses
        self._steps, self._losses = [], []
        if not steps:
            return LossSummary(mean=math.nan, steps=0, first_nonfinite_step=None)
        of_ranks = torch.stack(_all_gather(torch.stack(losses).double())).cpu()
        bad = (~of_ranks.isfinite()).any(dim=0).nonzero()
        return LossSummary(
            mean=of_ranks.mean().item(), steps=len(steps), first_nonfinite_step=steps[int(bad[0])] if len(bad) else None
        )


def read_expert_loads(layers: Sequence[MixtureOfExperts]) -> list[list[float]]:
    """Return each layer's tokens by expert, as parts of them all, over all ranks since they were read before. Collective."""
    if not layers:
        return []
    loads = torch.stack([layer.load for layer in layers])
    for layer in layers:
        layer.load.zero_()
    dist.all_reduce(loads)
    return (loads.double() / loads.sum(dim=1, keepdim=True).clamp(min=1)).tolist()


def load_values(loads: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the loads of each layer's busiest and idlest expert, relative to the mean of all: 1 if all are even."""
    return {
        f"experts_{layer}_{name}": extreme(fractions) * len(fractions)
        for layer, fractions in enumerate(loads)
        for name, extreme in (("busiest", max), ("idlest", min))
    }
