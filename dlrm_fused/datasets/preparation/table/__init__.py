"""Preparing tables of one's own: Parquet, Arrow IPC, CSV and TSV files of any size, read twice in blocks.

The first pass learns a :class:`~dlrm_fused.datasets.transformation.Transformation` from the training rows, the second applies
it to all rows.
"""
