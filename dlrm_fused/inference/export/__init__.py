"""Models that leave the trainer: a run becomes a folder that torch and NumPy alone predict with."""
