"""The start-up check of packages that belong together."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dlrm_fused.versions import VERSION_SETS, VersionError, check_version_set, check_versions, installed_version

GPU_MACHINE = {"torch": "2.11.0+cu130", "torchrec": "1.6.1", "fbgemm-gpu": "1.6.0", "triton": "3.6.0"}
CPU_MACHINE = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0+cpu", "triton": "3.7.1"}
NEWEST = {"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu": "1.9.0", "triton": "3.8.0"}
UNKNOWN = {"torch": "2.15.0", "torchrec": "1.10.1", "fbgemm-gpu": "1.10.0", "triton": "3.9.0"}


@pytest.mark.parametrize("installed", [GPU_MACHINE, CPU_MACHINE, NEWEST])
def test_sets_that_belong_together_pass(installed: dict[str, str | None]) -> None:
    assert check_version_set(installed) is None


@pytest.mark.parametrize("installed", [UNKNOWN, {**UNKNOWN, "torchrec": None}, {**UNKNOWN, "triton": "4.0"}])
def test_a_set_that_fits_by_its_numbers_is_warned_of_with_what_was_tested(
    installed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dlrm_fused.versions.installed_versions", lambda: installed)
    # test_compat.py has the names of the installed libraries.
    monkeypatch.setattr("dlrm_fused.versions.missing_names", list)
    with caplog.at_level(logging.WARNING, "dlrm_fused"):
        check_versions()
    (line,) = caplog.messages
    torchrec = installed["torchrec"] or "of unknown version"
    assert line.startswith(f"nobody has tested torch 2.15.0, torchrec {torchrec}, fbgemm-gpu 1.10.0, triton ")
    assert "tested are torch 2.11, torchrec 1.6" in line
    assert "or torch 2.14, torchrec 1.9, fbgemm-gpu 1.9, triton 3.8" in line


def test_an_untested_set_without_a_private_name_is_refused_by_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_fused.versions.installed_versions", lambda: UNKNOWN)
    monkeypatch.setattr("dlrm_fused.versions.missing_names", lambda: ["torch._foreach_copy_"])
    with pytest.raises(VersionError, match=r"^nobody has tested torch 2\.15\.0.*; missing: torch\._foreach_copy_\. "):
        check_versions()


def test_the_packages_of_this_environment_belong_together() -> None:
    check_versions()


@pytest.mark.parametrize(("package", "module"), [("torchrec", "torchrec"), ("fbgemm-gpu", "fbgemm_gpu")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    package: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(VersionError, match=rf"^not installed: {package}; .*`pip install --no-deps 'torchrec>=1.9,<1.10'`$"):
        check_versions()


@pytest.mark.parametrize(
    ("package", "version", "wanted"),
    [
        ("torchrec", "1.9.2", "1.8"),
        ("fbgemm-gpu", "1.6.0", "1.8"),
        ("triton", "3.8.0", "3.7"),
        ("torch", "2.15.0", "2.13"),  # which needs TorchRec 1.10
        ("torch", "2.10.0", "2.13"),
    ],
)
def test_the_wrong_package_is_named_with_both_versions(package: str, version: str, wanted: str) -> None:
    with pytest.raises(VersionError) as error:
        check_version_set({**CPU_MACHINE, package: version})
    assert str(error.value).startswith(f"{package} is {version}, wanted {wanted}.*. ")


def test_torch_decides_when_halves_of_two_sets_are_installed() -> None:
    with pytest.raises(VersionError, match=r"^torchrec is 1.8.0, wanted 1.6.\*; fbgemm-gpu is 1.8.0, wanted 1.6.\*\."):
        check_version_set({**GPU_MACHINE, "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"})


def test_a_package_without_a_version_is_not_checked() -> None:
    check_version_set({**GPU_MACHINE, "fbgemm-gpu": None})
    with pytest.raises(VersionError, match=r"^torch is 2.10.0, wanted 2.11.\*"):
        check_version_set({**GPU_MACHINE, "fbgemm-gpu": None, "torch": "2.10.0"})


def test_a_copied_module_without_metadata_is_asked_for_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "carried_copy.py").write_text('__version__ = "1.6.0"\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_version("carried_copy") == "1.6.0"
    assert installed_version("not_installed_at_all") is None


@pytest.mark.parametrize("known", VERSION_SETS, ids=lambda known: known["torch"])
def test_the_pins_of_each_stack_of_make_setup_are_a_tested_set(known: dict[str, str]) -> None:
    lines = (Path(__file__).parents[2] / "requirements" / "stacks" / f"{known['torch']}.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and line[0] != "#"]
    releases = {pin.name: str(pin.specifier).removeprefix("==") for pin in pins}
    assert releases.pop("fbgemm-gpu-cpu") == releases["fbgemm-gpu"]
    assert {name: ".".join(version.split(".")[:2]) for name, version in releases.items()} == known
