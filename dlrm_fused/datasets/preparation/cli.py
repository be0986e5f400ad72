"""The command line of data/prepare.py and of ``dlrm-fused prepare``."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from dlrm_fused.config import SyntheticConfig
from dlrm_fused.datasets.one_class import splits_of_one_class
from dlrm_fused.datasets.parallel import available_cores
from dlrm_fused.datasets.preparation.criteo import CriteoOptions, prepare_criteo
from dlrm_fused.datasets.preparation.movielens import MovieLensOptions, SplitBy, prepare_movielens
from dlrm_fused.datasets.preparation.parquet import ROW_GROUP_ROWS, write_parquet
from dlrm_fused.datasets.preparation.table.arguments import add_apply, add_table, options_of, whole
from dlrm_fused.datasets.schema import SCHEMA_FILE, PreparedInfo
from dlrm_fused.errors import UserError
from dlrm_fused.paths import user_path


def main(arguments: Sequence[str] | None = None, program: str = "data/prepare.py") -> int:
    """Run one preparation; returns the exit code, 1 for an error, whose message it prints."""
    args = argparse.Namespace(output=None)
    try:
        _parser(program).parse_args(arguments, args)
        done: PreparedInfo | str = args.prepare(args)
    except UserError as error:
        return _fail(str(error))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return _fail(f"--output {args.output}: the disk is full; free some space there and run the same command again")
        return _fail(f"{error.filename or args.output}: {error.strerror or error}")
    except KeyboardInterrupt:
        return _fail(f"interrupted before --output {args.output} was complete; run the same command again")
    print(done if isinstance(done, str) else _summary(args.output, done))
    return 0


def _summary(output: Path, info: PreparedInfo) -> str:
    samples = ", ".join(f"{count:,} {split}" for split, count in info.samples.items())
    tokens = f", {len(info.schema.token_features)} token features" if info.schema.token_features else ""
    lines = [f"{output}: {samples} samples, {len(info.schema.sparse_features)} sparse features{tokens}"]
    if "times" in info.origin:
        lines.append(f"times: {info.origin['times']}")
    if (output / SCHEMA_FILE).is_file():  # Parquet files have none
        lines += [f"warning: {line}" for line in splits_of_one_class(output, info)]
    return "\n".join(lines)


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description="Prepare a data set for training.")
    commands = parser.add_subparsers(required=True, metavar="{table,apply,movielens,criteo,synthetic,parquet}")
    add_table(commands.add_parser("table", help="tables of your own: Parquet, Arrow IPC, CSV, TSV"))
    add_apply(commands.add_parser("apply", help="other rows, with the transformation of a prepared table"))
    _add_movielens(commands)
    _add_criteo(commands)
    _add_synthetic(commands)
    _add_parquet(commands)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=user_path, required=True, help="folder for the prepared set")
    parser.add_argument("--overwrite", action="store_true", help="replace a prepared set that is there already")


def _max_malformed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-malformed", type=_share, default=0.001, metavar="SHARE", help="largest share of malformed lines (default 0.001)"
    )


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed: 0 to 1")
    return value


def _add_movielens(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("movielens", help="MovieLens 100K, 1M, 10M, 20M, 25M")
    parser.add_argument(
        "--source", required=True, help="folder of a release, or 'recbole' to download the 100K one from PyPI's recbole package"
    )
    _common(parser)
    parser.add_argument("--like-rating", type=float, default=4.0, help="label 1 for a rating of at least this (default 4)")
    parser.add_argument("--split", choices=[s.name for s in SplitBy], default="random", help="80/10/10 at random or by time")
    parser.add_argument("--seed", type=whole("--seed", 0), default=1, help="of the random split (default 1)")
    parser.add_argument(
        "--history",
        type=int,
        default=0,
        metavar="N",
        help="with --split time: give each sample up to N earlier ratings of its user as tokens (default 0: none)",
    )
    _max_malformed(parser)
    parser.set_defaults(
        prepare=lambda args: prepare_movielens(replace(options_of(MovieLensOptions, args), split=SplitBy[args.split]))
    )


def _add_criteo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    defaults = CriteoOptions(Path(), Path())
    parser = commands.add_parser("criteo", help="Criteo Kaggle train.txt and Criteo 1TB day_0 ... day_23")
    parser.add_argument(
        "--input", type=user_path, required=True, help="file, or folder with train.txt or day_0, day_1, ...; plain or .gz"
    )
    _common(parser)
    ids = parser.add_mutually_exclusive_group()
    ids.add_argument("--hash-rows", type=int, default=0, metavar="N", help="take ids modulo N")
    ids.add_argument(
        "--min-frequency",
        type=int,
        default=defaults.min_frequency,
        metavar="N",
        help=f"number the ids that occur N times or more in training (default, with N = {defaults.min_frequency})",
    )
    parser.add_argument(
        "--held-out",
        type=float,
        default=defaults.held_out,
        metavar="SHARE",
        help="last part of a single file, halved into validation and test (default 1/7); of several files the last is",
    )
    parser.add_argument("--torchrec", action="store_true", help="give the tensors of TorchRec's BinaryCriteoUtils")
    parser.add_argument("--workers", type=int, default=available_cores(), help="threads (default: one for each core)")
    _max_malformed(parser)
    parser.set_defaults(prepare=lambda args: prepare_criteo(options_of(CriteoOptions, args)))


def _add_synthetic(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    defaults = SyntheticConfig()
    parser = commands.add_parser("synthetic", help="samples that data.source=synthetic would generate on the fly")
    _common(parser)
    for name, help_text in {
        "rows": "rows of the tables: one number, or one for each",
        "pooling": "ids for each sample of a table: one number, or one for each",
    }.items():
        parser.add_argument(f"--{name}", type=int, nargs="+", default=getattr(defaults, name), metavar="N", help=help_text)
    parser.add_argument("--jagged", action="store_true", help="1 to POOLING ids for each sample instead of exactly POOLING")
    for field in fields(SyntheticConfig):
        of_type = {"int": int, "float": float}.get(str(field.type))
        if of_type is not None:
            default, name = getattr(defaults, field.name), f"--{field.name.replace('_', '-')}"
            parser.add_argument(name, type=of_type, default=default, metavar="N", help=f"default {default}")
    parser.add_argument("--seed", type=whole("--seed", 0), default=1, help="decides every sample (default 1)")
    parser.set_defaults(prepare=_prepare_synthetic)


def _add_parquet(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("parquet", help="a prepared set as Parquet files, for data.source=parquet")
    parser.add_argument("--input", type=user_path, required=True, help="folder of a prepared set")
    parser.add_argument("--output", type=user_path, required=True, help="new folder for the files of each split")
    parser.add_argument(
        "--row-group-rows",
        type=whole("--row-group-rows", 1),
        default=ROW_GROUP_ROWS,
        metavar="N",
        help=f"default {ROW_GROUP_ROWS}",
    )
    parser.set_defaults(prepare=lambda args: write_parquet(args.input, args.output, args.row_group_rows))


def _prepare_synthetic(args: argparse.Namespace) -> PreparedInfo:
    # Imported here, since it needs torch, which takes seconds to load.
    from dlrm_fused.datasets.preparation.synthetic import prepare_synthetic

    return prepare_synthetic(args.output, options_of(SyntheticConfig, args), args.seed, args.overwrite)
