"""The doctor: what it concludes from facts of ranks, and how it gathers them. Real ranks: tests/distributed/test_doctor.py."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_fused.doctor import architectures, gpus
from dlrm_fused.doctor.architectures import parse_cuobjdump, runs_on
from dlrm_fused.doctor.collect import collect_facts
from dlrm_fused.doctor.command import main
from dlrm_fused.doctor.examine import attempt
from dlrm_fused.doctor.facts import Gpu, Interface, Network, RankFacts, RdmaPort
from dlrm_fused.doctor.findings import NAMES, Finding, Level, exit_status, judge_facts, judge_measurements
from dlrm_fused.doctor.gpus import Smi, ask_nvidia_smi, parse_gpus, parse_nvlinks, parse_topology
from dlrm_fused.doctor.measure import Measurement, pairs_to_measure
from dlrm_fused.doctor.network import gloo_uses, list_rdma_ports, nccl_uses
from dlrm_fused.doctor.report import Examination, as_json, as_ranges, as_text
from dlrm_fused.doctor.transports import operator_transports, transport_of
from dlrm_fused.symmetric.hosts import Host
from dlrm_fused.training.runtime import Rank

ROOT = Path(__file__).parents[2]
CPU_VERSIONS = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0", "triton": "3.7.1"}
GPU_VERSIONS = {"torch": "2.11.0+cu130", "torchrec": "1.6.1", "fbgemm-gpu": "1.6.0", "triton": "3.6.0"}
LOOPBACK = Interface("lo", ["127.0.0.1"], is_loopback=True)
ETHERNET = Interface("eth0", ["10.0.0.1"])
ACTIVE_PORT = RdmaPort("mlx5_0", "1", "InfiniBand", "ACTIVE", "400 Gb/sec (4X NDR)")
Ranks = list[RankFacts]


def cpu_rank(rank: int, host: str = "a") -> RankFacts:
    ethernet = replace(ETHERNET, addresses=["10.0.0.1" if host == "a" else f"10.0.0.{rank + 2}"])
    network = Network([LOOPBACK, ethernet], settings={}, uses={"gloo": ["eth0"], "nccl": ["eth0"]})
    return RankFacts(
        rank=rank,
        local_rank=rank % 2,
        host=Host(host, f"boot of {host}", "pid:[1]"),
        python="3.12.3",
        versions=CPU_VERSIONS,
        cuda=None,
        nccl=None,
        host_gpus=0,
        visible_gpus=0,
        gpu=None,
        network=network,
    )


def gpu_rank(rank: int, host: str = "a") -> RankFacts:
    """One of two ranks of a host whose two GPUs are connected by NVLink, with InfiniBand."""
    uuid, peer = f"{host}-{rank % 2}", f"{host}-{1 - rank % 2}"
    on_cpu = cpu_rank(rank, host)
    return replace(
        on_cpu,
        versions=GPU_VERSIONS,
        cuda="13.0",
        nccl="2.28.9",
        host_gpus=2,
        visible_gpus=2,
        gpu=Gpu(
            "H200",
            uuid,
            {peer: True},
            driver="580.65",
            nvlinks=[26.562] * 18,
            topology={peer: "NV18"},
            dmabuf=True,
            capability=(9, 0),
        ),
        torch_architectures=["sm_80", "sm_90", "sm_100", "sm_120"],
        fbgemm_architectures=["sm_80", "sm_90a", "sm_100a"],
        shared_memory=64_000_000,
        network=replace(on_cpu.network, rdma=[ACTIVE_PORT]),
    )


def with_gpu(facts: RankFacts, **changes: Any) -> RankFacts:
    assert facts.gpu is not None
    return replace(facts, gpu=replace(facts.gpu, **changes))


def with_network(facts: RankFacts, **changes: Any) -> RankFacts:
    return replace(facts, network=replace(facts.network, **changes))


def two_cpu_hosts() -> Ranks:
    return [cpu_rank(rank, "ab"[rank // 2]) for rank in range(4)]


def two_gpu_hosts() -> Ranks:
    return [gpu_rank(rank, "ab"[rank // 2]) for rank in range(4)]


def changed(ranks: Ranks, rank: int, facts: RankFacts) -> Ranks:
    return [*ranks[:rank], facts, *ranks[rank + 1 :]]


def told(findings: Sequence[Finding]) -> str:
    return "\n".join(f"{f.level.name} {f.name} {as_ranges(f.ranks)}: {f.what} -> {f.advice}" for f in findings)


# Transports.


def test_ranks_of_one_cpu_host_share_memory() -> None:
    assert transport_of(cpu_rank(0), cpu_rank(1)) == ("stores", "one host: shared memory", "")


def test_gpus_of_one_host_with_peer_access_store_into_each_other() -> None:
    assert transport_of(gpu_rank(0), gpu_rank(1)) == ("stores", "one host: peer access over 18 NVLinks", "")
    by_pcie = with_gpu(gpu_rank(0), topology={"a-1": "SYS"})
    assert transport_of(by_pcie, gpu_rank(1)).why == "one host: peer access over PCIe (SYS)"


def test_a_gpu_that_this_process_does_not_see_is_taken_to_be_reachable() -> None:
    assert transport_of(with_gpu(gpu_rank(0), peer_access={}, topology={}), gpu_rank(1)).transport == "stores"


def test_gpus_without_peer_access_send_messages() -> None:
    choice = transport_of(with_gpu(gpu_rank(0), peer_access={"a-1": False}), gpu_rank(1))
    assert (choice.transport, choice.why) == ("messages", "one host, but their GPUs have no peer access")
    assert "nvidia-smi topo -p2p r" in choice.advice


def test_amds_gpus_take_torchrecs_path() -> None:
    ranks = [replace(facts, hip="7.1") for facts in two_gpu_hosts()]
    assert transport_of(ranks[0], ranks[1]) == transport_of(ranks[0], ranks[2])
    assert transport_of(ranks[0], ranks[1]).transport == "torchrec"
    assert operator_transports(ranks)["embedding + All-to-All"] == operator_transports(ranks)["expert layer"] == "torchrec"


def test_hosts_send_messages_to_each_other() -> None:
    assert transport_of(cpu_rank(0), cpu_rank(1, "b")) == ("messages", "other hosts: gloo", "")
    assert transport_of(gpu_rank(0), gpu_rank(1, "b")) == ("messages", "other hosts: NCCL", "")


def test_hosts_without_rdma_are_told_what_would_be_faster() -> None:
    bare = [with_network(f, rdma=[]) for f in (gpu_rank(0), gpu_rank(2, "b"))]
    assert transport_of(*bare).advice.startswith("an active InfiniBand or RoCE port on both hosts")
    staged = [with_gpu(f, dmabuf=False) for f in (gpu_rank(0), gpu_rank(2, "b"))]
    assert transport_of(*staged).advice.startswith("`modprobe nvidia_peermem`")


def test_containers_of_one_machine_cannot_map_each_others_memory() -> None:
    other = replace(cpu_rank(1), host=Host("a", "boot of a", "pid:[2]"))
    choice = transport_of(cpu_rank(0), other)
    assert (choice.transport, choice.advice) == ("messages", "run all ranks of a host in one container")


def test_a_gpu_and_a_cpu_send_messages() -> None:
    assert transport_of(gpu_rank(0), cpu_rank(1)).transport == "messages"


def test_operators_take_the_transports_of_their_groups() -> None:
    taken = operator_transports(two_gpu_hosts())
    assert taken["embedding + All-to-All"] == "stores, messages"
    assert taken["feature All-to-All"] == "TorchRec's own, through NCCL: the fused one needs stores between all ranks"
    assert taken["GEMV + AllReduce"] == "stores; with model.tensor_parallel over hosts: stores, messages"
    on_one_host = operator_transports(two_gpu_hosts()[:2])
    assert on_one_host["feature All-to-All"] == on_one_host["GEMV + AllReduce"] == "stores"
    on_cpu = operator_transports(two_cpu_hosts())
    assert on_cpu["feature All-to-All"] == "TorchRec's own, through gloo: the fused one needs GPUs"
    assert set(operator_transports([cpu_rank(0)]).values()) >= {"none: no peers"}


# Findings.


@pytest.mark.parametrize("ranks", [[cpu_rank(0)], two_cpu_hosts(), two_gpu_hosts()], ids=["alone", "cpu", "gpu"])
def test_a_healthy_cluster_has_no_findings(ranks: Ranks) -> None:
    assert told(judge_facts(ranks)) == ""


CPU, GPU = two_cpu_hosts(), two_gpu_hosts()
WITHOUT_PEERS = [with_gpu(GPU[0], peer_access={"a-1": False}), with_gpu(GPU[1], peer_access={"a-0": False})]
PLANTED: dict[str, tuple[Ranks, str]] = {
    "another torchrec on one rank": (
        changed(CPU, 3, replace(CPU[3], versions={**CPU_VERSIONS, "torchrec": "1.7.0"})),
        "broken version-set 3: b: torchrec is 1.7.0, wanted 1.8.*.* -> install one set",
    ),
    "the same, between ranks": (
        changed(CPU, 3, replace(CPU[3], versions={**CPU_VERSIONS, "torchrec": "1.8.1"})),
        "broken versions-differ 3: torchrec is 1.8.1 on b, 1.8.0 on a, b -> use the same .venv",
    ),
    "no triton on one host": (
        [*CPU[:2], *(replace(f, versions={k: v for k, v in CPU_VERSIONS.items() if k != "triton"}) for f in CPU[2:])],
        "broken version-set 2-3: b: not installed: triton; * -> install one set",
    ),
    "another Python": (
        changed(CPU, 1, replace(CPU[1], python="3.11.7")),
        "note versions-differ 1: Python is 3.11 on a, 3.12 on a, b -> use the same .venv",
    ),
    "another NCCL": (
        changed(GPU, 0, replace(GPU[0], nccl="2.27.3")),
        "broken versions-differ 0: NCCL is 2.27.3 on a, 2.28.9 on a, b -> use the same .venv",
    ),
    "two machines of one name": (
        [CPU[0], replace(CPU[1], host=Host("a", "boot of another", "pid:[1]"))],
        "note host-name-twice 0-1: several machines call themselves a -> give each a name",
    ),
    "another driver": (
        changed(GPU, 2, with_gpu(GPU[2], driver="570.10")),
        "note versions-differ 2: the GPU's driver is 570.10 on b, 580.65 on a, b -> install one",
    ),
    "a slower GPU": (
        changed(GPU, 2, with_gpu(GPU[2], name="A100")),
        "slower versions-differ 2: the GPU is A100 on b, H200 on a, b -> use GPUs of one kind",
    ),
    "more ranks than GPUs": (
        [GPU[0], replace(GPU[1], gpu=None, visible_gpus=1)],
        "broken too-few-gpus 1: a has 1 GPUs, and more ranks -> start fewer processes with --nproc-per-node",
    ),
    "a host without GPUs": (
        [*GPU[:2], *CPU[2:]],
        "broken devices-differ 2-3: no GPU on b, but on a -> give all ranks GPUs",
    ),
    "torch's CPU build on a GPU host": (
        [replace(CPU[0], host_gpus=8)],
        "slower gpus-unused 0: nvidia-smi lists 8 GPUs on a, torch 2.13.0+cpu finds none -> install torch's CUDA build",
    ),
    "two ranks on one GPU": (
        [GPU[0], with_gpu(GPU[1], uuid="a-0")],
        "broken gpu-shared 0-1: ranks 0, 1 on a use the same GPU (a-0) -> give each rank one of its own",
    ),
    "no peer access": (
        [with_gpu(GPU[0], peer_access={"a-1": False}), GPU[1]],
        "slower no-peer-access 0-1: a: one host, but their GPUs have no peer access: ranks 0 and 1 -> `nvidia-smi topo -p2p r`",
    ),
    "peer access switched off": (
        [with_network(facts, settings={"NCCL_P2P_DISABLE": "1"}) for facts in GPU[:2]],
        "slower no-peer-access 0-1: a: one host, but NCCL_P2P_DISABLE=1 switches peer access off: ranks 0 and 1 -> unset "
        "NCCL_P2P_DISABLE*; comm=auto takes the faster",
    ),
    "a small /dev/shm": (
        WITHOUT_PEERS,
        "note shared-memory 0-1: a: 64.0 MB free in /dev/shm, NCCL needs about 77.1 MB * -> start the container with * "
        "--shm-size=8g",
    ),
    "a /dev/shm that NCCL cannot begin with": (
        [replace(facts, shared_memory=16_000_000) for facts in WITHOUT_PEERS],
        "broken shared-memory 0-1: a: 16.0 MB free in /dev/shm",
    ),
    "FBGEMM's wheel on a GeForce": (
        [with_gpu(facts, name="RTX 5090", capability=(12, 0)) for facts in GPU[:2]],
        "broken fbgemm-kernels 0-1: fbgemm-gpu 1.6.0 has kernels for sm_80, sm_90a, sm_100a, not for RTX 5090 (sm_120) on a "
        "-> build FBGEMM from source for sm_120",
    ),
    "FBGEMM on a GeForce, without cuobjdump": (
        [replace(with_gpu(GPU[0], name="RTX 5090", capability=(12, 0)), fbgemm_architectures=())],
        "note fbgemm-kernels 0: fbgemm-gpu 1.6.0 cannot be looked into; wheels of the ordinary index have kernels for sm_80, "
        "sm_90a, sm_100a, not for RTX 5090 (sm_120) on a -> if it is one of them, build FBGEMM",
    ),
    "a torch for older GPUs": (
        [replace(facts, torch_architectures=["sm_70", "sm_80"]) for facts in GPU[:2]],
        "broken torch-kernels 0-1: torch 2.11.0+cu130 has kernels for sm_70, sm_80, not for H200 (sm_90) on a -> install",
    ),
    "AMD's GPUs": (
        [replace(facts, hip="7.1") for facts in GPU[:2]],
        "note rocm 0-1: torch for ROCm 7.1 on a: fused communication has never run on AMD's GPUs -> nothing: comm=fused",
    ),
    "two containers on one machine": (
        [CPU[0], replace(CPU[1], host=Host("a", "boot of a", "pid:[2]"))],
        "slower containers 0-1: a: one host, but another container: ranks 0 and 1 -> run all ranks of a host in one",
    ),
    "a dead NVLink": (
        [GPU[0], with_gpu(GPU[1], nvlinks=[26.562] * 17)],
        "slower nvlink-inactive 1: a: 17 active NVLinks on the GPU of rank 1, 18 on others -> `nvidia-smi nvlink -s`",
    ),
    "GPUs on PCIe": (
        [with_gpu(GPU[0], topology={"a-1": "SYS"}), with_gpu(GPU[1], topology={"a-0": "SYS"})],
        "note no-nvlink 0-1: a: GPUs connected by PCIe, not NVLink: ranks 0 and 1 -> if the host has NVSwitch",
    ),
    "an interface that does not exist": (
        [
            *CPU[:2],
            *(with_network(f, settings={"GLOO_SOCKET_IFNAME": "eth9"}, uses={"gloo": [], "nccl": ["eth0"]}) for f in CPU[2:]),
        ],
        "broken interface-missing 2-3: GLOO_SOCKET_IFNAME=eth9 on b: no such interface there: eth9 "
        "-> set GLOO_SOCKET_IFNAME on b to eth0 (10.0.0.4)",
    ),
    "NCCL's interface does not exist": (
        changed(GPU, 0, with_network(GPU[0], settings={"NCCL_SOCKET_IFNAME": "ib"}, uses={"gloo": ["eth0"], "nccl": []})),
        "broken interface-missing 0: NCCL_SOCKET_IFNAME=ib on a: no such interface there: ib -> set NCCL_SOCKET_IFNAME on a",
    ),
    "an interface that is down": (
        changed(
            CPU,
            0,
            with_network(
                CPU[0], settings={"GLOO_SOCKET_IFNAME": "eth0"}, interfaces=[LOOPBACK, replace(ETHERNET, is_up=False)]
            ),
        ),
        "broken interface-missing 0: GLOO_SOCKET_IFNAME=eth0 on a: it is down: eth0 -> bring up a network interface on a",
    ),
    "another interface on one host": (
        [*CPU[:2], CPU[2], with_network(CPU[3], uses={"gloo": ["eth1"], "nccl": ["eth0"]})],
        "slower interfaces-differ 3: gloo uses eth1 on b, eth0 on a, b -> if these are different networks, name one",
    ),
    "loopback between hosts": (
        [*CPU[:2], *(with_network(f, uses={"gloo": ["lo"], "nccl": ["eth0"]}) for f in CPU[2:])],
        "broken loopback 2-3: gloo on b uses loopback, the address that the name b has there: no other host can reach it "
        "-> set GLOO_SOCKET_IFNAME on b to eth0 (10.0.0.4)",
    ),
    "one address on two hosts": (
        [with_network(f, interfaces=[LOOPBACK, ETHERNET]) for f in CPU],
        "broken address-twice 0-3: gloo has the address 10.0.0.1 on several hosts: a, b -> name an interface of the network",
    ),
    "no RDMA adapter": (
        [with_network(f, rdma=[]) for f in GPU],
        "note no-rdma 0-1: a: no InfiniBand or RoCE adapter, NCCL goes through TCP -> if the machine has one",
    ),
    "an RDMA port that is down": (
        [with_network(f, rdma=[replace(ACTIVE_PORT, state="DOWN")]) for f in GPU],
        "slower rdma-down 0-1: a: mlx5_0 port 1 is DOWN, NCCL goes through TCP -> check cable and switch",
    ),
    "RDMA switched off": (
        [with_network(f, settings={"NCCL_IB_DISABLE": "1"}) for f in GPU],
        "slower rdma-off 0-1: a: NCCL_IB_DISABLE=1, though mlx5_0 is up -> unset NCCL_IB_DISABLE",
    ),
    "no GPUDirect RDMA": (
        [with_gpu(f, dmabuf=False) for f in GPU],
        "slower no-gpudirect-rdma 0-1: a: no GPUDirect RDMA * -> `modprobe nvidia_peermem`",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named_with_what_to_do(fault: str) -> None:
    """``*`` stands for any text, and so does what follows."""
    ranks, expected = PLANTED[fault]
    lines = told(judge_facts(ranks)).splitlines()
    pattern = ".*".join(map(re.escape, expected.split("*")))
    assert any(re.match(pattern, line) for line in lines), lines


def test_what_suits_a_machine_without_peer_access_is_no_finding() -> None:
    names = [
        {finding.name for finding in judge_facts(ranks)}
        for ranks in (
            [replace(facts, shared_memory=100_000_000) for facts in WITHOUT_PEERS],
            [with_network(facts, settings={"NCCL_SHM_DISABLE": "1"}) for facts in WITHOUT_PEERS],
        )
    ]
    assert names == [{"no-peer-access"}] * 2


@pytest.mark.parametrize(("interface", "name"), [("lo", "loopback"), ("eth0", "address-twice")])
@pytest.mark.parametrize(("namespaces", "reach_each_other"), [("xx", True), ("xy", False)])
def test_hosts_that_are_declared_on_one_machine_reach_each_other_by_any_address(
    namespaces: str, reach_each_other: bool, interface: str, name: str
) -> None:
    ranks = [
        replace(
            with_network(cpu_rank(rank), namespace=namespace, uses={"gloo": [interface], "nccl": []}),
            host=Host(f"host{rank}", "boot", "pid:[1]"),
        )
        for rank, namespace in enumerate(namespaces)
    ]
    assert {finding.name for finding in judge_facts(ranks)} == (set() if reach_each_other else {name})


@pytest.mark.parametrize(
    ("architecture", "runs", "fails"),
    [
        ("sm_80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        ("sm_86", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("sm_90a", [(9, 0)], [(8, 9), (10, 0)]),
        ("sm_100a", [(10, 0)], [(10, 3), (12, 0)]),
        ("sm_100f", [(10, 0), (10, 3)], [(9, 0), (12, 0)]),
        ("sm_120", [(12, 0), (12, 1)], [(10, 0)]),
        ("compute_90", [(9, 0), (10, 0), (12, 0)], [(8, 9)]),
        ("compute_90a", [(9, 0)], [(10, 0)]),
        ("gfx942", [], [(9, 4)]),
    ],
)
def test_code_runs_on_its_architecture_and_on_what_that_is_compatible_with(
    architecture: str, runs: list[tuple[int, int]], fails: list[tuple[int, int]]
) -> None:
    assert [capability for capability in runs + fails if runs_on(architecture, capability)] == runs


def test_what_cuobjdump_lists_is_read() -> None:
    listed = "ELF file    1: fbgemm_gpu_tbe.1.sm_80.cubin\nELF file    2: fbgemm_gpu_tbe.2.sm_90a.cubin\n"
    ptx = "PTX file    1: fbgemm_gpu_tbe.1.sm_90.ptx\n"
    assert parse_cuobjdump(listed + listed + ptx) == ["sm_80", "sm_90a", "compute_90"]
    assert parse_cuobjdump("cuobjdump info    : No PTX file found to extract from 'a.so'.\n") == []


def test_fbgemm_is_looked_into_by_its_smallest_library_that_has_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = {"none.so": "", "some.so": "ELF file    1: some.1.sm_80.cubin\n", "more.so": "ELF file    1: more.1.sm_90.cubin\n"}
    for size, name in enumerate(listed):
        (tmp_path / name).write_bytes(bytes(size))
    looked_into: list[str] = []

    def list_code(library: Path) -> str:
        looked_into.append(library.name)
        return listed[library.name]

    monkeypatch.setattr(architectures, "_cuobjdump", list_code)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[tmp_path]))
    assert (architectures.fbgemm_architectures(), looked_into) == (["sm_80"], ["none.so", "some.so"])


def test_a_link_that_is_much_slower_than_others_is_named() -> None:
    ranks = [cpu_rank(rank, f"host{rank}") for rank in range(4)]
    measured = [Measurement((rank, rank + 1), "gloo", 50.0, speed) for rank, speed in enumerate([1.2, 0.3, 1.1])]
    (finding,) = judge_measurements(measured, ranks)
    assert (finding.name, finding.level, finding.ranks) == ("slow-link", Level.slower, (1, 2))
    assert "0.30 GB/s between rank 1 on host1 and rank 2 on host2, where the median of such pairs is 1.10" in finding.what


@pytest.mark.parametrize(
    ("levels", "status"),
    [
        ([], 0),
        ([Level.note], 0),
        ([Level.slower, Level.note], 2),
        ([Level.slower, Level.broken], 1),
    ],
)
def test_the_worst_finding_decides_the_status(levels: list[Level], status: int) -> None:
    assert exit_status([Finding("slow-link", level, [0], "", "") for level in levels]) == status


def test_the_docs_list_every_finding() -> None:
    text = (ROOT / "docs/many_nodes.md").read_text()
    assert set(re.findall(r"^\| `([a-z-]+)` \| (?:broken|slower|note)", text, re.MULTILINE)) == NAMES


# Gathering.

GPU_LIST = "0, GPU-5f1c0e9a-0000-1111-2222-333344445555, 580.65.06\n1, GPU-77aa12bc-0000-1111-2222-333344445555, 580.65.06\n"
NVLINKS = """\
GPU 0: NVIDIA H100 PCIe (UUID: GPU-5f1c0e9a-0000-1111-2222-333344445555)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
\t Link 2: <inactive>
GPU 1: NVIDIA H100 PCIe (UUID: GPU-77aa12bc-0000-1111-2222-333344445555)
\t Link 0: <inactive>
"""
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-51\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t52-103\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n\n"
)


def test_what_nvidia_smi_prints_is_read() -> None:
    uuids = [line.split(", ")[1].removeprefix("GPU-") for line in GPU_LIST.splitlines()]
    assert parse_gpus(GPU_LIST) == ({uuids[0]: 0, uuids[1]: 1}, "580.65.06")
    assert parse_nvlinks(NVLINKS) == {0: [26.562, 26.562], 1: []}
    assert parse_topology(TOPOLOGY) == {
        "GPU0": {"GPU1": "NV18", "mlx5_0": "PIX"},
        "GPU1": {"GPU0": "NV18", "mlx5_0": "SYS"},
        "mlx5_0": {"GPU0": "PIX", "GPU1": "SYS"},
    }


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed\n", "GPU0\n", "\x00\tGPU0\nGPU0\n"])
def test_what_nvidia_smi_should_not_print_is_no_error(text: str) -> None:
    assert parse_gpus(text) == ({}, None)
    assert parse_nvlinks(text) == {}
    assert parse_topology(text) in ({}, {"GPU0": {}})


@pytest.mark.parametrize("script", [None, "exit 9", "echo nonsense", "sleep 60"], ids=["missing", "fails", "nonsense", "hangs"])
def test_without_a_working_nvidia_smi_there_are_no_gpu_facts(
    script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpus, "_TOOL_SECONDS", 0.5)
    assert ask_nvidia_smi() == Smi()


def test_a_gpu_is_found_in_nvidia_smis_tables_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES has turned them round: torch's 0 is nvidia-smi's 1."""
    indices, driver = parse_gpus(GPU_LIST)
    first, second = indices
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda index, other: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="H100", uuid=(second, first)[index])
    )
    found = gpus.gpu_of(0, Smi(indices, driver, parse_nvlinks(NVLINKS), parse_topology(TOPOLOGY)))
    assert found == Gpu("H100", second, {first: True}, driver, [], {first: "NV18", "mlx5_0": "SYS"}, capability=(9, 0))
    without_smi = gpus.gpu_of(1, Smi())
    assert (without_smi.uuid, without_smi.nvlinks, without_smi.topology) == (first, None, {})


