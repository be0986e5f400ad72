"""A description of a table's columns, for people to read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from dlrm_fused.datasets.one_class import one_class
from dlrm_fused.datasets.preparation.table.columns import NULL_VALUES
from dlrm_fused.datasets.preparation.table.learning import check_kept, check_survey
from dlrm_fused.datasets.preparation.table.proposed_config import proposed_config
from dlrm_fused.datasets.preparation.table.splits import TRAIN, TimeSplit
from dlrm_fused.datasets.preparation.table.survey import Survey
from dlrm_fused.datasets.preparation.table.writing import rows_of_tokens
from dlrm_fused.datasets.preparation.writer import SPLITS
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature
from dlrm_fused.datasets.transformation import CONSTANT, FIRST_KEPT, HistoryColumns, SparseColumn
from dlrm_fused.errors import DataError


def describe(
    survey: Survey, min_frequency: int, hash_buckets: Mapping[str, int], history: HistoryColumns | None, output: Path
) -> str:
    """Findings about training rows, and the proposed config, or why the table cannot be prepared like this.

    Args:
        survey: with the values of all sparse columns counted.
    """
    kept: dict[str, int] = {}
    for name, counter in survey.counters.items():
        kept[name] = len(counter.frequent(min_frequency))
    sparse = _sparse(survey, kept, min_frequency, hash_buckets)
    found = "\n".join([*_rows(survey), "", *_dense(survey), *sparse, *suspects(survey)])
    try:
        check_survey(survey)
        for name in kept.keys() - hash_buckets.keys():
            check_kept(name, kept[name], survey.counters[name].distinct, min_frequency)
    except DataError as error:
        return f"{found}\n\nIt cannot be prepared like this: {error}"
    rows = {name: hash_buckets.get(name, FIRST_KEPT + count) for name, count in kept.items()}
    schema = DatasetSchema(
        tuple(survey.question.dense) or (CONSTANT,),
        tuple(SparseFeature(name, count) for name, count in rows.items()),
        tuple(itertools.starmap(SparseFeature, rows_of_tokens(history, rows).items())) if history else (),
        history.length if history else 0,
    )
    return f"{found}\n\nProposed config:\n\n{proposed_config(schema, int(survey.rows[TRAIN]), output)}"


def suspects(survey: Survey) -> list[str]:
    """Return a line for each value that may stand for a missing one but has an id, or has a quote that was not read; and for
    each column whose values others may spell otherwise."""
    escaped = [
        f"warning: --sparse {name}: {value[:60]!r} has a backslash before a quote; if the files escape quotes so, give "
        "--escape '\\'"
        for name, value in sorted(survey.escaped.items())
    ]
    spelled = [
        f"warning: --sparse {name}: all values are spelled like {value!r}; as a number or truth of Parquet or JSON each would "
        "be another text, such as '7' or 'true', and unseen: send texts, or write whole numbers and true or false"
        for name, value in sorted(survey.spelled.items())
        if value
    ]
    bracketed = [
        f"warning: --sparse {name}: each text such as {value[:60]!r} is one value; if they are lists, write them as lists to "
        "Parquet, or as 'a|b' with --separated"
        for name, value in sorted(survey.bracketed.items())
        if value
    ]
    return [*escaped, *spelled, *bracketed] + [
        f"warning: --sparse {name}: {value!r} is a value like others, {count:,} times in training rows; if it stands for a "
        f"missing one, add it to {NULL_VALUES}"
        for (name, value), count in sorted(survey.suspects.items())
    ]


def _rows(survey: Survey) -> list[str]:
    total, question = int(survey.rows.sum()), survey.question
    splits = ", ".join(f"{count:,} {name}" for name, count in zip(SPLITS, survey.rows, strict=True))
    positives = survey.positives.sum(axis=1).tolist()
    labels = [
        f"label {label}: 1 in {count:,} rows, {count / total:.2%}"
        for label, count in zip(question.labels, positives, strict=True)
    ]
    weight = [f"sample weight {question.sample_weight}: {survey.weight.sum() / total:g} on average"]
    split = question.split
    times = [f"time {split.column}: {split.found}"] if isinstance(split, TimeSplit) else []
    one_classes = [
        f"warning: {one_class(name, label, int(count > 0), int(rows))}"
        for label, counts in zip(question.labels, survey.positives, strict=True)
        for name, count, rows in zip(SPLITS, counts, survey.rows, strict=True)
        if rows and count in (0, rows)
    ]
    return [f"{total:,} rows: {splits}", *times, *one_classes, *labels, *(weight if question.sample_weight else [])]


def _dense(survey: Survey) -> list[str]:
    lines = []
    for name, moments in survey.moments.items():
        missing = 1 - moments.count / max(int(survey.rows[TRAIN]), 1)
        low, high = survey.extremes[name]
        known = f"from {low:g} to {high:g}" if moments.count else "no value"
        lines.append(f"dense {name}: {known}, {missing:.2%} missing, {survey.question.dense[name].name}")
    return lines


def _sparse(survey: Survey, kept: Mapping[str, int], min_frequency: int, hash_buckets: Mapping[str, int]) -> list[str]:
    lines = []
    for column in survey.question.sparse:
        lengths = survey.lengths[column.name]
        distinct = survey.counters[column.name].distinct
        missing = lengths.missing / max(lengths.values, 1)
        line = f"sparse {column.name}: {_type(column)}, {distinct:,} different, {missing:.2%} missing"
        if column.is_list:
            mean = lengths.values / max(int(survey.rows[TRAIN]), 1)
            line += f", {lengths.shortest} to {lengths.longest} values a row, {mean:.2f} on average"
        if column.name in hash_buckets:
            line += f", hashed into {hash_buckets[column.name]:,} rows"
        else:
            line += f", {kept[column.name]:,} of them {min_frequency} times or more"
        lines.append(line)
    return lines


def _type(column: SparseColumn) -> str:
    return f"{'list of ' if column.is_list else ''}{column.values.name}"
