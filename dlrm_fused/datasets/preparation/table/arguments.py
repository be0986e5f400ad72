"""The options of ``data/prepare.py table`` and ``apply``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

from dlrm_fused.datasets.parallel import available_cores
from dlrm_fused.datasets.preparation.writer import SPLITS
from dlrm_fused.datasets.schema import PreparedInfo
from dlrm_fused.datasets.table_format import UNITS, TableFormat
from dlrm_fused.datasets.transformation import DenseKind, HistoryColumns
from dlrm_fused.errors import DataError
from dlrm_fused.paths import user_path

_KINDS = ", ".join(kind.name for kind in DenseKind)


def options_of(kind: type[Any], args: argparse.Namespace) -> Any:
    """Return options of this dataclass, each with the value of the argument of its name."""
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind)})


def whole(option: str, least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from ``least`` on; the largest has 31 bits, as that of ``seed`` in a config."""

    def read(text: str) -> int:
        if not text.strip().removeprefix("-").isdecimal() or not least <= int(text) < 2**31:
            raise DataError(f"{option}={text}: allowed: {least} to {2**31 - 1}")
        return int(text)

    return read


def add_table(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)

    def add(option: str, convert: Any, metavar: str, help_text: str, default: Any = "", **settings: Any) -> None:
        parser.add_argument(option, type=convert, default=default, metavar=metavar, help=help_text, **settings)

    add("--label", _names, "COLUMN,...", "columns of labels, 0 or 1, the most important first", dest="labels", required=True)
    add("--sample-weight", str.strip, "COLUMN", "what each row counts in the loss and the metrics: 0 or more")
    add(
        "--dense",
        _dense,
        "COLUMN[:KIND],...",
        f"columns of numbers, each with what becomes of it: {_KINDS} (default standardize)",
    )
    add("--sparse", _names, "COLUMN,...", "columns of ids: whole numbers, text, lists of them")
    add(
        "--separated",
        str,
        "COLUMN=SEPARATOR",
        "text columns of --sparse that hold several values, such as 'genres=|'",
        default=[],
        nargs="+",
    )
    add("--min-frequency", int, "N", "values that occur less often in training rows share one id (default 3)", default=3)
    add(
        "--hash-buckets",
        _buckets,
        "COLUMN=ROWS,...",
        "hash the values of these columns into tables of so many rows, instead of numbering the frequent ones",
    )
    add(
        "--null-values",
        _names,
        "VALUE,...",
        r"values of dense and sparse columns that stand for missing ones, beside empty ones: '\N,NULL,NA'",
    )
    parser.add_argument(
        "--history",
        nargs=3,
        metavar=("USER", "TIME", "ITEM[,COLUMN...]"),
        help="give each row the earlier rows of its user as tokens, made of these sparse columns; splits by TIME",
    )
    add("--history-length", whole("--history-length", 1), "N", "of those the last N (default 50)", default=50)
    parser.add_argument("--describe", action="store_true", help="print what the table holds and a config; write nothing")
    _add_split(parser, held_out=0.2)
    parser.set_defaults(prepare=_prepare)