def test_this_machine_has_facts() -> None:
    facts = collect_facts(Rank(index=0, world_size=1, local_index=0, host="here"))
    assert facts.host == Host.here()
    assert facts.shared_memory is None or facts.shared_memory >= 0
    assert facts.hip is None
    assert set(facts.versions) == {"torch", "torchrec", "fbgemm-gpu", "triton"}
    assert "lo" in [interface.name for interface in facts.network.interfaces if interface.is_loopback]


INTERFACES = [LOOPBACK, ETHERNET, Interface("ib0", ["10.1.0.1"]), Interface("docker0", ["172.17.0.1"])]


@pytest.mark.parametrize(
    ("setting", "address", "uses"),
    [
        ("eth0", "10.0.0.1", ["eth0"]),
        ("eth0,ib0", "10.0.0.1", ["eth0", "ib0"]),
        ("eth9", "10.0.0.1", []),
        (None, "10.1.0.1", ["ib0"]),
        (None, "127.0.1.1", ["lo"]),
    ],
)
def test_gloo_uses_the_interfaces_it_is_told_or_that_of_the_hosts_name(
    setting: str | None, address: str, uses: list[str]
) -> None:
    assert gloo_uses(setting, INTERFACES, address) == uses


@pytest.mark.parametrize(
    ("setting", "uses"),
    [
        (None, ["ib0"]),
        ("eth", ["eth0"]),
        ("=eth", []),
        ("=eth0", ["eth0"]),
        ("^lo,docker", ["eth0", "ib0"]),
        ("eth,ib", ["eth0", "ib0"]),
    ],
)
def test_nccl_uses_the_interfaces_that_its_setting_matches(setting: str | None, uses: list[str]) -> None:
    assert nccl_uses(setting, INTERFACES) == uses


