"""Operators: a package each, in torch and Triton alone. See docs/operators.md."""
