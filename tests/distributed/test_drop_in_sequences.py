"""FusedEmbeddingCollectionSharder in place of TorchRec's: the same bits of all that a user may read, and of the tables.

On the CPU, TorchRec itself has no unpooled lookups of replicated tables, under ``inference_mode``, or of negative ids, and
finds no distinct ids.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import Tensor, nn
from torch.utils._device import set_device
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, data_parallel, row_wise, table_wise
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.sharding import FusedEmbeddingBagCollectionSharder, FusedEmbeddingCollectionSharder
from dlrm_fused.sharding.module_support import tables_of_sequences
from dlrm_fused.sharding.sequence_sharder import FusedShardedEmbeddingCollection
from dlrm_fused.sharding.without_tables import receive_the_dtype_of_the_others
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import on_hosts, run_program, run_ranks
from tests.distributed.test_drop_in import further_off, group_of, state_of
from tests.distributed.test_fused_sharder import CPU, WITH_KERNELS, RowWiseToo, fill_tables

TABLE_WISE, ROW_WISE, COLUMN_WISE, REPLICATED = "table_wise", "row_wise", "column_wise", "data_parallel"
FUSED = "fused"


@dataclass(frozen=True)
class Table:
    """A table of an odd case; a column-wise one has shards of 4 columns."""

    sharding: str
    features: tuple[str, ...]
    rank: int = 0
    rows: int = 30


@dataclass(frozen=True)
class Case:
    """A model of some modules, whose tables are ``dim`` wide, and the batches that it is given.

    Attributes:
        keys: of the batches, in their order; some may be read by no table.
        most_ids: of a feature of a sample; 0 for empty batches.
    """

    modules: tuple[tuple[Table, ...], ...]
    keys: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    dim: int = 8
    most_ids: tuple[int, ...] = (3, 0, 5)
    weighted: bool = False
    need_indices: bool = False
    index_dtype: torch.dtype = torch.int64
    wrong_ids: bool = False
    optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    output: SparseType = SparseType.FP32
    weights: DataType = DataType.FP32
    dedup: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    device_type: str = "cpu"

    @property
    def device(self) -> torch.device:
        return CPU if self.device_type == "cpu" else torch.device(self.device_type, int(os.environ["LOCAL_RANK"]))

    @property
    def tolerance(self) -> float:
        """Of differences: none, where FBGEMM looks up and updates on the CPU."""
        return 1e-5 if WITH_KERNELS or self.device_type != "cpu" else 0.0

    @property
    def ranks(self) -> int:
        return len(self.batch_sizes)

    @property
    def tables(self) -> list[Table]:
        return [*itertools.chain(*self.modules)]


def odd_case(seed: int) -> Case:
    """A case by chance; the same for the same seed."""
    draw = random.Random(seed)
    ranks, names = draw.choice([1, 2, 2, 3]), [f"feature_{i}" for i in range(draw.randint(1, 5))]
    kinds = draw.choice(
        [[TABLE_WISE], [ROW_WISE], [COLUMN_WISE], [TABLE_WISE, COLUMN_WISE], [TABLE_WISE, COLUMN_WISE, ROW_WISE]]
    )
    used: set[str] = set()

    def table(number: int) -> Table:
        features = draw.sample(names, draw.randint(1, min(3, len(names))))
        used.update(features)
        return Table(draw.choice(kinds), tuple(features), draw.randrange(ranks), 20 + 7 * number)

    modules = tuple(tuple(table(i) for i in range(draw.randint(1, 4))) for _ in range(draw.choice([1, 1, 2])))
    keys = [*sorted(used), *(["unread"] if draw.random() < 0.3 else [])]
    draw.shuffle(keys)
    is_row_wise = any(t.sharding == ROW_WISE for t in itertools.chain(*modules))
    return Case(
        modules,
        tuple(keys),
        tuple(draw.randint(1, 7) for _ in range(ranks)),
        draw.choice([4, 8, 12]),
        tuple(draw.choice([0, 1, 3, 9]) for _ in range(4)),
        draw.random() < 0.2,
        draw.random() < 0.2,
        draw.choice([torch.int64, torch.int32]),
        not is_row_wise and draw.random() < 0.3,
        draw.choice([EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_SGD]),
        draw.choice([SparseType.FP32, SparseType.FP32, SparseType.FP16]),
        draw.choice([DataType.FP32, DataType.FP32, DataType.FP16]),
    )


class Reader(nn.Module):
    """Some modules of tables, and a loss of all that they give."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.collections = nn.ModuleList(
            EmbeddingCollection(
                [
                    EmbeddingConfig(
                        name=f"table_{m}_{t}",
                        num_embeddings=table.rows,
                        embedding_dim=case.dim,
                        feature_names=list(table.features),
                        data_type=case.weights,
                    )
                    for t, table in enumerate(tables)
                ],
                need_indices=case.need_indices,
            )
            for m, tables in enumerate(case.modules)
        )
        self.over = nn.Linear(case.dim, 2)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, dict[str, Any]]:
        """The loss, and all that a user may read."""
        observed: dict[str, Any] = {}
        loss = torch.zeros((), device=batch.values().device)
        for m, collection in enumerate(self.collections):
            output: dict[str, JaggedTensor] = collection(batch).wait()
            observed[f"{m}.keys"] = list(output)
            for key, jagged in output.items():
                observed |= {f"{m}[{key}].values": jagged.values(), f"{m}[{key}].lengths": jagged.lengths()}
                observed[f"{m}[{key}].weights"] = jagged.weights_or_none()
                loss = loss + self.over(jagged.values().float()).sigmoid().square().sum()
        return loss, observed


