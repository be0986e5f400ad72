"""A table whose rows have two labels and weights, for tests."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tests.unit.tables import random_table

# Instead of those of :data:`tests.unit.tables.COLUMNS`.
TWO_LABELS = ("--label", "clicked,bought", "--sample-weight", "w")
LABELS = ("clicked", "bought")


def two_labels(rows: int = 400, seed: int = 0) -> pa.Table:
    """The random table with one more label, and with weights, of which some are 0."""
    rng = np.random.default_rng(seed + 100)
    return (
        random_table(rows, seed)
        .append_column("bought", pa.array((rng.random(rows) < 0.3).astype(np.int8)))
        .append_column("w", pa.array(rng.integers(0, 5, rows) / 2, pa.float64()))
    )
