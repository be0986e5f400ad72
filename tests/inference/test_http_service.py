"""The service in a process of its own: the loader's predictions over HTTP, a clear status for whatever is wrong."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fastapi import HTTPException, Request

from dlrm_fused.inference.export.loader import Inputs, load
from dlrm_fused.inference.http.batching import Batcher, Overloaded
from dlrm_fused.inference.http.limits import Limits
from dlrm_fused.inference.http.service import build_service
from tests.distributed.launch import run_alone, train
from tests.inference.clients import questions_of, send
from tests.inference.exporting import be_service, export, predictions_of_eval, running_service
from tests.inference.rows import prepared_rows
from tests.inference.service_process import Service, running_command
from tests.inference.trouble import cause

ROOT = Path(__file__).parents[2]
# The promise of a machine that does nothing else; the tests of a suite share theirs.
SLOWEST_SECONDS = 1.0 if "HOSTILE_SECONDS" in os.environ else 30.0
LIMITS = ["--max-rows", "1000", "--max-waiting-rows", "2000", "--max-body-bytes", "1000000"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = train(tmp_path_factory.mktemp("run"), 1, "training.max_steps=15")
    export(run, run / "model")
    return run


@pytest.fixture(scope="module")
def rows(run: Path) -> list[dict[str, Any]]:
    return prepared_rows(run, 1000)


@pytest.fixture(scope="module")
def service(run: Path) -> Iterator[Service]:
    with running_service(run / "model", LIMITS) as started:
        yield started


def post(service: Service, content: Any) -> tuple[int, Any]:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    status, answer = service.request("POST", "/predict", body)
    return status, json.loads(answer)


def test_a_thousand_rows_are_predicted_as_eval_predicts_them(service: Service, run: Path, rows: list[dict[str, Any]]) -> None:
    status, answer = post(service, {"rows": rows})
    assert status == 200
    np.testing.assert_allclose(answer["probabilities"], predictions_of_eval(run)[:1000], rtol=0, atol=1e-6)


def test_concurrent_clients_get_the_answers_to_their_own_rows(service: Service, run: Path, rows: list[dict[str, Any]]) -> None:
    load = send(service.port, questions_of(run / "model", rows, 3), clients=16, seconds=1)
    assert not load.lost
    assert len(load.seconds) > 16
    metrics = service.request("GET", "/metrics")[1].decode()
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(values["dlrm_batch_rows_sum"]) / float(values["dlrm_batch_rows_count"]) > 3  # requests were batched
    assert float(values['dlrm_requests_total{status="200"}']) >= len(load.seconds)
    assert float(values["dlrm_waiting_rows"]) == 0


WRONG = [
    (b"{", 400, "the body is not JSON"),
    (b"\xff", 400, "the body is not JSON"),
    (b'{"rows": [{"dense_0": Infinity}]}', 400, "Infinity is no JSON number"),
    (b"[" * 100_000, 400, "the body is not JSON"),
    ([], 422, 'the body must be an object with a list of rows: {"rows": [{...}]}'),
    ({"rows": [[]]}, 422, "row 0: []; allowed: an object with the features dense_0"),
    ({"rows": [{}] * 1001}, 413, "1001 rows; allowed: 1000 in a request"),
    (b" " * 1_000_001, 413, "the body has 1000001 bytes; allowed: 1000000; send fewer rows at a time"),
]


@pytest.mark.parametrize(("content", "expected", "reason"), WRONG)
def test_what_is_wrong_with_a_request_is_said(service: Service, content: Any, expected: int, reason: str) -> None:
    status, answer = post(service, content)
    assert status == expected
    assert reason in answer["detail"]


WRONG_VALUES = [
    ("dense_1", None, "row 0, feature dense_1: None; allowed: finite numbers"),
    ("dense_1", "1", "row 0, feature dense_1: '1'"),
    ("dense_1", 1e39, "row 0, feature dense_1: 1e+39; allowed: finite numbers of float32"),
    ("table_0", 7, "row 0, feature table_0: 7; allowed: a list of whole numbers from 0 to 49"),
    ("table_0", [50], "row 0, feature table_0: 50; allowed: whole numbers from 0 to 49"),
    ("table_0", [-1], "row 0, feature table_0: -1"),
    ("table_0", [True], "row 0, feature table_0: True"),
    ("city", "Oslo", "row 0: unknown feature 'city'='Oslo'; the model has: dense_0"),
]


@pytest.mark.parametrize(("name", "value", "reason"), WRONG_VALUES)
def test_the_feature_and_the_value_at_fault_are_named(
    service: Service, rows: list[dict[str, Any]], name: str, value: Any, reason: str
) -> None:
    status, answer = post(service, {"rows": [{**rows[0], name: value}]})
    assert status == 422
    assert reason in answer["detail"]


def exchange(service: Service, sent: bytes, *, ends: bool = False) -> bytes:
    """All that the service sends until it closes the connection; the client may say that it sends no more."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as client:
        client.sendall(sent)
        if ends:
            client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