def test_ports_of_adapters_are_read_from_sysfs(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text("InfiniBand\n")
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert list_rdma_ports(tmp_path) == [ACTIVE_PORT]
    (port / "rate").unlink()
    assert list_rdma_ports(tmp_path)[0].rate == "unknown"
    assert list_rdma_ports(tmp_path / "missing") == []


# The command: what it measures and shows.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--jason"], "unrecognized arguments: --jason"),
        (["--seconds", "nan"], "argument --seconds: nan: allowed: 1 to 86400"),
        (["--seconds", "-1"], "argument --seconds: -1.0: allowed: 1 to 86400"),
    ],
)
def test_wrong_arguments_end_with_1_as_2_is_a_slow_cluster(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(arguments)
    assert said in capsys.readouterr().err


def test_an_environment_that_contradicts_itself_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="1"):
        main([])
    assert "RANK=1 in the environment: allowed: 0 to 0" in capsys.readouterr().err


def test_one_pair_in_each_host_and_one_between_neighbours_are_measured() -> None:
    hosts = [Host(name, "", "") for name in "aabbcd"]
    assert pairs_to_measure(hosts) == [(0, 1), (2, 3), (0, 2), (4, 5), (2, 4)]
    assert pairs_to_measure(hosts[:1]) == []


def test_work_that_raises_or_hangs_has_an_outcome() -> None:
    assert attempt(lambda: 7, 10.0).value == 7
    assert attempt(lambda: [][1], 10.0).error == "IndexError: list index out of range"
    assert attempt(threading.Event().wait, 0.05).error == "did not end within 0 s"


