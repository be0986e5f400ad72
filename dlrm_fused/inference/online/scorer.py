"""Online scoring: the history of a user is encoded once, then candidates are scored against it::

    scorer = OnlineScorer(...)
    history = scorer.encode(interactions)  # keep it for as long as the user has no new interaction
    probabilities = scorer.score(history, candidates)

The encoder's weights are sharded over tensor-parallel ranks, the embedding tables by rows. All ranks must make the same
calls with the same inputs, and get the same results; a server may take requests at rank 0 and broadcast them.

A request computes only what depends on its candidates: m rows go through the layers, each attends to the history's kept keys
and values and to its own. Every layer has two row-parallel products, and so has the input: the ranks look up the rows that
they hold, and the sum over ranks is the product's. On GPUs a request is one CUDA graph, from the copy of its ids to the device
to that of its probabilities back; there is one for each number of candidates that is a power of two. A history is encoded by
one for its padded length. When weights were replaced or have moved, the graphs are made again. HSTU's requests and histories
are computed without graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.models.dlrm import DenseArch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.compat.torch import is_rocm, modules_of, tensors_of
from dlrm_fused.cuda_graphs import RUNS_BEFORE_CAPTURE, Captures, Generation, GraphRecorder
from dlrm_fused.errors import UsageError
from dlrm_fused.inference.online.block_attention import (
    BlockAttention,
    History,
    HstuAttention,
    Kept,
    TransformerAttention,
)
from dlrm_fused.inference.online.encodings import Encodings, padded_length, positions_of
from dlrm_fused.inference.online.sharded_tables import ShardedTables
from dlrm_fused.lasting import lasting
from dlrm_fused.models.history import HistoryEncoder, HistoryOverArch
from dlrm_fused.models.hstu import Hstu
from dlrm_fused.models.tensor_parallel import group_size
from dlrm_fused.ops.gemv_all_reduce import gemv_all_reduce
from dlrm_fused.symmetric.launches import next_power_of_2

MAX_CANDIDATES = 64


@dataclass(frozen=True)
class Candidates:
    """The candidates to score for one user: m samples, as the full model takes them. All on the CPU.

    Attributes:
        dense: [m, dense features] float32.
        sparse: the sample features, of stride m.
        tokens: the token features of the candidates, of stride m; bags may be empty, as those of the response are.
        times: int64 [m], seconds since 1970, for a model that reads times.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    tokens: KeyedJaggedTensor
    times: Tensor | None = None


class _Inputs(NamedTuple):
    """Inputs of a request: views of one block of memory, so that one copy takes them to the device."""

    cache: Tensor  # int64 [2], address and length of the history's cache
    rows: Tensor  # int64 [m, token features + sample features, ids of a bag], rows of the tables
    times: Tensor  # int64 [m]
    dense: Tensor  # float32 [m, dense features]


