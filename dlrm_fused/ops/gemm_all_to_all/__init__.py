"""A matrix product whose rows belong to different ranks, and the All-to-All that takes them there, as one operator.

:func:`gemm_all_to_all`: x [M, K] is multiplied by weight [N, K] transposed; the p-th of as many equal blocks of rows as there
are ranks goes to rank p, whose result has the blocks of all ranks in their order. Experts use the same kernel for rows in
groups with a weight each, and a destination for every row.

How it runs (Punniyamurthy et al., arXiv 2305.06942, "GEMM + All-to-All"):

* ``kernel``, on GPUs: a persistent GEMM, :mod:`~dlrm_fused.ops.gemm_all_to_all.kernel`, that stores every finished tile
  straight into the memory of its ranks;
* ``chunks``, on GPUs: the library's GEMM by chunks, which a copy engine sends,
  :mod:`~dlrm_fused.ops.gemm_all_to_all.chunks`;
* on the CPU: torch's product, stored in the other process's memory.
"""

from dlrm_fused.ops.gemm_all_to_all.op import FP8 as FP8
from dlrm_fused.ops.gemm_all_to_all.op import gemm_all_to_all as gemm_all_to_all
from dlrm_fused.ops.gemm_all_to_all.reference import reference as reference
from dlrm_fused.ops.gemm_all_to_all.schedule import schedule_of as schedule_of
from dlrm_fused.ops.gemm_all_to_all.workspace import GemmWorkspace as GemmWorkspace
