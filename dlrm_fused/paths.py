"""Paths as users give them."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str) -> Path:
    """Return a path of the command line; of ``--output=~/x``, shells leave the ``~`` as it is."""
    return Path(os.path.expanduser(text))
