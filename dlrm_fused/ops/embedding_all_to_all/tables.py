"""Embedding tables of one rank, and the optimizer that updates them, as the operators see them.

One :class:`LocalTables` describes the tables that one lookup reads. They lie behind each other in one flat tensor, which is how
FBGEMM's table-batched embedding keeps them: the operators read and update its memory in place.

The inputs of a lookup over F features and a batch of B samples:

* ``indices``: int32 or int64 [N], the rows that are looked up;
* ``offsets``: the same type, [F * B + 1]: bag b of feature f is ``indices[offsets[f * B + b] : offsets[f * B + b + 1]]``, so
  ``offsets[F * B]`` is N; a bag may be empty;
* ``per_sample_weights``: fp32 [N], or None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.lasting import lasting
from dlrm_fused.ops.common.dtypes import DTYPES


@dataclass(frozen=True, eq=False)
class RowwiseAdagrad:
    """Adagrad with one momentum a row (EXACT_ROWWISE_ADAGRAD of FBGEMM, without weight decay).

    With g the summed gradient of a row: ``momentum += mean(g ** 2)``, then ``weight -= lr / (sqrt(momentum) + eps) * g``.
    """

    momentum: Tensor  # fp32, flat: one value for each row of each table, in table order
    learning_rate: Tensor  # fp32, no dimension; on the CPU (read at every update), or beside the weights (read by the kernels)
    eps: float


@dataclass(frozen=True, eq=False)
class Adagrad:
    """Adagrad with one momentum an element (EXACT_ADAGRAD of FBGEMM).

    With g the summed gradient of a row: ``momentum += g ** 2``, then ``weight -= lr * g / (sqrt(momentum) + eps)``.
    """

    momentum: Tensor  # fp32, flat: one value for each element of the weights, at its place there
    learning_rate: Tensor  # as in RowwiseAdagrad
    eps: float


@dataclass(frozen=True, eq=False)
class Sgd:
    """Plain gradient descent (EXACT_SGD of FBGEMM): ``weight -= lr * g``, with g the summed gradient of a row."""

    learning_rate: Tensor  # as in RowwiseAdagrad


@dataclass(frozen=True, eq=False)
class Adam:
    """Adam of the rows that were looked up, with decoupled weight decay (ADAM of FBGEMM).

    With g the summed gradient of a row, and t the number of this update, from 1 on and the same for all rows:
    ``m = beta1 * m + (1 - beta1) * g``, ``v = beta2 * v + (1 - beta2) * g ** 2``, then
    ``weight -= lr * (m / (1 - beta1 ** t) / (sqrt(v / (1 - beta2 ** t)) + eps) + weight_decay * weight)``.

    Source: D. P. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015 (arXiv 1412.6980); I. Loshchilov,
    F. Hutter, "Decoupled Weight Decay Regularization", ICLR 2019 (arXiv 1711.05101).
    """

    momentum1: Tensor  # m; fp32, flat: one value for each element of the weights, at its place there
    momentum2: Tensor  # v; the same
    steps: Tensor  # int64 [1] beside the weights: updates that were made, counted by them
    learning_rate: Tensor  # as in RowwiseAdagrad
    eps: float
    beta1: float
    beta2: float
    weight_decay: float


@dataclass(frozen=True, eq=False)
class RowwiseAdam(Adam):
    """Adam with one second moment a row (PARTIAL_ROWWISE_ADAM of FBGEMM): ``v = beta2 * v + (1 - beta2) * mean(g ** 2)``.

    ``momentum2`` is fp32, flat: one value for each row of each table, in table order.
    """


Optimizer = RowwiseAdagrad | Adagrad | Sgd | Adam


class RateOnDevice:
    """A learning rate beside the weights, for kernels; the address stays the same.

    Attributes:
        value: [1] fp32 as of the last :meth:`refresh`.
    """

    def __init__(self, rate: Tensor, device: torch.device) -> None:
        self._rate = rate
        self._is_there = rate.device == device
        self._last = math.nan
        self.value = rate if self._is_there else rate.reshape(1).to(device)

    def refresh(self) -> None:
        """Bring the value from the CPU if it has changed. Not while a CUDA graph is captured: its replays read the value that
        the last refresh has left."""
        if self._is_there or torch.cuda.is_current_stream_capturing():
            return
        rate = self._rate.item()
        if rate != self._last:
            self.value.fill_(rate)
            self._last = rate


class BiasCorrection:
    """The divisors of Adam's moments, computed anew at each step.

    Attributes:
        betas: of the optimizer, as numbers of fp32: what kernels of GPUs would make of them.
        divisors: fp32 [2] beside the weights: 1 - beta ** steps for both betas.
    """

    def __init__(self, adam: Adam) -> None:
        self.betas = torch.tensor([adam.beta1, adam.beta2], dtype=torch.float32, device="cpu").tolist()
        self.divisors = torch.empty(2, dtype=torch.float32, device=adam.steps.device)


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """The facts about tables that the kernels of the update need; tensors are on the device of the weights."""

    tables: (
        Tensor  # int64 [T, 3]: weights of row k, counted over all tables, begin at k * dim + this; dim; column, if one feature
    )
    bounds: Tensor  # int64 [T + 1]: first row of each table, and the number of all rows
    # int64 [T + 1], if features stand in the order of tables: first feature that reads each table.
    first_features: Tensor | None
    feature_tables: Tensor  # int32 [F]
    feature_first_rows: Tensor  # int64 [F]: first row of the feature's table
    columns: Tensor  # int64 [F]
    is_shared: bool  # some features read the same table
    blocks: dict[int, int]  # powers of two that hold the dims of tables: the dim, if it is one, else 0
    rate: RateOnDevice | None  # None: these tables are never updated
    bias_correction: BiasCorrection | None  # of Adam


@dataclass(frozen=True, eq=False)
class LocalTables:
    """Tables that one lookup reads. What does not fit together is a :class:`UsageError`."""

    weights: Tensor  # fp32, fp16 or bf16, flat: the rows of the tables, one table behind the other
    offsets: tuple[int, ...]  # where each table begins in `weights`, in elements
    rows: tuple[int, ...]  # of each table
    dims: tuple[int, ...]  # of each table: elements of a row
    feature_tables: tuple[int, ...]  # the table that each feature reads
    mean: bool  # bags are averaged, else summed
    optimizer: Optimizer | None  # None: these tables are never updated
    stochastic_rounding: bool  # of updated fp16 and bf16 weights; else to nearest

    def __post_init__(self) -> None:
        _check_tables(self)

    @property
    def rounds_stochastically(self) -> bool:
        """Whether updates draw random numbers."""
        return self.stochastic_rounding and self.weights.dtype != torch.float32

    @property
    def total_rows(self) -> int:
        """Rows of all tables together."""
        return sum(self.rows)

    @cached_property
    def first_rows(self) -> tuple[int, ...]:
        """Number of each table's first row, when the rows of all tables are counted on in table order."""
        return tuple(accumulate(self.rows[:-1], initial=0)) if self.rows else ()

    @cached_property
    def feature_dims(self) -> tuple[int, ...]:
        """Width of each feature's pooled embedding."""
        return tuple(self.dims[table] for table in self.feature_tables)

    @cached_property
    def feature_columns(self) -> tuple[int, ...]:
        """First column of each feature in the pooled embeddings, [B, sum of feature_dims]."""
        return tuple(accumulate(self.feature_dims[:-1], initial=0)) if self.feature_tables else ()

    @cached_property
    def on_device(self) -> DeviceTables:
        """The facts for kernels; made at the first use, since a copy to the device waits for it."""
        return _copy_to_device(self)

    def batch_size(self, offsets: Tensor) -> int:
        """B, from the shape of the offsets; UsageError where they do not fit the features."""
        features = len(self.feature_tables)
        batch, rest = divmod(offsets.numel() - 1, features) if features else (0, offsets.numel() - 1)
        if rest or batch < 0:
            raise UsageError(f"offsets has {offsets.numel()} elements: give F * B + 1 of them, with F = {features} features")
        return batch


