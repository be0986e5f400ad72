"""The GPUs that the binaries of torch and FBGEMM run on."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import triton

from dlrm_fused.doctor.gpus import output_of

_LARGE_BYTES = 16 << 20


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Return whether code for an architecture, such as ``sm_90a`` or ``compute_90``, runs on a GPU of a compute capability.

    Binaries (``sm``) run on their own major capability from their minor one on; PTX (``compute``) is compiled for every later
    one. ``a`` binds either to just its capability, ``f`` to its major one. Source: NVIDIA's *CUDA C++ Programming Guide*,
    "Compute Capability and Streaming Multiprocessor Versions" and "Feature Set Compiler Targets".
    """
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if found is None:
        return False
    kind, needed, feature = found[1], (int(found[2]), int(found[3])), found[4]
    if feature == "a":
        return capability == needed
    if kind == "compute" and not feature:
        return capability >= needed
    return capability[0] == needed[0] and capability >= needed


def fbgemm_architectures() -> list[str]:
    """Architectures of the installed FBGEMM's kernels, such as ``sm_80``; empty for a CPU build, or where they cannot be read.

    Read from one of its small libraries by the cuobjdump that Triton brings: all of them are built for the same.
    """
    spec = importlib.util.find_spec("fbgemm_gpu")
    for folder in spec.submodule_search_locations or () if spec else ():
        sizes = {library: library.stat().st_size for library in Path(folder).glob("*.so")}
        for library in sorted(sizes, key=lambda library: sizes[library]):
            if sizes[library] < _LARGE_BYTES and (found := parse_cuobjdump(_cuobjdump(library))):
                return found
    return []


def _cuobjdump(library: Path) -> str:
    """Return the output of cuobjdump; empty if Triton does not bring it."""
    try:
        tool = triton.knobs.nvidia.cuobjdump.path
    except (AttributeError, RuntimeError):
        return ""
    return output_of(tool, "--list-elf", str(library)) + output_of(tool, "--list-ptx", str(library))


def parse_cuobjdump(text: str) -> list[str]:
    """``ELF file    1: name.1.sm_80.cubin`` a line, or ``PTX file    1: name.1.sm_90.ptx`` -> ``sm_80``, ``compute_90``."""
    names = re.findall(r"\.sm_(\d+[af]?)\.(cubin|ptx)$", text, re.MULTILINE)
    return list(dict.fromkeys(f"{'sm' if kind == 'cubin' else 'compute'}_{number}" for number, kind in names))