def examination(ranks: Ranks) -> Examination:
    measured = [Measurement((0, 1), "gloo", 41.6, 1.5)]
    return Examination(len(ranks), ranks, measured, "", judge_facts(ranks))


def test_people_read_ranks_links_transports_and_what_to_do() -> None:
    text = as_text(examination(PLANTED["an interface that does not exist"][0]))
    assert "dlrm_fused doctor: 4 ranks on 2 hosts" in text
    assert re.search(r"^0-1    a     CPU     3.12.3  2.13.0\+cpu  1.8.0", text, re.MULTILINE)
    assert re.search(r"^0, 1   a      gloo     42 us    1.50 GB/s$", text, re.MULTILINE)
    assert re.search(r"^2 pairs, such as 0, 1  stores    one host: shared memory", text, re.MULTILINE)
    assert (
        "broken: interface-missing (ranks 2-3): GLOO_SOCKET_IFNAME=eth9 on b: no such interface there: eth9\n    do: set"
        in text
    )
    assert text.endswith("status 1: broken: training or comm=fused cannot run")


def test_programs_read_the_same_as_json() -> None:
    content = json.loads(as_json(examination([with_network(facts, rdma=[]) for facts in two_gpu_hosts()])))
    assert content["status"] == 0
    assert content["ranks"][3]["gpu"]["nvlinks"] == [26.562] * 18
    assert content["measurements"] == [
        {"ranks": [0, 1], "backend": "gloo", "latency_us": 41.6, "gb_per_s": 1.5, "bytes": 8000000}
    ]
    assert {transport["transport"] for transport in content["transports"]} == {"stores", "messages"}
    assert content["operators"]["GEMM + All-to-All"] == "stores, messages"
    assert content["findings"][0]["level"] == "note"


@pytest.mark.parametrize(("ranks", "shown"), [([0, 1, 2, 5], "0-2, 5"), ([3], "3"), ([], "")])
def test_ranks_are_shown_as_ranges(ranks: list[int], shown: str) -> None:
    assert as_ranges(ranks) == shown
