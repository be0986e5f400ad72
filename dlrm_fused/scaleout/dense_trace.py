"""The part of a step that follows the embeddings: its kernels and exchanges, traced from the trainer's own model.

PyTorch's tracer runs the model as one of so many ranks, on tensors without memory, and notes each operation. A matrix product
is a kernel, and so is an attention. Of the other operations, a compiled model makes one kernel of each chain between products;
in eager mode each of them is one. Collectives are those of ``comm=baseline``, and experts have evenly spread tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.compat.torch import ATTENTION_OF_GPUS, tensors_without_memory, traced_group
from dlrm_fused.config import EmbeddingConfig
from dlrm_fused.datasets.batch import Batch
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature, labels_shape
from dlrm_fused.models import RankingTask
from dlrm_fused.models.embedding_tables import pooled_columns
from dlrm_fused.models.expert_parallel import ExpertComputation
from dlrm_fused.models.history import HistoryDLRM
from dlrm_fused.models.moe import MixtureOfExperts
from dlrm_fused.models.tensor_parallel import group_size
from dlrm_fused.ops.common.all_to_all import all_to_all
from dlrm_fused.ops.moe.activations import Activation

# Operations that give a tensor another shape, or take memory for one, and move nothing.
_MOVE_NOTHING = {
    *("t", "transpose", "permute", "view", "_unsafe_view", "expand", "unbind", "split", "getitem"),
    *("squeeze", "unsqueeze", "slice", "select", "alias", "detach", "empty", "new_empty"),
}
# Operations that put rows elsewhere, and those that no compiler joins to others.
_COPIES = {"index_select", "index_add", "new_zeros"}
_ALONE = {"index_select", "index_add", "sort", "topk"}
_COLLECTIVES = {"alltoall_base_": "all_to_all", "allreduce_": "all_reduce", "_allgather_base_": "all_gather"}


@dataclass(frozen=True)
class Kernel:
    """Work of a GPU between two launches.

    Args:
        flops: Of a matrix product or an attention; 0 for everything else.
        bytes: Read from memory and written to it.
        is_copy: Whether it only puts rows elsewhere.
    """

    name: str
    flops: float
    bytes: float
    is_copy: bool = False


@dataclass(frozen=True)
class Exchange:
    """A collective that the next kernel waits for.

    Args:
        collective: A key of :data:`~dlrm_fused.scaleout.collectives.COLLECTIVES`.
        bytes: What a rank holds, as there.
        ranks: Of one of the groups of consecutive ranks that exchange.
        has_numbers: Whether it is of integers: how many rows come, not the rows.
    """

    collective: str
    bytes: float
    ranks: int
    has_numbers: bool = False


@dataclass(frozen=True)
class Gradient:
    """The gradient of a dense parameter.

    Args:
        after: The index of the backward pass's last piece of work before it is there.
        is_sharded: Whether the ranks of a group hold pieces of the parameter.
    """

    after: int
    bytes: float
    is_sharded: bool


@dataclass(frozen=True)
class DenseWork:
    """The work of both passes, in the order of the operations."""

    forward: Sequence[Kernel | Exchange]
    backward: Sequence[Kernel | Exchange]
    gradients: Sequence[Gradient] = ()

    @property
    def kernels(self) -> list[Kernel]:
        return [work for work in (*self.forward, *self.backward) if isinstance(work, Kernel)]


def trace(
    task: RankingTask,
    schema: DatasetSchema,
    embedding: EmbeddingConfig,
    samples: int,
    pooled: torch.dtype,
    *,
    compiled: bool,
    captured: bool = False,
) -> DenseWork:
    """Return the kernels, exchanges and gradients of one rank's dense part.

    Args:
        task: built for the CPU, not compiled; with ``comm=baseline``, on the ranks of
            :func:`~dlrm_fused.compat.torch.ranks_without_peers`.
        pooled: dtype of what the embedding stage returns.
        captured: the task is captured without being compiled.
    """
    for layer in task.expert_layers:
        spread_evenly(layer)
    if isinstance(task.model, HistoryDLRM):
        task.model.transformer.ask_ranks = lambda rows, group: [rows] * group_size(group)
    parameters = [parameter for layer in task.dense_layers() for parameter in layer.parameters()]
    module = _graph(task, schema, embedding, samples, pooled, parameters)
    nodes = [node for node in module.graph.nodes if node.op == "call_function" and _name(node) not in _MOVE_NOTHING]
    output = next(node for node in module.graph.nodes if node.op == "output")
    loss, *of_tensors = output.args[0]
    gradients = dict(zip(parameters, of_tensors[-len(parameters) :], strict=True))
    ends_forward = nodes.index(_source(loss)) + 1

    forward, backward = _Work(module, compiled=compiled), _Work(module, compiled=compiled)
    forward.add(nodes[:ends_forward])
    backward.add(nodes[ends_forward:])
    last = len(backward.work) - 1
    return DenseWork(
        forward.work,
        backward.work,
        sorted(
            (
                # A compiled or captured function gives all of its gradients at once.
                Gradient(
                    last if compiled or captured else backward.end_of(_source(node)),
                    float(parameter.numel() * parameter.element_size()),
                    getattr(parameter, "shard_dim", None) is not None,
                )
                for parameter, node in gradients.items()
                if node is not None
            ),
            key=lambda gradient: gradient.after,
        ),
    )


def spread_evenly(layer: MixtureOfExperts) -> None:
    """Have the layer compute as if each expert had as many tokens."""
    own = layer.computation
    layer.computation = EvenExperts(own.group, activation=own.activation)


class EvenExperts(ExpertComputation):
    """The steps of :func:`dlrm_fused.ops.moe.reference`, whose sizes depend on what the router says; here they do not.

    The products of all experts of a rank are one kernel, as they are on GPUs. For shapes and dtypes only: values are not those
    of experts.
    """

    def with_slots(
        self, x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Returns None for the slots of the group, as the unfused computation does."""
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        x, w_in, w_out = x.to(dtype), w_in.to(dtype), w_out.to(dtype)
        (tokens, top_k), local = experts.shape, len(w_in)
        count = local * group_size(self.group)
        slots = -(-tokens * top_k // count) * count

        all_to_all(experts.new_zeros(count), self.group)
        experts.flatten().argsort()
        to_slots, to_tokens = experts.new_empty(slots), experts.new_empty(tokens * top_k)
        rows = all_to_all(x.index_select(0, to_slots), self.group).index_select(0, to_slots)
        hidden = torch.bmm(rows.view(local, -1, x.shape[1]), w_in.transpose(1, 2))
        hidden = Activation.named(self.activation, "EvenExperts").of(hidden)
        rows = torch.bmm(hidden, w_out.transpose(1, 2)).flatten(0, 1)
        rows = all_to_all(rows.index_select(0, to_slots), self.group).index_select(0, to_tokens)
        return torch.bmm(gates[:, None], rows.view(tokens, top_k, -1).float())[:, 0].to(dtype), None


class _Pooled(nn.Module):
    """Stands in for the embedding stage: returns the embeddings that it is given."""

    def __init__(self, *embeddings: Tensor) -> None:
        super().__init__()
        self._embeddings = embeddings

    def forward(self, *_: object) -> Any:
        return self._embeddings if len(self._embeddings) > 1 else self._embeddings[0]


@contextmanager
def _embeddings_given(task: RankingTask, *embeddings: Tensor) -> Iterator[None]:
    stage = task.embedding_stage
    task.model.sparse_arch = _Pooled(*embeddings)
    try:
        yield
    finally:
        task.model.sparse_arch = stage


def _graph(
    task: RankingTask,
    schema: DatasetSchema,
    embedding: EmbeddingConfig,
    samples: int,
    pooled_dtype: torch.dtype,
    parameters: Sequence[nn.Parameter],
) -> fx.GraphModule:
    ids = KeyedJaggedTensor.empty()

    def step(dense: Tensor, labels: Tensor, weights: Tensor, lengths: Tensor, *embeddings: Tensor) -> list[Tensor | None]:
        count = samples * (schema.history_length + 1)  # the longest histories, as flops.py has them
        batch = Batch(dense, ids, labels, weights, samples, ids, lengths, sample_weights=weights, token_count=count)
        with _embeddings_given(task, *embeddings), _NormsInOneKernel():
            loss, _ = task(batch)
        return [loss, *torch.autograd.grad(loss, [*embeddings, *parameters], allow_unused=True)]

    def pooled(bags: int, features: Sequence[SparseFeature]) -> Tensor:
        return torch.empty(bags, pooled_columns(embedding, features), dtype=pooled_dtype, requires_grad=True)

    with tensors_without_memory():
        dense = torch.empty(samples, len(schema.dense_features))
        embeddings = [pooled(samples, schema.sparse_features)]
        if schema.token_features:
            embeddings.append(pooled(samples * (schema.history_length + 1), schema.token_features))
        lengths = torch.empty(samples, dtype=torch.int32)
        labels = torch.empty(samples, *labels_shape(schema.labels))
        return make_fx(step)(dense, labels, torch.empty(samples), lengths, *embeddings)


class _NormsInOneKernel(TorchFunctionMode):
    """An RMS norm is a kernel on GPUs and many operations here; a layer norm is one everywhere, and moves as many bytes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.rms_norm:
            x, shape = args
            return nn.functional.layer_norm(x, shape, kwargs["weight"])
        return func(*args, **(kwargs or {}))


def _name(node: fx.Node) -> str:
    target = node.target
    return target.__name__ if isinstance(target, type(math.exp)) else str(target).split(".")[1]


def _source(node: fx.Node) -> fx.Node:
    """Return the node that computed what this one is a view of, or has exchanged."""
    while node.op == "call_function" and (_name(node) in _MOVE_NOTHING or _name(node) in _COLLECTIVES):
        if not node.all_input_nodes or _name(node).endswith("empty"):
            break
        node = node.all_input_nodes[0]
    return node


class _Work:
    """Operations of a graph as kernels and exchanges."""

    def __init__(self, module: fx.GraphModule, *, compiled: bool) -> None:
        self.work: list[Kernel | Exchange] = []
        self._module, self._compiled = module, compiled
        self._chain: list[fx.Node] = []
        self._ends: dict[fx.Node, int] = {}

    def add(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            flops = _flops(node)
            if _name(node) in _COLLECTIVES:
                self._end_chain()
                self._append(self._exchange(node), node)
            elif flops or not self._compiled or _name(node) in _ALONE:
                self._end_chain()
                moved = _size(node) + sum(map(_size, _inputs(node)))
                self._append(Kernel(_name(node), flops, moved, _name(node) in _COPIES), node)
            else:
                self._chain.append(node)
        self._end_chain()

    def end_of(self, node: fx.Node) -> int:
        """Return the index of the work after which the node's result is there; 0 for what no kernel here computes."""
        return self._ends.get(node, 0)

    def _append(self, work: Kernel | Exchange, *nodes: fx.Node) -> None:
        for node in nodes:
            self._ends[node] = len(self.work)
        self.work.append(work)

    def _end_chain(self) -> None:
        if self._chain:
            self._append(_kernel_of_chain(self._chain), *self._chain)
            self._chain = []

    def _exchange(self, node: fx.Node) -> Exchange:
        held = node.args[0]
        tensor = held[0] if isinstance(held, (list, tuple)) else held
        assert isinstance(tensor, fx.Node)
        handles = [getattr(self._module, str(given.target)) for given in node.all_input_nodes if given.op == "get_attr"]
        return Exchange(
            _COLLECTIVES[_name(node)],
            _size(tensor),
            traced_group(handles[0]).size(),
            not tensor.meta["val"].is_floating_point(),
        )


def _kernel_of_chain(nodes: Sequence[fx.Node]) -> Kernel:
    """Return one kernel, which reads what others computed and writes what others use."""
    own = set(nodes)
    read = {source for node in nodes for source in _inputs(node) if source not in own}
    written = [node for node in nodes if any(user not in own for user in _users(node))]
    names = dict.fromkeys(map(_name, nodes))
    return Kernel("+".join(names), 0, sum(map(_size, read)) + sum(map(_size, written)), names.keys() <= _COPIES)


def _inputs(node: fx.Node) -> list[fx.Node]:
    return [_source(given) for given in node.all_input_nodes]


def _users(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.op == "call_function" and _name(user) in _MOVE_NOTHING:
            yield from _users(user)
        else:
            yield user


def _flops(node: fx.Node) -> float:
    attention = ATTENTION_OF_GPUS.get(_name(node))
    count = flop_registry.get(attention or getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    values = [given.meta["val"] if isinstance(given, fx.Node) else given for given in node.args]
    if attention is None:
        return float(count(*values, out_val=node.meta["val"]))
    is_backward, is_causal = _name(node).endswith("backward"), True in node.args
    flops = count(*values[: 4 if is_backward else 3], out_val=node.meta["val"][0])
    return float(flops) / (2 if is_causal else 1)


def _size(node: fx.Node) -> float:
    """Return bytes of a tensor, or of several; 0 for what is none."""
    value = node.meta.get("val")
    tensors = [value] if isinstance(value, Tensor) else [part for part in value or () if isinstance(part, Tensor)]
    return float(sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors))
