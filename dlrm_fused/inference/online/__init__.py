"""Online scoring of candidates against kept histories. See docs/online.md."""
