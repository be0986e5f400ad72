"""GEMM and All-to-All as one operator. See op.py."""

from dlrm_fused.deprecated import moved_names
from dlrm_fused.ops.gemm_all_to_all.op import GemmWorkspace as GemmWorkspace
from dlrm_fused.ops.gemm_all_to_all.op import Routes as Routes
from dlrm_fused.ops.gemm_all_to_all.op import gemm_all_to_all as gemm_all_to_all
from dlrm_fused.ops.gemm_all_to_all.op import reference as reference
from dlrm_fused.ops.gemm_all_to_all.op import routed_gemm_all_to_all as routed_gemm_all_to_all

__getattr__ = moved_names(__name__)
