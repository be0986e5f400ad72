"""Raises an error of one rank on all ranks at a collective call, so that none goes on and waits for it.

For errors anywhere else in a run, see :mod:`dlrm_fused.training.runtime`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from dlrm_fused.errors import CommunicationError, UserError

T = TypeVar("T")


def gather_or_raise(
    work: Callable[[], T], process_group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> list[T]:
    """Return the results of ``work()`` on all ranks, by rank. Collective.

    Args:
        work: what it returns is pickled.
        process_group: default: all ranks; without torch.distributed, this process alone.
        device: of this rank, if the process group has NCCL alone.

    Raises:
        UserError: if ``work`` raised on some rank: all ranks raise the error of the lowest such rank.
        CommunicationError: likewise, if that error is no UserError; or a rank has ended, or makes no such call within the time
            limit of the process group.
    """
    if process_group is None and dist.is_initialized():
        process_group = cast(dist.ProcessGroup, dist.GroupMember.WORLD)
    rank, world_size = (0, 1) if process_group is None else (process_group.rank(), process_group.size())
    failure: BaseException | None = None
    answer: tuple[T | None, type[UserError] | None, str] = (None, None, "")
    try:
        answer = (work(), None, "")
    except UserError as error:
        failure, answer = error, (None, type(error), str(error))
    except Exception as error:
        failure, answer = error, (None, CommunicationError, f"rank {rank}: {type(error).__name__}: {error}")
    answers = [answer] * world_size
    if world_size > 1:
        # Object collectives of NCCL use the current device.
        with torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext():
            try:
                dist.all_gather_object(answers, answer, group=process_group)
            except RuntimeError as error:
                raise CommunicationError(f"rank {rank}: a rank gave no answer, it may have ended: {error}") from error
    for _, kind, message in answers:
        if kind is not None:
            raise kind(message) from failure
    return [value for value, _, _ in answers]  # type: ignore[misc]  # only a failure has no value
