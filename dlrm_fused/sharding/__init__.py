"""Embedding tables spread over ranks."""

from dlrm_fused.sharding.fused import FusedEmbeddingBagCollectionSharder

__all__ = ["FusedEmbeddingBagCollectionSharder"]
