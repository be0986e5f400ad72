"""The command line of the service, ``python -m dlrm_fused.inference.http``, and what starts it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from dlrm_fused.errors import ConfigError, UserError
from dlrm_fused.inference.http.limits import Limits
from dlrm_fused.paths import user_path

DESCRIPTION = """\
Serve an exported model: ``python -m dlrm_fused.inference.http --model model [--port 8000]``.

POST /predict takes {"rows": [{...}]}; /docs describes the features, /health says that the model is there, /metrics is for
Prometheus. SIGTERM ends the service after the requests that it has begun.
"""
_GRACE_SECONDS = 30  # for requests that have begun when the service is told to end
_BURSTS = 6  # one of so many parts of all connections is accepted at once, before the first of them can be closed


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to end; return the exit code: 1, with one line on stderr, for an error that a user can mend."""
    parser = argparse.ArgumentParser(
        "python -m dlrm_fused.inference.http", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, type=user_path, help="folder that export.py wrote")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)")
    parser.add_argument("--port", default=8000, type=int, help="default: 8000")
    parser.add_argument("--threads", default=1, type=int, help="that compute a batch, of torch (default: 1)")
    for name, default, text in (
        ("max-body-bytes", Limits.max_body_bytes, "of a request; larger ones get 413"),
        ("max-rows", Limits.max_rows, "of a request, and of a batch of requests"),
        ("max-waiting-rows", Limits.max_waiting_rows, "of all requests that wait; those beyond get 503"),
    ):
        parser.add_argument(f"--{name}", default=default, type=int, help=f"{text} (default: {default})")
    parsed = parser.parse_args(arguments)
    limits = Limits(parsed.max_body_bytes, parsed.max_rows, parsed.max_waiting_rows)
    try:
        _serve(parsed.model, parsed.host, parsed.port, parsed.threads, limits)
    except UserError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return 1
    return 0


def _serve(model: Path, host: str, port: int, threads: int, limits: Limits) -> None:
    limits.check()
    cores = os.cpu_count() or 1
    if not 1 <= threads <= cores:
        raise ConfigError(f"--threads {threads}: allowed: 1 to {cores}, the cores of this machine")
    if not (model / "manifest.json").is_file():
        raise ConfigError(f"--model {model}: no exported model there (manifest.json is missing); export.py writes one")
    try:
        import uvicorn

        from dlrm_fused.inference.http.connections import Door, LimitedProtocol, bind, most_connections

        sockets = bind(host, port)  # before the work of loading
        from dlrm_fused.inference.http.service import build_service
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; the service needs: pip install '.[serve]'") from None
    import torch

    from dlrm_fused.inference.export.loader import load

    # Threads of one batch wait for each other, busily: on cores that others use too, several are slower than one.
    torch.set_num_threads(threads)
    try:
        loaded = load(model)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model {model}: {error}") from None
    most = most_connections()
    config = uvicorn.Config(
        build_service(loaded, limits),
        http=cast(Any, partial(LimitedProtocol, Door(most))),
        ws="none",
        backlog=most // _BURSTS,
        access_log=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    logging.getLogger("uvicorn.error").info("Serving %s at %s, port %d", model, host, sockets[0].getsockname()[1])
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets)


if __name__ == "__main__":
    sys.exit(main())