def _check_tables(tables: LocalTables) -> None:
    weights, count = tables.weights, len(tables.rows)
    if weights.dtype not in DTYPES:
        raise UsageError(f"weights are {weights.dtype}: tables of {', '.join(map(str, DTYPES))} are supported")
    if weights.dim() != 1 or not weights.is_contiguous():
        raise UsageError(
            f"weights have shape {list(weights.shape)}, strides {weights.stride()}: give one flat, contiguous tensor"
        )
    if len(tables.offsets) != count or len(tables.dims) != count:
        raise UsageError(
            f"{count} rows, {len(tables.dims)} dims, {len(tables.offsets)} offsets: give one of each for every table"
        )
    for table, (offset, rows, dim) in enumerate(zip(tables.offsets, tables.rows, tables.dims, strict=True)):
        if dim <= 0 or dim % 4:
            raise UsageError(f"table {table} has dim {dim}: it must be a positive multiple of 4")
        if rows < 0 or offset < 0 or offset % 4 or offset + rows * dim > weights.numel():
            raise UsageError(
                f"table {table} of {rows} rows x {dim} at offset {offset} does not lie, aligned to 4 elements, "
                f"in weights of {weights.numel()} elements"
            )
    for feature, table in enumerate(tables.feature_tables):
        if not 0 <= table < count:
            raise UsageError(f"feature {feature} reads table {table}: there are {count} tables")
    if tables.optimizer is not None:
        _check_optimizer(tables, tables.optimizer)


