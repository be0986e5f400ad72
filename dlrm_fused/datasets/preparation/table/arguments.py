"""The options of ``data/prepare.py table`` and ``apply``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm_fused.datasets.preparation.parallel import available_cores
from dlrm_fused.datasets.preparation.writer import SPLITS
from dlrm_fused.datasets.schema import PreparedInfo
from dlrm_fused.datasets.table_format import UNITS, TableFormat
from dlrm_fused.datasets.transformation import DenseKind, HistoryColumns
from dlrm_fused.errors import DataError

# Modules that read tables are imported when they are needed: other preparations do without them.
if TYPE_CHECKING:
    from dlrm_fused.datasets.preparation.table.prepare import SplitOptions, TableOptions

_KINDS = ", ".join(kind.name for kind in DenseKind)


def add_table(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument(
        "--label", required=True, metavar="COLUMN,...", help="columns of labels, 0 or 1, the most important first"
    )
    parser.add_argument(
        "--sample-weight", default="", metavar="COLUMN", help="what each row counts in the loss and the metrics: 0 or more"
    )
    parser.add_argument(
        "--dense",
        default="",
        metavar="COLUMN[:KIND],...",
        help=f"columns of numbers, each with what becomes of it: {_KINDS} (default standardize)",
    )
    parser.add_argument("--sparse", default="", metavar="COLUMN,...", help="columns of ids: whole numbers, text, lists of them")
    parser.add_argument(
        "--separated",
        nargs="+",
        default=[],
        metavar="COLUMN=SEPARATOR",
        help="text columns of --sparse that hold several values, such as 'genres=|'",
    )
    parser.add_argument(
        "--min-frequency",
        type=int,
        default=3,
        metavar="N",
        help="values that occur less often in training rows share one id (default 3)",
    )
    parser.add_argument(
        "--hash-buckets",
        default="",
        metavar="COLUMN=ROWS,...",
        help="hash the values of these columns into tables of so many rows, instead of numbering the frequent ones",
    )
    parser.add_argument(
        "--null-values",
        default="",
        metavar="VALUE,...",
        help=r"values of dense and sparse columns that stand for missing ones, beside empty ones: '\N,NULL,NA'",
    )
    parser.add_argument(
        "--history",
        nargs=3,
        metavar=("USER", "TIME", "ITEM[,COLUMN...]"),
        help="give each row the earlier rows of its user as tokens, made of these sparse columns; splits by TIME",
    )
    parser.add_argument("--history-length", type=int, default=50, metavar="N", help="of those the last N (default 50)")
    parser.add_argument("--describe", action="store_true", help="print what the table holds and a config; write nothing")
    _add_split(parser, held_out=0.2)
    parser.set_defaults(prepare=_prepare)


def add_apply(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transformation", type=Path, required=True, help="folder of a prepared set of 'table'")
    _add_common(parser)
    _add_split(parser, held_out=None)
    parser.set_defaults(prepare=_apply)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        nargs="+",
        default=[],
        metavar="FILE",
        help="Parquet, Arrow IPC, CSV or TSV files (the last two also .gz or .zst), or patterns in quotes: 'logs/*.parquet'",
    )
    for split in SPLITS:
        parser.add_argument(
            f"--{split}", nargs="+", default=[], metavar="FILE", help=f"instead of --input, files whose rows are for {split}"
        )
    _add_format(parser)
    parser.add_argument("--output", type=Path, required=True, help="folder for the prepared set")
    parser.add_argument("--overwrite", action="store_true", help="replace a prepared set that is there already")
    parser.add_argument("--workers", type=int, default=available_cores(), help="threads (default: one for each core)")


def _add_format(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("how files are written (of 'apply', by default as those of the transformation)")
    text.add_argument("--delimiter", metavar="CHARACTER", help="between fields of text, such as ';', '|' or '\\t' for a tab")
    text.add_argument("--encoding", metavar="NAME", help="of text, such as latin-1, cp1252 or utf-16 (default utf-8)")
    text.add_argument("--quote", metavar="CHARACTER", help="encloses fields of text; '' if nothing does (default '\"')")
    text.add_argument("--escape", metavar="CHARACTER", help="takes the meaning from the next character of text, such as '\\'")
    text.add_argument(
        "--trim", action=argparse.BooleanOptionalAction, default=None, help="leave out blanks around names and fields of text"
    )
    text.add_argument("--column-names", metavar="COLUMN,...", help="of text without a header; '' if there is one")
    text.add_argument("--rename", nargs="+", metavar="OLD=NEW", help="other names for columns, such as 'user id=user'")
    text.add_argument(
        "--time-format",
        metavar="FORMAT",
        help=f"of the column of times: {', '.join(UNITS)} since 1970, or a format of Python's strptime, such as '%%Y%%m%%d'",
    )


def _add_split(parser: argparse.ArgumentParser, held_out: float | None) -> None:
    default = "all rows are for the test" if held_out is None else f"default {held_out}"
    parser.add_argument(
        "--held-out",
        type=float,
        metavar="SHARE",
        help=f"share of the rows for validation and test, half of it each ({default})",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the random split (default 1)")
    parser.add_argument("--split-by-time", default="", metavar="COLUMN", help="hold out the newest rows, not random ones")
    parser.add_argument(
        "--split-by-column", default="", metavar="COLUMN", help="a column says train, validation or test for each row"
    )


def _prepare(args: argparse.Namespace) -> PreparedInfo | str:
    from dlrm_fused.datasets.preparation.table.prepare import describe_table, prepare_table

    options = _table_options(args)
    return describe_table(options) if args.describe else prepare_table(options)


def _apply(args: argparse.Namespace) -> PreparedInfo:
    from dlrm_fused.datasets.preparation.table.prepare import ApplyOptions, apply_transformation

    return apply_transformation(
        ApplyOptions(
            transformation=args.transformation,
            input=tuple(args.input),
            output=args.output,
            split=_split_options(args) if _is_split(args) else None,
            workers=args.workers,
            overwrite=args.overwrite,
            table_format=_table_format(args),
            split_files=_split_files(args, needed=()),
        )
    )


def _table_options(args: argparse.Namespace) -> TableOptions:
    from dlrm_fused.datasets.preparation.table.prepare import TableOptions

    history = None
    if args.history:
        user, time, items = args.history
        history = HistoryColumns(user, time, tuple(_names(items)), args.history_length)
    return TableOptions(
        input=tuple(args.input),
        output=args.output,
        labels=tuple(_names(args.label)),
        dense=_dense(args.dense),
        sparse=tuple(_names(args.sparse)),
        separated=_pairs("--separated", args.separated),
        min_frequency=args.min_frequency,
        hash_buckets={
            name: _whole("--hash-buckets", name, count)
            for name, count in _pairs("--hash-buckets", _names(args.hash_buckets)).items()
        },
        split=_split_options(args),
        history=history,
        sample_weight=args.sample_weight.strip(),
        null_values=tuple(_names(args.null_values)),
        workers=args.workers,
        overwrite=args.overwrite,
        table_format=TableFormat(**_table_format(args)),
        split_files=_split_files(args, needed=SPLITS),
    )


def _table_format(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that are given, by their names in :class:`TableFormat`."""
    given = {
        "delimiter": "\t" if args.delimiter == "\\t" else args.delimiter,
        "encoding": args.encoding,
        "quote": args.quote,
        "escape": args.escape,
        "trim": args.trim,
        "column_names": None if args.column_names is None else tuple(_names(args.column_names)),
        "renamed": None if args.rename is None else _renamed(args.rename),
        "time": args.time_format,
    }
    return {name: value for name, value in given.items() if value is not None}


