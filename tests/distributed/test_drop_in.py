"""FusedEmbeddingBagCollectionSharder in place of TorchRec's: the same bits, whatever reads the output, and in whatever order.

Dense layers read ``.values()``, so that they would be given other features if the columns had another order. Between the
batches that the fused path takes, some fall back to TorchRec's.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from tensordict import TensorDict
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.sharding_plan import (
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_fused.sharding import FusedEmbeddingBagCollectionSharder
from dlrm_fused.sharding.parallel import Sharder
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import RankFailed, on_hosts, run_ranks
from tests.distributed.test_fused_sharder import CPU, WITH_KERNELS, fill_tables, plan_of_modules

TABLE_WISE, COLUMN_WISE, ROW_WISE, REPLICATED = "table_wise", "column_wise", "row_wise", "data_parallel"
SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
TRAIN, EVALUATE, TRACKED, PER_FEATURE, EMPTY = "train", "evaluate", "tracked", "per feature", "empty"
FUSED = EmbeddingComputeKernel.FUSED.value


@dataclass(frozen=True)
class Table:
    """A table of an odd case; a column-wise one has shards of 4 columns."""

    sharding: str
    dim: int
    features: tuple[str, ...]
    pooling: PoolingType = SUM
    rank: int = 0
    rows: int = 30
    kernel: str = FUSED


@dataclass(frozen=True)
class Case:
    """A model of some modules, and the batches that it is given.

    Attributes:
        keys: of the batches, in their order; some may be read by no table.
        order: of sharding types, instead of that of their tables.
        events: the kind of each batch, one after the other; a tracked one and one with a batch size for each feature fall back.
    """

    modules: tuple[tuple[Table, ...], ...]
    keys: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    events: tuple[str, ...] = (TRAIN, EVALUATE, TRAIN)
    weighted: bool = False
    optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    output: SparseType = SparseType.FP32
    weights: DataType = DataType.FP32
    options: dict[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] | None = None
    device_type: str = "cpu"

    @property
    def device(self) -> torch.device:
        return CPU if self.device_type == "cpu" else torch.device(self.device_type, int(os.environ["LOCAL_RANK"]))

    @property
    def ranks(self) -> int:
        return len(self.batch_sizes)

    @property
    def tables(self) -> list[Table]:
        return [*itertools.chain(*self.modules)]

    @property
    def is_exact(self) -> bool:
        """Whether sums have one order: gloo adds up terms of more than two ranks in its own, as kernels do those of bags."""
        of_two = self.ranks == 2 or all(table.sharding in (TABLE_WISE, COLUMN_WISE) for table in self.tables)
        return of_two and not WITH_KERNELS and self.device_type == "cpu"


def odd_case(seed: int) -> Case:
    """A case by chance; the same for the same seed."""
    draw = random.Random(seed)
    ranks, names = draw.choice([2, 2, 3]), [f"feature_{i}" for i in range(draw.randint(1, 5))]
    kinds = draw.choice(
        [[TABLE_WISE], [ROW_WISE], [COLUMN_WISE], [TABLE_WISE, COLUMN_WISE], [TABLE_WISE, COLUMN_WISE, ROW_WISE]]
    )
    kinds = [*kinds, REPLICATED] if draw.random() < 0.25 else kinds
    poolings = draw.choice([[SUM], [MEAN], [SUM, MEAN]])
    used: set[str] = set()

    def table(number: int) -> Table:
        features = draw.sample(names, draw.randint(1, min(3, len(names))))
        used.update(features)
        dim = draw.choice([4, 8, 8, 12, 20])
        return Table(draw.choice(kinds), dim, tuple(features), draw.choice(poolings), draw.randrange(ranks), 20 + 7 * number)

    modules = tuple(tuple(table(i) for i in range(draw.randint(1, 5))) for _ in range(draw.choice([1, 1, 2])))
    keys = [*sorted(used), *(["unread"] if draw.random() < 0.3 else [])]
    draw.shuffle(keys)
    weighted = draw.random() < 0.25
    batch_sizes = [draw.randint(1, 7) for _ in range(ranks)]
    if any(t.sharding == ROW_WISE for t in itertools.chain(*modules)):  # TorchRec's backward pass fails for others with gloo
        batch_sizes = [batch_sizes[0]] * ranks
    between = [EVALUATE, TRACKED, EMPTY]
    events = [TRAIN, draw.choice(between), TRAIN, draw.choice(between), TRAIN][draw.randrange(2) :]
    # TorchRec takes such batches before all others only.
    tables = [*itertools.chain(*modules)]
    can_differ_by_feature = not weighted and len(poolings) == 1 and all(t.sharding in (TABLE_WISE, COLUMN_WISE) for t in tables)
    events = [*([PER_FEATURE] if can_differ_by_feature and draw.random() < 0.5 else []), *events]
    optimizers = [EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD]
    if PER_FEATURE in events:  # FBGEMM has it with the first two only
        optimizers.pop()
    return Case(
        modules,
        tuple(keys),
        tuple(batch_sizes),
        tuple(events),
        weighted,
        draw.choice(optimizers),
        draw.choice([SparseType.FP32, SparseType.FP16]),
        draw.choice([DataType.FP32, DataType.FP32, DataType.FP16]),
        {"mode": draw.choice(["fused", "fused", "auto"])},
        draw.choice([None, (ROW_WISE, COLUMN_WISE, TABLE_WISE)]),
    )


class Behind(nn.Module):
    """Dense layers behind ``.values()`` of some modules of tables, and behind TorchRec's regrouping of their features."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.collections = nn.ModuleList(
            EmbeddingBagCollection(
                [_config(case, f"table_{m}_{t}", table) for t, table in enumerate(tables)], is_weighted=case.weighted
            )
            for m, tables in enumerate(case.modules)
        )
        self.over_values = nn.Linear(sum(table.dim * len(table.features) for table in case.tables), 2)
        names = [cast(EmbeddingBagCollection, collection)._embedding_names for collection in self.collections]
        # Each caches the order of the first output.
        self.regroups = nn.ModuleList(KTRegroupAsDict([own[::2], own[1::2] or own], ["even", "odd"]) for own in names)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, dict[str, Any]]:
        """The loss, and all that a user may read."""
        observed: dict[str, Any] = {}
        outputs: list[KeyedTensor] = [collection(batch).wait() for collection in self.collections]
        for m, (output, regroup) in enumerate(zip(outputs, self.regroups, strict=True)):
            observed |= {f"{m}.keys": output.keys(), f"{m}.values": output.values(), f"{m}.offsets": output.offset_per_key()}
            observed |= {f"{m}[{key}]": output[key] for key in output.keys()}  # noqa: SIM118
            observed |= {f"{m}.{group}": values for group, values in regroup([output]).items()}
        hidden = self.over_values(torch.cat([output.values().float() for output in outputs], dim=1)).sigmoid().sum()
        for m, own in enumerate(self.regroups):
            hidden = hidden + sum(observed[f"{m}.{group}"].float().square().mean() for group in own._keys)
        return hidden, observed


