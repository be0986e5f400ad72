"""Models that a config can name."""

from dlrm_fused.models.task import BuildModel, Output, RankingTask, build_model

__all__ = ["BuildModel", "Output", "RankingTask", "build_model"]