class OnlineScorer:
    """Scores candidates against encoded histories.

    Args:
        transformer: the encoder. All modules and the tables are on one device, in one dtype. The workspace of its product, if
            there is one, must have room for 64 rows, and for the columns of all sample features if their tables were as wide as
            the widest table.
        tables: of all token and sample features.
        token_features, sparse_features: their names, in the order in which the model was trained on them.
        ids_per_bag: the most ids of a bag.

    Raises:
        UsageError: on AMD's GPUs.
    """

    @lasting
    def __init__(
        self,
        transformer: HistoryEncoder[Any],
        dense_arch: DenseArch,
        over_arch: HistoryOverArch,
        tables: ShardedTables,
        *,
        token_features: Sequence[str],
        sparse_features: Sequence[str],
        ids_per_bag: int,
    ) -> None:
        self._transformer, self._dense_arch, self._over_arch, self._tables = transformer, dense_arch, over_arch, tables
        self._token_features, self._sparse_features = list(token_features), list(sparse_features)
        self._ids_per_bag = ids_per_bag
        self._device, self._dtype = tables.rows.device, tables.rows.dtype
        if self._device.type == "cuda" and is_rocm():
            raise UsageError(f"device={self._device}: online scoring is not known to work on AMD's GPUs; allowed here: cpu")
        self._dense_features = next(dense_arch.parameters()).shape[1]
        *_, last_bias = over_arch.parameters()
        self._labels = last_bias.numel()
        self._product = transformer.product
        self._token_columns, self._sparse_columns = map(tables.columns_of, (self._token_features, self._sparse_features))
        width = len(self._sparse_features) * tables.rows.shape[1]
        _check_parts((transformer, dense_arch, over_arch), tables, width)
        self._identity = torch.eye(width, dtype=self._dtype, device=self._device)
        self._cache_shape = (
            len(transformer.blocks),
            2,
            transformer.heads // group_size(self._product.group),
            transformer.d_model // transformer.heads,
        )
        is_hstu = isinstance(transformer, Hstu)
        self._attention: BlockAttention[Any] = HstuAttention() if is_hstu else TransformerAttention(transformer.history_length)
        self._buckets: Captures[_Bucket] = Captures(MAX_CANDIDATES.bit_length())
        self._encodings: Encodings | None = None
        workspace = self._product.workspace
        self._captures = self._device.type == "cuda" and self._attention.can_be_captured
        if self._captures and (workspace is None or not workspace.group.hosts.are_many):
            layers, both, heads, width = self._cache_shape
            shape = len(self._token_features), ids_per_bag
            cache_shape = layers, both, heads, transformer.history_length, width
            self._encodings = Encodings(shape, cache_shape, self._dtype, self._device)
        self._branch = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @torch.no_grad()
    def encode(self, interactions: KeyedJaggedTensor, times: Tensor | None = None) -> History:
        """Encode a history. Collective: the same on all ranks.

        Args:
            interactions: the token features of n past interactions, oldest first, of stride n; on the CPU.
            times: int64 [n], seconds since 1970 of each, for a model that reads times; None where n is 0.

        Raises:
            UsageError: if there are more than the model's ``history_length``, if their times are missing, or as
                :meth:`ShardedTables.local_rows` does.
        """
        model, count = self._transformer, interactions.stride()
        if count > model.history_length:
            raise UsageError(f"a history of {count} interactions; the model takes history_length={model.history_length}")
        rows = torch.from_numpy(self._tables.local_rows(interactions, self._token_features, self._ids_per_bag))
        cache = torch.empty(*self._cache_shape[:3], count, self._cache_shape[3], dtype=self._dtype, device=self._device)
        times = self._times(times, count, "interactions")
        history = History(cache, None if times is None else times.to(self._device, copy=True))
        if count == 0:
            return history
        self._begin_call()
        if self._encodings is None or not self._encodings.fill(rows, cache, self._fill, self._weights):
            self._fill(rows.to(self._device), positions_of(count).to(self._device), cache, history.times)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._raise_fault()
        return history

    def _times(self, times: Tensor | None, count: int, what: str) -> Tensor | None:
        """Return the times that the model reads; None if it reads none."""
        if not self._transformer.reads_times:
            return None
        if times is None and count == 0:
            return torch.empty(0, dtype=torch.int64)
        if times is None or list(times.shape) != [count] or times.dtype != torch.int64:
            given = "none" if times is None else f"{times.dtype} {list(times.shape)}"
            raise UsageError(f"times of {count} {what}: {given}; the model reads them: seconds since 1970, int64 [{count}]")
        return times

    def _fill(self, rows: Tensor, positions: Tensor, cache: Tensor, times: Tensor | None = None) -> None:
        """Fill the cache [layers, 2, heads / ranks, n, d_head] of rows [n, token features, ids], with positions [n]."""
        model = self._transformer
        stages = model.stages()
        x, normed = self._enter(self._look_up(rows), model.positions[positions])
        for layer, (block, next_norm) in enumerate(stages):
            projected = block.project(normed)
            cache[layer] = projected[:, :, 1:3].permute(2, 1, 0, 3)
            if layer + 1 < len(stages):  # candidates see only keys and values of the last layer
                x, normed = block.finish(self._attention.of_history(block, projected, times), x, next_norm)

    @torch.no_grad()
    def score(self, history: History, candidates: Candidates) -> Tensor:
        """Return the model's predictions for 1 to 64 candidates. Collective: the same on all ranks.

        They equal those of :class:`~dlrm_fused.models.history.HistoryDLRM` for samples of the history and one
        candidate each, up to rounding.

        Returns:
            [m] float32 probabilities, or [m, L] of several labels, on the CPU.

        Raises:
            UsageError: for another number of candidates or of dense features, without times that the model reads, or as
                :meth:`ShardedTables.local_rows` does.
            CommunicationError: if a peer is lost.
        """
        count = candidates.dense.shape[0]
        if not 1 <= count <= MAX_CANDIDATES:
            raise UsageError(f"{count} candidates; allowed: 1 to {MAX_CANDIDATES} in a call")
        for name, ids in (("sparse", candidates.sparse), ("tokens", candidates.tokens)):
            if ids.stride() != count:
                raise UsageError(f"{name} has stride {ids.stride()}, dense has {count} rows: they must be the same candidates")
        if candidates.dense.shape[1] != self._dense_features:
            raise UsageError(f"dense has {candidates.dense.shape[1]} features, the model takes {self._dense_features}")
        if (*history.cache.shape[:3], history.cache.shape[4]) != self._cache_shape or history.cache.dtype != self._dtype:
            raise UsageError(f"the history's cache is {history.cache.dtype} {list(history.cache.shape)}: another scorer's")
        if (history.times is not None) != self._transformer.reads_times:
            with_times = "has times" if history.times is not None else "has no times"
            raise UsageError(f"the history {with_times}: another scorer's")
        times = self._times(candidates.times, count, "candidates")
        tokens = self._tables.local_rows(candidates.tokens, self._token_features, self._ids_per_bag)
        sparse = self._tables.local_rows(candidates.sparse, self._sparse_features, self._ids_per_bag)
        bucket = self._bucket(count)
        inputs = bucket.inputs
        self._begin_call()
        inputs.cache.numpy()[:] = history.cache.data_ptr(), len(history)
        rows = inputs.rows.numpy()
        rows[:count, : tokens.shape[1]] = tokens
        rows[:count, tokens.shape[1] :] = sparse
        inputs.dense[:count] = candidates.dense
        if times is not None:
            inputs.times[:count] = times
        if bucket.graph is None:
            probabilities = self._probabilities(bucket.inputs_on_device(), history).cpu()
        else:
            bucket.graph.replay()
            if self._product.workspace is not None:
                self._product.workspace.watch()
            # Weights are compared while the GPU computes.
            if self._buckets.generation != self._weights():
                bucket.probabilities()
                self._buckets.clear()
                return self.score(history, candidates)
            probabilities = bucket.probabilities()
        self._raise_fault()
        return probabilities[:count].clone()

    @torch.no_grad()
    def warm_up(self, history_lengths: Sequence[int] = ()) -> None:
        """Capture now the CUDA graphs that requests would capture later; where there are none, compile kernels. Collective.

        Args:
            history_lengths: the most frequent lengths of histories, each at least 1.
        """
        history = self._empty_history(max(history_lengths, default=1))
        for count in (1 << power for power in range(MAX_CANDIDATES.bit_length())):
            bucket = self._bucket(count)
            if bucket.graph is None:
                self._begin_call()
                self._probabilities(bucket.inputs_on_device(), history)
        for length in {padded_length(length, self._transformer.history_length) for length in history_lengths}:
            if self._encodings is not None:
                self._encodings.capture(length, self._fill, self._weights)
                continue
            own = self._empty_history(length)
            ids = torch.full((length, len(self._token_features), self._ids_per_bag), len(self._tables.rows) - 1)
            self._begin_call()
            self._fill(ids.to(self._device), positions_of(length).to(self._device), own.cache, own.times)

    def _empty_history(self, count: int) -> History:
        """Return a history of so many interactions, of which nothing is known."""
        layers, both, heads, width = self._cache_shape
        times = torch.zeros(count, dtype=torch.int64, device=self._device) if self._transformer.reads_times else None
        return History(torch.zeros(layers, both, heads, count, width, dtype=self._dtype, device=self._device), times)

    def _bucket(self, count: int) -> _Bucket:
        """Return the bucket for at least ``count`` candidates."""
        size = next_power_of_2(count)
        if size not in self._buckets:
            self._buckets[size] = self._make_bucket(size)
        return self._buckets[size]

    @lasting
    def _make_bucket(self, size: int) -> _Bucket:
        features = len(self._token_features) + len(self._sparse_features)
        bucket = _Bucket((size, features, self._ids_per_bag), self._dense_features, self._labels, self._device)
        bucket.inputs.rows.fill_(len(self._tables.rows) - 1)
        workspace = self._product.workspace
        if self._captures and (workspace is None or workspace.group.calls_can_be_captured):
            if not self._buckets:
                weights = self._weights()
                weights.hold()
                self._buckets.renew(weights)
            bucket.capture(self._probabilities)
        return bucket

    def _weights(self) -> Generation:
        """Return the weights that CUDA graphs read."""
        modules = modules_of((self._transformer, self._dense_arch, self._over_arch))
        return Generation([self._tables.rows, *tensors_of(modules)])

    def _probabilities(self, inputs: _Inputs, history: History | None = None) -> Tensor:
        """Return the probabilities: [m] float32, or [m, L] of several labels.

        Args:
            inputs: on the device.
            history: the history that ``inputs.cache`` points to; not needed where kernels read that.
        """
        model, over, kept = self._transformer, self._over_arch, Kept(history, inputs.cache, inputs.times)
        pooled, tokens = self._look_up(inputs.rows), len(self._token_features)
        sparse = _select(self._sum_over_ranks(pooled[:, tokens:]), self._sparse_columns)
        with self._beside():
            interactions = over.interaction(self._dense_arch(inputs.dense.to(self._dtype)), sparse)
        x, normed = self._enter(pooled[:, :tokens], model.positions[:1].expand(len(pooled), -1))
        for layer, (block, next_norm) in enumerate(model.stages()):
            attended = self._attention.of_candidates(block, block.project(normed), kept, layer)
            x, normed = block.finish(attended, x, next_norm)
        self._join()
        logits: Tensor = over.over(torch.cat((interactions, normed), dim=1))
        return logits.squeeze(1).float().sigmoid()

    def _look_up(self, rows: Tensor) -> Tensor:
        """Map rows [m, features, ids of a bag] to this rank's part of the pooled embeddings, [m, features, D]."""
        embedded = F.embedding(rows, self._tables.rows)
        return embedded.squeeze(2) if rows.shape[2] == 1 else embedded.sum(2)

    def _enter(self, pooled: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the first block: the sum of the ranks' embeddings through the input layer, and its norm.

        Args:
            pooled: [m, token features, D], of this rank.
            positions: [m, d_model].
        """
        layer, norm = self._transformer.input, self._transformer.stages()[0][0].attention_norm
        return self._product(_select(pooled, self._token_columns), layer.weight, positions + layer.bias, norm)

    def _sum_over_ranks(self, pooled: Tensor) -> Tensor:
        """Sum [m, features, D] over the ranks."""
        group, workspace = self._product.group, self._product.workspace
        rows, features, dim = pooled.shape
        if workspace is not None:
            # A product with the identity, which is read from memory: as few features together as the rows allow.
            together = next(n for n in range(1, features + 1) if features % n == 0 and rows * features <= n * MAX_CANDIDATES)
            identity = self._identity[: together * dim, : together * dim]
            return gemv_all_reduce(workspace, pooled.reshape(-1, together * dim), identity)[0].view(pooled.shape)
        if group_size(group) > 1:
            pooled = pooled.contiguous()
            dist.all_reduce(pooled, group=group)
        return pooled

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On GPUs, run small kernels on another stream until :meth:`_join`, while the layers wait for memory and peers."""
        if self._branch is None:
            yield
            return
        self._branch.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._branch):
            yield

    def _join(self) -> None:
        if self._branch is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._branch)

    def _begin_call(self) -> None:
        if self._product.workspace is not None:
            self._product.workspace.begin_call()

    def _raise_fault(self) -> None:
        if self._product.workspace is not None:
            self._product.workspace.raise_fault()


