"""Write MovieLens ratings as one Parquet file, as logs of one's own would be: ``--output logs/ratings.parquet``.

A row for each rating, with what the release tells of its user and movie: user, item, timestamp, year, genres (a list), age,
gender, occupation, and the label ``liked``, 1 for a rating of 4 or higher. docs/from_logs_to_service.md begins with it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, installed or not

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from dlrm_fused.datasets.preparation.malformed import MalformedLines
from dlrm_fused.datasets.preparation.movielens import read_source
from dlrm_fused.datasets.preparation.movielens_releases import Release
from dlrm_fused.errors import DataError
from dlrm_fused.paths import user_path

_LIKED = 4


def ratings_table(release: Release) -> pa.Table:
    """Ratings joined with users and movies, in file order; null or empty where the release does not say."""
    ratings = release.ratings.join(release.users, on="user", how="left", maintain_order="left")
    ratings = ratings.join(release.movies, on="movie", how="left", maintain_order="left")
    columns = ratings.select(
        (pl.col("rating") >= _LIKED).cast(pl.Int8).alias("liked"),
        "user",
        pl.col("movie").alias("item"),
        "timestamp",
        "year",
        pl.col("genres").fill_null([]),
        "age",
        pl.col("gender", "occupation").fill_null(""),
    ).to_arrow(compat_level=pl.CompatLevel.oldest())
    types = {"timestamp": pa.timestamp("s"), "genres": pa.list_(pa.string()), "gender": pa.string(), "occupation": pa.string()}
    return columns.cast(pa.schema([(field.name, types.get(field.name, field.type)) for field in columns.schema]))


def main() -> int:
    """Returns the exit code, 1 for an error, whose message it prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source", default="recbole", help="folder of a release; default: the 100K one, out of PyPI's recbole package"
    )
    parser.add_argument("--output", type=user_path, required=True, help="the Parquet file; its folder is made")
    args = parser.parse_args()
    malformed = MalformedLines(max_share=1)  # they are left out and told; data/prepare.py movielens refuses many
    try:
        table = ratings_table(read_source(args.source, malformed))
        args.output.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, args.output)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: --output {args.output}: {error.strerror or error}", file=sys.stderr)
        return 1
    malformed.print_report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
