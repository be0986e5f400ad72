"""Ranks without tables of a sharding type, which receive the pooled embeddings of those that have some."""

from __future__ import annotations

from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from dlrm_fused.compat import torchrec as compat
from dlrm_fused.sharding.support import output_type


def receive_the_dtype_of_the_others(module: ShardedEmbeddingBagCollection) -> None:
    """Have a rank without tables expect pooled embeddings in the ``output_dtype`` of the other ranks.

    With TorchRec's own lookup (1.6 to 1.9) it expects fp32. Of outputs in 16 bits it waits for twice the bytes: for ever with
    NCCL; gloo breaks the connection.
    """
    for kind, lookup in zip(compat.sharding_types(module), compat.lookups(module), strict=True):
        dtypes = {output_type(info.fused_params or {}) for info in module.sharding_type_to_sharding_infos[kind]}
        if len(dtypes) == 1 and (dtype := dtypes.pop()) is not None:
            compat.set_dtype_without_tables(lookup, dtype)
