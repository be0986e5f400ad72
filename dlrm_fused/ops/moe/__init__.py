"""The experts of a Mixture-of-Experts layer, spread over ranks, as one differentiable operator.

``expert_layer(workspace, x, experts, gates, w_in, w_out, gradient_scale)``: every rank has tokens, and some of the experts,
each a two-layer perceptron with SiLU or SwiGLU between its layers. A token goes to k experts, and gets the sum of their
results, each times its gate. Nothing is dropped: memory is for the worst case.

How it runs (Punniyamurthy et al., arXiv 2305.06942, "GEMM + All-to-All"):

1. the ranks tell each other how many tokens they have for each expert (:mod:`~dlrm_fused.ops.moe.dispatch`);
2. every token's row is stored straight into its place at its experts' ranks, grouped by expert
   (:mod:`~dlrm_fused.ops.common.scatter_rows`);
3. all experts' first products with their activation are one kernel (:mod:`~dlrm_fused.ops.moe.products`), the second products
   another, which stores each finished row straight into its slot at the token's rank;
4. there the k rows of a token are added, in their order.

The backward pass goes the same ways. Counts never pass through the host of a GPU: every size is that of the worst case, and
kernels read how much of it is used.
"""

from dlrm_fused.ops.moe.op import expert_layer as expert_layer
from dlrm_fused.ops.moe.op import expert_layer_with_slots as expert_layer_with_slots
from dlrm_fused.ops.moe.reference import reference as reference
from dlrm_fused.ops.moe.workspace import ExpertMemory as ExpertMemory
from dlrm_fused.ops.moe.workspace import ExpertWorkspace as ExpertWorkspace
from dlrm_fused.ops.moe.workspace import expert_memory as expert_memory
