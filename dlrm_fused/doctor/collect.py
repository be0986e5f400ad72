"""Gathers the facts of this rank. What is missing (GPUs, tools, libraries) is a fact, not an error."""

from __future__ import annotations

import platform
import shutil

import torch

from dlrm_fused.doctor.architectures import fbgemm_architectures
from dlrm_fused.doctor.facts import RankFacts
from dlrm_fused.doctor.gpus import ask_nvidia_smi, gpu_of
from dlrm_fused.doctor.network import network_of_host
from dlrm_fused.symmetric.hosts import Host
from dlrm_fused.training.runtime import Rank
from dlrm_fused.versions import installed_versions


def collect_facts(rank: Rank) -> RankFacts:
    smi = ask_nvidia_smi()
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return RankFacts(
        rank=rank.index,
        local_rank=rank.local_index,
        host=Host.here(),
        python=platform.python_version(),
        versions=installed_versions(),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        nccl=_nccl_version(),
        host_gpus=len(smi.indices),
        visible_gpus=visible,
        gpu=gpu_of(rank.local_index, smi) if rank.local_index < visible else None,
        network=network_of_host(),
        torch_architectures=torch.cuda.get_arch_list(),
        fbgemm_architectures=fbgemm_architectures(),
        shared_memory=_free_shared_memory(),
    )


def _free_shared_memory() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def _nccl_version() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, ImportError, RuntimeError):  # a build without NCCL
        return None
