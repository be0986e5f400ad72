"""The encoding of histories as CUDA graphs, one for each padded length: without them the host's launches limit it.

A history is padded behind its newest interaction. No interaction sees what comes after it, so pads change nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from dlrm_fused.cuda_graphs import RUNS_BEFORE_CAPTURE, Captures, Generation, GraphRecorder
from dlrm_fused.lasting import lasting
from dlrm_fused.symmetric.launches import Remembered, ceil_div, next_power_of_2

logger = logging.getLogger("dlrm_fused")

# Lengths are padded to multiples of this, and of a sixteenth of the next power of two: to an eighth more at most, from 128 on.
_LEAST_UNIT, _PARTS_OF_POWER = 16, 16
_MOST_CAPTURES = 64

# Encodes rows int64 [n, features, ids of a bag], whose positions are int64 [n], and fills the cache [layers, 2, heads, n, d].
Encode = Callable[[Tensor, Tensor, Tensor], None]


def padded_length(count: int, longest: int) -> int:
    """Return for how many interactions a history is encoded."""
    unit = max(_LEAST_UNIT, next_power_of_2(count) // _PARTS_OF_POWER)
    return min(longest, ceil_div(count, unit) * unit)


def positions_of(count: int) -> Tensor:
    """Return int64 [n], the positions of a history: the newest interaction, the last one, has 1."""
    return torch.arange(count, 0, -1)


class Encodings:
    """CUDA graphs by padded length, which share the memory of their activations and of the result.

    Args:
        shape: features, and ids of a bag.
        cache_shape: layers, 2, heads, the most interactions, and d of a head.
    """

    def __init__(
        self, shape: tuple[int, int], cache_shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape, self._cache_shape, self._dtype, self._device = shape, cache_shape, dtype, device
        self._captures: Captures[_Encoding] = Captures(_MOST_CAPTURES)
        self._requests: Remembered[int] = Remembered()
        self._cache: Tensor | None = None

    def fill(self, rows: Tensor, cache: Tensor, encode: Encode, weights: Callable[[], Generation]) -> bool:
        """Encode a history by a graph, and fill its cache; return whether there was one. Collective.

        The first history of a padded length finds none; the second one makes it.

        Args:
            rows: on the CPU.
            weights: tells what graphs read, which may have been replaced.
        """
        length = padded_length(len(rows), self._cache_shape[3])
        if length not in self._captures:
            requests = self._requests[length] = self._requests.get(length, 0) + 1
            if requests < 2 or not self._captures.has_room:
                return False
            self.capture(length, encode, weights)
        assert self._cache is not None
        self._captures[length].replay(rows)
        # Weights are compared while the GPU computes.
        if self._captures.generation != weights():
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # the graph reads memory that goes with it
            self._captures.clear()
            return False
        cache.copy_(self._cache[..., : len(rows), :])
        return True

    @lasting
    def capture(self, length: int, encode: Encode, weights: Callable[[], Generation]) -> None:
        """Capture the graph of a padded length. Collective."""
        generation = weights()
        generation.hold()
        self._captures.renew(generation)
        if self._cache is None:
            self._cache = torch.empty(self._cache_shape, dtype=self._dtype, device=self._device)
            self._recorder = GraphRecorder(self._device)
            size = self._cache.numel() * self._cache.element_size()
            logger.info("online scoring: %.0f MiB for encoded histories, which all CUDA graphs share", size / 2**20)
        encoding = _Encoding((length, *self._shape), self._device)
        encoding.capture(self._recorder, encode, self._cache[..., :length, :])
        self._captures[length] = encoding


class _Encoding:
    """The graph of one padded length, and the memory of its inputs.

    Args:
        shape: n, features, and ids of a bag.
    """

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        self._shape = shape
        size = math.prod(shape) + shape[0]
        self._block = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._on_device = torch.zeros(size, dtype=torch.int64, device=device)
        self._rows, self._positions = self._views(self._block)

    def _views(self, block: Tensor) -> tuple[Tensor, Tensor]:
        rows, positions = block.split([math.prod(self._shape), self._shape[0]])
        return rows.view(self._shape), positions

    def capture(self, recorder: GraphRecorder, encode: Encode, cache: Tensor) -> None:
        """Capture the copy of the inputs to the device, and the encoding. Collective."""

        def run() -> None:
            self._on_device.copy_(self._block, non_blocking=True)
            encode(*self._views(self._on_device), cache)

        with recorder.on_its_stream():
            for _ in range(RUNS_BEFORE_CAPTURE):  # compiles kernels, connects ranks, takes workspaces
                run()
            with recorder.record() as self._graph:
                run()

    def replay(self, rows: Tensor) -> None:
        """Encode rows int64 [n, features, ids], at most as many as the graph has."""
        self._rows[: len(rows)] = rows
        self._positions[: len(rows)] = positions_of(len(rows))
        self._graph.replay()
