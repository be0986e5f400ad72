"""train.py for one of several runs: it imports what it needs, says that it is ready, and waits for its turn.

    python -m torch.distributed.run --standalone --nproc-per-node=2 -m benchmarks.training.train_in_turn FOLDER --config ...

Each rank makes the file ``ready_<rank>`` in the folder and begins when there is one named ``turn``. It ends when the folder has
gone.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import dlrm_fused.training.trainer
from dlrm_fused.cli import train_command

_SECONDS_BETWEEN_LOOKS = 0.1


def main() -> None:
    folder = Path(sys.argv.pop(1))
    (folder / f"ready_{os.environ['RANK']}").touch()
    while not (folder / "turn").exists():
        if not folder.exists():
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    train_command()


if __name__ == "__main__":
    assert dlrm_fused.training.trainer  # so that nothing is left to import
    main()
