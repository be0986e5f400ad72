"""What ``import dlrm_fused`` offers, and what it costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dlrm_fused

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/reference/api.md"
HEAD = "| name | what it is | defined in |\n|---|---|---|\n"


def run_python(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout


@pytest.mark.parametrize("name", dlrm_fused.__all__)
def test_every_public_name_is_there_and_explains_itself(name: str) -> None:
    value = getattr(dlrm_fused, name)
    assert value.__name__ == name
    assert len(inspect.getdoc(value) or "") > 20


def test_the_import_loads_no_library_and_takes_less_than_a_third_of_a_second() -> None:
    program = (
        "import sys, time; begin = time.perf_counter(); import dlrm_fused; "
        "print(time.perf_counter() - begin, sys.modules.keys() & {'torch', 'torchrec', 'triton', 'numpy'})"
    )
    seconds, libraries = zip(*(run_python(program).split(maxsplit=1) for _ in range(3)), strict=True)
    assert set(libraries) == {"set()\n"}
    assert min(map(float, seconds)) < 0.3


def test_operators_are_imported_without_torchrec() -> None:
    operators = (
        "symmetric_group, gemv_all_reduce, gemm_all_to_all, all_gather_gemm, gemm_reduce_scatter, expert_layer, "
        "embedding_all_to_all, pooled_all_to_all"
    )
    program = (
        f"import sys; from dlrm_fused import {operators}; print([m for m in ('torchrec', 'fbgemm_gpu') if m in sys.modules])"
    )
    assert run_python(program) == "[]\n"


def test_type_checkers_see_the_names_that_are_there() -> None:
    (only_for_types,) = [node for node in ast.parse(inspect.getsource(dlrm_fused)).body if isinstance(node, ast.If)]
    seen = {node.names[0].name: node.module for node in only_for_types.body if isinstance(node, ast.ImportFrom)}
    assert seen == dlrm_fused._DEFINED_IN


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'dlrm_fused' has no attribute 'shard_everything'"):
        dlrm_fused.shard_everything  # noqa: B018
    assert set(dlrm_fused.__all__) < set(dir(dlrm_fused))


@pytest.mark.parametrize("operator", ["embedding_all_to_all", "gemv_all_reduce", "gemm_all_to_all"])
def test_what_was_an_operators_module_is_its_package(operator: str) -> None:
    package = importlib.import_module(f"dlrm_fused.ops.{operator}")
    assert getattr(package, operator) is getattr(dlrm_fused, operator)
    assert callable(package.reference)


def first_sentence(value: object) -> str:
    paragraph = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
    sentence = re.split(r"(?<=[.:]) (?=[A-Z])", paragraph)[0].rstrip(".:")
    return re.sub(r":\w+:`~?([\w.]+)`|``(.+?)``", lambda match: f"`{match[1] or match[2]}`", sentence).replace("|", "\\|")


def described(name: str) -> str:
    module = dlrm_fused._DEFINED_IN[name]
    path = f"{module.replace('.', '/')}.py"
    return f"| `{name}` | {first_sentence(getattr(dlrm_fused, name))} | [{path}](../../{path}) |\n"


def test_the_page_lists_the_public_names() -> None:
    """``UPDATE_DOCS=1 pytest tests/unit/test_public_api.py`` writes the table anew."""
    text = DOCUMENT.read_text()
    wanted = re.sub(f"{re.escape(HEAD)}(\\|.*\n)*", lambda _: HEAD + "".join(map(described, dlrm_fused.__all__)), text)
    if os.environ.get("UPDATE_DOCS") == "1":
        DOCUMENT.write_text(wanted)
    assert DOCUMENT.read_text() == wanted
    assert all(f"| `{name}` |" in wanted for name in dlrm_fused.__all__)
