"""Export of a run as a folder that torch and NumPy alone predict with. See docs/export_and_serve.md."""
