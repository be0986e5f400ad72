"""All-to-All of rows, one for each id: unpooled embeddings, as sequence models read them.

* :func:`sequence_all_to_all`: the rank that has looked a row up stores it straight into its place in the output of the rank
  that asked for it. There is no send buffer, and nothing is sorted by rank before it travels. Backward, the gradient of a row
  goes straight to the place of that row among those that its owner has looked up.
* :func:`sequence_lookup_all_to_all`: the same kernel reads the row from its table, and the backward pass updates the tables.

Rows go by :mod:`dlrm_fused.ops.common.scatter_rows`, as those of experts do.

Source of the layout: TorchRec's ``SequenceEmbeddingsAllToAll``, which it replaces.
"""

from dlrm_fused.ops.sequence_all_to_all.lookup import sequence_lookup_all_to_all as sequence_lookup_all_to_all
from dlrm_fused.ops.sequence_all_to_all.op import sequence_all_to_all as sequence_all_to_all
from dlrm_fused.ops.sequence_all_to_all.reference import reference as reference
from dlrm_fused.ops.sequence_all_to_all.workspace import Counts as Counts
from dlrm_fused.ops.sequence_all_to_all.workspace import SequenceWorkspace as SequenceWorkspace
from dlrm_fused.ops.sequence_all_to_all.workspace import numbers_of as numbers_of
