"""The trainer and its parts: metrics, step times, what a run writes, checkpoints."""
