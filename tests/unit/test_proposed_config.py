"""The config that data/prepare.py table proposes: it loads, and tables have columns by their rows."""

from __future__ import annotations

from pathlib import Path

from dlrm_fused.config import Config, load_config
from dlrm_fused.datasets.preparation.table.proposed_config import proposed_config
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature


def proposed(folder: Path, **rows: int) -> Config:
    schema = DatasetSchema(("age",), tuple(SparseFeature(name, count) for name, count in rows.items()))
    path = folder / "config.yaml"
    path.write_text(proposed_config(schema, 100_000, folder / "my set"))
    return load_config(path)


def test_a_table_has_columns_by_its_rows_and_none_more_than_the_largest(tmp_path: Path) -> None:
    config = proposed(tmp_path, user=20_000, item=300, country=64, genre=17, gender=4, label=1)
    dims = {name: config.embedding.dim_of(name) for name in ("user", "item", "country", "genre", "gender", "label")}
    assert dims == {"user": 16, "item": 16, "country": 8, "genre": 8, "gender": 4, "label": 4}
    assert config.model.bottom_mlp[-1] == config.embedding.dim == 16


def test_large_tables_are_as_wide_as_the_largest(tmp_path: Path) -> None:
    config = proposed(tmp_path, user=20_000_000, item=100_000)
    assert config.embedding.dim == 64
    assert not config.embedding.tables


def test_a_name_may_be_anything_that_a_feature_may_be_called(tmp_path: Path) -> None:
    config = proposed(tmp_path, **{"7": 20_000, "user-id": 4, "null": 17})
    assert {name: table.dim for name, table in config.embedding.tables.items()} == {"user-id": 4, "null": 8}


def test_the_size_of_all_tables_is_told(tmp_path: Path) -> None:
    proposed(tmp_path, user=2**16, gender=2)
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    assert lines[1:4] == ["# 2 tables, 4.0 MiB:", "#   user: 65,536 rows of 16 numbers", "#   gender: 2 rows of 4 numbers"]
