"""GEMV and AllReduce as one operator. See op.py."""

from dlrm_fused.deprecated import moved_names
from dlrm_fused.ops.gemv_all_reduce.op import GemvWorkspace as GemvWorkspace
from dlrm_fused.ops.gemv_all_reduce.op import gemv_all_reduce as gemv_all_reduce
from dlrm_fused.ops.gemv_all_reduce.op import reference as reference

__getattr__ = moved_names(__name__)
