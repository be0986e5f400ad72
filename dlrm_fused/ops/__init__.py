"""Operators: one file each, in torch and Triton alone."""
