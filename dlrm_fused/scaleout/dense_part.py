"""The kernels of a model's dense part, forward and backward, traced from the model that the trainer would build.

PyTorch's tracer runs the model on tensors without memory and notes each operation. A matrix product is a kernel. Of the other
operations, a compiled model makes one kernel of each chain between products; in eager mode each of them is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry

from dlrm_fused.compat.torch import tensors_without_memory
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import ConfigError
from dlrm_fused.models import RankingTask

# Operations that give a tensor another shape and move nothing.
_VIEWS = {
    *("t", "transpose", "permute", "view", "_unsafe_view", "expand"),
    *("squeeze", "unsqueeze", "slice", "select", "alias", "detach"),
}


@dataclass(frozen=True)
class Kernel:
    """Work of a GPU between two launches.

    Args:
        flops: Of a matrix product; 0 for everything else.
        bytes: Read from memory and written to it.
    """

    name: str
    flops: float
    bytes: float


@dataclass(frozen=True)
class DenseKernels:
    """Attributes: forward, backward: Kernels in their order."""

    forward: Sequence[Kernel]
    backward: Sequence[Kernel]


def trace(
    task: RankingTask, schema: DatasetSchema, dim: int, samples: int, pooled: torch.dtype, *, compiled: bool
) -> DenseKernels:
    """The kernels of one rank's step.

    Args:
        task: built for the CPU, not compiled.
        dim: columns of an embedding.
        samples: of one rank.
        pooled: dtype of what the embedding stage returns.

    Raises:
        ConfigError: a model that is not called in two parts.
    """
    part = task.dense_part
    if part is None:
        raise ConfigError("model.kind: the scale-out model covers those whose dense part follows the embeddings: dlrm, dcnv2")
    graph = _graph(part, task, schema, dim, samples, pooled)
    nodes = [node for node in graph.nodes if node.op == "call_function" and _name(node) not in _VIEWS]
    output = next(node for node in graph.nodes if node.op == "output")
    loss = nodes.index(_source(output.args[0][0]))
    return DenseKernels(
        list(_kernels(nodes[: loss + 1], compiled=compiled)), list(_kernels(nodes[loss + 1 :], compiled=compiled))
    )


def _graph(
    part: torch.nn.Module, task: RankingTask, schema: DatasetSchema, dim: int, samples: int, pooled_dtype: torch.dtype
) -> fx.Graph:
    parameters = [parameter for layer in task.dense_layers() for parameter in layer.parameters()]

    def step(dense: Tensor, pooled: Tensor, labels: Tensor, weights: Tensor) -> list[Tensor]:
        losses, _ = part(dense, pooled, labels, weights)
        return [losses, *torch.autograd.grad(losses, [pooled, *parameters])]

    with tensors_without_memory():
        dense = torch.empty(samples, len(schema.dense_features))
        pooled = torch.empty(samples, len(schema.tables), dim, dtype=pooled_dtype, requires_grad=True)
        traced = make_fx(step)(dense, pooled, torch.empty(samples), torch.empty(samples))
    graph: fx.Graph = traced.graph
    return graph


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").split(".")[0]


def _source(node: fx.Node) -> fx.Node:
    """The node that computed what this one is a view of."""
    while node.op == "call_function" and _name(node) in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def _kernels(nodes: Sequence[fx.Node], *, compiled: bool) -> Iterator[Kernel]:
    chain: list[fx.Node] = []
    for node in nodes:
        flops = _flops(node)
        if flops or not compiled:
            yield from _chain(chain)
            chain = []
            yield Kernel(_name(node), flops, _size(node) + sum(map(_size, _inputs(node))))
        else:
            chain.append(node)
    yield from _chain(chain)


def _chain(nodes: Sequence[fx.Node]) -> Iterator[Kernel]:
    """One kernel, which reads what others computed and writes what others use."""
    if not nodes:
        return
    own = set(nodes)
    read = {source for node in nodes for source in _inputs(node) if source not in own}
    written = [node for node in nodes if any(user not in own for user in _users(node))]
    yield Kernel("+".join(dict.fromkeys(map(_name, nodes))), 0, sum(map(_size, read)) + sum(map(_size, written)))


def _inputs(node: fx.Node) -> list[fx.Node]:
    return [_source(given) for given in node.all_input_nodes]


def _users(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.op == "call_function" and _name(user) in _VIEWS:
            yield from _users(user)
        else:
            yield user


def _flops(node: fx.Node) -> float:
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    values = [given.meta["val"] if isinstance(given, fx.Node) else given for given in node.args]
    return float(count(*values, out_val=node.meta["val"]))


def _size(node: fx.Node) -> float:
    """Bytes; 0 for what is no tensor."""
    value = node.meta.get("val")
    return float(math.prod(value.shape) * value.element_size()) if isinstance(value, Tensor) else 0.0
