"""Products of layers whose activations are sharded by rows between them (sequence parallelism), with their collectives.

* :func:`all_gather_gemm`: x [M / ranks, K] of all ranks is gathered and multiplied by this rank's weight [N, K], transposed: a
  column-parallel layer. Pieces of x are multiplied as they arrive, own rows first.
* :func:`gemm_reduce_scatter`: x [M, K] times this rank's weight [N, K], transposed, summed over the ranks, of which each gets
  its M / ranks rows: a row-parallel layer. Products for peers are computed and sent first.

Each is the other's backward pass. Schedules are those of :mod:`dlrm_fused.ops.schedules`.

Sources: Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, arXiv 2205.05198, for the layers;
*FiCCO*, arXiv 2512.10236, for copy engines and pieces below the shard.
"""

from dlrm_fused.ops.all_gather_gemm.op import all_gather_gemm as all_gather_gemm
from dlrm_fused.ops.all_gather_gemm.op import gemm_reduce_scatter as gemm_reduce_scatter
from dlrm_fused.ops.all_gather_gemm.reference import reference as reference
from dlrm_fused.ops.all_gather_gemm.reference import scatter_reference as scatter_reference
from dlrm_fused.ops.all_gather_gemm.workspace import ShardWorkspace as ShardWorkspace