def request(row: dict[str, Any], *headers: str) -> bytes:
    body = json.dumps({"rows": [row]})
    return "\r\n".join(["POST /predict HTTP/1.1", f"Content-Length: {len(body)}", *headers, "", body]).encode()


HTTP_2 = ("Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA", "Connection: Upgrade, HTTP2-Settings")


@pytest.mark.parametrize("offered", [HTTP_2, ("Upgrade: websocket", "Connection: Upgrade")], ids=["HTTP/2", "WebSocket"])
def test_a_request_that_offers_another_protocol_is_answered(
    service: Service, rows: list[dict[str, Any]], offered: tuple[str, ...]
) -> None:
    sent = request(rows[0], *offered) * 2 + request(rows[0], "Connection: close")
    assert exchange(service, sent).count(b"HTTP/1.1 200 OK") == 3
    assert b"400 Bad Request" in exchange(service, b"CONNECT a:80 HTTP/1.1\r\n\r\n")


def test_requests_of_a_client_that_sends_no_more_are_answered(service: Service, rows: list[dict[str, Any]]) -> None:
    assert exchange(service, request(rows[0]) * 3, ends=True).count(b"HTTP/1.1 200 OK") == 3
    assert exchange(service, request(rows[0])[:-1], ends=True) == b""


def test_bytes_that_are_no_http_behind_a_request_are_no_error_of_the_service(
    run: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    served = f'exec "$0" -m dlrm_fused.inference.http --model {run / "model"} "$@" 2> {tmp_path / "log"}'
    with running_command(["bash", "-c", served, sys.executable], ROOT) as service:
        assert exchange(service, request(rows[0]) + b"no HTTP\r\n\r\n").count(b"HTTP/1.1 400 Bad Request") == 1
        assert service.request("GET", "/health")[0] == 200
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_the_page_of_the_api_describes_the_features(service: Service) -> None:
    description = json.loads(service.request("GET", "/openapi.json")[1])
    body = description["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    features = body["properties"]["rows"]["items"]["properties"]
    assert features["table_1"] == {"description": "a list of whole numbers from 0 to 119"}
    assert service.request("GET", "/docs")[0] == 200
    assert json.loads(service.request("GET", "/health")[1]) == {"run": "run", "step": 15, "table_dtype": "fp32"}
    assert service.request("GET", "/nothing")[0] == 404
    assert service.request("GET", "/predict")[0] == 405


def test_under_load_trouble_gets_the_right_status_and_nothing_is_lost(run: Path, rows: list[dict[str, Any]]) -> None:
    command = [sys.executable, "-m", "dlrm_fused.inference.http", "--model", str(run / "model")]
    with running_command(command, ROOT) as service, ThreadPoolExecutor() as threads:
        asking = threads.submit(send, service.port, questions_of(run / "model", rows, 1), clients=16, seconds=3)
        incidents = cause(service, rows[0], repeats=3)
        load = asking.result()
        assert service.request("GET", "/health")[0] == 200
    assert {name for name, incident in incidents.items() if not incident.is_right} == set()
    assert len(load.seconds) > 16
    assert not load.lost


def test_requests_that_have_begun_are_answered_when_the_service_is_told_to_end(run: Path, rows: list[dict[str, Any]]) -> None:
    statuses: list[int] = []
    with running_service(run / "model") as service:
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
        body = json.dumps({"rows": rows[:10]}).encode()
        connection.putrequest("POST", "/predict")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:100])

        def finish_later() -> None:
            time.sleep(1)
            connection.send(body[100:])
            statuses.append(connection.getresponse().status)

        time.sleep(0.5)
        finishing = threading.Thread(target=finish_later)
        finishing.start()
    finishing.join()
    assert statuses == [200]


