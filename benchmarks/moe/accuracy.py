"""What experts are worth: DLRM with and without them, at the same multiply-adds for each sample, on data of many segments.

    python -m benchmarks.moe.accuracy --output benchmarks/results/moe/planted.json

Trains ``configs/moe_planted.yaml`` and DLRMs of at least as many multiply-adds on one process each. A seed decides the data and
the initial weights. Of the DLRMs, ``deep`` has two layers in place of the experts, ``wide`` has wider layers instead; both also
train with half and twice the learning rate of the dense layers. The margin of the experts is that over the best DLRM of a seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common.environment import ROOT
from benchmarks.common.results import add_report_arguments, write_results
from benchmarks.training.loss_parity import describe, lines_of, train
from dlrm_fused.config import load_config
from dlrm_fused.datasets import open_dataset
from dlrm_fused.models import build_model
from dlrm_fused.models.moe import MixtureOfExperts

_CONFIG = ROOT / "configs/moe_planted.yaml"
_MODELS = {
    "experts": [],
    "deep": ["model.experts.count=0", "model.top_mlp=[32,64,32,16,1]"],
    "wide": ["model.experts.count=0", "model.top_mlp=[80,40,1]"],
}
_RATES = {
    "half": "training.dense_optimizer.learning_rate=0.0025",
    "twice": "training.dense_optimizer.learning_rate=0.01",
}


def variants() -> dict[str, list[str]]:
    """The settings of each model, by its name."""
    rivals = [name for name in _MODELS if name != "experts"]
    others = {f"{name}, {rate} the rate": [*_MODELS[name], _RATES[rate]] for name in rivals for rate in _RATES}
    return {**_MODELS, **others}


def multiply_adds(settings: list[str]) -> int:
    """Of a sample's forward pass in linear layers, experts, router and the interaction of features; lookups have none."""
    config, device = load_config(_CONFIG, settings), torch.device("cpu")
    model = build_model(config, open_dataset(config, device).schema, 1, device)
    layers = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    experts = sum(
        (layer.w_in[0].numel() + layer.w_out[0].numel()) * config.model.experts.top_k
        for layer in model.modules()
        if isinstance(layer, MixtureOfExperts)
    )
    vectors = config.data.synthetic.tables + 1
    return layers + experts + vectors * vectors * config.embedding.dim


def measure(name: str, seed: int, settings: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = train(
            f"{name} {seed}".replace(", ", "-").replace(" ", "-"), _CONFIG, 1, Path(folder), [*settings, f"seed={seed}"]
        )
        summary = json.loads((run / "summary.json").read_text())
        validation = [line["auc"] for line in lines_of(run, "evaluation")]
    kept = ("test_auc", "attainable_auc", "attainable_auc_error", "wall_seconds")
    return {"model": name, "seed": seed, **{key: summary[key] for key in kept}, "validation_auc": validation}


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """By model the mean test AUC, and by seed how far the experts are above the best model without them."""
    names, seeds = dict.fromkeys(run["model"] for run in runs), dict.fromkeys(run["seed"] for run in runs)
    auc = {(run["model"], run["seed"]): run["test_auc"] for run in runs}
    rivals = [name for name in names if name != "experts"]
    margins = {seed: auc["experts", seed] - max(auc[name, seed] for name in rivals) for seed in seeds}
    return {
        "mean_test_auc": {name: statistics.mean(auc[name, seed] for seed in seeds) for name in names},
        "margin_over_best_dlrm": margins,
        "smallest_margin": min(margins.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add_report_arguments(parser)
    parser.set_defaults(ranks=1)
    arguments = parser.parse_args()
    runs = [measure(name, seed, settings) for seed in arguments.seeds for name, settings in variants().items()]
    result = {
        **describe(arguments, []),
        "settings": {name: " ".join(settings) for name, settings in variants().items()},
        "multiply_adds_per_sample": {name: multiply_adds(settings) for name, settings in _MODELS.items()},
        **summarize(runs),
        "runs": runs,
    }
    write_results(arguments.output, result)
    print(json.dumps(summarize(runs), indent=1))


if __name__ == "__main__":
    main()
