"""Facts of a rank about itself, its host and its network: plain values, which rank 0 compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlrm_fused.symmetric.hosts import Host


@dataclass(frozen=True)
class Gpu:
    """The GPU of a rank.

    Attributes:
        peer_access: whether its kernels can reach the memory of another GPU that this process sees, by uuid.
        driver: its version; None without nvidia-smi, like what follows.
        nvlinks: GB/s of each active NVLink, in one direction.
        topology: how it is connected, by uuid of the other GPU or name of the network adapter: ``NV18``, ``PIX``, ``SYS``.
        dmabuf: whether adapters may reach its memory through dmabuf, for GPUDirect RDMA.
        capability: compute capability, such as (9, 0).
    """

    name: str
    uuid: str
    peer_access: Mapping[str, bool]
    driver: str | None = None
    nvlinks: Sequence[float] | None = None
    topology: Mapping[str, str] = field(default_factory=dict)
    dmabuf: bool = False
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Interface:
    """A network interface with its IPv4 and IPv6 addresses; ``megabits`` per second is 0 where the driver does not say."""

    name: str
    addresses: Sequence[str]
    is_up: bool = True
    is_loopback: bool = False
    megabits: int = 0


@dataclass(frozen=True)
class RdmaPort:
    """A port of an InfiniBand or RoCE adapter, as /sys/class/infiniband has it.

    Attributes:
        link_layer: ``InfiniBand``, or ``Ethernet`` for RoCE.
        state: ``ACTIVE``, ``DOWN``, ...
        rate: such as ``400 Gb/sec (4X NDR)``.
    """

    adapter: str
    port: str
    link_layer: str
    state: str
    rate: str

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class Network:
    """Attributes:
    settings: environment variables that choose among them, and among ways inside the host, where they are set.
    uses: names of the interfaces that a backend, ``gloo`` or ``nccl``, connects ranks over; empty if the setting names none
        that is there.
    peermem: whether the kernel module nvidia_peermem, one way to GPUDirect RDMA, is loaded.
    namespace: Linux's name of the network namespace; None where there are none.
    """

    interfaces: Sequence[Interface]
    settings: Mapping[str, str]
    uses: Mapping[str, Sequence[str]]
    rdma: Sequence[RdmaPort] = ()
    peermem: bool = False
    namespace: str | None = None


@dataclass(frozen=True)
class RankFacts:
    """Attributes:
    versions: of what is installed, by package; None if it states no version.
    cuda: the CUDA release that torch was built with; None for a CPU build.
    hip: the ROCm release that torch was built with; None for all other builds.
    nccl: None where torch has no NCCL.
    host_gpus: number of GPUs of the host by nvidia-smi, seen by torch or not; 0 without nvidia-smi.
    gpu: what this rank computes on; None for the CPU.
    torch_architectures: those that torch has kernels for, such as ``sm_90``; empty without GPUs.
    fbgemm_architectures: the same of FBGEMM; empty too where they cannot be read.
    shared_memory: free bytes of the host's or container's /dev/shm; None if there is none.
    """

    rank: int
    local_rank: int
    host: Host
    python: str
    versions: Mapping[str, str | None]
    cuda: str | None
    nccl: str | None
    host_gpus: int
    visible_gpus: int
    gpu: Gpu | None
    network: Network
    hip: str | None = None
    torch_architectures: Sequence[str] = ()
    fbgemm_architectures: Sequence[str] = ()
    shared_memory: int | None = None

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends of which the trainer's process group consists on this rank's device."""
        return ("gloo",) if self.gpu is None else ("gloo", "nccl")

    @property
    def is_p2p_off(self) -> bool:
        """Whether GPUs are told not to use peer access."""
        return self.network.settings.get("NCCL_P2P_DISABLE") == "1"

    @property
    def active_rdma(self) -> list[RdmaPort]:
        return [port for port in self.network.rdma if port.is_active]

    @property
    def has_gpudirect_rdma(self) -> bool:
        """Whether adapters can read and write the memory of this rank's GPU."""
        return self.gpu is not None and bool(self.active_rdma) and (self.network.peermem or self.gpu.dmabuf)