def _split_files(args: argparse.Namespace, needed: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Files of each split that is given.

    Args:
        needed: splits that must be, if there is one.
    """
    files = {split: tuple(getattr(args, split)) for split in SPLITS if getattr(args, split)}
    options = ", ".join(f"--{split}" for split in files)
    missing = [f"--{split}" for split in needed if split not in files]
    if not files and not args.input:
        raise DataError("--input: no file given; name files, or those of each split with --train, --validation and --test")
    if files and args.input:
        raise DataError(f"--input {args.input[0]}: not together with {options}; keep one of them")
    if files and missing:
        raise DataError(f"{options}: without {', '.join(missing)}; give files for each split, or all of them as --input")
    if files and _is_split(args):
        raise DataError(f"{options}: files are split already; leave out --held-out, --split-by-time and --split-by-column")
    return files


def _is_split(args: argparse.Namespace) -> bool:
    return bool(args.held_out is not None or args.split_by_time or args.split_by_column)


def _split_options(args: argparse.Namespace) -> SplitOptions:
    from dlrm_fused.datasets.preparation.table.prepare import SplitOptions

    held_out = SplitOptions().held_out if args.held_out is None else args.held_out
    return SplitOptions(held_out, args.seed, args.split_by_time, args.split_by_column)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _dense(text: str) -> dict[str, DenseKind]:
    dense: dict[str, DenseKind] = {}
    for entry in _names(text):
        name, _, kind = entry.partition(":")
        if kind and kind not in DenseKind.__members__:
            raise DataError(
                f"--dense {entry}: {kind} is unknown; allowed after the colon: {_KINDS}; if that is the column's name, give it "
                f"another one with --rename '{entry}={name}'"
            )
        if name in dense:
            raise DataError(f"--dense {name}: is twice in --dense; keep one of them")
        dense[name] = DenseKind[kind] if kind else DenseKind.standardize
    return dense


def _renamed(entries: Sequence[str]) -> dict[str, str]:
    pairs = [entry.rpartition("=") for entry in entries]
    for (old, _, new), entry in zip(pairs, entries, strict=True):
        if not old or not new:
            raise DataError(f"--rename {entry}: allowed: the name in the file, =, and the new name")
    return {old: new for old, _, new in pairs}


def _pairs(option: str, entries: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for entry in entries:
        name, _, value = entry.partition("=")
        if not name or not value:
            raise DataError(f"{option} {entry}: allowed: a column, =, and its value; --help shows how")
        pairs[name] = value
    return pairs


def _whole(option: str, name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise DataError(f"{option} {name}={text}: allowed: a whole number of rows") from None
