"""Random delays on a device, other ones on each rank: what stress tests put between kernels."""

from __future__ import annotations

import random
import time

import torch

_CYCLES_PER_MICROSECOND = 1_900


class RandomDelays:
    """Delays of up to ``usual`` microseconds, and now and then a longer one.

    Args:
        usual: the longest usual one, in microseconds.
        long_every: one of so many delays, on average, is a long one.
        long_factor: how many times as long as a usual one.
    """

    def __init__(self, device: torch.device, seed: int, usual: float, *, long_every: int, long_factor: int) -> None:
        self._device, self._random, self._usual = device, random.Random(seed), usual
        self._long_every, self._long_factor = long_every, long_factor
        self.longest = usual * long_factor

    def delay(self) -> None:
        """Delay what the device is given from now on. The host does not wait for a GPU."""
        microseconds = self._random.uniform(0, self._usual)
        if self._random.randrange(self._long_every) == 0:
            microseconds *= self._long_factor
        if self._device.type == "cuda":
            torch.cuda._sleep(int(microseconds * _CYCLES_PER_MICROSECOND))
        else:
            time.sleep(microseconds / 1e6)
