"""AllReduce of dense gradients that gives way to the exchange of the embeddings' gradients.

A dense part that is compiled as a whole has all its gradients at once, together with that of the embeddings, so
DistributedDataParallel (DDP) would average them beside the exchange of the latter, over the same links. The update of the
tables waits for the exchange, and uses no link; nothing but the optimizer waits for dense gradients. So the exchange goes
first, and AllReduce runs beside the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torchrec.distributed import DistributedModelParallel

from dlrm_fused.compat.torch import at_the_end_of_backward
from dlrm_fused.compat.torchrec import data_parallel_module
from dlrm_fused.sharding.sharded_module import FusedShardedEmbeddingBagCollection


def reduce_after_exchange(model: DistributedModelParallel, device: torch.device) -> None:
    """Let the AllReduce of a model in DDP begin when this rank's embedding gradients have been sent.

    DDP must not have a static graph: it would wait for the first step's AllReduce before that is begun.
    """
    ddp = data_parallel_module(model)
    if ddp is not None:
        stages = [module for module in model.modules() if isinstance(module, FusedShardedEmbeddingBagCollection)]
        late = LateAllReduce(stages, ddp.process_group, device)
        ddp.register_comm_hook(None, lambda _, bucket: late.postpone(bucket))


class LateAllReduce:
    """Buckets of gradients that wait for an exchange of embedding gradients.

    Args:
        stages: any of which may have gradients to exchange; where none has, nothing is postponed.
        group: over whose ranks gradients are averaged.
    """

    def __init__(
        self, stages: Sequence[FusedShardedEmbeddingBagCollection], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._stages = stages
        self._group = group
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting: list[tuple[Tensor, Future[Tensor]]] = []
        for stage in stages:
            stage.on_gradients_sent(self.begin)

    def postpone(self, bucket: GradBucket) -> Future[Tensor]:
        """A communication hook of DDP: the bucket's gradients, as soon as they are averaged."""
        if not self._waiting:
            # For a backward pass that exchanges nothing. DDP's own callback, which waits, comes after it.
            at_the_end_of_backward(self.begin)
        future: Future[Tensor] = Future(devices=[self._device] if self._stream else None)
        self._waiting.append((bucket.buffer(), future))
        if not any(stage.exchanges_gradients for stage in self._stages):
            self.begin()
        return future

    def begin(self) -> None:
        """Average what waits. Collective."""
        waiting, self._waiting = self._waiting, []
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # The stream of its own waits for the collectives, and the one of the backward pass does not.
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for gradients, future in waiting:
                self._average(gradients)
                future.set_result(gradients)

    def _average(self, gradients: Tensor) -> None:
        if self._stream is not None:
            dist.all_reduce(gradients, dist.ReduceOp.AVG, self._group)
        else:  # gloo has no AVG
            dist.all_reduce(gradients.div_(self._group.size()), group=self._group)