def sharding_of(case: Case, table: Table) -> Callable[..., Any]:
    if table.sharding == COLUMN_WISE:
        return column_wise([(table.rank + shard) % case.ranks for shard in range(case.dim // 4)], compute_kernel=FUSED)
    if table.sharding == TABLE_WISE:
        return table_wise(table.rank, compute_kernel=FUSED)
    return row_wise(compute_kernel=FUSED) if table.sharding == ROW_WISE else data_parallel()


def shard(case: Case, sharder: EmbeddingCollectionSharder) -> DistributedModelParallel:
    """The model of a case, with the same weights whatever the sharder."""
    torch.manual_seed(3)
    model = Reader(case)
    plan: dict[str, EmbeddingModuleShardingPlan] = {
        f"collections.{m}": construct_module_sharding_plan(
            model.collections[m],
            {f"table_{m}_{t}": sharding_of(case, table) for t, table in enumerate(tables)},
            cast(ModuleSharder[nn.Module], RowWiseToo(sharder)),  # type: ignore[arg-type]
            local_size=case.ranks,
            world_size=case.ranks,
            device_type=case.device_type,
        )
        for m, tables in enumerate(case.modules)
    }
    sharders = [cast(ModuleSharder[nn.Module], sharder)]
    sharded = DistributedModelParallel(
        model, device=case.device, plan=ShardingPlan(plan), sharders=sharders, init_parameters=False
    )
    fill_tables(sharded)
    return sharded


def batch_of(case: Case, number: int) -> KeyedJaggedTensor:
    """This rank's batch of that number."""
    bags = case.batch_sizes[dist.get_rank()]
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    lengths = torch.randint(0, case.most_ids[number] + 1, (len(case.keys) * bags,), generator=generator)
    rows = min(table.rows for table in case.tables)
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator).to(case.index_dtype)
    if case.wrong_ids and len(values):
        values[::5] = 10_000
    weights = torch.rand(len(values), generator=generator) if case.weighted else None
    return KeyedJaggedTensor(list(case.keys), values, weights, lengths.to(case.index_dtype))


def run(case: Case, model: DistributedModelParallel) -> dict[str, Any]:
    """All that can be observed of the case's batches, and at the end the weights and the states of the optimizer."""
    tables = set(model.fused_optimizer.params)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if name not in tables], lr=0.125)
    observed: dict[str, Any] = {}
    for number in range(len(case.most_ids)):
        if number % 3 == 1:  # between two training batches
            with torch.no_grad() if case.device_type == "cpu" else torch.inference_mode():
                _, read = model(batch_of(case, number).to(case.device))
            observed |= {f"{number} without gradients: {name}": value for name, value in read.items()}
        loss, read = model(batch_of(case, number).to(case.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        observed |= {f"{number}: {name}": value for name, value in {"loss": loss, **read}.items()}
    return observed | state_of(model)


class TorchRecs(EmbeddingCollectionSharder):
    """TorchRec's sharder, whose ranks without tables know in which dtype the others send; gloo would break the connection."""

    def shard(self, *args: Any, **kwargs: Any) -> ShardedEmbeddingCollection:
        module = super().shard(*args, **kwargs)
        receive_the_dtype_of_the_others(module, tables_of_sequences(module))
        return module


def differences(cases: dict[int, Case]) -> dict[int, list[str]]:
    """By case, what differs between our sharder and TorchRec's on this rank."""
    found = {}
    with group_of(next(iter(cases.values()))):
        for name, case in cases.items():
            params = {"optimizer": case.optimizer, "learning_rate": 0.25, "eps": 1e-8, "output_dtype": case.output}
            model = shard(case, FusedEmbeddingCollectionSharder(params, use_index_dedup=case.dedup, **case.options))
            ours = run(case, model)
            theirs = run(case, shard(case, TorchRecs(params, use_index_dedup=case.dedup)))
            found[name] = [*_wrong_paths(case, model), *further_off(ours, theirs, case.tolerance)]
    return found


def _wrong_paths(case: Case, model: DistributedModelParallel) -> list[str]:
    return [
        f"{name}: {path}"
        for m, tables in enumerate(case.modules)
        for name, path in get_unwrapped_module(model).collections[m].paths.items()
        if path != (f"torchrec: sharding type {REPLICATED}" if tables[int(name[-1])].sharding == REPLICATED else FUSED)
    ]


# Odd cases: as many as continuous integration has time for, and all. DROP_IN_CASES is another number.
FEW, ALL = 12, 120


def by_kernels(case: Case) -> Case:
    """Without what amplifies or randomizes rounding: kernels add gradients of a row up in another order."""
    return replace(case, optimizer=EmbOptimType.EXACT_SGD, weights=DataType.FP32, output=SparseType.FP32, most_ids=(3, 0, 2))


@pytest.mark.interpreted
@pytest.mark.parametrize("ranks", [2, 3])
def test_kernels_look_up_and_update_as_fbgemm_does(ranks: int) -> None:
    cases = {seed: by_kernels(case) for seed in range(40) if (case := odd_case(seed)).ranks == ranks and not case.wrong_ids}
    cases = dict(itertools.islice(cases.items(), 3))
    assert run_ranks(ranks, differences, cases) == [{seed: [] for seed in cases}] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("count", [int(os.environ.get("DROP_IN_CASES", FEW)), pytest.param(ALL, marks=pytest.mark.exhaustive)])
def test_odd_cases_have_the_bits_of_torchrecs_sharder(ranks: int, count: int) -> None:
    cases = {seed: case for seed in range(4 * count) if (case := odd_case(seed)).ranks == ranks}
    cases = dict(itertools.islice(cases.items(), count))
    assert len(cases) > count // 2
    assert run_ranks(ranks, differences, cases) == [{seed: [] for seed in cases}] * ranks


MIXED = (
    Table(TABLE_WISE, ("c", "a"), rank=1),
    Table(COLUMN_WISE, ("b",)),
    Table(ROW_WISE, ("a",)),
    Table(TABLE_WISE, ("d",)),
)
OF_MIXED = Case((MIXED,), ("d", "b", "a", "c"), (3, 5))


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1)], ids=str)
def test_ranks_of_several_hosts_have_the_bits_of_torchrecs_sharder(hosts: tuple[int, ...]) -> None:
    case = replace(OF_MIXED, batch_sizes=(3, 5, 2)[: len(hosts)])
    assert run_ranks(len(hosts), on_hosts, hosts, differences, {0: case}) == [{0: []}] * len(hosts)


