"""Steps as ``dlrm_fused.scaleout`` foretells them, for the rows of :mod:`benchmarks.training.compare`.

The step of a contestant's smallest batch is the time of its host, and has no simulated one. Nothing else comes from steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlrm_fused.config import load_config
from dlrm_fused.scaleout.scenario import HostSettings, NetworkSettings, Scenario, TrainSettings
from dlrm_fused.scaleout.sweep import sweep


@dataclass(frozen=True)
class Measured:
    """The measured steps of a contestant.

    Attributes:
        config: of the trainer.
        settings: of the config, ``comm`` among them.
        ranks, hosts: on which it ran; ranks are divided equally.
        step_ms: by global batch size.
    """

    config: str
    settings: Sequence[str]
    ranks: int
    hosts: int
    step_ms: Mapping[int, float]

    def simulated_ms(self, machine: str) -> dict[int, float]:
        """Return the milliseconds of a step by global batch size, without the smallest.

        Args:
            machine: a file of ``benchmarks/calibrate.py``.

        Raises:
            ConfigError: as of :func:`dlrm_fused.scaleout.sweep.sweep`.
        """
        smallest, *others = sorted(self.step_ms)
        return {batch: self._simulated(machine, batch, self.step_ms[smallest]) for batch in others}

    def _simulated(self, machine: str, batch: int, host_ms: float) -> float:
        scenario = Scenario(
            train=TrainSettings(self.config, [one for one in self.settings if not one.startswith("comm=")]),
            machine=machine,
            network=NetworkSettings(ranks_per_host=self.ranks // self.hosts),
            hosts=[self.hosts],
            samples_per_rank=batch // self.ranks,
            host_ms=HostSettings(baseline=host_ms, fused=host_ms),
        )
        if torch.cuda.is_available():
            scenario.memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        comm = load_config(self.config, self.settings).comm.name
        found: dict[str, Any] = next(row for row, _ in sweep(scenario) if row["comm"] == comm)
        return float(found["step_ms"])
