"""Turning published data sets into prepared ones (the format of :mod:`dlrm_fused.datasets.schema`).

Nothing here imports torch: preparation runs in many small processes.
"""