def without_gradient_division(case: Case) -> list[str]:
    set_gradient_division(False)
    return differences({0: case})[0]


def test_gradients_are_divided_as_torchrec_is_told_to() -> None:
    assert run_ranks(2, without_gradient_division, OF_MIXED) == [[], []]


def under_another_default_device(case: Case) -> list[str]:
    forward = set_device("meta")(FusedShardedEmbeddingCollection.forward)
    with mock.patch.object(FusedShardedEmbeddingCollection, "forward", forward):
        return differences({0: case})[0]


def test_rows_are_the_same_under_another_default_device() -> None:
    assert run_ranks(2, under_another_default_device, OF_MIXED) == [[], []]


def move(case: Case, from_fused: bool, folder: Path) -> list[str]:
    """Differences between a course whose second half has another sharder, from a checkpoint, and one with TorchRec's alone."""
    params = {"optimizer": case.optimizer, "learning_rate": 0.25}
    with process_group(Rank.from_environment(), CPU):
        sharders = [FusedEmbeddingCollectionSharder(params), EmbeddingCollectionSharder(params)]
        first, second = (shard(case, sharder) for sharder in (sharders if from_fused else sharders[::-1]))
        run(case, first)
        dcp.save({"model": first.state_dict(), "optimizer": first.fused_optimizer.state_dict()}, checkpoint_id=folder)
        states = {"model": second.state_dict(), "optimizer": second.fused_optimizer.state_dict()}
        dcp.load(states, checkpoint_id=folder)
        second.load_state_dict(states["model"])
        second.fused_optimizer.load_state_dict(states["optimizer"])
        stays = shard(case, EmbeddingCollectionSharder(params))
        run(case, stays)
        return further_off(run(case, second), run(case, stays))


