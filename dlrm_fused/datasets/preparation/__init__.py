"""Turning published data sets into prepared ones (the format of :mod:`dlrm_fused.datasets.schema`).

Only ``synthetic`` imports torch, which takes seconds to load.
"""
