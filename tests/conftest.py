"""What all tests share: whether they run with Triton's interpreter, and on which worker of xdist."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Workers and ranks share the cores. Before the first import of torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from benchmarks.common.network import Hosts
from tests.interpreter import quicken
from tests.processor_time import ProcessorTime

# Their assertions show values, too.
pytest.register_assert_rewrite("tests.distributed.launch", "tests.distributed.killing")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def reason_to_skip(marks: set[str], is_interpreted: bool) -> str | None:
    """Why a test with these marks does not run with Triton's interpreter, or without it; Triton decides at its import."""
    if is_interpreted and not marks & {"interpreted", "also_interpreted", "gpu"}:
        return "runs without TRITON_INTERPRET=1"
    if not is_interpreted and "interpreted" in marks:
        return "runs kernels on the CPU: needs TRITON_INTERPRET=1"
    return None


if IS_INTERPRETED:
    quicken()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--core-per-worker",
        action="store_true",
        help="each worker keeps its ranks on cores of its own: faster, but ranks of one core do not truly run at once",
    )
    parser.addoption(
        "--most-processor-seconds",
        type=float,
        help="fail where all tests together, or one that is not marked slow, take more processor time than they should",
    )


def pytest_configure(config: pytest.Config) -> None:
    # All that tests import lives as long as the process: to search it for garbage is a third of the time of collection.
    gc.disable()
    config.pluginmanager.register(ProcessorTime(config.option.most_processor_seconds))
    worker = getattr(config, "workerinput", None)
    if worker and config.option.core_per_worker:
        cores, index = sorted(os.sched_getaffinity(0)), int(worker["workerid"].removeprefix("gw"))
        os.sched_setaffinity(0, cores[index % len(cores) :: worker["workercount"]])


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """With Triton's interpreter, leave out files that name no test for it: to import all would take half a minute."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if IS_INTERPRETED and is_test and collection_path.parent.name != "gpu":
        return True if "interpreted" not in collection_path.read_text() else None
    return None


# Before xdist reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        reason = reason_to_skip(marks, IS_INTERPRETED) or _lack_of_gpus(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        if "xdist_group" not in marks and _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))


def _lack_of_gpus(item: pytest.Item) -> str | None:
    needed = max((count for mark in item.iter_markers("gpu") for count in mark.args), default=0)
    if not needed:
        return None
    from torch.cuda import device_count

    return f"needs {needed} CUDA devices" if device_count() < needed else None


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()
    _refuse_tests_without_groups(session)


def _refuse_tests_without_groups(session: pytest.Session) -> None:
    """Refuse versions of pytest and pytest-xdist that do not go together: every worker would make shared fixtures anew."""
    if getattr(session.config.option, "loadgroup", False):
        for item in session.items:
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
                raise pytest.UsageError(
                    f"pytest {pytest.__version__}: pytest-xdist does not group {item.nodeid}; install requirements/dev.txt"
                )


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Whether a fixture of the whole module takes part: it should be made once, so by one worker."""
    info = getattr(item, "_fixtureinfo", None)
    definitions = [found for several in info.name2fixturedefs.values() for found in several] if info else []
    return any(definition.scope == "module" for definition in definitions)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts, each a network namespace; needs root."""
    with Hosts(2) as hosts:
        yield hosts
