"""What a workspace keeps between calls. One rank, no kernels."""

from __future__ import annotations

import weakref

import pytest

from dlrm_fused.ops.embedding_all_to_all import EmbeddingWorkspace, ExchangeLayout, LookupLayout
from dlrm_fused.symmetric import symmetric_group


def test_the_tables_of_a_batch_are_kept_as_long_as_a_captured_graph_may_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    group = symmetric_group(device="cpu")
    layout = ExchangeLayout(((LookupLayout((0,), (8,)),),), 8)
    workspace = EmbeddingWorkspace(group, layout, name="captured", timeout_seconds=60.0)
    workspace.reserve([4])
    monkeypatch.setattr(workspace, "_is_capturing", lambda: True)
    workspace.reserve([3])
    monkeypatch.undo()
    captured, other = (weakref.ref(workspace.plan([size]).gradient_table) for size in (3, 4))
    for size in range(5, 105):
        workspace.plan([size])
    assert captured() is not None
    assert other() is None, "only some plans are kept"
    group.close()
