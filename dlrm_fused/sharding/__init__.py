"""Embedding tables spread over ranks."""

from dlrm_fused.sharding.sharder import FusedEmbeddingBagCollectionSharder

__all__ = ["FusedEmbeddingBagCollectionSharder"]