def add_apply(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transformation", type=user_path, required=True, help="folder of a prepared set of 'table'")
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
    parser.add_argument("--output", type=user_path, required=True, help="folder for the prepared set")
    parser.add_argument("--overwrite", action="store_true", help="replace a prepared set that is there already")
    parser.add_argument("--workers", type=int, default=available_cores(), help="threads (default: one for each core)")


def _add_format(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("how files are written (of 'apply', by default as those of the transformation)")
    text.add_argument(
        "--delimiter",
        type=_character,
        metavar="CHARACTER",
        help="between fields of text, such as ';', '|' or '\\t' for a tab",
    )
    text.add_argument("--encoding", metavar="NAME", help="of text, such as latin-1, cp1252 or utf-16 (default utf-8)")
    text.add_argument("--quote", metavar="CHARACTER", help="encloses fields of text; '' if nothing does (default '\"')")
    text.add_argument("--escape", metavar="CHARACTER", help="takes the meaning from the next character of text, such as '\\'")
    text.add_argument(
        "--trim", action=argparse.BooleanOptionalAction, default=None, help="leave out blanks around names and fields of text"
    )
    text.add_argument("--column-names", type=_names, metavar="COLUMN,...", help="of text without a header; '' if there is one")
    text.add_argument(
        "--rename",
        action=_Renames,
        dest="renamed",
        nargs="+",
        metavar="OLD=NEW",
        help="other names for columns, such as 'user id=user'",
    )
    text.add_argument(
        "--time-format",
        dest="time",
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
    parser.add_argument("--seed", type=whole("--seed", 0), default=1, help="of the random split (default 1)")
    parser.add_argument("--split-by-time", default="", metavar="COLUMN", help="hold out the newest rows, not random ones")
    parser.add_argument(
        "--split-by-column", default="", metavar="COLUMN", help="a column says train, validation or test for each row"
    )


def _prepare(args: argparse.Namespace) -> PreparedInfo | str:
    # Imported here and below, since other preparations do without the modules that read tables.
    from dlrm_fused.datasets.preparation.table.prepare import TableOptions, describe_table, prepare_table

    if args.history:
        user, time, items = args.history
        args.history = HistoryColumns(user, time, _names(items), args.history_length)
    args.separated = {name: _character(separator) for name, separator in _pairs("--separated", args.separated).items()}
    args.split_files = _split_files(args, needed=SPLITS)
    args.split = _split_options(args)
    args.table_format = TableFormat(**_table_format(args))
    options = options_of(TableOptions, args)
    return describe_table(options) if args.describe else prepare_table(options)


def _apply(args: argparse.Namespace) -> PreparedInfo:
    from dlrm_fused.datasets.preparation.table.prepare import ApplyOptions, apply_transformation

    args.split_files = _split_files(args, needed=())
    args.split = _split_options(args) if _is_split(args) else None
    args.table_format = _table_format(args)
    return apply_transformation(options_of(ApplyOptions, args))


def _character(given: str) -> str:
    """Return a character that separates, of which a tab may be written as in Python."""
    return "\t" if given == r"\t" else given


def _table_format(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that are given, by their names in :class:`TableFormat`."""
    given = {name: getattr(args, name) for name in (field.name for field in fields(TableFormat))}
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


def _split_options(args: argparse.Namespace) -> Any:
    from dlrm_fused.datasets.preparation.table.prepare import SplitOptions

    held_out = SplitOptions.held_out if args.held_out is None else args.held_out
    return SplitOptions(held_out, args.seed, args.split_by_time, args.split_by_column)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


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


def _buckets(text: str) -> dict[str, int]:
    pairs = _pairs("--hash-buckets", _names(text))
    for name, count in pairs.items():
        if not count.strip().removeprefix("-").isdecimal():
            raise DataError(f"--hash-buckets {name}={count}: allowed: a whole number of rows")
    return {name: int(count) for name, count in pairs.items()}


def _pairs(option: str, entries: Iterable[str]) -> dict[str, str]:
    """Return the value of each column that ``COLUMN=VALUE ...`` names."""
    pairs: dict[str, str] = {}
    for entry in entries:
        name, _, value = entry.partition("=")
        if not name or not value:
            raise DataError(f"{option} {entry}: allowed: a column, =, and its value; --help shows how")
        if pairs.setdefault(name, value) != value:
            raise DataError(f"{option} {entry}: {name} has {pairs[name]} already; keep one of them")
    return pairs


class _Renames(argparse.Action):
    """Reads ``OLD=NEW ...``, where the old name may have an equals sign."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        pairs = [entry.rpartition("=") for entry in values]
        for (old, _, new), entry in zip(pairs, values, strict=True):
            if not old or not new:
                raise DataError(f"--rename {entry}: allowed: the name in the file, =, and the new name")
        namespace.renamed = {old: new for old, _, new in pairs}
