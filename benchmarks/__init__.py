"""Measurements of the operators and of training: README.md has the question that each answers, and its command."""
