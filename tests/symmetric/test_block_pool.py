"""An pool lends a block for exactly as long as the tensor's storage lives. One process, without torch.distributed."""

from __future__ import annotations

import gc
import io
import random
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.symmetric import BlockPool, SymmetricGroup, symmetric_group

UNIT = 4096
UNITS = 16


@pytest.fixture
def group() -> Iterator[SymmetricGroup]:
    group = symmetric_group(device="cpu")
    yield group
    group.close()


@pytest.fixture
def pool(group: SymmetricGroup) -> BlockPool:
    return BlockPool(group, "pool", UNITS * UNIT)


def floats(pool: BlockPool, units: int) -> Tensor | None:
    return pool.take((units, UNIT // 4), torch.float32)


def taken(pool: BlockPool, units: int) -> Tensor:
    tensor = floats(pool, units)
    assert tensor is not None
    return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_a_tensor_lies_in_the_memory_of_the_pool(pool: BlockPool, dtype: torch.dtype) -> None:
    first, tensor = pool.take((1,), torch.uint8), pool.take((3, 5), dtype)
    assert first is not None
    assert tensor is not None
    assert (tensor.shape, tensor.dtype, tensor.device) == ((3, 5), dtype, torch.device("cpu"))
    assert tensor.is_contiguous()
    assert not tensor._is_view()
    offset = pool.offset_of(tensor)
    assert offset == UNIT
    assert pool.offset_of(tensor[1]) == offset + 5 * dtype.itemsize
    tensor.copy_(torch.arange(15).view(3, 5))
    stored = pool.memory.local[offset : offset + 15 * dtype.itemsize].view(dtype)
    assert stored.tolist() == list(range(15))


def test_a_tensor_without_elements_has_a_place_too(pool: BlockPool) -> None:
    tensor = pool.take((0, 7), torch.float32)
    assert tensor is not None
    assert tensor.shape == (0, 7)
    assert pool.offset_of(tensor) == 0


def test_a_tensor_is_saved_without_the_rest_of_its_block(pool: BlockPool) -> None:
    tensor = pool.take((3, 5), torch.float32, 8 * UNIT)
    assert tensor is not None
    sizes = []
    for saved in (tensor, torch.empty(3, 5)):
        file = io.BytesIO()
        torch.save(saved, file)
        sizes.append(len(file.getvalue()))
    assert sizes[0] == sizes[1]
    assert pool.free_bytes() == (UNITS - 8) * UNIT


def test_there_is_none_when_no_free_block_is_large_enough(pool: BlockPool) -> None:
    assert floats(pool, UNITS + 1) is None
    held = [taken(pool, 1) for _ in range(UNITS)]
    assert floats(pool, 1) is None
    del held[3], held[7]  # two free blocks, not adjacent
    assert floats(pool, 2) is None
    assert pool.offset_of(taken(pool, 1)) == 3 * UNIT


def test_adjacent_free_blocks_become_one_in_whatever_order_they_are_freed(pool: BlockPool) -> None:
    for seed in range(20):
        held = [taken(pool, 1) for _ in range(UNITS)]
        random.Random(seed).shuffle(held)
        while held:
            held.pop()
        whole = taken(pool, UNITS)
        assert pool.offset_of(whole) == 0
        del whole


def test_a_block_is_lent_as_long_as_a_view_lives(pool: BlockPool) -> None:
    view = taken(pool, 4)[1, 3:5]
    assert pool.free_bytes() == (UNITS - 4) * UNIT
    del view
    assert pool.free_bytes() == UNITS * UNIT


def test_a_block_is_lent_as_long_as_its_storage_lives(pool: BlockPool) -> None:
    storage = taken(pool, 4).untyped_storage()
    assert pool.free_bytes() == (UNITS - 4) * UNIT
    del storage
    assert pool.free_bytes() == UNITS * UNIT


def test_a_block_is_lent_as_long_as_an_autograd_graph_holds_it(pool: BlockPool) -> None:
    weight = torch.ones(4, UNIT // 4, requires_grad=True)
    loss = (weight * taken(pool, 4).fill_(3.0)).sum()
    assert pool.free_bytes() == (UNITS - 4) * UNIT
    loss.backward()
    # backward has freed what the graph had saved, in a thread of autograd
    assert pool.free_bytes() == UNITS * UNIT
    assert weight.grad is not None
    assert weight.grad.eq(3.0).all()


def test_a_block_is_lent_as_long_as_a_reference_cycle_holds_it(pool: BlockPool) -> None:
    gc.collect()
    gc.disable()
    try:
        cycle: list[object] = [taken(pool, 1)]
        cycle.append(cycle)
        del cycle
        assert pool.free_bytes() == (UNITS - 1) * UNIT
        gc.collect()
        assert pool.free_bytes() == UNITS * UNIT
    finally:
        gc.enable()


def test_a_tensor_outlives_arena_and_group() -> None:
    group = symmetric_group(device="cpu")
    pool = BlockPool(group, "pool", UNITS * UNIT)
    tensor = taken(pool, 2).fill_(5.0)
    group.close()
    del pool, group
    gc.collect()
    assert tensor.eq(5.0).all()


def test_memory_that_was_released_is_freed_with_its_last_tensor(group: SymmetricGroup) -> None:
    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum("dlrm_fused outgrown" in line for line in maps)

    pool = BlockPool(group, "outgrown", UNIT)
    tensor = taken(pool, 1)
    group.release(pool.memory)
    del pool
    assert mappings() == 1
    del tensor
    assert mappings() == 0


def test_several_threads_never_share_a_block(group: SymmetricGroup) -> None:
    pool = BlockPool(group, "pool", 64 * UNIT)
    wrong: list[int] = []
    droppers: list[threading.Thread] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        held: list[Tensor] = []
        for _ in range(300):
            tensor = floats(pool, chance.randint(1, 5))
            if tensor is not None:
                held.append(tensor.fill_(number))
            while len(held) > 4:
                tensor = held.pop(chance.randrange(len(held)))
                if not tensor.eq(number).all():
                    wrong.append(number)
                # Dropped by another thread, as autograd does.
                dropper = threading.Thread(target=list.clear, args=([tensor],))
                del tensor
                dropper.start()
                droppers.append(dropper)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for dropper in droppers:
        dropper.join()
    assert wrong == []
    assert pool.free_bytes() == 64 * UNIT


def test_a_foreign_tensor_has_no_offset(pool: BlockPool) -> None:
    with pytest.raises(UsageError, match=r"pool pool: a tensor of shape \(2, 3\) is not in it"):
        pool.offset_of(torch.zeros(2, 3))


def test_who_holds_more_than_there_is_receives_in_the_spare_block_and_gets_copies(group: SymmetricGroup) -> None:
    pool = BlockPool.with_spare(group, "pool", 2 * UNIT, held=2)
    whole = (2 * UNIT // 4,)
    received = [pool.receive(whole, torch.float32) for _ in range(4)]
    assert [pool.offset_of(tensor) for tensor in received[2:]] == [0, 0]
    assert len({pool.offset_of(tensor) for tensor in received}) == 3
    assert [pool.to_hold(tensor) is tensor for tensor in received] == [True, True, False, False]
    received[3].fill_(7.0)
    assert pool.to_hold(received[3]).unique().tolist() == [7.0]
    del received[0]
    assert pool.offset_of(pool.receive(whole, torch.float32)) > 0


def test_a_pool_with_a_spare_block_is_freed_when_nobody_refers_to_it(group: SymmetricGroup) -> None:
    pool = BlockPool.with_spare(group, "pool", UNIT, held=1)
    held = pool.to_hold(pool.receive((3,), torch.float32))
    memory = weakref.ref(pool.memory)
    pool.release()
    del pool
    gc.collect()
    assert memory() is not None, "a tensor in it is held"
    del held
    gc.collect()
    assert memory() is None
