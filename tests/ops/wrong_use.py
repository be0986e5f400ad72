"""What a wrong use is, and how it is tried: the terms in which wrong_uses.py of each operator speaks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.symmetric import symmetric_group

RANKS = 2
BOTH, SECOND = (0, 1), (1,)
TIMEOUT_SECONDS = 60.0
TOLERANCE = 1e-5


@dataclass(frozen=True)
class WrongUse:
    """Something done wrongly.

    Attributes:
        what: is done wrongly, in Markdown.
        attempt: ``attempt(scene, wrong)``, called on every rank: wrongly, or as it should be.
        culprit: what the error must name on the ranks that do it wrongly.
        ranks: these ranks.
        others: what the error of the other ranks must name.
        error: type of the error of ``ranks``; of the others UsageError, or CommunicationError, or its own.
    """

    what: str
    attempt: Callable[[Any, bool], object]
    culprit: str
    ranks: tuple[int, ...] = BOTH
    others: str = "rank 1 on"
    error: type[Exception] = UsageError


@dataclass(frozen=True)
class Outcome:
    """What one rank has seen of a wrong use.

    Attributes:
        kind, message: of the error; "" and "" if there was none.
        unchanged: whether tables, states of optimizers and held outputs are as before, to the bit.
        difference: of results and tables from what they must be, after a correct forward and backward pass.
        seconds: from the call to the error.
    """

    kind: str
    message: str
    unchanged: bool
    difference: float
    seconds: float


class Scene(ABC):
    """What wrong uses are tried on. Collective."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.group = symmetric_group()
        self.held: list[Tensor] = []

    def begin(self) -> None:  # noqa: B027 - most need nothing
        """Prepare for the next wrong use."""

    @abstractmethod
    def tables(self) -> Sequence[Tensor]:
        """Weights and states of optimizers, or what is in their place."""

    @abstractmethod
    def difference(self) -> float:
        """Of a correct forward and backward pass, from what they must give."""

    def state(self) -> list[Tensor]:
        """What no wrong use may change."""
        return [*self.tables(), *self.held]


def try_out(scene: Scene, use: WrongUse) -> Outcome:
    """Do something wrongly. Collective."""
    scene.begin()
    before = [tensor.detach().clone() for tensor in scene.state()]
    kind = message = ""
    began = time.monotonic()
    try:
        use.attempt(scene, scene.rank in use.ranks)
    except Exception as error:
        kind, message = type(error).__name__, str(error)
    seconds = time.monotonic() - began
    dist.barrier()
    unchanged = all(torch.equal(left, right) for left, right in zip(before, scene.state(), strict=True))
    return Outcome(kind, message, unchanged, scene.difference(), seconds)
