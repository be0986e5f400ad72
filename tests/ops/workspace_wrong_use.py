"""Wrong uses that operators with a workspace have in common, and the scene that they are tried on."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UserError
from dlrm_fused.symmetric import SymmetricGroup, symmetric_group
from tests.ops.wrong_use import SECOND, TIMEOUT_SECONDS, Scene, WrongUse

Attempt = Callable[[Any, bool], object]
Change = Callable[[Tensor], Tensor | None]


class WorkspaceScene(Scene):
    """An operator and its workspace, which is in use.

    Attributes:
        inputs: of the operator, by the name of the argument.
        correct: a workspace that is never used wrongly.
        workspace: one for each wrong use.
    """

    inputs: Mapping[str, Tensor]
    workspace: Any

    def hold_results(self) -> None:
        """Use the operator for the first time; to be called once the inputs are there."""
        self.correct = self.make()
        self._first = self.results(self.correct)

    @abstractmethod
    def create(self, group: SymmetricGroup, **settings: Any) -> Any:
        """A workspace of the group, with other settings than the usual."""

    def make(self, **settings: Any) -> Any:
        return self.create(self.group, **{"timeout_seconds": TIMEOUT_SECONDS, **settings})

    def begin(self) -> None:
        self.workspace = self.make()
        self.held = [*self._first, *self.results(self.workspace)]

    @abstractmethod
    def results(self, workspace: Any, **changes: Any) -> list[Tensor]:
        """Call the operator with the inputs, or with others."""


def settings(**wrong: Any) -> Attempt:
    """Make a workspace with other settings."""
    return lambda scene, is_wrong: scene.make(**(wrong if is_wrong else {}))


def given(**changes: Change) -> Attempt:
    """Give other tensors."""

    def attempt(scene: WorkspaceScene, is_wrong: bool) -> None:
        scene.results(scene.workspace, **(changed(scene.inputs, changes) if is_wrong else {}))

    return attempt


def changed(inputs: Mapping[str, Tensor], changes: Mapping[str, Change]) -> dict[str, Any]:
    return {key: change(inputs[key].detach().clone()) for key, change in changes.items()}


def by_schedule(name: str) -> Attempt:
    return lambda scene, is_wrong: scene.results(scene.workspace, schedule=name if is_wrong else "auto")


def wrong_setting(what: str = "", **setting: Any) -> WrongUse:
    """A setting that rank 1 must not have; the errors of all ranks name it with its value."""
    ((key, value),) = setting.items()
    culprit = f"{key}={value}"
    return WrongUse(what or f"`{culprit}`", settings(**setting), culprit, SECOND, culprit)


def settings_that_differ(**settings_of_second: Any) -> list[WrongUse]:
    return [
        WrongUse(f"`{key}` that differs between ranks", settings(**{key: value}), f"{key} differs", SECOND, f"{key} differs")
        for key, value in settings_of_second.items()
    ]


def calls_that_differ(what: str, attempt: Attempt) -> WrongUse:
    return WrongUse(what, attempt, "differ in shapes or settings", SECOND, error=CommunicationError)


def too_large(what: str, **setting: Any) -> WrongUse:
    return WrongUse(what, settings(**setting), "but this host has", error=CommunicationError)


def _use_a_closed_group(scene: WorkspaceScene, _: bool) -> None:
    group = symmetric_group(dist.new_group())
    group.close()
    scene.create(group)


CLOSED_GROUP = WrongUse("a group that is closed", _use_a_closed_group, "its group is closed")


def dropped(workspace: str, call: Callable[[Any, int], object], what: str = "a workspace that is no longer") -> WrongUse:
    """``call(scene, handle)`` with the handle of a workspace, of a type of this name, that has been dropped."""

    def attempt(scene: WorkspaceScene, _: bool) -> None:
        handle, scene.workspace = scene.workspace.handle, None
        call(scene, handle)

    return WrongUse(what, attempt, f"no such {workspace}")


def _come_too_late(scene: WorkspaceScene, is_wrong: bool) -> None:
    scene.workspace = scene.make(timeout_seconds=0.3)
    scene.results(scene.workspace)
    if is_wrong:
        time.sleep(1.0)
    scene.results(scene.workspace)


LATE_CALL = WrongUse(
    "a call later than `timeout_seconds`", _come_too_late, "a call has failed on rank 0", SECOND, error=CommunicationError
)


def _go_on_after_an_error(scene: WorkspaceScene, is_wrong: bool) -> None:
    try:
        given(x=Tensor.half)(scene, is_wrong)
    except UserError:
        scene.results(scene.workspace)


CALL_AFTER_AN_ERROR = WrongUse(
    "calls after one that failed", _go_on_after_an_error, "did not take part", SECOND, error=CommunicationError
)
