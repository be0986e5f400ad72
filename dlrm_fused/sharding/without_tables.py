"""Ranks without tables of a sharding type, or without rows of them, which take part in its exchanges all the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from dlrm_fused.compat import torchrec as compat
from dlrm_fused.errors import UsageError
from dlrm_fused.sharding.support import TableSettings, output_type


def receive_the_dtype_of_the_others(module: compat.ShardedModule, tables: Mapping[str, Sequence[TableSettings]]) -> None:
    """Have a rank without tables expect embeddings in the ``output_dtype`` of the other ranks.

    With TorchRec's own lookup (1.6 to 1.9) it expects fp32. Of outputs in 16 bits it waits for twice the bytes: for ever with
    NCCL; gloo breaks the connection.
    """
    for kind, lookup in zip(compat.sharding_types(module), compat.lookups(module), strict=True):
        dtypes = {output_type(table.fused_params) for table in tables[kind]}
        if len(dtypes) == 1 and (dtype := dtypes.pop()) is not None:
            compat.set_dtype_without_tables(lookup, dtype)


def check_that_ranks_have_rows(module: ShardedEmbeddingBagCollection) -> None:
    """Raise UsageError, on all ranks, if one has a table on the CPU of which it has no row, and which it would train wrongly.

    FBGEMM's fused kernel takes a lookup without any rows for a GPU's. Its update takes the next table that has rows for a
    feature of the empty one, with that one's columns, which is right if they have as many; behind the last it reads on.
    """
    if compat.device(module).type != "cpu":
        return
    for kind, sharding in zip(compat.sharding_types(module), compat.shardings(module), strict=True):
        for rank, groups in enumerate(compat.grouped_configs_per_rank(sharding)):
            for tables in (group.embedding_tables for group in groups if group.compute_kernel is EmbeddingComputeKernel.FUSED):
                following_columns = None  # of the next table that has rows
                for table in reversed(tables):
                    if table.local_rows:
                        following_columns = table.local_cols
                    elif table.local_cols != following_columns:
                        raise UsageError(
                            f"{compat.path(module)}: sharding {kind} leaves rank {rank} no row of {table.name} "
                            f"({table.num_embeddings} rows), which the fused kernel of FBGEMM cannot train on the CPU; give it "
                            "another sharding, or start fewer ranks"
                        )