def _config(case: Case, name: str, table: Table) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=table.rows,
        embedding_dim=table.dim,
        feature_names=list(table.features),
        pooling=table.pooling,
        data_type=case.weights,
    )


def ranks_of(table: Table, ranks: int) -> list[int]:
    """Those of a column-wise table's shards, or of a table-wise one."""
    shards = table.dim // 4 if table.sharding == COLUMN_WISE else 1
    return [(table.rank + shard) % ranks for shard in range(shards)]


def _sharding(table: Table, ranks: int) -> Callable[..., Any]:
    if table.sharding == COLUMN_WISE:
        return column_wise(ranks_of(table, ranks), compute_kernel=FUSED)
    if table.sharding == TABLE_WISE:
        return table_wise(*ranks_of(table, ranks), compute_kernel=FUSED)
    return row_wise(compute_kernel=table.kernel) if table.sharding == ROW_WISE else data_parallel()


def plan_of(case: Case, model: Behind, sharder: EmbeddingBagCollectionSharder) -> dict[str, EmbeddingModuleShardingPlan]:
    return plan_of_modules(model.collections, case.modules, _sharding, sharder, case.ranks, case.device_type)


def shard(case: Case, sharder: EmbeddingBagCollectionSharder) -> DistributedModelParallel:
    """The model of a case, with the same weights whatever the sharder."""
    torch.manual_seed(3)
    model = Behind(case)
    plan, sharders = ShardingPlan(plan_of(case, model, sharder)), [cast(ModuleSharder[nn.Module], sharder)]
    sharded = DistributedModelParallel(model, device=case.device, plan=plan, sharders=sharders, init_parameters=False)
    fill_tables(sharded)
    return sharded


