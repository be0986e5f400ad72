"""What the server that ranks are forked from has done already at its import, so that no rank does it anew."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import tempfile
from pathlib import Path

# Once CUDA is initialized, a process cannot be forked. Imports ask whether there are GPUs, which then does not initialize it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import pytest  # noqa: F401
import torch
from torch import overrides

from dlrm_fused.datasets import open_dataset
from dlrm_fused.models import dlrm, moe, transformer  # noqa: F401
from dlrm_fused.ops.gemv_all_reduce import kernel as gemv
from dlrm_fused.symmetric.device import polls_per_second
from dlrm_fused.training import offline_evaluation, trainer  # noqa: F401
from tests.distributed.launch import small_config
from tests.interpreter import rewrite_all

_IMPORTED_LATE = (
    "encodings.idna",  # by sockets
    "numpy.ma",  # by what writes TensorBoard's files
    "torch._inductor.pattern_matcher",  # by torch.library.opcheck
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",  # by record_function
    "xxhash",  # by TorchRec's planner
)
for module in _IMPORTED_LATE:
    if importlib.util.find_spec(module):  # some releases of torch lack some
        importlib.import_module(module)
with tempfile.TemporaryDirectory() as folder:
    small = small_config(Path(folder))  # OmegaConf's schema
open_dataset(small, torch.device("cpu"))  # the mean of generated labels
overrides.is_tensor_method_or_property(torch.add)  # the list of all functions of torch, for tracing a model
if os.environ.get("TRITON_INTERPRET") == "1":
    rewrite_all()
    polls_per_second(torch.device("cpu"))
    polls_per_second(torch.device("cpu"), gemv.poll)
del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
# Ranks neither search nor copy what is there already.
gc.freeze()
