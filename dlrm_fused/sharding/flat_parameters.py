"""Data parallelism of parameters whose gradients come all at once: one AllReduce, and an optimizer of one tensor.

DistributedDataParallel (DDP) and an optimizer of many parameters take several launches for each of them. Where a model is
small, the host spends more time on these than the GPU on its layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DataParallelWrapper, get_unwrapped_module
from torchrec.distributed.types import ShardingEnv

from dlrm_fused.compat.torch import copy_all
from dlrm_fused.errors import UsageError

_ALIGNMENT = 512  # bytes, as of CUDA's allocations, so that what reads a parameter runs as fast as before

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


class FlatParameters:
    """Parameters that lie in one tensor, and their gradients in another. Making one is collective.

    The parameters stay what they are, with names and shapes, and move; all ranks begin with the values of rank 0.

    Args:
        parameters: all of one dtype and device.
        group: of the ranks that hold the same.

    Attributes:
        values: 1-D; its ``grad`` is the mean gradient over the ranks after :meth:`wait`. Between parameters it is 0.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = list(parameters)
        self._group = group
        unit = max(1, _ALIGNMENT // parameters[0].element_size())
        sizes = [-(-p.numel() // unit) * unit for p in parameters]
        self._begins = [0, *itertools.accumulate(sizes)]
        self.values = nn.Parameter(parameters[0].new_zeros(self._begins[-1]))
        self.values.grad = torch.zeros_like(self.values)
        self._gradients = self.parts_of(self.values.grad)
        self._is_averaging = False
        self._work: dist.Work | None = None
        for parameter, part in zip(self.parameters, self.parts_of(self.values.detach()), strict=True):
            part.copy_(parameter.detach())
            parameter.data = part
        self._places = [parameter.data_ptr() for parameter in self.parameters]
        dist.broadcast(self.values.detach(), group=group, group_src=0)

    def parts_of(self, flat: Tensor) -> list[Tensor]:
        """Views of a tensor like ``values``, as the parameters lie in it."""
        return [flat[begin : begin + p.numel()].view(p.shape) for begin, p in zip(self._begins, self.parameters, strict=False)]

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy this rank's gradients of the parameters, None for 0; may be captured in a CUDA graph."""
        assert self.values.grad is not None
        given = [(part, gradient) for part, gradient in zip(self._gradients, gradients, strict=True) if gradient is not None]
        if len(given) < len(self.parameters):
            self.values.grad.zero_()
        copy_all([part for part, _ in given], [gradient for _, gradient in given])
        if self._group.size() > 1:
            self.values.grad.mul_(1 / self._group.size())

    def check(self) -> None:
        """Raises UsageError if a parameter no longer lies in :attr:`values`, and so would not be trained."""
        for number, (parameter, place) in enumerate(zip(self.parameters, self._places, strict=True)):
            if parameter.data_ptr() != place:
                raise UsageError(
                    f"dense parameter {number} of shape {list(parameter.shape)} has moved out of the tensor in which all are "
                    "trained; change its values in place (copy_, load_state_dict), or move the model before it is sharded"
                )

    def use(self) -> None:
        """Begin to average what has been stored over the ranks. Collective; does not wait.

        Raises:
            RuntimeError: for a second backward pass before :meth:`wait`: gradients are not accumulated.
        """
        assert self.values.grad is not None
        if self._is_averaging:
            raise RuntimeError(
                "a second backward pass before the optimizer's step: flat parameters do not accumulate gradients"
            )
        if self._group.size() > 1:
            self._work = dist.all_reduce(self.values.grad, group=self._group, async_op=True)
        self._is_averaging = True

    def wait(self) -> None:
        """Let the current stream wait for the mean. Collective if nobody has called :meth:`use`: it averages ``grad``."""
        if not self._is_averaging:
            self.store([p.grad for p in self.parameters])
            self.use()
        if self._work is not None:
            self._work.wait()
        self._is_averaging, self._work = False, None


class FlatOptimizer(torch.optim.Optimizer):
    """An optimizer of flat parameters, which steps them as one; for optimizers that treat each element alike.

    Its parameters, their states and its groups look as if they were stepped one by one.

    Args:
        make: makes the optimizer of one tensor.
    """

    def __init__(self, flat: FlatParameters, make: MakeOptimizer) -> None:
        self._flat = flat
        self._optimizer = make([flat.values])
        super().__init__(flat.parameters, self._optimizer.defaults)
        self._show_state()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step with the gradients' mean, once for each backward pass. Collective.

        Raises:
            UsageError: if a parameter has moved.
        """
        self._flat.check()
        self._flat.wait()
        (own,), (group,) = self._optimizer.param_groups, self.param_groups
        own.update({key: value for key, value in group.items() if key != "params"})
        self._optimizer.step()
        if not self.state:
            self._show_state()

    def _show_state(self) -> None:
        """Let the state of each parameter be its part of the state of all."""
        for name, value in self._optimizer.state[self._flat.values].items():
            is_flat = isinstance(value, Tensor) and value.shape == self._flat.values.shape
            parts = self._flat.parts_of(value) if is_flat else [value] * len(self._flat.parameters)
            for parameter, part in zip(self._flat.parameters, parts, strict=True):
                self.state[parameter][name] = part


class GivesGradientsAtOnce(Protocol):
    """A module that computes the gradients of some parameters together, as a captured function does."""

    takes_gradients: Any  # who gets them: FlatParameters

    def parameters(self) -> list[nn.Parameter]:
        """In the order in which ``takes_gradients`` is given their gradients."""


class FlatDataParallel(DataParallelWrapper):
    """For DistributedModelParallel, in place of DDP.

    Args:
        function: which uses all parameters of the model but tables.

    Attributes:
        flat: its parameters; once the model is wrapped.
    """

    def __init__(self, function: GivesGradientsAtOnce) -> None:
        self._function = function
        self.flat: FlatParameters | None = None

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Collective."""
        get_unwrapped_module(dmp).to(device)
        self.flat = FlatParameters(self._function.parameters(), cast(dist.ProcessGroup, env.process_group))
        self._function.takes_gradients = self.flat
