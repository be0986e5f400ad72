"""Operators whose messages are NCCL's, of more ranks than GPU tests have: two hosts of two ranks, under Triton's interpreter.

Gloo stands in for NCCL, and asks of ranks what torch's backend of NCCL asks of them: all take part in an All-to-All, whatever
they have to send or receive, and both sides of each slice agree on its bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.symmetric import SymmetricGroup, messages
from dlrm_fused.symmetric.messages import NcclLink
from tests.distributed.launch import run_ranks
from tests.gpu import test_transports_cuda as transports
from tests.gpu.test_embedding_all_to_all_cuda import world_of
from tests.ops.embedding_all_to_all.world import Features, Traffic, World

pytestmark = pytest.mark.interpreted
RANKS, RANKS_PER_HOST, EPOCHS = 4, 2, 3
TIMEOUT = timedelta(seconds=60)


class NcclByGloo:
    """Torch's backend of NCCL as far as links use it."""

    def __init__(self, store: dist.Store, rank: int, size: int, _: timedelta) -> None:
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
        self._ranks = range(size)

    def alltoall(self, received: Sequence[Tensor], sent: Sequence[Tensor], options: Any = None) -> Any:
        """Exchange a slice with every rank; an empty one takes a byte."""
        places = [_bytes_of(slice_) for slice_ in received]
        works = [self._gloo.send([_bytes_of(sent[rank])], rank, 0) for rank in self._ranks if rank != self._gloo.rank()]
        works += [self._gloo.recv([places[rank]], rank, 0) for rank in self._ranks if rank != self._gloo.rank()]
        places[self._gloo.rank()].copy_(_bytes_of(sent[self._gloo.rank()]))
        return _begun(works, options)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        return _begun([self._gloo.allreduce(tensors)], options)

    def abort(self) -> None:
        pass


def _bytes_of(slice_: Tensor) -> Tensor:
    return slice_.view(-1).view(torch.uint8) if slice_.numel() else torch.zeros(1, dtype=torch.uint8)


def _begun(works: Sequence[Any], options: Any) -> Any:
    def wait() -> None:
        for work in works:
            work.wait()

    if options is None or options.asyncOp:
        return SimpleNamespace(wait=wait)
    wait()
    return None


class Event:
    """Of a device that has done all it was given."""

    def record(self, _: object) -> None:
        pass

    def query(self) -> bool:
        return True


def connect(group: SymmetricGroup) -> NcclLink:
    name = group.gather(lambda: secrets.token_hex(8))[0]
    assert group.process_group is not None
    return NcclLink(group.process_group, group.device, group.peer_monitor, name)


def tables_on_the_last_rank(ranks: int, traffic: Traffic) -> World:
    """The rank beside it, on the same host, has nothing to send to another host or to receive from one."""
    return World([*[()] * (ranks - 1), [Features((11, 5), (8, 4), (0, 1))]], traffic, seed=1)


def differing_epochs(name: str, world: Callable[[int, Traffic], World] = world_of) -> dict[str, int]:
    """On a rank: as of :func:`tests.gpu.test_transports_cuda.differing_epochs`, with the stand-in."""
    replace = partial(mock.patch.object, messages)
    with (
        mock.patch.object(SymmetricGroup, "_connect_by_nccl", connect),
        replace("nccl_backend", NcclByGloo),
        replace("current_stream", lambda _: None),
        replace("sleep_on_device", lambda _: None),
        mock.patch.multiple(torch.cuda, Event=Event, is_current_stream_capturing=lambda: False),
        mock.patch.multiple(transports, RANKS=RANKS, EPOCHS=EPOCHS, world_of=world),
    ):
        return transports.differing_epochs(name, RANKS_PER_HOST)


OPERATORS = [pytest.param(name, world_of, id=name, marks=pytest.mark.slow) for name in transports.OPERATORS]
OPERATORS.append(pytest.param("embedding", tables_on_the_last_rank, id="a rank has nothing to send or receive"))


@pytest.mark.parametrize(("name", "world"), OPERATORS)
def test_messages_give_the_bits_of_stores(name: str, world: Callable[[int, Traffic], World]) -> None:
    compared = run_ranks(RANKS, differing_epochs, name, world)
    assert compared == [{"epochs": EPOCHS, "differing": 0, "exchanges": compared[0]["exchanges"]}] * RANKS
    assert compared[0]["exchanges"] or name == "sums", "NCCL adds up sums"
