"""Embedding tables spread over ranks."""
