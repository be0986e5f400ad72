"""What a workspace keeps between calls. No kernels."""

from __future__ import annotations

import weakref

import pytest

from dlrm_fused.ops.embedding_all_to_all import EmbeddingWorkspace, ExchangeLayout, LookupLayout
from dlrm_fused.symmetric import symmetric_group
from tests.distributed.launch import cpu_group, run_ranks


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


def batches_with_room() -> list[bool]:
    """Of some batch sizes, after memory has been made for two of them."""
    with cpu_group() as group:
        lookups = ((LookupLayout((0,), (8,)),), (LookupLayout((8,), (8,)),))
        workspace = EmbeddingWorkspace(group, ExchangeLayout(lookups, 16), name="room", timeout_seconds=60.0)
        uneven, even, larger = (9, 1), (6, 6), (9, 6)
        workspace.reserve(uneven)
        workspace.reserve(even)
        views = [workspace.plan(sizes).gradients_view(workspace.gradients, 0) for sizes in (uneven, even)]
        assert [len(view) for view in views] == [10, 12]
        return [workspace.has_room(sizes) for sizes in (uneven, even, larger)]


def test_memory_for_other_batches_stays_when_some_need_more() -> None:
    assert run_ranks(2, batches_with_room) == [[True, True, False]] * 2