def _check_optimizer(tables: LocalTables, optimizer: Optimizer) -> None:
    weights, rate = tables.weights, optimizer.learning_rate
    if rate.dtype != torch.float32 or rate.numel() != 1 or rate.device not in (torch.device("cpu"), weights.device):
        raise UsageError(
            f"learning_rate is {rate.dtype} {list(rate.shape)} on {rate.device}: "
            f"give one fp32 value, on the CPU or on {weights.device}"
        )
    elements, rows, fp32 = weights.numel(), tables.total_rows, torch.float32
    match optimizer:
        case RowwiseAdagrad():
            _check_state(weights, "momentum", optimizer.momentum, fp32, rows)
        case Adagrad():
            _check_state(weights, "momentum", optimizer.momentum, fp32, elements)
        case Adam():
            _check_state(weights, "momentum1", optimizer.momentum1, fp32, elements)
            is_rowwise = isinstance(optimizer, RowwiseAdam)
            _check_state(weights, "momentum2", optimizer.momentum2, fp32, rows if is_rowwise else elements)
            _check_state(weights, "steps", optimizer.steps, torch.int64, 1)


def _check_state(weights: Tensor, name: str, state: Tensor, dtype: torch.dtype, count: int) -> None:
    if state.dtype != dtype or state.shape != (count,) or not state.is_contiguous():
        wanted = "fp32" if dtype == torch.float32 else "int64"
        raise UsageError(f"{name} is {state.dtype} {list(state.shape)}: give contiguous {wanted} [{count}]")
    if state.device != weights.device:
        raise UsageError(f"{name} is on {state.device}: the weights are on {weights.device}")


@lasting
def _copy_to_device(tables: LocalTables) -> DeviceTables:
    def tensor(values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(tables.weights.device)

    feature_tables, count = tables.feature_tables, len(tables.rows)
    columns = dict(zip(feature_tables, tables.feature_columns, strict=True))
    places = tables.offsets, tables.first_rows, tables.dims
    is_ordered = list(feature_tables) == sorted(feature_tables)
    blocks: dict[int, set[int]] = {}
    for dim in tables.dims:
        blocks.setdefault(1 << (dim - 1).bit_length(), set()).add(dim)
    return DeviceTables(
        tables=tensor(
            [(offset - first * dim, dim, columns.get(i, 0)) for i, (offset, first, dim) in enumerate(zip(*places, strict=True))]
        ),
        bounds=tensor([*tables.first_rows, tables.total_rows]),
        first_features=tensor([sum(own < table for own in feature_tables) for table in range(count + 1)])
        if is_ordered
        else None,
        feature_tables=tensor(list(feature_tables), torch.int32),
        feature_first_rows=tensor([tables.first_rows[table] for table in feature_tables]),
        columns=tensor(list(tables.feature_columns)),
        is_shared=len(set(feature_tables)) < len(feature_tables),
        blocks={block: dims.copy().pop() if len(dims) == 1 else 0 for block, dims in blocks.items()},
        rate=RateOnDevice(tables.optimizer.learning_rate, tables.weights.device) if tables.optimizer is not None else None,
        bias_correction=BiasCorrection(tables.optimizer) if isinstance(tables.optimizer, Adam) else None,
    )
