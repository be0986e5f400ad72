"""The config of a small model on generated data, for tests in one process."""

from __future__ import annotations

from pathlib import Path

from dlrm_fused.config import Config, load_config

# Five sparse features, three dense ones; sizes of layers differ, so that none can stand for another.
_SMALL = [
    "runtime.device=cpu",
    "data.synthetic.dense_features=3",
    "data.synthetic.tables=5",
    "data.synthetic.rows=[20]",
    "data.synthetic.train_samples=100",
    "embedding.dim=12",
    "model.bottom_mlp=[20,12]",
    "model.top_mlp=[24,10,1]",
]


def config_of(tmp_path: Path, *overrides: str) -> Config:
    """The small config with ``key=value`` overrides."""
    path = tmp_path / "small.yaml"
    path.write_text("data: {source: synthetic}")
    return load_config(path, [*_SMALL, *overrides])
