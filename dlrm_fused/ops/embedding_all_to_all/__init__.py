"""Pooled embedding lookup and All-to-All as one kernel, and its backward pass with the tables' optimizer.

What it computes: ``reference.py``. The operators: ``op.py`` (lookup and All-to-All), ``pooled.py`` (the All-to-All of what
another library has looked up); ``inputs.py`` checks what both are given, ``gradient.py`` is the way back. Where things lie:
``tables.py`` (rows), ``layout.py`` (columns), ``byte_layout.py`` and ``plan.py`` (a batch, as numbers and as tensors),
``workspace.py`` (symmetric memory). Between hosts: ``host_slices.py`` (places), ``slices.py``, ``distinct.py``. Kernels:
``kernel.py`` (lookup), ``scatter.py`` (tiles to peers), ``reduce.py`` (what was received), ``update.py`` and
``update_kernels.py`` (optimizer), with ``prefetch_sort.py`` ahead of it. ``tuning.py`` has the lookup's block shapes.
"""

from dlrm_fused.ops.embedding_all_to_all.distinct import DistinctRows as DistinctRows
from dlrm_fused.ops.embedding_all_to_all.distinct import keys_of_bags as keys_of_bags
from dlrm_fused.ops.embedding_all_to_all.layout import ExchangeLayout as ExchangeLayout
from dlrm_fused.ops.embedding_all_to_all.layout import LookupLayout as LookupLayout
from dlrm_fused.ops.embedding_all_to_all.op import embedding_all_to_all as embedding_all_to_all
from dlrm_fused.ops.embedding_all_to_all.pooled import pooled_all_to_all as pooled_all_to_all
from dlrm_fused.ops.embedding_all_to_all.reference import reference as reference
from dlrm_fused.ops.embedding_all_to_all.tables import Adagrad as Adagrad
from dlrm_fused.ops.embedding_all_to_all.tables import Adam as Adam
from dlrm_fused.ops.embedding_all_to_all.tables import LocalTables as LocalTables
from dlrm_fused.ops.embedding_all_to_all.tables import RowwiseAdagrad as RowwiseAdagrad
from dlrm_fused.ops.embedding_all_to_all.tables import RowwiseAdam as RowwiseAdam
from dlrm_fused.ops.embedding_all_to_all.tables import Sgd as Sgd
from dlrm_fused.ops.embedding_all_to_all.workspace import EmbeddingWorkspace as EmbeddingWorkspace
