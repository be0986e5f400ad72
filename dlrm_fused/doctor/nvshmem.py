"""Facts about NVSHMEM: whether its library is there, whether torch can use it, how it would send between hosts."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from ctypes.util import find_library
from pathlib import Path

from dlrm_fused.compat.torch import is_nvshmem_available
from dlrm_fused.doctor.facts import Nvshmem


def nvshmem_of_host() -> Nvshmem:
    return Nvshmem(_find_library(), is_nvshmem_available(), nvshmem_transport(os.environ))


def nvshmem_transport(environment: Mapping[str, str]) -> str:
    """``IBGDA``, ``proxy (NAME)`` or ``none``, by NVSHMEM_IB_ENABLE_IBGDA and NVSHMEM_REMOTE_TRANSPORT.

    Source: NVSHMEM's documentation, environment variables; without them its transport is ibrc, with a proxy thread.
    """
    remote = environment.get("NVSHMEM_REMOTE_TRANSPORT", "ibrc").lower()
    if remote == "none":
        return "none"
    is_ibgda = environment.get("NVSHMEM_IB_ENABLE_IBGDA", "0").lower() in ("1", "true", "yes", "on", "y")
    return "IBGDA" if is_ibgda else f"proxy ({remote})"


def _find_library() -> str | None:
    for folder in _folders():
        for path in sorted(folder.glob("libnvshmem_host.so*")):
            return str(path)
    return find_library("nvshmem_host")


def _folders() -> Iterator[Path]:
    if "NVSHMEM_HOME" in os.environ:
        yield Path(os.environ["NVSHMEM_HOME"]) / "lib"
    # The package that torch's CUDA build depends on puts it here.
    try:
        package = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        return
    for location in package.submodule_search_locations or () if package else ():
        yield Path(location) / "lib"
