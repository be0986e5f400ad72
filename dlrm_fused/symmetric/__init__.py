"""Memory that all ranks can write, and what exchanges through it need. See docs/symmetric.md."""

from dlrm_fused.symmetric.block_pool import Arena, EqualBlocks
from dlrm_fused.symmetric.channel import Channel
from dlrm_fused.symmetric.memory import SymmetricGroup, SymmetricMemory, symmetric_group
from dlrm_fused.symmetric.peer_monitor import PeerMonitor

__all__ = ["Arena", "Channel", "EqualBlocks", "PeerMonitor", "SymmetricGroup", "SymmetricMemory", "symmetric_group"]