@pytest.mark.parametrize("from_fused", [True, False])
def test_a_checkpoint_goes_on_under_the_other_sharder(from_fused: bool, tmp_path: Path) -> None:
    assert run_ranks(2, move, OF_MIXED, from_fused, tmp_path) == [[], []]


class BagsAndSequences(nn.Module):
    """A layer over bags and over the sums of a sequence, which TorchRec's pipeline can trace."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            [EmbeddingBagConfig(name="table_0_0", num_embeddings=30, embedding_dim=8, feature_names=["a"])]
        )
        self.items = EmbeddingCollection(
            [EmbeddingConfig(name="table_1_0", num_embeddings=30, embedding_dim=8, feature_names=["b"])]
        )
        self.over = nn.Linear(16, 1)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """The loss and what it is computed from."""
        sums = self.items(batch)["b"].to_padded_dense(9).sum(dim=1)
        scores = self.over(torch.cat([self.bags(batch).values(), sums], dim=1)).sigmoid()
        return scores.square().mean(), scores.detach()


def pipelined(pipeline_class: str, fused: bool) -> dict[str, Tensor]:
    """Outputs of a pipeline of TorchRec's, and the tables afterwards."""
    params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.25}
    kinds = FusedEmbeddingBagCollectionSharder, FusedEmbeddingCollectionSharder
    sharders = [kind(params) for kind in (kinds if fused else (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder))]
    with process_group(Rank.from_environment(), CPU):
        torch.manual_seed(3)
        model = BagsAndSequences()
        plan: dict[str, EmbeddingModuleShardingPlan] = {
            name: construct_module_sharding_plan(
                getattr(model, name), {table: table_wise(rank, compute_kernel=FUSED)}, sharder,
                local_size=2, world_size=2, device_type="cpu",
            )
            for name, table, rank, sharder in (("bags", "table_0_0", 0, sharders[0]), ("items", "table_1_0", 1, sharders[1]))
        }  # fmt: skip
        sharded = DistributedModelParallel(model, device=CPU, plan=ShardingPlan(plan), sharders=sharders, init_parameters=False)
        fill_tables(sharded)
        if fused:
            module = get_unwrapped_module(sharded)
            assert (module.bags.paths, module.items.paths) == ({"table_0_0": FUSED}, {"table_1_0": FUSED})
        optimizer = torch.optim.SGD(sharded.module.over.parameters(), lr=0.125)
        pipeline = getattr(train_pipelines, pipeline_class)(sharded, optimizer, CPU)
        case = replace(OF_MIXED, modules=((Table(TABLE_WISE, ("a",)),),), keys=("a", "b"))
        given = iter([batch_of(case, number % 3) for number in range(6)])
        outputs = {str(number): pipeline.progress(given).clone() for number in range(6)}
        return outputs | state_of(sharded)


