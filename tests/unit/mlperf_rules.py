"""The rules by which MLPerf Training checks the log of a submission."""

from __future__ import annotations

from pathlib import Path

# Those that have DLRM-DCNv2 and take counts of samples: the first and the last.
VERSIONS = ("4.0.0", "6.0.0")


def complaints(log: Path, rules: str = "common", version: str = VERSIONS[-1]) -> list[str]:
    """Keys of a log that break rules, and other complaints in words.

    Args:
        rules: ``common`` checks all that the division and the benchmark in the log ask for; another file, such as
            ``closed_dlrm_dcnv2``, its own alone.
        version: that of the rules.
    """
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", version, quiet=False, werror=True)
    checker.check_file(str(log), f"training_{version}/{rules}.yaml")
    return [*checker.overwritable, *checker.not_overwritable]
