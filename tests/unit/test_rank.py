"""A rank is what its environment says; one that contradicts itself is told, where ranks would wait for each other in vain."""

from __future__ import annotations

import pytest

from dlrm_fused.errors import ConfigError
from dlrm_fused.training.runtime import Rank, run_with_error_reporting

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def rank_of(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Rank:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return Rank.from_environment()


def test_a_rank_is_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = rank_of(OF_TORCHRUN, monkeypatch)
    assert (rank.index, rank.world_size, rank.local_index) == (1, 2, 1)


def test_a_process_without_torchrun_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = rank_of({}, monkeypatch)
    assert (rank.index, rank.world_size, rank.local_index) == (0, 1, 0)


CONTRADICTIONS = {
    "a rank of one process": ({"RANK": "1"}, "RANK=1 in the environment: allowed: 0 to 0, with WORLD_SIZE=1"),
    "a rank beyond the others": (OF_TORCHRUN | {"RANK": "2"}, "RANK=2 in the environment: allowed: 0 to 1, with WORLD_SIZE=2"),
    "a rank that is no number": (OF_TORCHRUN | {"RANK": "a"}, "RANK=a in the environment: allowed: 0 to 1, with WORLD_SIZE=2"),
    "an empty local rank": (OF_TORCHRUN | {"LOCAL_RANK": ""}, "LOCAL_RANK= in the environment: allowed: 0 to 2147483647"),
    "no ranks": (OF_TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE=0 in the environment: allowed: 1 to 2147483647"),
    "ranks without numbers": ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 in the environment, without RANK, MASTER_ADDR, MASTER_PORT"),
    "an address without a port": ({"MASTER_ADDR": "node0"}, "MASTER_PORT= in the environment: allowed: 0 to 65535"),
    "a port that is none": (
        OF_TORCHRUN | {"MASTER_PORT": "99999"},
        "MASTER_PORT=99999 in the environment: allowed: 0 to 65535",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_an_environment_that_contradicts_itself_is_told(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    environment, said = CONTRADICTIONS[name]
    with pytest.raises(ConfigError) as raised:
        rank_of(environment, monkeypatch)
    assert str(raised.value).startswith(said)
    assert str(raised.value).endswith("start with torchrun, which sets what it needs, or unset all of these for one process")


def test_it_is_one_line_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match=r" ERROR RANK=1 in the environment: allowed: 0 to 0, with WORLD_SIZE=1; start with"):
        run_with_error_reporting(lambda rank, error_store: None)
