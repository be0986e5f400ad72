"""Data sets: their on-disk format, readers, and loaders that give each rank its batches."""
