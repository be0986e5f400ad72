"""An exported model as an HTTP service: ``python -m dlrm_fused.inference.http --model model``."""
