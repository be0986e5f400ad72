"""Facts about GPUs: torch says what this process may use, nvidia-smi how it is connected. Either may be missing."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from dlrm_fused.compat.torch import is_rocm
from dlrm_fused.doctor.facts import Gpu

_TOOL_SECONDS = 15
_CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124  # cuda.h


@dataclass(frozen=True)
class Smi:
    """The answers of nvidia-smi about a host; empty if it is missing or does not answer.

    Attributes:
        indices: nvidia-smi's number of each GPU, by uuid.
        nvlinks: GB/s of the active NVLinks of each GPU, by its number.
        topology: of each row, by column, names as in nvidia-smi's table, but adapters by their own.
    """

    indices: Mapping[str, int] = field(default_factory=dict)
    driver: str | None = None
    nvlinks: Mapping[int, list[float]] = field(default_factory=dict)
    topology: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def ask_nvidia_smi() -> Smi:
    """Ask nvidia-smi, if there is one, for its GPUs, NVLinks and topology; each question has a time limit."""
    listed = output_of("nvidia-smi", "--query-gpu=index,uuid,driver_version", "--format=csv,noheader")
    indices, driver = parse_gpus(listed)
    if not indices:
        return Smi()
    nvlinks, topology = output_of("nvidia-smi", "nvlink", "-s"), output_of("nvidia-smi", "topo", "-m")
    return Smi(indices, driver, parse_nvlinks(nvlinks), parse_topology(topology))


def output_of(*command: str) -> str:
    """Return the output of a tool; empty if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_gpus(text: str) -> tuple[dict[str, int], str | None]:
    """``0, GPU-c7b2..., 570.86.15`` a line -> number by uuid (without ``GPU-``), and the driver."""
    rows = re.findall(r"^(\d+), GPU-([\w-]+), (\S+)$", text, re.MULTILINE)
    return {uuid: int(index) for index, uuid, _ in rows}, rows[0][2] if rows else None


def parse_nvlinks(text: str) -> dict[int, list[float]]:
    """``nvidia-smi nvlink -s`` -> GB/s of each active link, by the number of the GPU."""
    links: dict[int, list[float]] = {}
    for line in text.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            links[int(gpu[1])] = []
        elif links and (rate := re.match(r"\s*Link \d+: ([\d.]+) GB/s", line)):
            links[max(links)].append(float(rate[1]))
    return links


def parse_topology(text: str) -> dict[str, dict[str, str]]:
    """``nvidia-smi topo -m`` -> the connection of each row with each column, such as ``{"GPU0": {"GPU1": "NV18"}}``.

    Adapters get their own names from the legend (``mlx5_0`` for ``NIC0``); columns of affinity are left out.
    """
    lines = [[cell.strip() for cell in re.sub(r"\x1b\[\d*m", "", line).split("\t")] for line in text.splitlines()]
    legend = dict(re.findall(r"^\s*(NIC\d+): (\S+)\s*$", text, re.MULTILINE))
    header = next((line for line in lines if "GPU0" in line[1:]), None)
    if header is None:
        return {}
    columns = {place: name for place, name in enumerate(header) if re.fullmatch(r"GPU\d+|NIC\d+|mlx\w+", name)}
    return {
        legend.get(line[0], line[0]): {
            legend.get(name, name): line[place] for place, name in columns.items() if name != line[0] and place < len(line)
        }
        for line in lines
        if line[0] in columns.values()
    }


def gpu_of(index: int, smi: Smi) -> Gpu:
    """Return the GPU with torch's number ``index``, which may differ from nvidia-smi's."""
    properties = [torch.cuda.get_device_properties(each) for each in range(torch.cuda.device_count())]
    uuids = [str(each.uuid).removeprefix("GPU-") for each in properties]
    number, names = smi.indices.get(uuids[index]), {f"GPU{number}": uuid for uuid, number in smi.indices.items()}
    return Gpu(
        name=properties[index].name,
        uuid=uuids[index],
        peer_access={
            uuid: torch.cuda.can_device_access_peer(index, other) for other, uuid in enumerate(uuids) if other != index
        },
        driver=smi.driver,
        nvlinks=None if number is None else smi.nvlinks.get(number),
        topology={names.get(column, column): link for column, link in smi.topology.get(f"GPU{number}", {}).items()},
        dmabuf=_has_dmabuf(index),
        capability=torch.cuda.get_device_capability(index),
    )


def _has_dmabuf(index: int) -> bool:
    if is_rocm():
        return False
    with suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")
        device, value = ctypes.c_int(), ctypes.c_int()
        if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index):
            return False
        return not cuda.cuDeviceGetAttribute(ctypes.byref(value), _CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, device) and bool(
            value.value
        )
    return False
