"""A torch that is built for AMD's GPUs: no kernel of ours, no instruction and no driver call of NVIDIA's is reached there.

Nobody has run this on an AMD GPU: ``torch.version.hip`` is made up here. Training: tests/distributed/test_rocm.py.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from dlrm_fused.doctor.gpus import _has_dmabuf
from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.inference.online.scorer import OnlineScorer
from dlrm_fused.ops.common import devices
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.symmetric.device import uses_kernels

PACKAGE = Path(__file__).parents[2] / "dlrm_fused"
GPU = torch.device("cuda", 0)
OF_NVIDIA = r"inline_asm_elementwise|\bgdc_|libcuda\b|\bcu[A-Z][a-z]+[A-Z]\w+\("


@pytest.fixture(autouse=True)
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI300 for torch: a compute capability of 9.4, and no driver of NVIDIA's."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} is loaded")

    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(ctypes, "CDLL", refuse)


def test_fused_communication_is_refused_in_one_line_that_says_what_to_set() -> None:
    with pytest.raises(CommunicationError) as refused:
        symmetric_group(device=GPU)
    assert str(refused.value) == (
        f"device=cuda:0: fused communication is not known to work on AMD's GPUs (torch {torch.__version__} for ROCm 7.1), "
        "where it has never run; comm=baseline is TorchRec's own path"
    )


def test_no_kernel_of_ours_runs_but_under_the_interpreter() -> None:
    under_interpreter = uses_kernels(torch.device("cpu"))
    assert uses_kernels(GPU) == under_interpreter


def test_no_launch_starts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_of", lambda device: SimpleNamespace(multiprocessors=304))
    # Devices of no other test: what is known of one is kept.
    assert not devices.starts_early(torch.device("cuda", 11), programs=1)
    monkeypatch.setattr(torch.version, "hip", None)
    assert devices.starts_early(torch.device("cuda", 12), programs=1)


def test_no_driver_of_nvidia_is_called() -> None:
    assert not _has_dmabuf(0)


def test_online_scoring_is_refused() -> None:
    nothing: Any = None
    tables: Any = SimpleNamespace(rows=SimpleNamespace(device=GPU, dtype=torch.float32))
    with pytest.raises(UsageError, match="device=cuda:0: online scoring is not known to work on AMD's GPUs; allowed here: cpu"):
        OnlineScorer(nothing, nothing, nothing, tables, token_features=[], sparse_features=[], ids_per_bag=1)


def test_what_only_nvidia_has_is_in_files_that_the_tests_above_know_of() -> None:
    """A file that is new here needs a test above; kernels need none, as no workspace of an operator is made."""
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if re.search(OF_NVIDIA, path.read_text())}
    kernels = {"symmetric/device.py", "ops/common/devices.py"}
    of_groups = {"compat/torch.py"}  # for their messages; they are refused
    assert found - kernels == {"doctor/gpus.py"} | of_groups