def fused_params(case: Case) -> dict[str, Any]:
    return {"optimizer": case.optimizer, "learning_rate": 0.25, "eps": 1e-8, "output_dtype": case.output}


def batch_of(case: Case, number: int) -> KeyedJaggedTensor:
    """This rank's batch: bags of 0 to 3 ids, of event ``number``."""
    event, keys, bags = case.events[number], case.keys, case.batch_sizes[dist.get_rank()]
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    strides = [1 + i % 2 if event == PER_FEATURE else bags for i in range(len(keys))]
    lengths = torch.randint(0, 1 if event == EMPTY else 4, (sum(strides),), generator=generator)
    rows = min(table.rows for table in case.tables)
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(values), generator=generator) if case.weighted else None
    if event != PER_FEATURE:
        return KeyedJaggedTensor(list(keys), values, weights, lengths)
    inverse = torch.stack([torch.arange(bags) % stride for stride in strides])
    return KeyedJaggedTensor(
        list(keys), values, weights, lengths,
        stride_per_key_per_rank=[[stride] for stride in strides], inverse_indices=(list(keys), inverse),
    )  # fmt: skip


def run(case: Case, model: DistributedModelParallel) -> dict[str, Any]:
    """All that can be observed of the case's batches, and at the end the weights and the states of the optimizer."""
    tables = set(model.fused_optimizer.params)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if name not in tables], lr=0.125)
    observed: dict[str, Any] = {}
    for number, event in enumerate(case.events):
        is_training = event not in (EVALUATE, PER_FEATURE)  # TorchRec's backward pass of the latter fails on the CPU
        model.train(is_training)
        for collection in get_unwrapped_module(model).collections:
            collection.post_lookup_tracker_fn = (lambda *_: None) if event == TRACKED else None
        with torch.set_grad_enabled(is_training):
            loss, read = model(batch_of(case, number).to(case.device))
        if is_training:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        observed |= {f"{number} {event}: {name}": value for name, value in {"loss": loss, **read}.items()}
    return observed | state_of(model)


def state_of(model: DistributedModelParallel) -> dict[str, Tensor]:
    """By name, dense weights, local shards of tables, and states of their optimizer."""
    tensors = dict(model.state_dict())
    for table, states in model.fused_optimizer.state_dict()["state"].items():
        tensors |= {f"{table}: {name}": state for name, state in states.items()}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        shards = tensor.local_shards() if hasattr(tensor, "local_shards") else None
        found |= {name: tensor} if shards is None else {f"{name} {i}": own.tensor for i, own in enumerate(shards)}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


@contextmanager
def group_of(case: Case) -> Iterator[None]:
    """The process group of all ranks."""
    if case.device.type == "cuda":
        torch.cuda.set_device(case.device)
    with process_group(Rank.from_environment(), case.device):
        yield


def differences(cases: dict[int, Case]) -> dict[int, list[str]]:
    """By case, what differs between our sharder and TorchRec's on this rank. All are on one device.

    Of outputs in 16 bits TorchRec's own sharder would break the connection to ranks without tables; that of ``comm=baseline``
    is TorchRec's but for this.
    """
    found = {}
    with group_of(next(iter(cases.values()))):
        for name, case in cases.items():
            given = fused_params(case), None, None if case.order is None else list(case.order)
            ours = run(case, shard(case, FusedEmbeddingBagCollectionSharder(*given, **case.options)))
            theirs = run(case, shard(case, Sharder(*given)))
            found[name] = different(case, ours, theirs)
    return found


