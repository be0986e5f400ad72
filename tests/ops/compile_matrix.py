"""Print shared memory and registers of every kernel of the package, compiled for each architecture; needs no GPU.

    python -m tests.ops.compile_matrix [sm_80 sm_120 ...]

Of a kernel that is launched in several ways the largest of each counts. A fresh run takes some minutes for an architecture;
Triton's cache keeps what it has compiled.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Any

import pytest
import torch
import triton

from dlrm_fused.ops.common.devices import room_of_program
from tests.ops.test_compile_for_gpus import ARCHITECTURES, LAUNCHES, check_limits, compile_only, is_possible, registers


def resources(architecture: str) -> dict[str, tuple[int, int]]:
    """By kernel, bytes of shared memory of a program and registers of a thread; these are 0 where they are not known."""
    of, found = ARCHITECTURES[architecture], dict[str, tuple[int, int]]()

    def seen(name: str, made: Any) -> None:
        check_limits(made, of)
        shared, used = found.get(name, (0, 0))
        of_thread = registers(made) if of.target.backend == "cuda" else 0
        found[name] = max(shared, made.metadata.shared), max(used, of_thread)

    for name, (launch, _) in LAUNCHES.items():
        if is_possible(name, architecture):
            with pytest.MonkeyPatch.context() as monkeypatch, compile_only(of, monkeypatch, seen):
                launch()
    return found


def main() -> None:
    architectures = sys.argv[1:] or list(ARCHITECTURES)
    tables = {architecture: resources(architecture) for architecture in architectures}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
    ).stdout.strip()
    print("# Kernels by architecture: bytes of shared memory of a program, and registers of a thread (of NVIDIA's alone)\n")
    print(f"commit {commit}, torch {torch.__version__}, triton {triton.__version__}, {platform.machine()} without a GPU")
    print("command: " + " ".join(["python -m tests.ops.compile_matrix", *sys.argv[1:]]) + "\n")
    print("| kernel | " + " | ".join(architectures) + " |\n|---|" + "---|" * len(architectures))
    for kernel in sorted(set().union(*tables.values())):
        cells = [tables[architecture].get(kernel, (0, 0)) for architecture in architectures]
        print(f"| {kernel} | " + " | ".join(f"{shared:,}, {used}" if used else f"{shared:,}" for shared, used in cells) + " |")
    largest = [tuple(map(max, zip(*table.values(), strict=True))) for table in tables.values()]
    print("| **largest** | " + " | ".join(f"{shared:,}, {used}" if used else f"{shared:,}" for shared, used in largest) + " |")
    limits = [room_of_program(ARCHITECTURES[architecture].memory) for architecture in architectures]
    print("| **limit** | " + " | ".join(f"{limit:,}" for limit in limits) + " |\n\nRegisters of a thread are 255 at most.")


if __name__ == "__main__":
    main()
