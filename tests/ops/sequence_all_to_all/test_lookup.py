"""Rows that kernels look up and update, between processes on the CPU: values, order, tables of 16 bits, and as an operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.ops.embedding_all_to_all import LocalTables, Sgd
from dlrm_fused.ops.sequence_all_to_all import SequenceWorkspace, sequence_lookup_all_to_all
from tests.distributed.launch import cpu_group, on_hosts, run_ranks
from tests.ops.sequence_all_to_all.test_op import WIDTH, Call, new_workspace

ROWS = (5, 7)
RATE = 0.5


def tables_of(rank: int, dtype: torch.dtype = torch.float32) -> LocalTables:
    """Two tables, the first of which two features read, the same for the same rank."""
    weights = torch.randn(sum(ROWS) * WIDTH, generator=torch.Generator().manual_seed(rank)).to(dtype)
    return LocalTables(
        weights=weights,
        offsets=(0, ROWS[0] * WIDTH),
        rows=ROWS,
        dims=(WIDTH, WIDTH),
        feature_tables=(0, 1, 0),
        mean=False,
        optimizer=Sgd(torch.tensor(RATE)),
        stochastic_rounding=False,
    )


def indices_of(call: Call, rank: int, seed: int) -> Tensor:
    """The ids that a rank is asked for."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    of_features = [ROWS[table] for table in tables_of(rank).feature_tables]
    counts = call.lengths[rank].sum(dim=1).tolist()
    return torch.cat([torch.randint(rows, (n,), generator=generator) for rows, n in zip(of_features, counts, strict=True)])


def rows_read(call: Call, rank: int, seed: int) -> Tensor:
    """The rows of the ids, counted on over all tables."""
    firsts = torch.tensor([(0, ROWS[0])[table] for table in tables_of(rank).feature_tables])
    return indices_of(call, rank, seed) + firsts.repeat_interleave(call.lengths[rank].sum(dim=1))


def rows_of(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return tables_of(rank, dtype).weights.view(-1, WIDTH).float()


def wrong_calls(seeds: Sequence[int], dtype: torch.dtype) -> list[str]:
    """The calls whose rows, or updated tables, are wrong on this rank; each begins with the same tables."""
    wrong = []
    with cpu_group() as group:
        workspace = new_workspace(group)
        for seed in seeds:
            drawn, tables = Call.draw(group.world_size, seed, features=3, placed=seed % 2 > 0), tables_of(group.rank, dtype)
            # Only the numbers of rows are those of the draw: here all rows come from tables.
            of_ranks = [rows_read(drawn, rank, seed) for rank in range(group.world_size)]
            call = drawn._replace(rows=[rows_of(rank, dtype)[own] for rank, own in enumerate(of_ranks)])
            workspace.attach_tables([tables])
            arguments = *call.arguments(group.rank), 2.0, call.places_of(group.rank)
            result = sequence_lookup_all_to_all(workspace, indices_of(call, group.rank, seed), *arguments)
            if not torch.equal(result, call.output(group.rank)):
                wrong.append(f"rows of {seed}")
            result.backward(call.gradients[group.rank])
            summed = torch.zeros(sum(ROWS), WIDTH).index_add_(0, of_ranks[group.rank], call.gradient_of(group.rank))
            expected = rows_of(group.rank, dtype) - RATE * summed / 2
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            if not torch.allclose(tables.weights.view(-1, WIDTH).float(), expected, rtol=tolerance, atol=tolerance):
                wrong.append(f"tables of {seed}")
    return wrong


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("hosts", "dtype"), [((0,), torch.float32), ((0, 0), torch.float16), ((0, 1, 0), torch.float32)], ids=str
)
def test_rows_come_from_tables_and_gradients_update_them(hosts: tuple[int, ...], dtype: torch.dtype) -> None:
    assert run_ranks(len(hosts), on_hosts, hosts, wrong_calls, range(6, 12), dtype) == [[]] * len(hosts)


def opcheck() -> None:
    with cpu_group() as group:
        workspace, call = new_workspace(group), Call.draw(group.world_size, 7, features=3, placed=True)
        workspace.attach_tables([tables_of(group.rank)])
        offsets, batch_sizes, counts = call.arguments(group.rank)
        numbers = workspace.counts(counts).numbers
        call_of_rank = call.places_of(group.rank), batch_sizes, numbers, 1.0, workspace.handle
        inputs = workspace.anchor, indices_of(call, group.rank, 7), offsets, *call_of_rank
        # Updates of tables are no results: what compares results of several calls would see tables that have changed.
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.dlrm_fused.sequence_lookup_all_to_all.default, inputs, test_utils=checks)


@pytest.mark.interpreted
def test_opcheck() -> None:
    run_ranks(2, opcheck)


def error_without_tables() -> str:
    with cpu_group() as group:
        workspace, call = new_workspace(group), Call.draw(group.world_size, 7, features=3)
        if group.rank == 0:
            workspace.attach_tables([tables_of(0)])
        try:
            sequence_lookup_all_to_all(workspace, indices_of(call, group.rank, 7), *call.arguments(group.rank))
        except (UsageError, CommunicationError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


@pytest.mark.interpreted
def test_a_rank_that_is_asked_for_rows_needs_tables() -> None:
    first, second = run_ranks(2, error_without_tables)
    for told in (first, second):
        assert told.startswith("UsageError: rank 1: sequences: ")
        assert told.endswith("indices, but no tables; attach them first")


class _Alone:
    name, device = "sequences", torch.device("cpu")
    width = WIDTH


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"dims": (WIDTH, 4)}, "rows of 8 elements, one behind the other"), ({"offsets": (0, 48)}, "one behind the other")],
    ids=str,
)
def test_tables_must_lie_behind_each_other(changes: dict[str, tuple[int, ...]], message: str) -> None:
    tables = tables_of(0)
    wrong = replace(tables, **changes, rows=(5, 6) if "offsets" in changes else tables.rows)
    with pytest.raises(UsageError, match=message):
        SequenceWorkspace.attach_tables(_Alone(), [wrong])  # type: ignore[arg-type]


def test_tables_of_several_lookups_are_refused() -> None:
    with pytest.raises(UsageError, match="tables of 2 lookups; needed: of one, or none"):
        SequenceWorkspace.attach_tables(_Alone(), [tables_of(0), tables_of(1)])  # type: ignore[arg-type]