# TorchRec's pipelines that run on CPUs.
PIPELINES = ("TrainPipelineSparseDist", "TrainPipelineSparseDistLite", "EvalPipelineSparseDist")


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_both_sharders_in_torchrecs_pipelines(pipeline: str) -> None:
    ours, theirs = run_ranks(2, pipelined, pipeline, True), run_ranks(2, pipelined, pipeline, False)
    for our, their in zip(ours, theirs, strict=True):
        assert further_off(our, their) == []


def uncovered(options: dict[str, Any]) -> dict[str, str] | str:
    case = replace(OF_MIXED, modules=((Table(TABLE_WISE, ("a",)), Table(REPLICATED, ("b",))),), keys=("a", "b"))
    with process_group(Rank.from_environment(), CPU):
        try:
            model = shard(case, FusedEmbeddingCollectionSharder({"learning_rate": 0.25}, **options))
        except UsageError as error:
            return str(error)
        return dict(get_unwrapped_module(model).collections[0].paths)


def test_tables_that_are_not_covered_are_torchrecs_or_refused() -> None:
    paths = {"table_0_0": FUSED, "table_0_1": f"torchrec: sharding type {REPLICATED}"}
    assert run_ranks(2, uncovered, {}) == [paths, paths]
    for told in run_ranks(2, uncovered, {"strict": True}):
        assert "does not cover all tables: table_0_1: sharding type data_parallel" in told


def of_other_options() -> str:
    rank = Rank.from_environment()
    with process_group(rank, CPU):
        with pytest.raises(UsageError) as raised:
            shard(OF_MIXED, FusedEmbeddingCollectionSharder({}, timeout_seconds=60.0 + rank.index))
        return str(raised.value)


def test_ranks_must_give_the_same_options() -> None:
    for told in run_ranks(2, of_other_options):
        assert "FusedEmbeddingCollectionSharder: timeout_seconds differs between ranks: 60.0 on rank 0, 61.0 on rank 1" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout_seconds": 0}, "timeout_seconds=0: allowed: a positive number"),
        ({"forward_wire": torch.int8}, "forward_wire=torch.int8: allowed: torch.float32, torch.bfloat16, torch.float16"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FusedEmbeddingCollectionSharder(**arguments)


def rounded(case: Case) -> list[float]:
    """The largest differences of rows from those without rounding on the wire, relative to what bf16 rounds."""
    with process_group(Rank.from_environment(), CPU):
        of_16_bits, exact = (
            run(case, shard(case, FusedEmbeddingCollectionSharder({"learning_rate": 0.25}, **wires)))
            for wires in ({"forward_wire": torch.bfloat16, "backward_wire": torch.bfloat16}, {})
        )
        values = [name for name in exact if name.startswith("0:") and name.endswith(".values")]
        return [float(((of_16_bits[name] - exact[name]).abs() / exact[name].abs().clamp(min=1e-3)).max()) for name in values]


def test_the_wire_rounds_what_travels() -> None:
    for differences_of_rank in run_ranks(2, rounded, OF_MIXED):
        assert 0 < max(differences_of_rank) <= 2**-8


def train_until_rank_1_is_killed() -> None:
    with process_group(Rank.from_environment(), CPU):
        model = shard(OF_MIXED, FusedEmbeddingCollectionSharder({"learning_rate": 0.25}))
        for number in itertools.count():
            if dist.get_rank() == 1 and number == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                loss, _ = model(batch_of(OF_MIXED, number % 3))
                loss.backward()
            except CommunicationError as error:
                print(error, flush=True)
                os._exit(0)  # the process group would wait for the rank that is gone


def test_every_other_rank_names_a_rank_that_is_killed(tmp_path: Path) -> None:
    ended = run_program(2, tmp_path, 240.0, train_until_rank_1_is_killed)
    assert ended.statuses == [0, -signal.SIGKILL], ended.output
    assert re.search(r"rank 1 on \S+ \(pid \d+\) is lost", ended.output), ended.output
