"""``train.py`` in processes of their own, as users start it: by torchrun with 2 ranks, or alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.distributed.killing import DEADLINE_SECONDS
from tests.distributed.launch import SMALL

ROOT = Path(__file__).parents[2]
_TWO_RANKS = ("--standalone", "--nproc-per-node=2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", *_TWO_RANKS)
_OURS = "import sys; from dlrm_fused.launcher import torchrun; sys.exit(torchrun(sys.argv[1:]))"
OUR_TORCHRUN = (sys.executable, "-c", _OURS, *_TWO_RANKS)
ALONE = (sys.executable,)
SECONDS_TO_END = 20.0


class Launched:
    """The processes of one start of the run ``folder/run``, with the config ``SMALL`` and these settings.

    Attributes:
        log: what it prints.
    """

    def __init__(self, folder: Path, launcher: Sequence[str], *settings: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config, self.log = folder / "small.yaml", folder / "log.txt"
        config.write_text(json.dumps(SMALL))
        command = [*launcher, "train.py", "--config", str(config), f"output_dir={folder}", *settings]
        with self.log.open("w") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            self.process = psutil.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def alive(self) -> bool:
        return self.process.poll() is None

    def ranks(self) -> list[psutil.Process]:
        return [p for p in self.process.children(recursive=True) if "RANK" in p.environ()]

    def kill(self) -> None:
        """SIGKILL to the launcher and its ranks."""
        tree = [self.process, *self.process.children(recursive=True)]
        for process in tree:
            process.kill()
        psutil.wait_procs(tree)

    def wait(self) -> int:
        """Wait for the end; returns the launcher's status."""
        return int(self.process.wait(DEADLINE_SECONDS))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal to the launcher; returns its status, when all processes have ended."""
        processes = [self.process, *self.process.children(recursive=True)]
        began = time.monotonic()
        self.process.send_signal(number)
        status = self.process.wait(SECONDS_TO_END)
        _, alive = psutil.wait_procs(processes, timeout=SECONDS_TO_END)
        assert not alive
        assert time.monotonic() - began < SECONDS_TO_END
        return int(status)
