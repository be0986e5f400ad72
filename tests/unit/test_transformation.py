"""Saved transformations: ids and dense inputs, of whole columns or of single values, with NumPy alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dlrm_fused.datasets.table_format import TableFormat
from dlrm_fused.datasets.transformation import (
    _FEW_TEXTS,
    FIRST_HASHED,
    FIRST_KEPT,
    MISSING,
    UNSEEN,
    DenseKind,
    DenseTransform,
    HistoryColumns,
    IdEncoding,
    SparseColumn,
    Transformation,
    Values,
    Vocabulary,
    file_stem,
    ids_of,
    integer_keys,
    text_keys,
)
from dlrm_fused.errors import DataError
from tests.unit.tables import ids_of_values

ROOT = Path(__file__).parents[2]
TEXTS = ["red", "", "blue", "red ", "red\0", "\0", "eight888", "nine99999", "sixteen 16161616", "é", "日本", "x" * 1000]


def packed(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    data = [text.encode() for text in texts]
    return np.frombuffer(b"".join(data), np.uint8), np.cumsum([0, *map(len, data)], dtype=np.int64)


def text_encoding(texts: list[str]) -> IdEncoding:
    data, offsets = packed(texts)
    vocabulary = Vocabulary.of(text_keys(data, offsets), data, offsets)
    return IdEncoding(SparseColumn("color", Values.text), FIRST_KEPT + len(texts), vocabulary)


def integer_encoding(values: list[int]) -> IdEncoding:
    array = np.array(values, np.int64)
    vocabulary = Vocabulary.of(integer_keys(array), array, None)
    return IdEncoding(SparseColumn("user", Values.integer), FIRST_KEPT + len(values), vocabulary)


def test_different_texts_have_different_keys() -> None:
    assert len(set(text_keys(*packed(TEXTS)).tolist())) == len(TEXTS)


def test_the_key_of_a_text_does_not_depend_on_its_neighbours() -> None:
    together = text_keys(*packed(TEXTS))
    for text, key in zip(TEXTS, together, strict=True):
        assert text_keys(*packed([text])).tolist() == [key]


@pytest.mark.parametrize("count", [_FEW_TEXTS - 1, _FEW_TEXTS + 1])
def test_of_many_texts_some_may_be_long(count: int) -> None:
    texts = ["x" * (3 * number) for number in range(count)] + ["y" * 1001]
    assert text_keys(*packed(texts)).tolist() == [int(text_keys(*packed([text]))[0]) for text in texts]


def test_a_text_of_a_megabyte_does_not_hold_up_a_service() -> None:
    began = time.process_time()
    text_keys(*packed(["x" * 1_000_000]))
    assert time.process_time() - began < 2.0


def test_keys_never_change() -> None:
    """Saved vocabularies hold them."""
    assert text_keys(*packed(["red", "sixteen 16161616"])).tolist() == [-1172614157585611894, 1655411304046800116]
    assert integer_keys(np.array([0, -1, 2**62])).tolist() == [5095610196844313600, -3642288131749336026, 4144848552329095882]


def test_whole_numbers_from_2_to_the_63_on_have_keys_of_their_own() -> None:
    """Their 64 bits are those of negative ones."""
    encoding = IdEncoding(SparseColumn("user", Values.integer), rows=2**31 - 1)
    values = [2**63, 2**64 - 1, -(2**63), -1, 2**63 - 1, 1]
    assert len(set(ids_of_values(encoding, values))) == len(values)
    beyond = [2**63, 2**64 - 1, 2**63 + 5]
    vocabulary = Vocabulary.of(
        integer_keys(np.array(beyond, np.uint64).view(np.int64), np.ones(3, bool)), np.array(beyond, np.uint64), None
    )
    encoding = IdEncoding(SparseColumn("user", Values.integer), FIRST_KEPT + 3, vocabulary)
    assert ids_of_values(encoding, [*beyond, -(2**63), -1]) == [2, 3, 4, UNSEEN, UNSEEN]
    assert (vocabulary.keys_of_values()[vocabulary.ids - FIRST_KEPT] == vocabulary.keys).all()


def test_columns_hashed_together_have_the_ids_of_each_alone() -> None:
    columns = [
        (integer_encoding([5, 2**62]), [5, None, 2**62, 7]),
        (text_encoding(["red", "blue"]), ["blue", None, "green"]),
        (IdEncoding(SparseColumn("tags", Values.text), 50), ["red", "x" * 100, None]),
        (integer_encoding([]), []),
        (IdEncoding(SparseColumn("hash", Values.integer), 50), [2**64 - 1, -1, 5]),
    ]
    together = ids_of(columns)
    assert [ids.tolist() for ids in together] == [ids_of_values(encoding, values) for encoding, values in columns]


def test_values_are_numbered_in_the_order_given_and_others_are_unseen_or_missing() -> None:
    assert ids_of_values(integer_encoding([70, -5, 2**63 - 1]), [-5, 70, 2**63 - 1, 71, None, "70"]) == [
        FIRST_KEPT + 1,
        FIRST_KEPT,
        FIRST_KEPT + 2,
        UNSEEN,
        MISSING,
        FIRST_KEPT,
    ]
    assert ids_of_values(text_encoding(["red", "blue"]), ["blue", "", None, "green", "red"]) == [3, MISSING, MISSING, 1, 2]


def test_an_empty_vocabulary_knows_nothing() -> None:
    assert ids_of_values(integer_encoding([]), [1, None]) == [UNSEEN, MISSING]


def test_hashed_values_fill_all_rows_but_that_of_missing_ones() -> None:
    encoding = IdEncoding(SparseColumn("user", Values.integer), rows=10)
    ids = ids_of_values(encoding, [*range(1000), None])
    assert ids[-1] == MISSING
    assert sorted(set(ids[:-1])) == list(range(FIRST_HASHED, 10))
    assert np.bincount(ids)[1:].min() > 60


@pytest.mark.parametrize("kind", list(DenseKind))
def test_a_missing_number_becomes_0(kind: DenseKind) -> None:
    transform = DenseTransform("price", kind, 3.0, 2.0, (1.0, 2.0), (-1.0, 1.0))
    assert transform.apply(np.array([np.nan])).tolist() == [0.0]


def test_numbers_are_scaled() -> None:
    standardized = DenseTransform("price", DenseKind.standardize, mean=3.0, deviation=2.0)
    assert standardized.apply(np.array([3.0, 7.0, -1.0])).tolist() == [0.0, 2.0, -2.0]
    logarithmic = DenseTransform("price", DenseKind.log, mean=1.0, deviation=0.5)
    np.testing.assert_allclose(logarithmic.apply(np.array([np.e - 1, 0.0, 1 - np.e])), [0.0, -2.0, -4.0], atol=1e-6)
    quantile = DenseTransform("price", DenseKind.quantile, points=(0.0, 10.0, 20.0), positions=(-0.5, 0.0, 0.5))
    assert quantile.apply(np.array([-100.0, 0.0, 5.0, 15.0, 99.0])).tolist() == [-0.5, -0.5, -0.25, 0.25, 0.5]


def example() -> Transformation:
    dense = (
        DenseTransform("price", DenseKind.log, 0.1 + 0.2, 1 / 3),
        DenseTransform("age", DenseKind.quantile, points=(1.0, 2.0), positions=(-0.9, 0.9)),
    )
    hashed = IdEncoding(SparseColumn("tags", Values.text, True, "|"), 100)
    history = HistoryColumns("user", "time", ("user", "color"), 20)
    return Transformation(("clicked",), dense, (integer_encoding([5, 4]), text_encoding(["red", "é"]), hashed), history)


def test_a_saved_transformation_is_the_same(tmp_path: Path) -> None:
    saved = example()
    saved.save(tmp_path / "t")
    loaded = Transformation.load(tmp_path / "t")
    assert (loaded.labels, loaded.dense, loaded.history) == (saved.labels, saved.dense, saved.history)
    assert [(e.column, e.rows) for e in loaded.sparse] == [(e.column, e.rows) for e in saved.sparse]
    values = ["red", "é", "5", None, "4"]
    for number in (1, 2):
        assert ids_of_values(loaded.sparse[number], values) == ids_of_values(saved.sparse[number], values)
    user, color, _ = loaded.sparse
    assert user.vocabulary is not None
    assert user.vocabulary.values.tolist() == [5, 4]
    assert color.vocabulary is not None
    assert color.vocabulary.values.tobytes().decode() == "redé"


def test_a_saved_transformation_is_applied_without_the_libraries_that_learned_it(tmp_path: Path) -> None:
    example().save(tmp_path / "t")
    program = (
        "import sys; from pathlib import Path; from dlrm_fused.datasets.transformation import Transformation, ids_of; "
        "t = Transformation.load(Path(sys.argv[1])); print(ids_of([(t.sparse[1], ['é', 'x'])])[0].tolist(), "
        "sys.modules.keys() & {'torch', 'pyarrow', 'polars'})"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "t")], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[3, 1] set()\n", done.stderr


def test_a_damaged_transformation_is_told(tmp_path: Path) -> None:
    example().save(tmp_path / "t")
    path = tmp_path / "t/transformation.json"
    content = path.read_text()
    for wrong, expected in (
        (content[:100], r"t: damaged \(JSONDecodeError"),
        (
            json.dumps({**json.loads(content), "format_version": 9}),
            r"transformation.json: format version 9, this release reads 1 to 3",
        ),
        (content.replace('"rows": 4', '"rows": 5'), r"user has 2 keys for 5 rows\); prepare the set again"),
        (content.replace('"log"', '"sine"'), r"damaged \(KeyError: 'sine'\)"),
    ):
        path.write_text(wrong)
        with pytest.raises(DataError, match=expected):
            Transformation.load(tmp_path / "t")
    path.write_text(content)
    (tmp_path / "t/color.keys.npy").unlink()
    with pytest.raises(DataError, match=r"color\.keys\.npy: missing; 'data/prepare\.py table' writes it"):
        Transformation.load(tmp_path / "t")


def replaced(array: np.ndarray, at: int, value: int) -> np.ndarray:
    changed = array.copy()
    changed[at] = value
    return changed


FORGED = {
    "ids in another order": ("user.ids", lambda ids: ids[::-1], r"user\.keys\.npy: holds keys of other values"),
    "an id twice": (
        "user.ids",
        lambda ids: replaced(ids, 0, ids[1]),
        r"user\.ids\.npy: does not hold each id from 2 to 4 once",
    ),
    "an id beyond the rows": ("user.ids", lambda ids: replaced(ids, 0, 5), r"user\.ids\.npy: does not hold each id"),
    "a negative id": ("user.ids", lambda ids: replaced(ids, 0, -1), r"user\.ids\.npy: does not hold each id"),
    "the id of unseen values": ("color.ids", lambda ids: replaced(ids, 0, UNSEEN), r"color\.ids\.npy: does not hold each id"),
    "too few ids": ("user.ids", lambda ids: ids[:-1], r"user\.ids\.npy: does not hold each id"),
    "ids of another type": (
        "user.ids",
        lambda ids: ids.astype(float),
        r"user\.ids\.npy: holds float64 of shape \[3\], expected a",
    ),
    "ids of another shape": (
        "user.ids",
        lambda ids: ids[None],
        r"user\.ids\.npy: holds int32 of shape \[1, 3\], expected a row",
    ),
    "keys that do not ascend": ("user.keys", lambda keys: keys[[1, 0, 2]], r"user\.keys\.npy: does not hold keys in ascending"),
    "a key twice": ("user.keys", lambda keys: keys[[0, 0, 2]], r"user\.keys\.npy: (does not hold|holds keys of other)"),
    "another key": ("color.keys", lambda keys: replaced(keys, 1, keys[1] + 1), r"color\.keys\.npy: holds keys of other values"),
    "keys of zeros": ("color.keys", np.zeros_like, r"color\.keys\.npy: (does not hold|holds keys of other)"),
    "another value": ("user.values", lambda values: replaced(values, 2, 6), r"user\.keys\.npy: holds keys of other values"),
    "values of zeros": ("user.values", np.zeros_like, r"user\.keys\.npy: holds keys of other values"),
    "too many values": ("user.values", lambda values: np.append(values, 9), r"user\.values\.npy: holds 4 values for 3 keys"),
    "a byte of a text": ("color.values", lambda text: replaced(text, 1, 7), r"color\.keys\.npy: holds keys of other values"),
    "a text cut off": (
        "color.values",
        lambda text: text[:-1],
        r"color\.offsets\.npy: does not cut the 4 bytes of values into 2",
    ),
    "offsets that descend": ("color.offsets", lambda of: of[[0, 2, 1]], r"color\.offsets\.npy: does not cut the 5 bytes"),
    "offsets of other texts": ("color.offsets", lambda of: replaced(of, 1, 2), r"color\.keys\.npy: holds keys of other values"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_vocabulary_that_would_give_other_ids_is_refused(tmp_path: Path, name: str) -> None:
    part, change, expected = FORGED[name]
    encodings = (integer_encoding([5, 4, 9]), text_encoding(["red", "é"]))
    Transformation(("clicked",), (), encodings).save(tmp_path / "t")
    path = tmp_path / f"t/{part}.npy"
    np.save(path, change(np.load(path)))
    with pytest.raises(DataError, match=expected + ".*; prepare the set again") as raised:
        Transformation.load(tmp_path / "t")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"deviation": 0.0}, "price has mean 0.3.* and deviation 0.0"),
        ({"deviation": -1.0}, "and deviation -1.0"),
        ({"mean": float("nan")}, "price has mean nan"),
        ({"kind": "quantile"}, "price has no points"),
        ({"points": [2.0, 1.0], "positions": [0.0, 0.5]}, "price has points that do not ascend"),
        ({"points": [1.0, 2.0], "positions": [0.0]}, "price has points that do not ascend, or have no positions"),
        ({"points": [1.0], "positions": [7.0]}, "no positions from -1 to 1"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused(tmp_path: Path, changed: dict[str, object], expected: str) -> None:
    example().save(tmp_path / "t")
    path = tmp_path / "t/transformation.json"
    content = json.loads(path.read_text())
    content["dense"][0] |= changed
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"t: damaged \(ValueError: .*" + expected):
        Transformation.load(tmp_path / "t")


def test_names_of_files_are_those_of_their_features_but_for_what_files_cannot_have() -> None:
    earlier = ["user", "user.id", "user-id", "größe", "日本", "a..b", "-", "_x", "1"]
    assert [file_stem(name) for name in earlier] == earlier
    others = {
        "a b": "a%20b",
        "a/b": "a%2Fb",
        "a%2Fb": "a%252Fb",
        "..": "%2E.",
        ".x": "%2Ex",
        "C:": "C%3A",
        "e\u0301": "e%CC%81",
    }
    assert {name: file_stem(name) for name in others} == others


@pytest.mark.parametrize("kept", [0, 60, 130])
@pytest.mark.parametrize("part", ["color.keys", "color.ids", "color.values", "color.offsets", "user.values"])
def test_a_vocabulary_that_is_cut_off_is_named(tmp_path: Path, part: str, kept: int) -> None:
    example().save(tmp_path / "t")
    path = tmp_path / f"t/{part}.npy"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=rf"{part}\.npy: damaged or cut off \(.*; prepare the set again"):
        Transformation.load(tmp_path / "t")


class TestDigest:
    """By which a model knows the transformation of its training."""

    @staticmethod
    def of(transformation: Transformation, folder: Path) -> str:
        transformation.save(folder)
        return Transformation.digest_of(folder)

    def test_sums_of_the_same_values_in_another_order_make_no_difference(self, tmp_path: Path) -> None:
        feature = DenseTransform("price", DenseKind.standardize, 3.3365017267164045, 2.0)
        other = replace(feature, mean=3.336501726716405)
        moved = replace(feature, mean=3.34)
        first, second, third = (
            self.of(Transformation(("label",), (each,), ()), tmp_path / str(number))
            for number, each in enumerate((feature, other, moved))
        )
        assert first == second != third

    @pytest.mark.parametrize("is_hashed", [True, False])
    def test_an_encoding_makes_a_difference_to_texts_that_are_hashed(self, tmp_path: Path, is_hashed: bool) -> None:
        column = SparseColumn("name", Values.text)
        sparse = IdEncoding(column, 100) if is_hashed else text_encoding(["red"])
        plain = Transformation(("label",), (), (sparse,))
        latin = replace(plain, table_format=TableFormat(encoding="latin-1"))
        assert (self.of(plain, tmp_path / "plain") != self.of(latin, tmp_path / "latin")) is is_hashed
