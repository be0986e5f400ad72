"""Online scoring: candidates against histories that are kept. See docs/online.md."""
