"""The house stands as docs/architecture.md draws it: packages are floors, imports lead down, and nowhere in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From the ground up. Modules of one floor may import each other, and those of lower floors.
FLOORS = (
    {"errors", "compat", "launcher"},
    {"paths", "records"},
    {"auto_choice", "checksums", "clocks", "config", "cuda_graphs", "lasting", "versions"},
    {"datasets", "symmetric"},
    {"ops"},
    {"models", "sharding"},
    {"training"},
    {"inference"},
    {"doctor", "scaleout"},
    {"cli"},
)
FLOOR_OF = {part: number for number, floor in enumerate(FLOORS) for part in floor}


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in ROOT.glob("dlrm_fused/**/*.py")}


def part_of(module: str) -> str:
    """``ops`` of ``dlrm_fused.ops.common.workspace``."""
    return module.split(".")[1]


def imported(module: str) -> Iterator[str]:
    """Full names of what a module imports, also within functions."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in full)


def own_imports(module: str) -> set[str]:
    """Other modules of the package; not the package itself, whose names are lazy."""
    return {name for name in imported(module) if name in MODULES and name not in (module, "dlrm_fused")}


INNER = sorted(MODULES.keys() - {"dlrm_fused"})


def test_every_module_belongs_to_a_floor() -> None:
    assert {part_of(module) for module in INNER} == FLOOR_OF.keys()


@pytest.mark.parametrize("module", INNER)
def test_imports_lead_down(module: str) -> None:
    floor = FLOOR_OF[part_of(module)]
    parts = {part_of(other) for other in own_imports(module)}
    assert not {part for part in parts if FLOOR_OF[part] > floor or (FLOOR_OF[part] == floor and part != part_of(module))}


def test_no_circle_of_imports() -> None:
    try:
        TopologicalSorter({module: own_imports(module) for module in INNER}).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


@pytest.mark.parametrize("module", [module for module in INNER if part_of(module) in ("symmetric", "ops")])
def test_operators_do_without_torchrec(module: str) -> None:
    assert not {name.split(".")[0] for name in imported(module)} & {"torchrec", "fbgemm_gpu"}


def _callables_given(module: str) -> Iterator[str]:
    """Public functions and methods of a module that are given a callable."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("_")):
            arguments = (*node.args.args, *node.args.kwonlyargs)
            annotations = [ast.unparse(argument.annotation) for argument in arguments if argument.annotation is not None]
            if any("Callable" in annotation for annotation in annotations):
                yield node.name


@pytest.mark.parametrize("module", [module for module in INNER if ".ops.embedding_all_to_all" in module])
def test_the_embedding_operators_call_nothing_of_their_callers(module: str) -> None:
    assert list(_callables_given(module)) == []
