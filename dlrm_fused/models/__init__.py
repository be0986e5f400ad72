"""Models that a config can name."""

from dlrm_fused.models.task import Output, RankingTask, build_model
