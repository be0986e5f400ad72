"""GPUs for which torch or FBGEMM has no kernels, or of a maker on which fused communication has not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dlrm_fused.doctor.architectures import runs_on
from dlrm_fused.doctor.facts import RankFacts
from dlrm_fused.doctor.findings.finding import Check, Finding, Level, group_by, hosts, numbers, with_gpus

# FBGEMM's wheels in the ordinary index have kernels for these, as cuobjdump lists them in that of release 1.8.0.
_OF_FBGEMM_WHEELS = ("sm_80", "sm_90a", "sm_100a")


def _torch_kernels(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for alike, kernels in _without_kernels(ranks, lambda facts: facts.torch_architectures):
        what = f"torch {alike[0].versions.get('torch')} has kernels for {kernels}, not for {_gpu(alike)}"
        advice = "install a build of torch for this GPU: https://pytorch.org/get-started has those of other CUDA releases"
        yield Finding("torch-kernels", Level.broken, numbers(alike), what, advice)


def _fbgemm_kernels(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for alike, kernels in _without_kernels(ranks, lambda facts: facts.fbgemm_architectures or _OF_FBGEMM_WHEELS):
        release, is_read = f"fbgemm-gpu {alike[0].versions.get('fbgemm-gpu')}", bool(alike[0].fbgemm_architectures)
        seen = f"{release} has" if is_read else f"{release} cannot be looked into; wheels of the ordinary index have"
        what = f"{seen} kernels for {kernels}, not for {_gpu(alike)}"
        advice = (
            f"build FBGEMM from source for {_architecture(alike[0])}, at the release that belongs to torch, or use another "
            "GPU; runtime.device=cpu works"
        )
        level = Level.broken if is_read else Level.note
        yield Finding("fbgemm-kernels", level, numbers(alike), what, advice if is_read else f"if it is one of them, {advice}")


def _without_kernels(
    ranks: Sequence[RankFacts], built_for: Callable[[RankFacts], Sequence[str]]
) -> Iterator[tuple[list[RankFacts], str]]:
    """Ranks with one kind of NVIDIA GPU that no architecture of ``built_for`` runs on, and those architectures."""
    on_nvidia = [facts for facts in with_gpus(ranks) if facts.hip is None]
    kinds = group_by(on_nvidia, lambda facts: (facts.gpu and (facts.gpu.name, facts.gpu.capability), tuple(built_for(facts))))
    for (gpu, architectures), alike in kinds.items():
        if gpu and architectures and not any(runs_on(architecture, gpu[1]) for architecture in architectures):
            yield alike, ", ".join(architectures)


def _rocm(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    alike = [facts for facts in with_gpus(ranks) if facts.hip]
    if alike:
        what = f"torch for ROCm {alike[0].hip} on {hosts(alike)}: fused communication has never run on AMD's GPUs"
        advice = "nothing: comm=fused runs TorchRec's path, as comm=baseline does, and that has not been tried there either"
        yield Finding("rocm", Level.note, numbers(alike), what, advice)


def _gpu(ranks: Sequence[RankFacts]) -> str:
    assert ranks[0].gpu is not None
    return f"{ranks[0].gpu.name} ({_architecture(ranks[0])}) on {hosts(ranks)}"


def _architecture(facts: RankFacts) -> str:
    assert facts.gpu is not None
    return "sm_{}{}".format(*facts.gpu.capability)


CHECKS: tuple[Check, ...] = (_torch_kernels, _fbgemm_kernels, _rocm)