def _select(pooled: Tensor, columns: Tensor) -> Tensor:
    """Select these columns of all features side by side: [m, features, D] to [m, columns]."""
    side_by_side = pooled.flatten(1)
    return side_by_side if len(columns) == side_by_side.shape[1] else side_by_side.index_select(1, columns)


def _check_parts(modules: Sequence[nn.Module], tables: ShardedTables, sparse_width: int) -> None:
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        if parameter.dtype != tables.rows.dtype or parameter.device != tables.rows.device:
            raise UsageError(
                f"weights are {parameter.dtype} on {parameter.device}, the tables {tables.rows.dtype} on {tables.rows.device}: "
                "they must be equal"
            )
    transformer = cast(HistoryEncoder[Any], modules[0])
    workspace = transformer.product.workspace
    if workspace is None:
        return
    needed = {"max_rows": MAX_CANDIDATES, "max_columns": max(transformer.d_model, sparse_width)}
    for name, value in needed.items():
        if getattr(workspace, name) < value:
            raise UsageError(f"workspace {workspace.name}: {name}={getattr(workspace, name)}; online scoring needs {value}")


class _Bucket:
    """Holds the inputs' memory of requests of up to m candidates, and on GPUs their CUDA graph.

    Args:
        shape: m, features, and ids of a bag.

    Attributes:
        inputs: on the CPU, to be filled before each request.
    """

    def __init__(self, shape: tuple[int, int, int], dense_features: int, labels: int, device: torch.device) -> None:
        self._shape, self._dense_features, self._labels, self._device = shape, dense_features, labels, device
        is_cuda = device.type == "cuda"
        size = 16 + 8 * math.prod(shape) + 8 * shape[0] + 4 * shape[0] * dense_features
        self._block = torch.zeros(size, dtype=torch.uint8, pin_memory=is_cuda)
        self.inputs = self._views(self._block)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _views(self, block: Tensor) -> _Inputs:
        rows, dense = self._shape[0], (self._shape[0], self._dense_features)
        *numbers, of_dense = block.split([16, 8 * math.prod(self._shape), 8 * rows, 4 * math.prod(dense)])
        cache, ids, times = (part.view(torch.int64) for part in numbers)
        return _Inputs(cache, ids.view(self._shape), times, of_dense.view(torch.float32).view(dense))

    def inputs_on_device(self) -> _Inputs:
        """Return the inputs of a request that is computed without a graph."""
        return self._views(self._block.to(self._device))

    def capture(self, compute: Callable[[_Inputs], Tensor]) -> None:
        """Capture the graph of a request: inputs to the device, ``compute``, probabilities back. Collective."""
        on_device = torch.empty_like(self._block, device=self._device)
        self._probabilities = torch.empty(self._shape[0], self._labels, pin_memory=True).squeeze(1)

        def request() -> None:
            on_device.copy_(self._block, non_blocking=True)
            self._probabilities.copy_(compute(self._views(on_device)), non_blocking=True)

        recorder = GraphRecorder(self._device)
        with recorder.on_its_stream():
            for _ in range(RUNS_BEFORE_CAPTURE):  # compiles kernels, connects ranks, takes workspaces
                request()
            with recorder.record() as graph:
                request()
        self._on_device, self.graph = on_device, graph

    def probabilities(self) -> Tensor:
        """Wait for the request that was launched; return its probabilities, which the next one overwrites."""
        torch.cuda.current_stream(self._device).synchronize()
        return self._probabilities
