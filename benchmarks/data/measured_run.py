"""Wall time, CPU time and peak memory of a command and its child processes."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLING_SECONDS = 0.02


@dataclass(frozen=True)
class MeasuredRun:
    """
    Attributes:
        cpu_seconds: what tells the cost on a machine that others use too.
        peak_pss_mib: largest sum over processes of PSS: each page divided among the processes that share it.
        peak_rss_mib: likewise of RSS, which counts shared pages several times.
    """

    wall_seconds: float
    cpu_seconds: float
    peak_pss_mib: float
    peak_rss_mib: float


def measured_run(command: Sequence[str]) -> MeasuredRun:
    """Run a command, sampling its memory; ends this process with a message if the command fails."""
    cpu_before, start = _children_cpu_seconds(), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak_pss, peak_rss = 0, 0
    while process.poll() is None:
        pss, rss = _tree_memory(process.pid)
        peak_pss, peak_rss = max(peak_pss, pss), max(peak_rss, rss)
        time.sleep(SAMPLING_SECONDS)
    seconds = time.perf_counter() - start
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with exit code {process.returncode}")
    cpu = _children_cpu_seconds() - cpu_before
    return MeasuredRun(round(seconds, 3), round(cpu, 3), round(peak_pss / 2**20, 1), round(peak_rss / 2**20, 1))


def processor() -> str:
    """The CPU's name."""
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return names[0] if names else "unknown"


def _children_cpu_seconds() -> float:
    """CPU time of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _tree_memory(pid: int) -> tuple[int, int]:
    """Sums of PSS and RSS in bytes over a process and its descendants."""
    pss, rss = 0, 0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            try:
                memory = process.memory_full_info()
            except psutil.Error:
                continue
            pss, rss = pss + memory.pss, rss + memory.rss
    except psutil.NoSuchProcess:
        pass
    return pss, rss
