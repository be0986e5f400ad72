"""Places of data do not overlap, and lie in the memory that is allocated for them: numbers alone, for all ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

from dlrm_fused.ops.embedding_all_to_all import ExchangeLayout, LookupLayout
from dlrm_fused.ops.embedding_all_to_all.byte_layout import ByteLayout
from dlrm_fused.ops.embedding_all_to_all.host_slices import HostSlices
from dlrm_fused.symmetric.hosts import Hosts

BATCH_SIZES = (5, 0, 17, 2)
ROW_WISE = LookupLayout((0, 8), (8, 12), row_wise=True)
LAYOUT = ExchangeLayout(
    (
        (LookupLayout((20,), (8,)), ROW_WISE),
        (LookupLayout((28,), (4,)), ROW_WISE),
        (ROW_WISE,),
        (LookupLayout((32,), (4,)), ROW_WISE),
    ),
    36,
)


@pytest.mark.parametrize("hosts", [((0, 1, 2, 3),), ((0, 2), (1, 3)), ((0,), (1, 2, 3))], ids=str)
@pytest.mark.parametrize("is_staged", [False, True])
def test_no_two_rows_of_all_ranks_have_the_same_bytes(hosts: tuple[tuple[int, ...], ...], is_staged: bool) -> None:
    wire = 2 if is_staged else 4
    places = [ByteLayout(LAYOUT, Hosts(hosts, rank), BATCH_SIZES, 4, wire, 2, is_staged) for rank in range(len(BATCH_SIZES))]
    stored: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for own in places:
        memories = ["staging" if own.goes_to_staging(number) else "output" for number in range(len(own.pooled_tiles))]
        tiles_of_memories = zip([*memories, "gradients"], [*own.pooled_tiles, own.gradient_tiles], strict=True)
        for memory, tile in ((memory, tile) for memory, tiles in tiles_of_memories for tile in tiles):
            begins = [tile.offset + row * tile.stride * tile.item_size for row in range(tile.rows)]
            found = stored.setdefault((memory, tile.peer), [])
            found += [(begin, begin + tile.width * tile.item_size) for begin in begins]
    sizes = {"staging": ByteLayout.staging_size, "output": ByteLayout.output_size, "gradients": ByteLayout.gradients_size}
    for (memory, rank), found in stored.items():
        found.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(found)), (memory, rank)
        assert max((end for _, end in found), default=0) <= sizes[memory](places[rank], rank)
    assert {memory for memory, _ in stored} == ({"staging", "gradients"} if is_staged else set(sizes))


def test_gradients_of_a_rank_with_one_lookup_arrive_where_they_belong() -> None:
    one, two = (LookupLayout((0,), (8,)),), (LookupLayout((8,), (4,)), LookupLayout((12,), (8,)))
    layout, hosts, batch_sizes = ExchangeLayout((one, two), 20), ((0,), (1,)), (3, 5)
    begins = [
        HostSlices(
            ByteLayout(layout, Hosts(hosts, rank), batch_sizes, 4, 4, 2, False),
            torch.float32,
            torch.float16,
            torch.device("cpu"),
        ).gradient_begins
        for rank in range(2)
    ]
    # Behind the 3 bags of rank 0, of 8 columns and 2 bytes.
    assert begins == [{1: 3 * 8 * 2}, {}]
