"""Measured choices for GEMM + All-to-All."""

from __future__ import annotations

# By rows, columns and K of one rank, and bytes of an element: the fields of Tiles.
TILES: dict[tuple[int, int, int, int], tuple[int, ...]] = {}
