"""Private names of torch, TorchRec, FBGEMM, Triton and OmegaConf are used in dlrm_fused/compat alone.

An attribute is taken for one of theirs if its name begins with one underscore and nothing of our own has that name: no class
of the module, or above it in dlrm_fused, no function, no variable.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlrm_fused
from dlrm_fused.compat.names import PRIVATE_NAMES, missing_names

PACKAGE = Path(dlrm_fused.__file__).parent
LIBRARIES = {"torch", "torchrec", "fbgemm_gpu", "triton", "omegaconf"}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "compat")
# Methods of named tuples have an underscore so as not to collide with fields; they are public.
NAMED_TUPLE = {"_replace", "_asdict", "_make", "_fields"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(source: str) -> list[str]:
    """What a module's source uses of the libraries' private names, as it is written there."""
    tree = ast.parse(source)
    return [*_imports(tree), *_attributes(tree), *_overridden_methods(tree)]


def _imports(tree: ast.Module) -> Iterator[str]:
    for path in _imported_paths(tree):
        library, *names = path.split(".")
        if library in LIBRARIES and any(is_private(name) for name in names):
            yield f"import {path}"


def _imported_paths(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _attributes(tree: ast.Module) -> Iterator[str]:
    own, standard = _own_names(tree), _imported(tree, set(sys.stdlib_module_names))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | NAMED_TUPLE:
            base = node.value
            if not (isinstance(base, ast.Name) and base.id in standard):
                yield ast.unparse(node)


def _own_names(tree: ast.Module) -> set[str]:
    """Names that a module gives to something, and those that the modules of its classes' bases do."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls"):
            names.add(node.attr)
    bases = {ast.unparse(base) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases}
    for node in ast.walk(tree):
        module = str(getattr(node, "module", ""))
        is_ours = module.startswith("dlrm_fused") and not module.startswith("dlrm_fused.compat")
        if is_ours and isinstance(node, ast.ImportFrom) and bases & {name.asname or name.name for name in node.names}:
            names |= _own_names(ast.parse(_source(module)))
    return names


def _source(module: str) -> str:
    path = PACKAGE.parent / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def _imported(tree: ast.Module, modules: set[str]) -> set[str]:
    """The names by which a module knows some modules."""
    return {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
        if name.name.split(".")[0] in modules
    }


def _overridden_methods(tree: ast.Module) -> Iterator[str]:
    """Methods of our classes that replace private ones of a library's class."""
    origins = {
        name.asname or name.name: (str(node.module), name.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith((*LIBRARIES, "dlrm_fused.compat"))
        for name in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for base in node.bases:
            written = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(written, ast.Name) and written.id in origins:
                module, name = origins[written.id]
                above = getattr(importlib.import_module(module), name)
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and is_private(method.name) and hasattr(above, method.name):
                        yield f"{node.name}.{method.name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_libraries_are_used_in_compat_alone(path):
    assert private_names(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch._C import x", ["import torch._C.x"]),
        (
            "from torchrec.distributed.embeddingbag import _apply_mean_pooling",
            ["import torchrec.distributed.embeddingbag._apply_mean_pooling"],
        ),
        ("def f():\n    import torch.distributed._symmetric_memory as memory", ["import torch.distributed._symmetric_memory"]),
        ("import torch.distributed as dist\ndist.distributed_c10d._world.pg_map", ["dist.distributed_c10d._world"]),
        ("def f(node):\n    return node._get_node('a')", ["node._get_node"]),
        ("class A(Base):\n    def f(self):\n        return self._lookups", ["self._lookups"]),
        (
            "from torchrec.distributed import TrainPipelineSparseDist\n"
            "class Mine(TrainPipelineSparseDist[int, int]):\n    def _backward(self, losses): pass",
            ["Mine._backward"],
        ),
        (
            "from dlrm_fused.compat.torchrec import SparseDistPipeline\n"
            "class Mine(SparseDistPipeline):\n    def _next_batch(self, batches): pass",
            ["Mine._next_batch"],
        ),
        ("class A:\n    def __init__(self):\n        self._own = 1\n    def f(self, other):\n        return other._own", []),
        ("import os\nos._exit(1)", []),
        (
            "from dlrm_fused.symmetric.memory import SymmetricGroup\n"
            "class A(SymmetricGroup):\n    def f(self): return self._memories",
            [],
        ),
    ],
)
def test_what_is_found(source, found):
    assert private_names(source) == found


def test_what_operators_import_of_compat_knows_neither_torchrec_nor_fbgemm():
    """compat is imported below the floors that know TorchRec."""
    for name in ("torch", "triton"):
        tree = ast.parse(_source(f"dlrm_fused.compat.{name}"))
        imported = {path.split(".")[0] for path in _imported_paths(tree)}
        assert imported & LIBRARIES == {name}


def test_the_list_of_private_names_has_those_that_are_used():
    """Names that we only set are not looked for."""
    listed = {part for place in PRIVATE_NAMES for part in place.replace(":", ".").split(".")}.union(*PRIVATE_NAMES.values())
    for path in (PACKAGE / "compat").glob("*.py"):
        used = {name.split(".")[-1] for name in private_names(path.read_text())}
        assert used - listed <= {"_dynamo", "_optimizer_classes", "_optimizer_kwargs"}, path.name


def test_the_installed_libraries_have_all_private_names():
    assert missing_names() == []


@pytest.mark.parametrize(
    ("place", "names", "missing"),
    [
        ("torch", ("_gone",), "torch._gone"),
        ("torchrec.gone", (), "torchrec.gone"),
        ("torchrec.distributed.embeddingbag:Gone", ("_env",), "torchrec.distributed.embeddingbag:Gone"),
        ("torchrec.distributed:TrainPipelineSparseDist", ("_gone",), "torchrec.distributed.TrainPipelineSparseDist._gone"),
    ],
)
def test_a_private_name_that_has_moved_is_named(place, names, missing, monkeypatch):
    monkeypatch.setattr("dlrm_fused.compat.names.PRIVATE_NAMES", {place: names})
    assert missing_names() == [missing]
