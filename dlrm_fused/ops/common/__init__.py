"""What operators share: workspaces, rows sent to other ranks, the measurement behind ``comm=auto``."""
