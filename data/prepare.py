"""Prepare a data set: ``python data/prepare.py {table,apply,movielens,criteo,synthetic,parquet} --help``; data/README.md."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, installed or not

from dlrm_fused.datasets.preparation.cli import main

if __name__ == "__main__":
    sys.exit(main())
