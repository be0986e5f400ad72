"""Export a run: ``python export.py --run runs/quickstart --output model``; ``--help`` says more."""

from dlrm_fused.cli import export_command

if __name__ == "__main__":
    export_command()
