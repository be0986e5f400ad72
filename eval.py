"""Evaluate a run: ``python eval.py --run runs/quickstart``; ``--help`` says more."""

from dlrm_fused.cli import evaluate

if __name__ == "__main__":
    evaluate()