def test_hostile_clients_hold_up_nobody(run: Path, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """2,000 connections that ask nothing and 4 endless headers, for a process of 1,024 files; 60 s with HOSTILE_SECONDS=60."""
    seconds = float(os.environ.get("HOSTILE_SECONDS", "2"))
    questions = questions_of(run / "model", rows, 1)
    log = tmp_path / "log"
    served = f'ulimit -n 1024; exec "$0" -m dlrm_fused.inference.http --model {run / "model"} "$@" 2> {log}'
    began = time.monotonic()
    with running_command(["bash", "-c", served, sys.executable], ROOT) as service:
        memory = psutil.Process(service.process.pid).memory_info
        hostile = subprocess.Popen([sys.executable, "-m", "tests.inference.hostile", str(service.port), "2000", "4"], cwd=ROOT)
        try:
            send(service.port, questions, clients=1, seconds=1)  # until all of them are there
            before = memory().rss
            load = send(service.port, questions, clients=64, seconds=seconds)
            growth = memory().rss - before
            assert service.request("GET", "/health")[0] == 200  # a new connection
            while not all(closed := closed_by_reason(log)) and time.monotonic() < began + seconds + 60:
                time.sleep(0.5)
        finally:
            hostile.kill()
            hostile.wait()
        rate, slowest = len(load.seconds) / load.wall, max(load.seconds)
        print(f"{rate:.0f} requests/s, slowest {slowest:.2f} s, memory + {growth / 1e6:.0f} MB")
    assert not load.lost
    assert slowest < SLOWEST_SECONDS
    assert growth < 50e6
    assert min(closed) > 0, closed
    assert log.read_text().count("WARNING") <= 1 + (time.monotonic() - began) / 10


def closed_by_reason(log: Path) -> list[int]:
    """Connections beyond the limit, and those with long headers, as the service's log has them so far."""
    text = log.read_text()
    return [sum(map(int, re.findall(rf"(\d+) {reason}", text))) for reason in ("beyond the limit of 768", "with headers of")]


def test_a_large_body_is_read_beside_other_requests(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_on = []

    def parse(body: bytes, *_: object) -> Inputs:
        read_on.append((len(body), threading.current_thread() is threading.main_thread()))
        raise HTTPException(422, "")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bodies.pop(0)}

    monkeypatch.setattr("dlrm_fused.inference.http.service.parse", parse)
    (predict,) = (route.endpoint for route in build_service(load(run / "model"), Limits()).routes if route.path == "/predict")
    bodies = [bytes(1000), bytes(100_000)]
    for _ in range(2):
        assert asyncio.run(predict(Request({"type": "http"}, receive))).status_code == 422
    assert read_on == [(1000, True), (100_000, False)]


def inputs(rows: int) -> Inputs:
    return Inputs(np.arange(rows, dtype=np.float32)[:, None], (), np.zeros(rows, np.int64))


def test_rows_beyond_those_that_may_wait_are_refused_at_once_and_the_others_scored() -> None:
    scored: list[int] = []

    def score(batch: Inputs) -> np.ndarray:
        time.sleep(0.05)
        return batch.dense[:, 0]

    async def ask() -> list[Any]:
        batcher = Batcher(score, Limits(max_rows=4, max_waiting_rows=8), scored.append)
        answers = await asyncio.gather(*(batcher.score(inputs(3)) for _ in range(5)), return_exceptions=True)
        await batcher.close()
        return answers

    answers = asyncio.run(ask())
    assert [isinstance(answer, Overloaded) for answer in answers] == [False, False, True, True, True]
    assert [answer.tolist() for answer in answers[:2]] == [[0, 1, 2]] * 2
    assert scored == [3, 3]  # together they would have been more than max_rows


def test_an_overloaded_service_says_so_with_503(run: Path, rows: list[dict[str, Any]]) -> None:
    with running_service(run / "model", ["--max-rows", "1", "--max-waiting-rows", "1"]) as service:
        load = send(service.port, questions_of(run / "model", rows, 1), clients=16, seconds=1)
        assert post(service, {"rows": rows[:1]})[0] == 200
    assert load.seconds
    assert load.lost
    assert {lost.partition(":")[0] for lost in load.lost} == {"status 503"}
    assert "rows are waiting; try again later" in load.lost[0]


def test_an_error_of_the_model_is_that_of_its_batch_alone() -> None:
    def score(batch: Inputs) -> np.ndarray:
        if len(batch) == 2:
            raise RuntimeError("no such kernel")
        return batch.dense[:, 0]

    async def ask() -> list[Any]:
        batcher = Batcher(score, Limits(max_rows=2), lambda _: None)
        answers = await asyncio.gather(batcher.score(inputs(2)), batcher.score(inputs(1)), return_exceptions=True)
        await batcher.close()
        return answers

    failed, scored = asyncio.run(ask())
    assert isinstance(failed, RuntimeError)
    assert scored.tolist() == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "--model nowhere: no exported model there (manifest.json is missing); export.py writes one"),
        (["--model", "MODEL", "--max-rows", "0"], "--max-rows 0: allowed: 1 or more"),
        (["--model", "MODEL", "--threads", "0"], f"--threads 0: allowed: 1 to {os.cpu_count()}, the cores of this machine"),
        (["--model", "MODEL", "--threads", str(10**11)], f"allowed: 1 to {os.cpu_count()}, the cores of this machine"),
        (["--model", "MODEL", "--max-waiting-rows", "5"], "--max-waiting-rows 5: allowed: --max-rows 1024 or more"),
        (["--model", "DAMAGED", "--port", "0"], "; export the model again"),
        (["--model", "MODEL", "--port", "TAKEN"], "Address already in use; give an address of this machine and a free port"),
        (["--model", "MODEL", "--host", "no.such.host.invalid"], "; give an address of this machine and a free port"),
        (["--model", "MODEL", "--port", "70000"], "--port 70000: allowed: 0 to 65535"),
    ],
)
def test_a_service_that_cannot_start_says_why_in_one_line(
    run: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    shutil.copytree(run / "model", tmp_path / "damaged")
    tables = tmp_path / "damaged/tables.safetensors"
    tables.write_bytes(tables.read_bytes()[:-9])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {"MODEL": str(run / "model"), "DAMAGED": str(tmp_path / "damaged"), "TAKEN": str(taken.getsockname()[1])}
        done = run_alone(ROOT, be_service, [given.get(each, each) for each in arguments])
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("ERROR ")
    assert line.endswith(message)
