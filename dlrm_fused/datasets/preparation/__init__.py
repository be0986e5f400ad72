"""Turning published data sets into prepared ones (the format of :mod:`dlrm_fused.datasets.schema`).

Only ``synthetic`` imports torch: the other preparations run in many small processes.
"""
