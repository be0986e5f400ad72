"""The files around the code agree with it and with each other."""

from __future__ import annotations

import ast
import io
import itertools
import os
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from setuptools import find_packages

import dlrm_fused
from dlrm_fused.config import load_config
from dlrm_fused.versions import VERSION_SETS
from tests.conftest import reason_to_skip

ROOT = Path(__file__).parents[2]
STACKS = [f"stacks/{path.name.removesuffix('.txt')}" for path in (ROOT / "requirements" / "stacks").iterdir()]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("data/*.md")])


def read_requirements(*names: str) -> list[Requirement]:
    lines = [line for name in names for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]


def read_project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("stack", STACKS)
def test_what_make_installs_is_within_the_ranges_of_the_package(device: str, stack: str) -> None:
    pins = {pin.name: pin for pin in read_requirements("base", device, stack)}
    project = read_project()
    for dependency in map(Requirement, [*project["dependencies"], *project["optional-dependencies"][device]]):
        (pin,) = pins[dependency.name].specifier
        assert pin.operator == "=="
        assert dependency.specifier.contains(pin.version), f"{pins[dependency.name]} is outside {dependency}"


def test_what_the_service_is_tested_with_is_within_the_ranges_of_its_extra() -> None:
    pins = {pin.name: pin for pin in read_requirements("serve")}
    for dependency in map(Requirement, read_project()["optional-dependencies"]["serve"]):
        (pin,) = pins[dependency.name].specifier
        assert dependency.specifier.contains(pin.version), f"{pins[dependency.name]} is outside {dependency}"
    assert pins["numpy"] in read_requirements("base")


def test_the_cpu_extra_has_what_torchrec_needs_but_fbgemm_gpu() -> None:
    """TorchRec is installed beside it without its dependencies: see dlrm_fused/versions.py."""
    project = read_project()
    there = {Requirement(line).name for line in [*project["dependencies"], *project["optional-dependencies"]["cpu"]]}
    needed = {Requirement(line).name for line in metadata.requires("torchrec") or [] if "extra ==" not in line}
    assert needed - there == {"fbgemm-gpu"}
    assert "fbgemm-gpu-cpu" in there


def test_every_folder_of_the_package_is_installed() -> None:
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "dlrm_fused").rglob("*.py")}
    assert set(find_packages(str(ROOT), include=include)) == {".".join(folder.parts) for folder in folders}


def test_everything_is_pinned() -> None:
    in_stacks = {pin.name for pin in read_requirements(STACKS[0])}
    for requirement in read_requirements("base", "cpu", "cuda", "serve", "dev", "mlperf", *STACKS):
        if not requirement.specifier and requirement.name in in_stacks:
            continue
        assert [specifier.operator for specifier in requirement.specifier] == ["=="], requirement


def test_make_train_runs_the_quickstart_on_two_ranks() -> None:
    # As `make test` itself runs under make, another one would say which folder it enters and leaves.
    dry_run = ["make", "--no-print-directory", "--dry-run", "--always-make", "train", "DEVICE=cpu", "NPROC=2"]
    commands = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert commands[-1].endswith("torchrun --standalone --nproc-per-node=2 train.py --config configs/quickstart.yaml")
    assert commands[-2].endswith("data/prepare.py movielens --source recbole --output data/movielens-100k")


def test_continuous_integration_runs_make_test_and_its_most_telling_part_on_the_newest_stack() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert f'newest="VENV=.venv-newest STACK={VERSION_SETS[-1]["torch"]}"' in lines
    assert lines[-1] == "make test-stack $newest"
    assert {"make --jobs=2 lint test-without-kernels", "make test-all-with-kernels", "make test-triton"} <= set(lines)


def test_what_is_tested_on_each_stack_is_there() -> None:
    dry_run = ["make", "--no-print-directory", "--dry-run", "test-stack", "DEVICE=cpu"]
    commands = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = re.findall(r"(?<=\s)tests/[\w/.]+", commands)
    assert len(paths) > 8
    assert all((ROOT / path).exists() for path in paths)


MARKS = ["slow", "exhaustive", "interpreted", "also_interpreted", "gpu"]


@pytest.mark.parametrize("target", ["test", "test-all"])
def test_whatever_its_marks_each_test_is_run_in_the_modes_that_they_name(target: str) -> None:
    dry_run = ["make", "--no-print-directory", "--dry-run", target, "DEVICE=cpu"]
    commands = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    runs = re.findall(r"^(TRITON_INTERPRET=1 )?\S+ -m pytest .*-m \"(.*)\"$", commands, re.MULTILINE)
    assert [bool(interpreted) for interpreted, _ in runs] == [False, True]
    for count in range(len(MARKS) + 1):
        for marks in itertools.combinations(MARKS, count):
            modes = [
                bool(interpreted)
                for interpreted, expression in runs
                if eval(expression, {mark: mark in marks for mark in MARKS})
            ]
            assert not any(reason_to_skip(set(marks), mode) for mode in modes)
            without, within = "interpreted" not in marks, "interpreted" in marks
            within |= target == "test-all" and "also_interpreted" in marks
            is_left_out = "exhaustive" in marks or (target == "test" and "slow" in marks)
            assert modes == ([] if is_left_out else [False] * without + [True] * within), marks


