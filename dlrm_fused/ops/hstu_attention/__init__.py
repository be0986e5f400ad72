"""The attention of HSTU, pointwise and causal, on jagged batches, as one differentiable operator of a single rank.

``hstu_attention(queries, keys, values, batch, scale=..., divisor=..., bias=...)``, by kernels for GPUs:

1. forward, a tile of queries walks the keys that it sees (:mod:`~dlrm_fused.ops.hstu_attention.kernel`);
2. backward, the same walk gives the queries' gradient, and a walk of each tile of keys through the queries that see it those of
   keys and values (:mod:`~dlrm_fused.ops.hstu_attention.backward`); scores are computed again, and so nothing of the size of a
   history squared is in memory;
3. the biases' gradients are sums of the scores' over pairs of a distance or a bucket of times, which the walk of the queries'
   gradient adds up where they are wanted (:mod:`~dlrm_fused.ops.hstu_attention.bias_gradient`).

No sum depends on which program is faster: every run has the same bits.
"""

from dlrm_fused.ops.hstu_attention.op import hstu_attention as hstu_attention
from dlrm_fused.ops.hstu_attention.reference import BUCKETS as BUCKETS
from dlrm_fused.ops.hstu_attention.reference import JaggedQueries as JaggedQueries
from dlrm_fused.ops.hstu_attention.reference import RelativeBias as RelativeBias
from dlrm_fused.ops.hstu_attention.reference import reference as reference
from dlrm_fused.ops.hstu_attention.reference import time_buckets as time_buckets
