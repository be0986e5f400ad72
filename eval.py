"""Evaluate a run: ``python eval.py --run runs/quickstart``; ``--help`` says more."""

from dlrm_fused.cli import evaluate_command

if __name__ == "__main__":
    evaluate_command()
