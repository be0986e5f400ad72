"""A Slurm cluster on one machine: a controller and compute nodes, each a host of its own.

Needs Debian's slurmctld, slurmd, slurm-client and munge beside what hosts need; tests that use it are marked ``@needs_slurm``.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import psutil
import pytest

from benchmarks.common.network import Hosts

_CONTROLLER = 0
# Binds a task to one core, as some sites do. Times are short: a node is down after SlurmdTimeout seconds without a sign of
# life, and a job that starts again waits for cred_expire seconds.
_CONFIG = """\
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdTimeout=10
KillWait=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
TaskPluginParam=Cores,AutoBind=Cores
SelectType=select/cons_tres
SchedulerParameters=bf_interval=1
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName={nodes} CPUs={cores} Gres=gpu:{gpus}
PartitionName=all Nodes=ALL Default=YES
"""
_GPUS = 8
_START_SECONDS = 60
_COMMAND_SECONDS = 60


class Slurm:
    """Context manager of a cluster whose nodes are idle; on exit daemons and jobs are killed and all files removed.

    Each node has all cores of the machine, and GPUs that Slurm counts but no program can use.
    """

    def __init__(self, nodes: int) -> None:
        self._hosts = Hosts(1 + nodes)
        self._daemons: list[subprocess.Popen[str]] = []
        self.nodes = self._hosts.names[1:]

    def __enter__(self) -> Slurm:
        with ExitStack() as resources:
            # Not a test's folder: the paths of Unix sockets are short.
            self.folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
            self.folder.chmod(0o755)  # munged wants its socket to be within everyone's reach
            resources.callback(self._wait_for_daemons)
            resources.enter_context(self._hosts)
            self._write_settings()
            self._start_daemons()
            wait_until(self._is_idle, _START_SECONDS, self.daemon_logs)
            self._resources = resources.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._resources.close()

    def submit(self, folder: Path, *arguments: str | Path, env: Mapping[str, str] | None = None) -> Job:
        """``sbatch arguments``, in ``folder``."""
        return Job(self, int(self.run("sbatch", "--parsable", *arguments, cwd=folder, env=env)))

    def processes(self) -> list[psutil.Process]:
        """All that live: daemons, and what they and we have started."""
        ours = str(self._settings)
        return [process for process in psutil.process_iter() if _environment(process).get("SLURM_CONF") == ours]

    def take_down(self, node: str) -> None:
        """What an operator does."""
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=maintenance")

    def cut_power(self, node: str) -> None:
        self._hosts.kill(self._hosts.names.index(node))

    def run(self, *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """Run a command of Slurm as a user does; returns what it prints."""
        process = self._popen(_CONTROLLER, *command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        output, errors = process.communicate(timeout=_COMMAND_SECONDS)
        assert process.returncode == 0, f"{' '.join(map(str, command))}: {errors}"
        return str(output)

    def daemon_logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def _is_idle(self) -> bool:
        return set(self.run("sinfo", "--noheader", "--format=%T").split()) == {"idle"}

    def _write_settings(self) -> None:
        self._settings = self.folder / "slurm.conf"
        self._settings.write_text(
            _CONFIG.format(
                controller=self._hosts.names[_CONTROLLER],
                folder=self.folder,
                nodes=",".join(self.nodes),
                cores=os.cpu_count(),
                gpus=_GPUS,
            )
        )
        # Beside it, where the daemons look for them. slurmd finds out by itself which cgroups there are, but not on our hosts.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{_GPUS - 1}]\n")
        for gpu in range(_GPUS):
            os.mknod(self.folder / f"gpu{gpu}", stat.S_IFCHR, os.stat(os.devnull).st_rdev)

    def _start_daemons(self) -> None:
        # One munged for all: it is reached by its path.
        key, socket = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "seed")]
        self._start_daemon(_CONTROLLER, "munged", "--foreground", f"--socket={socket}", *files)
        wait_until(socket.exists, _START_SECONDS, self.daemon_logs)
        self._start_daemon(_CONTROLLER, "slurmctld", "-D")
        for host, node in enumerate(self.nodes, start=1):
            (self.folder / node).mkdir()
            self._start_daemon(host, "slurmd", "-D")

    def _start_daemon(self, host: int, *command: str) -> None:
        with (self.folder / f"{command[0]}_{self._hosts.names[host]}.log").open("w") as log:
            self._daemons.append(self._popen(host, *command, stdout=log, stderr=subprocess.STDOUT))

    def _wait_for_daemons(self) -> None:
        for daemon in self._daemons:
            daemon.wait(_START_SECONDS)

    def _popen(
        self, host: int, *command: str | Path, env: Mapping[str, str] | None = None, **options: object
    ) -> subprocess.Popen[str]:
        return self._hosts.popen(host, command, {"SLURM_CONF": str(self._settings), **(env or {})}, **options)


class Job:
    """A job that was submitted."""

    def __init__(self, slurm: Slurm, number: int) -> None:
        self._slurm = slurm
        self._number = number

    @property
    def nodes(self) -> list[str]:
        """In their order; those that the job had, once it has ended."""
        return self._record()["NodeList"].split(",")

    @property
    def restarts(self) -> int:
        return int(self._record()["Restarts"])

    def log(self) -> str:
        path = Path(self._record()["StdOut"])
        return path.read_text() if path.exists() else ""

    def signal(self, name: str) -> None:
        """Send a signal to the processes of the job's steps, as ``--signal`` does before the time limit."""
        self._slurm.run("scancel", f"--signal={name}", str(self._number))

    def wait_for(self, state: str, seconds: float) -> None:
        self.wait_until(lambda: self._record()["JobState"] == state, seconds)

    def wait_until(self, happens: Callable[[], bool], seconds: float) -> None:
        wait_until(happens, seconds, lambda: f"{self._record()}\n{self.log()}\n{self._slurm.daemon_logs()}")

    def _record(self) -> dict[str, str]:
        shown = self._slurm.run("scontrol", "--oneliner", "show", "job", str(self._number))
        return dict(re.findall(r"(\S+?)=(\S*)", shown))


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return {}


def wait_until(happens: Callable[[], bool], seconds: float, explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, f"did not happen in {seconds:.0f} s\n{explain()}"
        time.sleep(0.2)


_missing = [tool for tool in ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol") if shutil.which(tool) is None]
needs_slurm = pytest.mark.skipif(
    bool(_missing), reason=f"no command {', '.join(_missing)}: apt-get install munge slurmctld slurmd slurm-client"
)
