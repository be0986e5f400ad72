"""Schedules: ways to run a computation together with the collective that belongs to it. One vocabulary for all operators.

A pair is a product or a lookup, and a collective before or after it (:class:`~dlrm_fused.ops.schedules.schedule.Pair`). A
:class:`~dlrm_fused.ops.schedules.schedule.Schedule` says what is cut, who moves it and what waits for what; it is data.
:mod:`~dlrm_fused.ops.schedules.plan` makes the tasks of one call from it, which
:mod:`~dlrm_fused.ops.schedules.executor` runs on a rank and :mod:`~dlrm_fused.ops.schedules.estimate` times on paper;
:mod:`~dlrm_fused.ops.schedules.rule` takes the schedule whose estimate is shortest.

Source of the space of schedules: *FiCCO*, arXiv 2512.10236, and Punniyamurthy et al., arXiv 2305.06942.
"""

from dlrm_fused.ops.schedules.executor import Streams as Streams
from dlrm_fused.ops.schedules.plan import Kind as Kind
from dlrm_fused.ops.schedules.plan import Lane as Lane
from dlrm_fused.ops.schedules.plan import Piece as Piece
from dlrm_fused.ops.schedules.plan import Task as Task
from dlrm_fused.ops.schedules.plan import make_plan as make_plan
from dlrm_fused.ops.schedules.schedule import MOST_PIECES as MOST_PIECES
from dlrm_fused.ops.schedules.schedule import SCHEDULES as SCHEDULES
from dlrm_fused.ops.schedules.schedule import Mover as Mover
from dlrm_fused.ops.schedules.schedule import Pair as Pair
from dlrm_fused.ops.schedules.schedule import Schedule as Schedule
from dlrm_fused.ops.schedules.schedule import sums_beside as sums_beside
