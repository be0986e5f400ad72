"""Embedding tables spread over ranks."""

from dlrm_fused.sharding.sequence_sharder import FusedEmbeddingCollectionSharder
from dlrm_fused.sharding.sharder import FusedEmbeddingBagCollectionSharder

__all__ = ["FusedEmbeddingBagCollectionSharder", "FusedEmbeddingCollectionSharder"]
