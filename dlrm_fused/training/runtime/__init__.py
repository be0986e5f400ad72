"""The surroundings of the work of one process: its rank and device, process groups, log lines, and failing together.

A run ends on all ranks when it ends on one. Every rank reports a failure to a key-value store that all ranks can reach
(that of torchrun's rendezvous), and a thread of each rank, the :class:`Watchdog`, looks there once a second; it also gives
signs of life, and watches those of the next rank, so that a host that has vanished is noticed. The main thread may be blocked
in a collective that will never complete; hence the watchdog ends the process itself.

A run also stops on all ranks when one is told to, by SIGTERM: :class:`StopRequest`.
"""

from dlrm_fused.training.runtime.environment import Rank, apply_numerics, choose_device, configure_logging, logger
from dlrm_fused.training.runtime.error_reporting import run_with_error_reporting
from dlrm_fused.training.runtime.error_store import ErrorStore
from dlrm_fused.training.runtime.rendezvous import meeting_store, process_group
from dlrm_fused.training.runtime.stop_request import Stopped, StopRequest
from dlrm_fused.training.runtime.watchdog import Watchdog, join_run
