"""``comm=fused`` with a torch that is built for AMD's GPUs: TorchRec's path, which one line says.

Nobody has run this on an AMD GPU: ``torch.version.hip`` is made up, and so is that the ranks' device is a GPU where it is
asked whether that has fused communication; all else runs on the CPU.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from triton.runtime import JITFunction

from dlrm_fused.config import Config
from dlrm_fused.symmetric import factory
from dlrm_fused.training import build, trainer
from dlrm_fused.training.runtime import ErrorStore, Rank
from tests.distributed.launch import RankFailed, losses, run_ranks, small_config, train
from tests.distributed.test_fused_across_hosts import EXPERTS
from tests.distributed.test_transformer_training import SETTINGS as TRANSFORMER

STEPS = ["training.max_steps=10"]
BUILD = f"torch {torch.__version__} for ROCm 7.1"
REASON = f"fused communication is not known to work on AMD's GPUs ({BUILD}), where it has never run"
GPU = torch.device("cuda", 0)


def train_on_rocm(config: Config, by_sharder: bool = False) -> list[str]:
    """On a rank: train, and return what the log says about AMD's GPUs.

    Args:
        by_sharder: as a trainer of one's own, which does not ask before it gives the model to the sharder.
    """
    torch.version.hip = "7.1"
    if by_sharder:
        factory._device = lambda *_: GPU
    else:
        build.reason_against = lambda _: factory.reason_against(GPU)
    JITFunction.run = _refuse("a kernel is launched")
    ctypes.CDLL = _refuse("a library is loaded")  # type: ignore[misc, assignment]
    said: list[str] = []
    logging.disable(logging.NOTSET)
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dlrm_fused").addHandler(handler)
    rank = Rank.from_environment()
    trainer.train(config, rank, ErrorStore(rank))
    return [message for message in said if "AMD" in message]


def _refuse(what: str) -> Callable[..., NoReturn]:
    def refuse(*arguments: object, **_: object) -> NoReturn:
        raise AssertionError(f"{what}: {arguments}")

    return refuse


@pytest.mark.parametrize(
    "settings",
    [[], EXPERTS, [*TRANSFORMER, "model.tensor_parallel=2"]],
    ids=["DCNv2", "experts", "Transformer"],
)
def test_training_takes_torchrecs_path_and_says_so_once(tmp_path: Path, settings: list[str]) -> None:
    config = small_config(tmp_path / "fused", *settings, *STEPS, "comm=fused")
    said = run_ranks(2, train_on_rocm, config)
    assert said == [[f"comm=fused runs as comm=baseline: {REASON}; comm=baseline is TorchRec's own path"], []]
    baseline = train(tmp_path / "baseline", 2, *settings, *STEPS)
    assert losses(config.run_dir) == losses(baseline)
    assert (config.run_dir / "plan.txt").read_text() == (baseline / "plan.txt").read_text()


def test_the_sharder_takes_torchrecs_path_by_itself(tmp_path: Path) -> None:
    config = small_config(tmp_path / "fused", *STEPS, "comm=fused")
    (said,), _ = run_ranks(2, train_on_rocm, config, True)
    assert f"fused communication for 0 of 4 embedding tables; not for 4: device=cuda:0: {REASON}" in said
    assert losses(config.run_dir) == losses(train(tmp_path / "baseline", 2, *STEPS))


def test_strict_training_ends_with_the_reason(tmp_path: Path) -> None:
    config = small_config(tmp_path, "comm=auto", "comm_strict=true")
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, train_on_rocm, config)
    assert str(failed.value.error).startswith(f"comm=auto, comm_strict=true: {REASON}; comm=baseline")
