"""``python -m dlrm_fused.doctor`` on two GPUs: as one host, as two, without peer access, and with faults that users make."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_fused.doctor.command import main
from tests.distributed.launch import run_program

pytestmark = pytest.mark.gpu(2)


def be_doctor(environment: Mapping[str, str], plant: Callable[[], None] | None) -> None:
    """A rank of doctor, in that environment; the fault is planted on rank 1."""
    number = os.environ["RANK"]
    os.environ.update({name: value.format(rank=number) for name, value in environment.items()})
    if plant is not None and number == "1":
        plant()
    sys.exit(main(["--json"]))


def examined(folder: Path, environment: Mapping[str, str], plant: Callable[[], None] | None = None) -> dict[str, Any]:
    ended = run_program(2, folder, 120.0, be_doctor, environment, plant)
    report, _ = json.JSONDecoder().raw_decode(ended.output, ended.output.index("{\n"))
    assert ended.statuses[0] == report["status"], ended.output
    return dict(report)


def found(report: Mapping[str, Any]) -> dict[str, str]:
    return {finding["name"]: finding["what"] for finding in report["findings"]}


@pytest.mark.parametrize(
    ("environment", "transport", "said"),
    [
        ({}, "stores", ""),
        ({"DLRM_FUSED_HOST": "host{rank}"}, "messages", ""),
        ({"NCCL_P2P_DISABLE": "1"}, "messages", "NCCL_P2P_DISABLE=1 switches peer access off"),
    ],
    ids=["one host", "two hosts", "no peer access"],
)
def test_it_says_what_fused_operators_take_and_how_fast_the_link_is(
    tmp_path: Path, environment: Mapping[str, str], transport: str, said: str
) -> None:
    report = examined(tmp_path, environment)
    assert [finding for finding in report["findings"] if finding["level"] == "broken"] == []
    assert said in found(report).get("no-peer-access", "")
    assert report["operators"]["embedding + All-to-All"] == transport
    (measured,) = report["measurements"]
    assert (measured["ranks"], measured["backend"]) == ([0, 1], "nccl")
    # NVLink carries 450 GB/s, PCIe 5 about 50; without peer access data goes through the host's memory. Where tests of other
    # workers take turns on the GPUs, 0.5 have been measured.
    is_alone = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1"
    assert measured["gb_per_s"] > (2 if is_alone else 0.1)


def hide_all_gpus() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def take_the_gpu_of_rank_0() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    os.environ["LOCAL_RANK"] = "0"


def see_one_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"


def raise_in_checks() -> None:
    def properties(device: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    torch.cuda.get_device_properties = properties  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("plant", "name", "said"),
    [
        (hide_all_gpus, "devices-differ", "no GPU on"),
        (take_the_gpu_of_rank_0, "gpu-shared", "ranks 0, 1 on"),
        (see_one_gpu, "too-few-gpus", "has 1 GPUs, and more ranks"),
        (raise_in_checks, "rank-failed", "device-side assert triggered"),
    ],
)
def test_it_names_a_fault_of_rank_1(tmp_path: Path, plant: Callable[[], None], name: str, said: str) -> None:
    report = examined(tmp_path, {}, plant)
    assert report["status"] == 1
    assert said in found(report)[name]
