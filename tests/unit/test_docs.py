"""The pages in docs/ agree with the code."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path

import pytest

from dlrm_fused.config import Config, TableConfig, flatten, known_keys
from dlrm_fused.training.run_folder import _FREE_SETTINGS
from dlrm_fused.training.step_timer import PARTS

DOCS = Path(__file__).parents[2] / "docs"
TABLE_PREFIX = "embedding.tables.<table>."


@dataclass(frozen=True)
class Row:
    key: str
    type: str
    default: str
    meaning: str


def documented_settings() -> list[Row]:
    row = re.compile(r"^\| `([\w.<>]+)` \| (.+?) \| `(.+?)` \| (.+) \|$", re.MULTILINE)
    _, settings = (DOCS / "reference/config.md").read_text().split("## All settings")
    return [Row(*found) for found in row.findall(settings)]


def value_of(key: str) -> object:
    value: object = Config()
    for part in key.split("."):
        value = getattr(value, part)
    return value


def as_type(value: object) -> str:
    if isinstance(value, Enum):
        return ", ".join(f"`{member.name}`" for member in type(value))
    if isinstance(value, list):
        return "list of str" if any(isinstance(member, str) for member in value) else "list of int"
    return "mapping" if isinstance(value, dict) else type(value).__name__


def as_default(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    return value if isinstance(value, str) and value else json.dumps(value)


ROWS = {row.key: row for row in documented_settings()}


def test_every_setting_is_documented_once_and_no_other() -> None:
    tables = [f"{TABLE_PREFIX}{field.name}" for field in fields(TableConfig)]
    assert sorted(row.key for row in documented_settings()) == sorted([*known_keys(), *tables])


@pytest.mark.parametrize("key", known_keys())
def test_the_documented_type_and_default_are_those_of_the_schema(key: str) -> None:
    assert (ROWS[key].type, ROWS[key].default) == (as_type(value_of(key)), as_default(value_of(key)))


@pytest.mark.parametrize("name", [field.name for field in fields(TableConfig)])
def test_the_documented_type_and_default_of_a_table_are_those_of_the_schema(name: str) -> None:
    row, value = ROWS[f"{TABLE_PREFIX}{name}"], getattr(TableConfig(), name)
    assert (row.type, row.default) == (as_type(value), as_default(value))


def test_the_settings_that_may_change_in_a_run_are_documented() -> None:
    (section,) = re.findall(
        r"^## What may change when a run continues\n(.*)", (DOCS / "reference/config.md").read_text(), re.M | re.S
    )
    items = [line for line in section.splitlines() if line.startswith("* ")]
    assert set(re.findall(r"`([\w.]+)`", "\n".join(items))) == set(_FREE_SETTINGS)


def test_settings_that_pages_name_exist() -> None:
    groups = {key.split(".")[0] for key in flatten(Config()) if "." in key}
    name = re.compile(rf"`((?:{'|'.join(groups)})\.[a-z_][\w.]*)(?:=[^`]*)?`")
    known = {*known_keys(), *(key.rpartition(".")[0] for key in known_keys())}
    for page in DOCS.glob("*.md"):
        named = {key for key in name.findall(page.read_text()) if not key.startswith("embedding.tables.")}
        assert named <= known, page.name


def test_the_parts_of_a_step_are_documented() -> None:
    text = (DOCS / "training.md").read_text()
    assert re.findall(r"^\| `(\w+)_ms` \|", text, re.MULTILINE) == ["step", *PARTS, "idle", "floor"]


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md") if path.name != "README.md"))
def test_the_index_lists_every_page(page: str) -> None:
    assert f"]({page})" in (DOCS / "README.md").read_text()


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_links_to_sections_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([\w.]*\.md)?#([\w-]+)\)", page.read_text()):
        headings = re.findall(r"^#+ (.+)$", (page.parent / (target or page.name)).read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", sorted([*DOCS.glob("**/*.md"), DOCS.parent / "README.md"]), ids=lambda path: path.name)
def test_code_that_a_link_names_is_in_the_file_it_leads_to(page: Path) -> None:
    for name, target in re.findall(r"\[`([\w.]+)`\]\(([^)#]+\.py)\)", page.read_text()):
        path = page.parent / target
        if not target.endswith(name):  # a path for a text
            definitions = path.read_text()
            for part in name.split("."):
                assert re.search(rf"^\s*(def|class) {part}\b", definitions, re.MULTILINE), f"{name}: not in {target}"
