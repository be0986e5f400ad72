"""The cross layers of DCNv2 in their low-rank form: x_{l+1} = x_0 * (W_l V_l x_l + b_l) + x_l.

Sources: Wang et al., *DCN V2*, arXiv 2008.13535, equation 2 and section 3; the weights are those of TorchRec's LowRankCrossNet.

A layer computes little for each byte that it moves: its results are as wide as its input, and one size of each product is the
rank of V and W. So in 16 bits on GPUs the products with W, and those with V in the backward pass, have the layer's elementwise
work in their epilogues (:mod:`~dlrm_fused.models.cross_layers.kernel`), and no result of a product is written to be read again.

* :func:`~dlrm_fused.models.cross_layers.reference.cross_layers` says what is computed;
* :func:`~dlrm_fused.models.cross_layers.op.cross_layers` is what a model calls: kernels where they can run, else the reference.
"""
