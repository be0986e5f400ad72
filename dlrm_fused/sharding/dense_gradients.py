"""Mean gradients of the dense layers, as DDP computes them: in an order that lasts, and between hosts with fewer bytes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dlrm_fused.auto_choice import measure_both
from dlrm_fused.errors import CommunicationError
from dlrm_fused.ops.common.sum_over_hosts import SumOverHosts
from dlrm_fused.symmetric import Channel, SymmetricGroup, symmetric_group

_TIMEOUT_SECONDS = 600.0
# With a static graph, DDP arranges its buckets after two.
_STEPS_BEFORE_BUCKETS = 2


def fix_order_of_sums(model: nn.Module) -> None:
    """Let DDP add up gradients in the same order at every step, the first included. Collective.

    In which order a collective adds up the ranks' values depends on the place of an element in its bucket, and DDP arranges
    its buckets anew after the first steps, as gradients come. A run that is started again would so add up in another order
    than an uninterrupted one. Here the buckets are arranged before the first step, as if the last parameter's gradient came
    first. Without gradients, as in an evaluation, it does nothing.
    """
    if not torch.is_grad_enabled():
        return
    for ddp, parameters in _averaged_by_ddp(model).items():
        ddp.module.forward = lambda _, parameters=parameters: _zero(parameters)
        for _ in range(_STEPS_BEFORE_BUCKETS):
            ddp(parameters[0].new_zeros(())).backward()  # on GPUs DDP wants an input
        del ddp.module.forward
        for parameter in parameters:
            parameter.grad = None


def _zero(parameters: Sequence[Tensor]) -> Tensor:
    """Zero, as a function of the parameters whose gradients come in their opposite order."""
    return torch.stack([(parameter * 0).sum().float() for parameter in parameters]).sum()


def sum_gradients_over_hosts(model: nn.Module, process_group: dist.ProcessGroup, *, measured: bool) -> None:
    """Let DDP sum the gradients of ``model``'s dense layers in two levels, where that sends less between hosts. Collective.

    That is on the CPU, with ranks on more than one host; NCCL knows the hosts itself.

    Args:
        measured: only if it takes less time than gloo's AllReduce.
    """
    wrapped = _averaged_by_ddp(model)
    parameters = [parameter for averaged in wrapped.values() for parameter in averaged]
    if not parameters or any(p.device.type != "cpu" or p.dtype != torch.float32 for p in parameters):
        return
    try:
        group = symmetric_group(process_group, "cpu")
    except CommunicationError:  # raised by all ranks, and said where tables are sharded
        return
    if not group.hosts.are_many:
        return
    elements = sum(p.numel() for p in parameters)
    sums = SumOverHosts(group, Channel(group, "dense gradients", _TIMEOUT_SECONDS), "dense gradients", elements)
    if measured:
        gradients = torch.zeros(elements)
        if not measure_both(
            lambda: sums.sum(gradients),
            lambda: dist.all_reduce(gradients, group=process_group),
            process_group,
            torch.device("cpu"),
            work=f"dense gradients of {elements} elements",
            unfused_name="AllReduce",
        ).fused_is_faster:
            sums.release()
            return
    hook = _MeanInThread(group, sums)
    for module in wrapped:
        # DDP does not understand annotations that are strings; a lambda has none.
        module.register_comm_hook(hook, lambda hook, bucket: hook(bucket))


def _averaged_by_ddp(model: nn.Module) -> dict[DistributedDataParallel, list[nn.Parameter]]:
    """The parameters whose gradients DDP averages."""
    return {
        module: [
            parameter
            for name, parameter in module.module.named_parameters()
            if parameter.requires_grad and name not in module.parameters_to_ignore
        ]
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
    }


class _MeanInThread:
    """A communication hook of DDP, which goes on with the backward pass while a thread sums one bucket after the other."""

    def __init__(self, group: SymmetricGroup, sums: SumOverHosts) -> None:
        self._world_size, self._sums = group.world_size, sums
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_run_all, args=(self._queue,), name="dlrm_fused dense gradients", daemon=True).start()

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        gradients, done = bucket.buffer(), Future[Tensor | Exception]()

        def work() -> None:
            try:
                done.set_result(self._sums.sum(gradients, divisor=self._world_size))
            except Exception as error:
                done.set_result(error)

        self._queue.put(work)
        # DDP would take an exception of `done` for a result; what is raised here ends the backward pass.
        return done.then(_result)

    def __del__(self) -> None:
        self._queue.put(None)


def _result(done: Future[Tensor | Exception]) -> Tensor:
    result = done.value()
    if isinstance(result, Exception):
        raise result
    return result


def _run_all(works: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := works.get()) is not None:
        work()
        del work
