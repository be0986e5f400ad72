"""The origin of results: versions of packages, the commit and the command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "triton")


def describe_environment(ranks: Sequence[str], commit: str | None) -> dict[str, Any]:
    """Machine, versions, commit and command, for the head of a report.

    Args:
        ranks: the device of each.
        commit: where there is no git repository.
    """
    return {
        "machine": {"ranks": list(ranks), "cpu_cores": os.cpu_count(), "kernel": platform.release()},
        "versions": versions(),
        "commit": commit or current_commit(),
        "command": command_line(),
    }


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or ``CPU``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed; on GPUs, of CUDA and NCCL too."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def command_line() -> str:
    """The command that started this process: without folders of this machine, and with a module's name for its file."""
    spec = sys.modules["__main__"].__spec__
    program = f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    return " ".join([program, *without_folders(sys.argv[1:])])


def without_folders(words: Sequence[str]) -> list[str]:
    """Arguments such as ``data.path=/data/criteo`` as ``data.path=criteo``; where data lie is nobody else's concern."""
    return [re.sub(r"(^|=)/\S*/", r"\1", word) for word in words]


def current_commit() -> str:
    """Return the commit of this repository; ``unknown`` if git does not know."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
