"""Learning rates over the steps of a run."""

from __future__ import annotations

from torchrec.optim.keyed import CombinedOptimizer

from dlrm_fused.config import ScheduleConfig


def factor(schedule: ScheduleConfig, step: int) -> float:
    """Return the factor of the learning rates in a step, counted from 0.

    Linear warm-up from 1 / warmup_steps, then 1, then (1 - fraction of the decay)^power, not below the floor. The shape
    of MLPerf's DLRM (facebookresearch/dlrm, LRPolicyScheduler).
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.decay_steps and step >= schedule.decay_start_step:
        passed = min(1.0, (step - schedule.decay_start_step) / schedule.decay_steps)
        return max(schedule.floor, (1.0 - passed) ** schedule.decay_power)
    return 1.0


class LearningRates:
    """Sets the learning rates of all parts of an optimizer, those of the fused embedding optimizer included.

    The fused optimizer updates rows inside the backward pass, so rates must be set before the step; its ``zero_grad``, which
    the pipeline calls first, hands them to the kernels.

    Attributes:
        factor: what the configured rates are multiplied by at present.
    """

    def __init__(self, schedule: ScheduleConfig, optimizer: CombinedOptimizer) -> None:
        self._schedule = schedule
        self._groups = [(group, group["lr"]) for group in optimizer.param_groups]
        self.factor = 1.0

    def apply(self, step: int) -> None:
        """Set the rates for a step, counted from 0."""
        current = factor(self._schedule, step)
        if current != self.factor:
            for group, base in self._groups:
                group["lr"] = base * current
            self.factor = current
