"""A product whose inner dimension is cut over ranks, and the sum over ranks, as one operator.

``gemv_all_reduce(workspace, x, weight, bias, residual, norm_weight, norm_eps)``: every rank has some columns of x and weight,
and gets the sum over ranks of x times weight transposed, plus bias and residual, and if wanted the RMSNorm of that. This is the
row-parallel layer of tensor parallelism (Shoeybi et al., *Megatron-LM*, arXiv 1909.08053) with what follows it in a pre-norm
Transformer.

How it runs:

* up to 64 rows on GPUs: one kernel (:mod:`~dlrm_fused.ops.gemv_all_reduce.kernel`), as in Punniyamurthy et al., arXiv
  2305.06942; from 17 rows on the product may be the library's, in fp32, which the kernel only adds up;
* more rows on GPUs: cuBLAS by chunks of rows, the sum of each beside the product of the next
  (:mod:`~dlrm_fused.ops.gemv_all_reduce.chunks`, which has another way too); or products and sums that copy engines move
  (:mod:`~dlrm_fused.ops.gemv_all_reduce.copies`), whichever was measured to be faster;
* on the CPU: torch's product, and a sum through shared memory.

One rank adds up each result, or every rank in the order of ranks: all ranks get the same bits.
"""

from dlrm_fused.ops.gemv_all_reduce.op import gemv_all_reduce as gemv_all_reduce
from dlrm_fused.ops.gemv_all_reduce.reference import reference as reference
from dlrm_fused.ops.gemv_all_reduce.workspace import GemvWorkspace as GemvWorkspace
