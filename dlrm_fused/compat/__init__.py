"""The private names of PyTorch, TorchRec, FBGEMM and Triton that the package uses, a module for each; OmegaConf needs none.

A release of one of them may change these without notice: what breaks after an update is mended here. Each has been used with
all sets of :data:`dlrm_fused.versions.VERSION_SETS` unless it says otherwise. tests/unit/test_compat.py finds private names
elsewhere.

Nothing here imports more than its own library, so that operators need neither TorchRec nor FBGEMM.
"""
