"""The private names themselves, so that a release of a library in which one has moved is refused by that name, at start."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Mapping
from typing import Any

# Names by module, or class as module:class; a class's attributes count, too. tests/unit/test_compat.py holds this list
# against the modules beside.
PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "fbgemm_gpu.split_table_batched_embeddings_ops_training:SplitTableBatchedEmbeddingBagsCodegen": (
        "bounds_check_mode_int", "bounds_check_version", "embedding_specs", "iter_cpu", "learning_rate_tensor",
        "optimizer_args", "placeholder_autograd_tensor", "prepare_inputs", "use_cpu",
    ),
    "torch": ("_foreach_copy_", "_scaled_mm"),
    "torch:ops.aten": ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
    "torch._C": ("_are_functorch_transforms_active", "_cuda_getCurrentRawStream", "_len_torch_dispatch_stack"),
    "torch._C._autograd": ("_profiler_enabled",),
    "torch.autograd.forward_ad": ("_current_level",),
    "torch._C._distributed_c10d": ("_SymmetricMemory", "_register_process_group", "_unregister_process_group"),
    "torch._C._distributed_c10d:Backend.Options": ("_timeout",),
    "torch._dynamo.config": ("optimize_ddp",),
    "torch._subclasses.fake_tensor": ("FakeTensorMode",),
    "torch.cuda": ("_sleep",),
    "torch.distributed._functional_collectives": ("wait_tensor",),
    "torch.distributed._symmetric_memory": ("get_backend",),
    "torch.distributed.distributed_c10d": ("_get_default_store", "_world"),
    "torch.nn:Module": ("_buffers", "_modules", "_parameters"),
    "torch.testing._internal.distributed.fake_pg": ("FakeStore",),
    "torchrec.distributed:TrainPipelineSparseDist": (
        "_backward", "_data_dist_stream", "_model", "_next_batch", "_stream_context"
    ),
    "torchrec.distributed.dist_data:KJTAllToAllSplitsAwaitable": ("_input_splits", "_labels"),
    "torchrec.distributed.embedding:ShardedEmbeddingCollection": ("_lookups", "_output_dists", "_sharding_type_to_sharding"),
    "torchrec.distributed.embeddingbag": ("_apply_mean_pooling",),
    "torchrec.distributed.embeddingbag:EmbeddingBagCollectionSharder": ("_sharded_module_order_overwrite",),
    "torchrec.distributed.embeddingbag:ShardedEmbeddingBagCollection": (
        "_device", "_embedding_bag_configs", "_embedding_dims", "_embedding_names", "_embedding_shardings", "_env",
        "_has_mean_pooling_callback", "_lookups", "_module_fqn", "_output_dists", "_sharding_types",
    ),
    "torchrec.distributed.embedding_lookup:GroupedPooledEmbeddingsLookup": (
        "_dummy_embs_tensor", "_emb_modules", "_feature_splits", "_forward", "_scale_gradient_factor"
    ),
    "torchrec.distributed.sharding.tw_sharding:BaseTwEmbeddingSharding": ("_grouped_embedding_configs_per_rank",),
    "torchrec.distributed.types:Awaitable": ("_wait_impl",),
    "triton._C.libtriton": ("interpreter",),
}  # fmt: skip

_OF_CUDA_BUILDS = ("_cuda_getCurrentRawStream", "_sleep")


def missing_names() -> list[str]:
    """Return which of ``PRIVATE_NAMES`` the installed libraries lack, each with its module or class."""
    import torch

    missing: list[str] = []
    elsewhere = () if torch.version.cuda else _OF_CUDA_BUILDS
    for place, names in PRIVATE_NAMES.items():
        try:
            found = pkgutil.resolve_name(place)
        except (ImportError, AttributeError):
            missing.append(place)
            continue
        missing += [f"{place}.{name}".replace(":", ".") for name in names if not _has(found, name) and name not in elsewhere]
    return missing


def _has(place: Any, name: str) -> bool:
    if hasattr(place, name):
        return True
    if not isinstance(place, type):
        return hasattr(place, "__path__") and importlib.util.find_spec(f"{place.__name__}.{name}") is not None
    sources = (inspect.getsource(owner) for owner in place.__mro__[:-1] if owner.__module__ != "typing")
    return any(re.search(rf'self\.{name}\b\s*[:=]|register_buffer\(\s*"{name}"', source) for source in sources)