def different(case: Case, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The names of what has other bits, or other values where the order of sums is not the same."""
    is_16_bit = SparseType.FP16 is case.output or DataType.FP16 is case.weights
    tolerance = 0.0 if case.is_exact else 4e-3 if is_16_bit else 1e-5 if case.device_type == "cpu" else 1e-3
    return further_off(ours, theirs, tolerance)


def further_off(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 0.0) -> list[str]:
    """The names of what differs by more."""
    if list(ours) != list(theirs):
        return ["keys"]

    def is_equal(our: Any, their: Any) -> bool:
        if not isinstance(their, Tensor):
            return bool(our == their)
        return our.dtype == their.dtype and torch.allclose(our, their, rtol=tolerance, atol=tolerance)

    return [name for name in theirs if not is_equal(ours[name], theirs[name])]


MIXED = (
    Table(TABLE_WISE, 8, ("c", "a"), rank=1),
    Table(COLUMN_WISE, 8, ("b",)),
    Table(ROW_WISE, 4, ("a",)),
    Table(TABLE_WISE, 8, ("d",)),
)
SOME_REPLICATED = (
    Table(TABLE_WISE, 8, ("a",), rank=1),
    Table(REPLICATED, 4, ("b",)),
    Table(TABLE_WISE, 8, ("d",)),
    Table(COLUMN_WISE, 8, ("c", "b")),
)


# Odd cases: as many as continuous integration has time for, and all. DROP_IN_CASES is another number.
FEW, ALL = 12, 120


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("count", [int(os.environ.get("DROP_IN_CASES", FEW)), pytest.param(ALL, marks=pytest.mark.exhaustive)])
def test_odd_cases_have_the_bits_of_torchrecs_sharder(ranks: int, count: int) -> None:
    cases = {seed: odd_case(seed) for seed in range(count)}
    own = {seed: case for seed, case in cases.items() if case.ranks == ranks}
    assert len(own) >= count // 4
    for found in run_ranks(ranks, differences, own):
        assert {seed: names for seed, names in found.items() if names} == {}
        assert list(found) == list(own)


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=["one host", "two hosts"])
def test_a_tensor_dict_is_taken_as_torchrec_takes_it(hosts: tuple[int, int]) -> None:
    tables = Table(TABLE_WISE, 8, ("a",), rank=1), Table(TABLE_WISE, 8, ("b",))
    case = Case((tables,), ("a", "b"), (3, 3), (TRAIN,))
    for ours, torchrecs in run_ranks(2, on_hosts, hosts, outputs_of_tensor_dict, case):
        assert torch.equal(ours, torchrecs)


def outputs_of_tensor_dict(case: Case) -> list[Tensor]:
    """Values of the output, by our sharder and TorchRec's."""
    found = []
    with group_of(case):
        features = batch_of(case, 0).to_dict()
        batch = {key: torch.nested.nested_tensor_from_jagged(own.values(), own.offsets()) for key, own in features.items()}
        for sharder in (
            FusedEmbeddingBagCollectionSharder(fused_params(case)),
            EmbeddingBagCollectionSharder(fused_params(case)),
        ):
            collection = get_unwrapped_module(shard(case, sharder)).collections[0]
            found.append(collection(TensorDict(batch)).wait().values().detach().clone())
    return found


@pytest.mark.parametrize("mode", ["fused", "auto"])
def test_a_rank_without_tables_receives_outputs_of_16_bits(mode: str) -> None:
    """Of both modules on each path: tracked batches fall back to TorchRec's, and ``auto`` measures it."""
    of_one_rank = (Table(TABLE_WISE, 8, ("a",), rank=1), Table(COLUMN_WISE, 4, ("b",), rank=1))
    everywhere = (Table(TABLE_WISE, 8, ("a",)), Table(TABLE_WISE, 4, ("b",), rank=1))
    events = (TRAIN, TRACKED, EVALUATE, TRAIN)
    case = Case((of_one_rank, everywhere), ("a", "b"), (3, 3), events, output=SparseType.FP16, options={"mode": mode})
    assert run_ranks(2, differences, {0: case}) == [{0: []}] * 2


def test_a_rank_without_a_row_of_its_tables_is_told_before_the_first_batch() -> None:
    case = Case(((Table(ROW_WISE, 8, ("a",), rows=2),),), ("a",), (3, 3, 3))
    beside, (few,) = Table(ROW_WISE, 4, ("b",)), case.tables
    for refused in (case, replace(case, modules=((few, beside),), keys=("a", "b"))):
        with pytest.raises(RankFailed, match=r"row_wise leaves rank 2 no row of table_0_0 \(2 rows\)"):
            run_ranks(3, differences, {0: refused})
    dense, as_wide = replace(few, kernel=EmbeddingComputeKernel.DENSE.value), replace(beside, dim=8)
    allowed = {0: replace(case, modules=((dense,),)), 1: replace(case, modules=((few, as_wide),), keys=("a", "b"))}
    assert run_ranks(3, differences, allowed) == [{0: [], 1: []}] * 3


def test_tables_that_read_a_feature_twice_are_torchrecs() -> None:
    twice = (Table(TABLE_WISE, 4, ("a", "a")), Table(COLUMN_WISE, 8, ("b", "b")), Table(ROW_WISE, 4, ("a", "b", "a")))
    case = Case((twice,), ("b", "a"), (3, 3), (EVALUATE,))  # TorchRec's regrouping has wrong gradients of such keys
    assert run_ranks(2, differences, {0: case}) == [{0: []}] * 2
    with pytest.raises(RankFailed, match="in_feature_order=True, but a table reads a@table_0_0 twice"):
        run_ranks(2, differences, {0: replace(case, options={"in_feature_order": True})})


@pytest.mark.parametrize(
    ("tables", "mode"),
    [(MIXED, "fused"), (MIXED, "auto"), (SOME_REPLICATED, "auto"), ((*MIXED, Table(ROW_WISE, 8, ("c",), MEAN)), "fused")],
)
def test_in_feature_order_every_batch_has_the_columns_of_the_module_before_it_was_sharded(
    tables: tuple[Table, ...], mode: str
) -> None:
    events = (EVALUATE, TRACKED, TRAIN, TRACKED, EVALUATE)
    case = Case((tables,), ("d", "b", "a", "c"), (3, 3), events, options={"mode": mode, "in_feature_order": True})
    for ours, torchrecs, order in run_ranks(2, outputs, case):
        assert [output.keys() for output in ours] == [order] * len(events)
        for our, torchrec in zip(ours, torchrecs, strict=True):
            by_key = torchrec.to_dict()
            assert order != torchrec.keys()
            assert torch.equal(our.values(), torch.cat([by_key[key] for key in order], dim=1))


def outputs(case: Case) -> tuple[list[KeyedTensor], list[KeyedTensor], list[str]]:
    """Outputs of all events, by our sharder and TorchRec's; and the keys of the module before it is sharded."""
    found, order = [], Behind(case).collections[0]._embedding_names
    with group_of(case):
        for sharder in (FusedEmbeddingBagCollectionSharder, EmbeddingBagCollectionSharder):
            options = case.options if sharder is FusedEmbeddingBagCollectionSharder else {}
            model = shard(case, sharder(fused_params(case), **options))
            found.append([_detached(output(case, model, number)) for number in range(len(case.events))])
    return found[0], found[1], order


def output(case: Case, model: DistributedModelParallel, number: int) -> KeyedTensor:
    """The output of the first module for the batch of an event."""
    event, collection = case.events[number], get_unwrapped_module(model).collections[0]
    collection.post_lookup_tracker_fn = (lambda *_: None) if event == TRACKED else None
    model.train(event != EVALUATE)
    with torch.set_grad_enabled(event != EVALUATE):
        return cast(KeyedTensor, collection(batch_of(case, number)).wait())


def _detached(output: KeyedTensor) -> KeyedTensor:
    return KeyedTensor(output.keys(), output.length_per_key(), output.values().detach().clone())


@pytest.mark.parametrize("from_fused", [True, False])
def test_a_checkpoint_goes_on_under_the_other_sharder(from_fused: bool) -> None:
    case = Case((MIXED,), ("d", "b", "a", "c"), (3, 3), (TRAIN, TRAIN))
    assert run_ranks(2, move, case, from_fused) == [[], []]


def move(case: Case, from_fused: bool) -> list[str]:
    """Differences between a course whose second half has another sharder, and one with TorchRec's alone."""
    sharders = [FusedEmbeddingBagCollectionSharder(fused_params(case)), EmbeddingBagCollectionSharder(fused_params(case))]
    with group_of(case):
        first, second = (shard(case, sharder) for sharder in (sharders if from_fused else sharders[::-1]))
        run(case, first)
        second.load_state_dict(first.state_dict())
        second.fused_optimizer.load_state_dict(first.fused_optimizer.state_dict())
        stays = shard(case, EmbeddingBagCollectionSharder(fused_params(case)))
        run(case, stays)
        return different(case, run(case, second), run(case, stays))
