"""Operators: a package each, in torch and Triton alone. See docs/operators.md."""

from dlrm_fused.deprecated import provide_gone_modules

provide_gone_modules(__name__)
