"""Names that have moved: see dlrm_fused/deprecated.py."""

from dlrm_fused.deprecated import moved_names

__getattr__ = moved_names(__name__)
