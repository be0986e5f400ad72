"""Commands to copy for a user's next steps after a run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import dlrm_fused
from dlrm_fused.config import Comm, Config

_CHECKOUT = Path(dlrm_fused.__file__).parents[1]


def next_steps(config: Config, world_size: int) -> str:
    """Three lines: see the run in TensorBoard, evaluate it, make it again with the other way of communication.

    The last is left out for ranks on several hosts, which one command does not start.
    """
    run = str(config.run_dir)
    shares = {"model.tensor_parallel": config.model.tensor_parallel, "model.experts.parallel": config.model.experts.parallel}
    alone = [f"{key}=1" for key, ranks in shares.items() if ranks > 1]  # the evaluation is that of one process
    commands = [
        ("see it", [_program("tensorboard"), "--logdir", str(config.run_dir.parent)]),
        ("evaluate it", [*_script("eval"), "--run", run, *alone]),
    ]
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == world_size:
        other = Comm.baseline if config.comm is Comm.fused else Comm.fused
        train = [_program("torchrun"), "--standalone", f"--nproc-per-node={world_size}", *_script("train", launched=True)]
        settings = ["--config", f"{run}/config.yaml", f"name={config.name}_{other.name}", f"comm={other.name}"]
        settings += ["comm_strict=false"] if config.comm_strict and other is Comm.baseline else []
        commands.append((f"compare with comm={other.name}", [*train, *settings]))
    return "\n".join(f"  {purpose}: {shlex.join(command)}" for purpose, command in commands)


def _program(name: str) -> str:
    """Return a program of this environment, which may not be on the PATH."""
    path = Path(sys.executable).parent / name
    found = shutil.which(name)
    return name if found and Path(found) == path else _shortened(path)


def _script(name: str, launched: bool = False) -> list[str]:
    """train.py or eval.py of this checkout; an installed package has the command dlrm-fused."""
    script = _CHECKOUT / f"{name}.py"
    if script.is_file():
        return [_shortened(script)] if launched else [_program("python"), _shortened(script)]
    # torchrun takes a program for a Python script, and an option after it for its own.
    return ["--no-python", _program("dlrm-fused"), name] if launched else [_program("dlrm-fused"), name]


def _shortened(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
