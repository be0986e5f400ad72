"""Inference: a run exported as a folder, the HTTP service of such a folder, and online scoring of candidates."""
