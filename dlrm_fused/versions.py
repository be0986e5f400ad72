"""The releases that belong together, and what of them, and of compilers, is installed.

TorchRec and FBGEMM-GPU call private functions of PyTorch and of each other, and FBGEMM-GPU is compiled against one
release of PyTorch: a set that does not belong together fails late, with a missing operator or a changed signature.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Mapping
from importlib import metadata

from dlrm_fused.compat.names import missing_names
from dlrm_fused.errors import UserError

logger = logging.getLogger("dlrm_fused")

# Releases that are tested together, as major.minor; patch releases and local tags (+cu130) may differ.
VERSION_SETS = (
    {"torch": "2.11", "torchrec": "1.6", "fbgemm-gpu": "1.6", "triton": "3.6"},
    {"torch": "2.13", "torchrec": "1.8", "fbgemm-gpu": "1.8", "triton": "3.7"},
    {"torch": "2.14", "torchrec": "1.9", "fbgemm-gpu": "1.9", "triton": "3.8"},
)

# Other names of packages: as published, and as imported.
_DISTRIBUTIONS = {"fbgemm-gpu": ("fbgemm-gpu", "fbgemm-gpu-cpu")}
_MODULES = {"fbgemm-gpu": "fbgemm_gpu"}

# `[cpu]` cannot bring TorchRec, whose metadata asks for fbgemm-gpu, the CUDA package, in place of fbgemm-gpu-cpu.
_INSTALL = (
    "`make setup` installs all that is needed, and so does `pip install .[cuda]`, or `pip install .[cpu]` followed by "
    "`pip install --no-deps 'torchrec>=1.9,<1.10'`"
)


class VersionError(UserError):
    """The installed packages do not belong together."""


def check_versions() -> None:
    """Check that the installed torch, torchrec, fbgemm-gpu and triton belong together; warn if nobody has tested this set.

    Raises:
        VersionError: one of them is missing, or see :func:`check_version_set`; or nobody has tested the set, and it lacks
            private names that this package needs.
    """
    untested = check_installed(installed_versions())
    if untested is None:
        return
    missing = missing_names()
    if missing:
        raise VersionError(f"{untested}; missing: {', '.join(missing)}. Install a tested set with `make setup`")
    if os.environ.get("RANK", "0") == "0":
        logger.warning(untested)


def installed_versions() -> dict[str, str | None]:
    """Return the installed packages of ``VERSION_SETS``, with versions as :func:`installed_version` gives them."""
    found = [package for package in VERSION_SETS[0] if importlib.util.find_spec(_MODULES.get(package, package)) is not None]
    return {package: installed_version(package) for package in found}


def check_installed(installed: Mapping[str, str | None]) -> str | None:
    """Check versions by package as :func:`check_version_set` does, perhaps those of another host.

    Raises:
        VersionError: a package is missing; or see :func:`check_version_set`.
    """
    missing = [package for package in VERSION_SETS[0] if package not in installed]
    if missing:
        raise VersionError(f"not installed: {', '.join(missing)}; {_INSTALL}")
    return check_version_set(installed)


def check_version_set(installed: Mapping[str, str | None]) -> str | None:
    """Compare versions, by package, with the one of ``VERSION_SETS`` that most of them belong to.

    Among sets that fit equally well, torch decides. A version of None is not compared: a copy of a package that was
    built or carried by hand may not state one. A release of torch that is in no set passes with those of TorchRec and FBGEMM
    that were made for it.

    Returns:
        A warning if nobody has tested these releases with this package.

    Raises:
        VersionError: names each package that does not belong to that set, its version, and the one wanted.
    """
    releases = {package: _release(version) for package, version in installed.items() if version is not None}
    if _is_set_of_another_torch(releases):
        listed = ", ".join(f"{package} {installed.get(package) or 'of unknown version'}" for package in VERSION_SETS[0])
        return f"nobody has tested {listed} with this package; tested are {_tested()}"

    def fit(wanted: Mapping[str, str]) -> tuple[int, bool]:
        matches = [package for package, release in releases.items() if wanted[package] == release]
        return len(matches), "torch" in matches

    wanted = max(VERSION_SETS, key=fit)
    wrong = [
        f"{package} is {installed[package]}, wanted {wanted[package]}.*"
        for package, release in releases.items()
        if release != wanted[package]
    ]
    if wrong:
        raise VersionError(f"{'; '.join(wrong)}. These belong together: {_tested()}; `make setup` installs the newest")
    return None


def _is_set_of_another_torch(releases: Mapping[str, str]) -> bool:
    """Return whether torch is 2.X of no known set, X above the first's, and TorchRec and FBGEMM are 1.(X - 5)."""
    major, minor = (int(part) for part in releases.get("torch", "0.0").split("."))
    is_known = any(known["torch"] == releases.get("torch") for known in VERSION_SETS)
    theirs = {releases.get(package, f"1.{minor - 5}") for package in ("torchrec", "fbgemm-gpu")}
    first = int(VERSION_SETS[0]["torch"].split(".")[1])
    return major == 2 and minor > first and not is_known and theirs == {f"1.{minor - 5}"}


def _tested() -> str:
    return " or ".join(", ".join(f"{package} {release}" for package, release in known.items()) for known in VERSION_SETS)


def installed_version(package: str) -> str | None:
    """Return the version by the package's metadata, else by its module's ``__version__``; None where neither states one."""
    for distribution in _DISTRIBUTIONS.get(package, (package,)):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    try:
        return getattr(importlib.import_module(_MODULES.get(package, package)), "__version__", None)
    except ImportError:
        return None


def _release(version: str) -> str:
    """``2.13.0+cpu`` -> ``2.13``"""
    return ".".join(version.split("+")[0].split(".")[:2])


def has_c_compiler() -> bool:
    """Return whether Triton, and so torch.compile on GPUs, finds a compiler for the launchers of its kernels."""
    return "CC" in os.environ or any(shutil.which(name) for name in ("gcc", "clang", "cc"))
