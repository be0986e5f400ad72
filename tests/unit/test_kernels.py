"""What holds for the source of all kernels."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "dlrm_fused"
MAX_ARGUMENTS = 24


def launched_kernels() -> Iterator[tuple[str, int]]:
    """Name and number of arguments, constants included, of every kernel that its module launches."""
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        launches = [node.func.value for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)]
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list):
                is_launched = any(isinstance(name, ast.Name) and name.id == node.name for name in launches)
                if is_launched or node.name.endswith("_kernel"):
                    yield node.name, len(node.args.args) + len(node.args.kwonlyargs)


def test_no_kernel_has_more_arguments_than_a_reader_can_follow() -> None:
    kernels = dict(launched_kernels())
    assert {"gemm_kernel", "gemv_all_reduce_kernel", "scatter_rows_kernel", "count_kernel"} <= kernels.keys()
    too_many = {name: count for name, count in kernels.items() if count > MAX_ARGUMENTS}
    assert not too_many, f"group what belongs together in a NamedTuple, as ChannelArgs does: {too_many}"
