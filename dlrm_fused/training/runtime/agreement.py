"""Ranks that raise the same error at the same place."""

from __future__ import annotations

import torch.distributed as dist

from dlrm_fused.errors import UserError


def raise_together(error: UserError | None) -> None:
    """Raise on all ranks if any rank has an error, so that none waits for another. Collective.

    Raises:
        UserError: that of the first rank that has one; the same on all ranks, since any may be the one that tells the user.
    """
    errors: list[UserError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for first in errors:
        if first is not None:
            raise first
