"""TorchRec's three-stage training pipeline with the times of its parts, and evaluations in between.

While batch i is trained, the sparse features of batch i+1 are exchanged and batch i+2 is copied to the device
(``TrainPipelineSparseDist``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_fused.compat.fbgemm import uncounted
from dlrm_fused.compat.torchrec import SparseDistPipeline, fbgemm_lookups
from dlrm_fused.datasets.batch import Batch
from dlrm_fused.models import Output, RankingTask
from dlrm_fused.training.step_timer import StepTimer


class TrainingPipeline(SparseDistPipeline[Batch, Output]):
    """``progress(batches)`` makes one step and returns its :class:`Output`.

    Args:
        model: a :class:`RankingTask` in DistributedModelParallel.
        timer: receives the times of data_wait, input_dist, embedding, dense_forward, backward and optimizer.
    """

    def __init__(
        self, model: DistributedModelParallel, optimizer: CombinedOptimizer, device: torch.device, timer: StepTimer
    ) -> None:
        self._timer = timer
        self._in_forward = False
        super().__init__(
            model,
            cast(torch.optim.Optimizer, _TimedOptimizer(optimizer, timer)),
            device,
            custom_model_fwd=self._forward,
        )
        stage = cast(RankingTask, get_unwrapped_module(model)).embedding_stage
        stage.register_forward_pre_hook(self._embedding_begins)
        stage.register_forward_hook(self._embedding_ends)

    @contextmanager
    def paused(self) -> Iterator[nn.Module]:
        """The model as it is without the pipeline, for an evaluation; batches in flight stay where they are."""
        model = self.detach()
        model.eval()
        with uncounted(fbgemm_lookups(model)):
            yield model
        # A finally would not do: this starts a collective, which other ranks may never join after a failure.
        model.train()
        self.attach(model)

    def next_batch(self, batches: Iterator[Batch]) -> Batch | None:
        with self._timer.part("data_wait"):
            return super().next_batch(batches)

    def start_sparse_data_dist(self, batch: Batch | None, context: Any) -> None:
        with self._on_data_dist_stream():
            super().start_sparse_data_dist(batch, context)

    def wait_sparse_data_dist(self, context: Any) -> None:
        with self._on_data_dist_stream():
            super().wait_sparse_data_dist(context)

    @contextmanager
    def _on_data_dist_stream(self) -> Iterator[None]:
        """Time what happens on the stream of the input dist; the stream itself is chosen by TorchRec."""
        if not self._timer.is_measuring:
            yield
            return
        with self.data_dist_stream():
            self._timer.start("input_dist")
        yield
        with self.data_dist_stream():
            self._timer.stop("input_dist")

    def _forward(self, batch: Batch | None) -> tuple[Tensor, Output]:
        self._in_forward = True
        self._timer.start("dense_forward")
        result: tuple[Tensor, Output] = self.sharded_model(batch)
        self._timer.stop("dense_forward")
        self._in_forward = False
        return result

    def run_backward(self, losses: Tensor) -> None:
        with self._timer.part("backward"):
            super().run_backward(losses)

    # TorchRec also calls the embedding stage when it traces the model, and an evaluation does: neither is timed.
    def _embedding_begins(self, *_: object) -> None:
        if self._in_forward:
            self._timer.stop("dense_forward")
            self._timer.start("embedding")

    def _embedding_ends(self, *_: object) -> None:
        if self._in_forward:
            self._timer.stop("embedding")
            self._timer.start("dense_forward")


@dataclass(frozen=True)
class _TimedOptimizer:
    """The calls that the pipeline makes of an optimizer, with the update's time taken."""

    optimizer: CombinedOptimizer
    timer: StepTimer

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        with self.timer.part("optimizer"):
            self.optimizer.step()
