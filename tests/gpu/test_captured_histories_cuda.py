"""GPUs capture a training step of histories once for each number of rows, and replay it with the results of the whole."""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from dlrm_fused.config import Compile, Precision
from dlrm_fused.cuda_graphs import RUNS_BEFORE_CAPTURE
from dlrm_fused.models.jagged import NUMBERS_OF_ROWS
from tests.distributed.launch import losses, metrics
from tests.gpu.training_runs import WITHOUT_AMPLIFIED_ROUNDING, gpu_counts, train_together
from tests.unit.test_histories_in_two_parts import ENCODERS, HISTORY, SAMPLES, TOKENS, batch, task

pytestmark = pytest.mark.gpu(1)

STEPS = 60


def trained(kind: str, compile: Compile, precision: Precision) -> tuple[list[Tensor], list[Tensor], int, set[int]]:
    """Return losses, final parameters, how often the host ran the encoder, and the numbers of rows that it would compute."""
    device = torch.device("cuda")
    own = task(kind, compile, device=device, precision=precision)
    optimizer, drawn, found, rows = torch.optim.SGD(own.parameters(), lr=0.1), random.Random(1), [], set()
    encoder = own.model.transformer
    with mock.patch.object(encoder, "_encode", wraps=encoder._encode) as encode:
        for number in range(STEPS):
            lengths = [drawn.randint(0, HISTORY) for _ in range(SAMPLES)]
            step = -(-SAMPLES * TOKENS // NUMBERS_OF_ROWS)
            rows.add(min(-(-(sum(lengths) + SAMPLES) // step) * step, SAMPLES * TOKENS))
            loss, output = own(batch(lengths, number).to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(output.loss)
    return found, [parameter.detach() for parameter in own.parameters()], encode.call_count, rows


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
@pytest.mark.parametrize("kind", ENCODERS)
def test_each_number_of_rows_is_captured_once_and_then_replayed(kind: str, precision: Precision) -> None:
    captured, parameters, runs, rows = trained(kind, Compile.auto, precision)
    assert 1 < len(rows) <= NUMBERS_OF_ROWS
    assert runs == len(rows) * (RUNS_BEFORE_CAPTURE + 1)
    eager, expected, runs, _ = trained(kind, Compile.never, precision)
    assert runs == STEPS
    tolerance = 1e-4 if precision is Precision.fp32 else 0.02
    torch.testing.assert_close(captured, eager, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(parameters, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ENCODERS)
def test_losses_of_a_run_are_those_of_eager_mode(tmp_path: Path, kind: str) -> None:
    settings = [
        *WITHOUT_AMPLIFIED_ROUNDING,
        f"model.kind={kind}",
        "model.d_model=64",
        "model.heads=4",
        "model.tensor_parallel=1",
        "data.synthetic.history_length=30",
        "data.synthetic.history_items=2000",
        "data.synthetic.jagged=true",
        "evaluation.every_steps=10",
        # Later on, the norm of an attention's result that is nearly zero has amplified rounding.
        *(["training.max_steps=8"] if kind == "hstu" else []),
    ]
    gpus = gpu_counts()[-1]
    runs = train_together(tmp_path, {"captured": (gpus, settings), "eager": (gpus, [*settings, "training.compile=never"])})
    assert losses(runs["captured"]) == pytest.approx(losses(runs["eager"]), rel=1e-4)
    of_evaluations = [[line["auc"] for line in metrics(run, "evaluation")] for run in runs.values()]
    assert of_evaluations[0] == pytest.approx(of_evaluations[1], abs=1e-4)
