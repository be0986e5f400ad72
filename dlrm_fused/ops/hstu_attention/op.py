"""The attention of HSTU with its gradients: where kernels run an operator of PyTorch, ``torch.ops.dlrm_fused.hstu_attention``,
elsewhere plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.dispatch import Operator, without_autocast
from dlrm_fused.ops.common.dtypes import DTYPES
from dlrm_fused.ops.hstu_attention.backward import keys_and_values_gradients, queries_and_biases_gradients
from dlrm_fused.ops.hstu_attention.kernel import Call, forward
from dlrm_fused.ops.hstu_attention.reference import BUCKETS, JaggedQueries, RelativeBias, reference
from dlrm_fused.symmetric.device import uses_kernels


def hstu_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: JaggedQueries,
    *,
    scale: float,
    divisor: float,
    bias: RelativeBias | None = None,
) -> Tensor:
    """HSTU's attention ``silu(scale * Q K^T + bias) V / divisor`` of jagged samples, causal. Local; differentiable once.

    A query sees the places of its sample up to its own. Nothing is normalized over them.
    Source: Zhai et al., arXiv 2402.17152, equation 2; the formula is in
    :mod:`~dlrm_fused.ops.hstu_attention.reference`.

    Args:
        queries: [m, heads, d], float32, bfloat16 or float16.
        keys: [n, heads, d], of the same dtype, as are ``values``: [n, heads, d_v]. All three may be views of one tensor.
        batch: which rows are of which sample, and which of them are candidates.
        scale: of products of queries and keys; alpha of the paper, d^-0.5 as a rule.
        divisor: n of the paper, above 0; a constant, so that what a query gets does not depend on what follows.
        bias: relative biases of scores, which may be of other dtypes than queries, or None.

    Returns:
        [m, heads, d_v] in the dtype of values. Products of 16 bits are added in float32, and shares of values are rounded to
        16 bits before they are multiplied. In each run the bits are the same, of gradients too.

    Raises:
        UsageError: for other shapes, dtypes or devices. Numbers in ``batch`` are on the device, and are not checked.
    """
    bias = bias or RelativeBias()
    _check_rows(queries, keys, values)
    _check_batch(queries, batch)
    _check_bias(queries, keys, bias, batch.longest)
    if not divisor > 0:
        raise UsageError(f"hstu_attention: divisor={divisor}; it must be above 0, for example the longest sample's keys")
    # A compiler cannot see whether Triton interprets kernels.
    is_compiled_for_cpu = queries.device.type == "cpu" and torch.compiler.is_compiling()
    if is_compiled_for_cpu or not uses_kernels(queries.device):
        return _reference(queries, keys, values, batch, scale, divisor, bias)
    bounds = batch.key_bounds, batch.query_bounds, batch.first_places, batch.targets_from
    return _operator(queries, keys, values, *bias, *bounds, batch.longest, batch.most, float(scale), float(divisor))


@without_autocast
def _reference(
    queries: Tensor, keys: Tensor, values: Tensor, batch: JaggedQueries, scale: float, divisor: float, bias: RelativeBias
) -> Tensor:
    return reference(queries, keys, values, batch, scale=scale, divisor=divisor, bias=bias)


_ARGUMENTS = (
    "Tensor queries, Tensor keys, Tensor values, Tensor? by_distance, Tensor? by_time, Tensor? times, Tensor key_bounds, "
    "Tensor query_bounds, Tensor first_places, Tensor? targets_from, SymInt longest, SymInt most_queries, float scale, "
    "float divisor"
)
torch.library.define("dlrm_fused::hstu_attention", f"({_ARGUMENTS}) -> Tensor")
torch.library.define(
    "dlrm_fused::hstu_attention_backward",
    f"(Tensor gradient, {_ARGUMENTS}, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _call(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    by_distance: Tensor | None,
    by_time: Tensor | None,
    times: Tensor | None,
    key_bounds: Tensor,
    query_bounds: Tensor,
    first_places: Tensor,
    targets_from: Tensor | None,
    longest: int,
    most_queries: int,
    scale: float,
    divisor: float,
) -> Call:
    bias = RelativeBias(*(one if one is None else _rows_contiguous(one) for one in (by_distance, by_time, times)))
    batch = JaggedQueries(
        _rows_contiguous(key_bounds),
        _rows_contiguous(query_bounds),
        _rows_contiguous(first_places),
        longest,
        None if targets_from is None else _rows_contiguous(targets_from),
        most_queries,
    )
    queries, keys, values = _rows_contiguous(queries), _rows_contiguous(keys), _rows_contiguous(values)
    return Call(queries, keys, values, batch, bias, scale, divisor)


def _rows_contiguous(x: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous: nearly always the same one."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward(*inputs: Any) -> Tensor:
    return forward(_call(*inputs))


@torch.library.register_fake("dlrm_fused::hstu_attention")
def _fake_forward(queries: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
    return values.new_empty(*queries.shape[:2], values.shape[2])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, longest, most_queries, scale, divisor = inputs
    ctx.save_for_backward(*tensors)
    ctx.numbers = longest, most_queries, scale, divisor


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:5])
    backward = torch.ops.dlrm_fused.hstu_attention_backward
    found = backward(gradient, *ctx.saved_tensors, *ctx.numbers, wanted)
    found = [one if is_wanted else None for one, is_wanted in zip(found, wanted, strict=True)]
    return *found, *([None] * (len(ctx.needs_input_grad) - len(found)))


@torch.library.impl("dlrm_fused::hstu_attention_backward", ["cpu", "cuda"])
@without_autocast
def _backward(gradient: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys, values and both biases; those that are not wanted are empty."""
    call, (of_queries, of_keys, of_values, of_distances, of_times) = _call(*inputs[:-1]), inputs[-1]
    gradient = _rows_contiguous(gradient)
    found: list[Tensor | None] = [None] * len(inputs[-1])
    if of_queries or of_distances or of_times:
        found[0], *found[3:5] = queries_and_biases_gradients(call, gradient, of_distances, of_times)
    if of_keys or of_values:
        found[1:3] = keys_and_values_gradients(call, gradient)
    return tuple(gradient.new_empty(0) if one is None else one for one in found)


