"""Models that a config can name."""

from dlrm_fused.models.dlrm import Output, RankingTask, build_model

__all__ = ["Output", "RankingTask", "build_model"]