@pytest.mark.parametrize("config", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.name)
def test_every_config_is_valid(config: Path) -> None:
    assert load_config(config).training.max_steps > 0


def assert_valid_for_kubernetes(manifests: Iterable[Mapping[str, Any]]) -> None:
    """Unknown fields are errors."""
    for manifest, version in itertools.product(manifests, kubernetes_validate.utils.all_versions()):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_kubernetes_manifests_are_valid_in_every_version_whose_api_is_known() -> None:
    assert_valid_for_kubernetes(yaml.safe_load_all((ROOT / "launch/kubernetes.yaml").read_text()))


@pytest.mark.parametrize(
    ("right", "wrong", "error"),
    [
        ("clusterIP:", "clusterIp:", "'clusterIp' was unexpected"),
        ("backoffLimit:", "backofLimit:", "'backofLimit' was unexpected"),
        ("subdomain:", "subDomain:", "'subDomain' was unexpected"),
        ("completions: 2", "completions: two", "'two' is not of type"),
        ("apiVersion: batch/v1", "apiVersion: batch/v7", "batch/v7"),
    ],
)
def test_a_mistake_in_a_kubernetes_manifest_is_found(right: str, wrong: str, error: str) -> None:
    text = (ROOT / "launch/kubernetes.yaml").read_text()
    assert right in text
    with pytest.raises((kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError)) as raised:
        assert_valid_for_kubernetes(yaml.safe_load_all(text.replace(right, wrong)))
    assert error in raised.value.message


def test_kubernetes_pods_find_each_other_and_are_as_many_as_torchrun_waits_for() -> None:
    service, job = yaml.safe_load_all((ROOT / "launch/kubernetes.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]

    (container,) = pod["containers"]
    arguments = container["args"]
    (port,) = service["spec"]["ports"]
    assert f"--rdzv-endpoint={name}-0.{pod['subdomain']}:{port['port']}" in arguments
    assert f"--nnodes={job['spec']['completions']}" in arguments
    assert job["spec"]["parallelism"] == job["spec"]["completions"]

    assert container["command"] == ["torchrun"]
    config, *overrides = arguments[arguments.index("train.py") + 1 :]
    load_config(ROOT / config.removeprefix("--config="), overrides)

    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert container["image"].endswith(f":{dlrm_fused.__version__}")


def test_the_slurm_script_is_a_valid_shell_script() -> None:
    subprocess.run(["bash", "-n", ROOT / "launch/slurm.sbatch"], check=True)


@pytest.mark.parametrize("launch", ["launch/slurm.sbatch", "launch/kubernetes.yaml", "docs/many_nodes.md"])
def test_launches_on_many_nodes_let_a_lost_host_be_replaced(launch: str) -> None:
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in (ROOT / launch).read_text()


def test_images_are_pinned_and_run_without_root_and_without_data() -> None:
    _, *stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    names = []
    for stage in stages:
        name, base = stage.split()[2], stage.split()[0]
        names.append(name)
        assert re.fullmatch(r"(nvidia/cuda|python):\d+\.\d+\.\d+-\S+", base)
        assert re.findall(r"^USER (\S+)$", stage, re.MULTILINE)[-1] not in ("0", "root")
    assert names == ["serve", "train"]  # the last is what is built by default
    assert {"data/*/", "runs", ".venv*", ".git"} <= set((ROOT / ".dockerignore").read_text().split())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", document.read_text(), flags=re.DOTALL)  # x[i](y) in code is no link
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", prose)
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert not missing


FRAGMENT = re.compile(r"\s*(What|Of|That|The same|Whose|How|Where|Which|Those)\b")


def _sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_docstring_begins_with_a_fragment() -> None:
    """A docstring says what a function does or returns: "Return the bytes of one piece.", not "Of one piece."."""
    fragments = [
        f"{path.relative_to(ROOT)}:{node.value.lineno}: {node.value.value.splitlines()[0]}"
        for path in _sources("dlrm_fused", "benchmarks")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if FRAGMENT.match(node.value.value)
    ]
    assert not fragments, "\n".join(fragments)


def test_no_comment_begins_with_a_fragment() -> None:
    fragments = [
        f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}"
        for path in _sources("dlrm_fused", "benchmarks")
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.COMMENT and FRAGMENT.match(token.string[1:])
    ]
    assert not fragments, "\n".join(fragments)
