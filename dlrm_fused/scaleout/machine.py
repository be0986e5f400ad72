"""The time that a rank's kernels take: a roofline fitted to measured kernels.

A kernel takes a launch, and then the longer of its matrix products at the machine's rate and of its bytes at the bandwidth of
its memory (Williams, Waterman, Patterson, *Roofline*, Commun. ACM 52(4), 2009). Products of few operations, which do not fill
the machine, run at a lower rate: rate = peak * flops / (flops + half), Hockney's r_infinity and n_1/2 (Parallel Computing
1(3), 1984). ``benchmarks/calibrate.py`` writes the file that :func:`read` reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dlrm_fused.errors import ConfigError
from dlrm_fused.records import parse_record
from dlrm_fused.scaleout.dense_trace import Kernel


@dataclass(frozen=True)
class Machine:
    """Rates of one rank, in seconds, bytes/s and floating-point operations/s.

    Args:
        launch: Seconds between the starts of two kernels that do nothing.
        memory: Bandwidth of elementwise kernels, reading and writing.
        products: Peak of matrix products, by dtype (bf16, fp32).
        half_products: Operations of a product that runs at half of the peak, by dtype.
        lookup: Bandwidth of embedding rows that are read and pooled.
        update: Bandwidth of embedding rows that are read and written by the fused optimizer.
        optimizer: Bandwidth of the dense optimizer, reading and writing.
        collective: Seconds that a collective of no bytes takes on one rank's stream.
        link_shares: Share of a link's rate between hosts that a collective of the library reaches, by its name; those that were
            not measured reach all of it. gloo's All-to-All of two ranks reaches half, since it sends in one direction after
            the other.
        nvlink_shares: The same within a host of GPUs; ``stores`` are those of the kernels of ``comm=fused``.
        fused_speeds: How many times as fast as FBGEMM's the ``lookup`` and the ``update`` of ``comm=fused`` are, 1 if not
            measured; and its ``sort`` over FBGEMM's update, which contains one.
    """

    name: str
    launch: float
    memory: float
    products: Mapping[str, float]
    half_products: Mapping[str, float]
    lookup: float
    update: float
    optimizer: float
    collective: float
    link_shares: Mapping[str, float] = field(default_factory=dict)
    nvlink_shares: Mapping[str, float] = field(default_factory=dict)
    fused_speeds: Mapping[str, float] = field(default_factory=dict)

    def share(self, sender: str, link: str) -> float:
        """Return the share of a link's rate that a collective of the library, or ``stores``, reach.

        Args:
            link: Its name in :attr:`Topology.links <dlrm_fused.scaleout.topologies.Topology.links>`.
        """
        shares = self.nvlink_shares if link.startswith("nvlink") else self.link_shares
        return shares.get(sender, 1.0)

    def seconds(self, kernel: Kernel, dtype: str) -> float:
        compute = 0.0
        if kernel.flops:
            compute = (kernel.flops + self.half_products[dtype]) / self.products[dtype]
        return self.launch + max(compute, kernel.bytes / self.memory)

    def slower(self, factor: float) -> Machine:
        """Return one whose kernels take ``factor`` times as long."""
        return replace(
            self,
            launch=self.launch * factor,
            memory=self.memory / factor,
            products={dtype: rate / factor for dtype, rate in self.products.items()},
            lookup=self.lookup / factor,
            update=self.update / factor,
            optimizer=self.optimizer / factor,
        )


def read(path: Path, setting: str = "machine") -> Machine:
    """

    Raises:
        ConfigError: no such file, or it is no calibration.
    """
    try:
        found = json.loads(path.read_text())["machine"]
    except FileNotFoundError:
        raise ConfigError(f"{setting}={path}: no such file; benchmarks/calibrate.py writes one") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{setting}={path}: not a calibration, as benchmarks/calibrate.py writes it") from None
    try:
        machine = parse_record(found, Machine)
    except ValueError as error:
        raise ConfigError(f"{setting}={path}: under machine, {error}; measure again") from None
    rates = [machine.memory, machine.lookup, machine.update, machine.optimizer, *machine.products.values()]
    rates += [*machine.link_shares.values(), *machine.nvlink_shares.values(), *machine.fused_speeds.values()]
    times = [machine.launch, machine.collective, *machine.half_products.values()]
    if not all(math.isfinite(value) and value > 0 for value in rates) or not all(0 <= value < math.inf for value in times):
        raise ConfigError(f"{setting}={path}: rates must be above 0 and times not below it; measure again")
    return machine