@torch.library.register_fake("dlrm_fused::hstu_attention_backward")
def _fake_backward(gradient: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    wanted = inputs[-1]
    is_made = [wanted[0] or wanted[3] or wanted[4], wanted[1] or wanted[2], wanted[1] or wanted[2], *wanted[3:]]
    found = zip(inputs[:5], is_made, strict=True)
    return tuple(one.new_empty(one.shape) if is_there else gradient.new_empty(0) for one, is_there in found)


_operator = Operator("dlrm_fused::hstu_attention", _forward, _differentiate, _save_for_backward)


def _check_rows(queries: Tensor, keys: Tensor, values: Tensor) -> None:
    for name, x in (("queries", queries), ("keys", keys), ("values", values)):
        if x.dim() != 3 or x.shape[1] == 0 or x.shape[2] == 0:
            raise UsageError(f"hstu_attention: {name} has shape {list(x.shape)}; needed is [rows, heads, columns]")
        if x.dtype not in DTYPES:
            allowed = ", ".join(map(str, DTYPES))
            raise UsageError(f"hstu_attention: {name} has dtype {x.dtype}; allowed: {allowed}")
        if x.dtype != queries.dtype or x.device != queries.device:
            raise UsageError(
                f"hstu_attention: {name}: {x.dtype} on {x.device}; needed are dtype and device of queries, {queries.dtype} on "
                f"{queries.device}"
            )
    if keys.shape[1:] != queries.shape[1:]:
        raise UsageError(
            f"hstu_attention: keys has shape {list(keys.shape)}; needed are heads and columns of queries, {list(queries.shape)}"
        )
    if values.shape[:2] != keys.shape[:2]:
        raise UsageError(
            f"hstu_attention: values has shape {list(values.shape)}; needed are rows and heads of keys, {list(keys.shape)}"
        )


def _check_batch(queries: Tensor, batch: JaggedQueries) -> None:
    samples = batch.samples
    needed = {"key_bounds": samples + 1, "query_bounds": samples + 1, "first_places": samples, "targets_from": samples}
    for name, size in needed.items():
        x = getattr(batch, name)
        if x is None:
            continue
        if x.dtype not in (torch.int32, torch.int64) or x.device != queries.device:
            raise UsageError(
                f"hstu_attention: batch.{name}: {x.dtype} on {x.device}; needed is int32 or int64 on {queries.device}"
            )
        if list(x.shape) != [size]:
            raise UsageError(
                f"hstu_attention: batch.{name} has shape {list(x.shape)}; needed is [{size}], with {samples} samples by "
                "first_places"
            )
    if batch.longest < 0 or (batch.most_queries or 0) < 0:
        raise UsageError(
            f"hstu_attention: batch.longest={batch.longest}, most_queries={batch.most_queries}; needed are numbers of rows"
        )


def _check_bias(queries: Tensor, keys: Tensor, bias: RelativeBias, longest: int) -> None:
    heads = queries.shape[1]
    for name, x in (("by_distance", bias.by_distance), ("by_time", bias.by_time)):
        if x is not None and (not x.is_floating_point() or x.device != queries.device):
            raise UsageError(
                f"hstu_attention: bias.{name}: {x.dtype} on {x.device}; needed is a floating dtype on {queries.device}"
            )
    by_distance, by_time, times = bias
    if by_distance is not None and (by_distance.dim() != 2 or by_distance.shape[0] != heads or by_distance.shape[1] < longest):
        raise UsageError(
            f"hstu_attention: bias.by_distance has shape {list(by_distance.shape)}; needed is [heads, P], here {heads} heads, "
            f"and P at least the longest sample, {longest}"
        )
    if by_time is not None and list(by_time.shape) != [heads, BUCKETS]:
        raise UsageError(
            f"hstu_attention: bias.by_time has shape {list(by_time.shape)}; needed is [heads, BUCKETS], here "
            f"[{heads}, {BUCKETS}]"
        )
    if (by_time is None) != (times is None):
        there, missing = ("times", "by_time") if by_time is None else ("by_time", "times")
        raise UsageError(f"hstu_attention: bias.{there} is given without bias.{missing}; give both, or neither")
    if times is not None and (times.dtype != torch.int64 or times.shape != keys.shape[:1] or times.device != keys.device):
        raise UsageError(
            f"hstu_attention: bias.times: {times.dtype} {list(times.shape)} on {times.device}; needed are seconds of each row "
            f"of keys, torch.int64 [{len(keys)}] on {keys.device}"
        )
