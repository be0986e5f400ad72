"""Names of features and of their modules: whatever a column is called, its module has a name, and the feature keeps its own."""

from __future__ import annotations

import pytest
from torch import nn

from dlrm_fused.config import EmbeddingConfig
from dlrm_fused.datasets.feature_names import check_names, feature_name, module_name
from dlrm_fused.datasets.schema import SparseFeature
from dlrm_fused.errors import DataError
from dlrm_fused.models.embedding_tables import embedding_tables
from dlrm_fused.models.interaction import Interaction, dims_of
from dlrm_fused.sharding.tables import is_table, table_name

# Names that modules took in the release before; its checkpoints have them.
EARLIER = ["user", "user_id", "user-id", "größe", "日本", "a b", "a/b", "class", "None", "1", "User", "%", "weight", "x" * 300]
OTHERS = [
    *(name for name in dir(nn.ModuleDict()) if not name.startswith("__")),
    *("user.id", ".", "..", "a.b.c", "", "x.weight", "embedding_bags", "escaped%type", "type.x%"),
]


@pytest.mark.parametrize("name", EARLIER)
def test_a_module_has_the_name_of_its_feature(name: str) -> None:
    assert module_name(name) == name == feature_name(name)


@pytest.mark.parametrize("name", OTHERS)
def test_a_module_that_cannot_have_the_name_of_its_feature_has_another(name: str) -> None:
    module = module_name(name)
    assert feature_name(module) == name
    modules = nn.ModuleDict({module: nn.Linear(1, 1)})
    assert modules.state_dict().keys() == {f"{module}.weight", f"{module}.bias"}


def test_names_of_modules_differ() -> None:
    assert len({module_name(name) for name in EARLIER + OTHERS}) == len(set(EARLIER + OTHERS))


def test_tables_and_projections_are_of_their_features() -> None:
    names = [*EARLIER, *OTHERS]
    embedding = EmbeddingConfig(dim=8)
    tables = embedding_tables(embedding, [SparseFeature(name, 5) for name in names])
    interaction = Interaction(dims_of(tables), 16)
    parameters = nn.ModuleDict({"ebc": tables, "over": interaction}).named_parameters()
    of_tables = [name for name, _ in parameters if is_table(name)]
    assert [table_name(name) for name in of_tables] == names
    assert list(dims_of(tables)) == names


@pytest.mark.parametrize("name", ["", "a\nb", "a\tb", "\0", "\x7f", "a\u2028b", "\ud800"])
def test_a_name_that_no_line_can_show_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"^t.parquet: column .* allowed: a name that is not empty .*; rename it$") as raised:
        check_names(["user", name], "t.parquet: column", "rename it")
    assert str(raised.value).isprintable()
