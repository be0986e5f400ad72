"""The mark of tests that need several hosts, where a machine cannot have them."""

from __future__ import annotations

import pytest

from benchmarks.common.network import obstacle

_found = obstacle()
needs_hosts = pytest.mark.skipif(bool(_found), reason=_found)
