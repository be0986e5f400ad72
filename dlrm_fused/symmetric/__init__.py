"""Memory that all ranks can write, and what exchanges through it need. See docs/symmetric.md."""

from dlrm_fused.symmetric.block_pool import BlockPool
from dlrm_fused.symmetric.channel import Channel, abort_peers_on_error
from dlrm_fused.symmetric.factory import symmetric_group
from dlrm_fused.symmetric.memory import SymmetricGroup, SymmetricMemory
from dlrm_fused.symmetric.peer_monitor import PeerMonitor, name_lost_peer
