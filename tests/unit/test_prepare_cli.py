"""The command data/prepare.py: one line for each error, and no set that looks complete but is not."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_fused.datasets.preparation import cli, criteo
from dlrm_fused.datasets.preparation.blocks import read_blocks
from dlrm_fused.datasets.preparation.writer import NpyAppender, new_output
from dlrm_fused.datasets.schema import PreparedInfo
from dlrm_fused.errors import DataError

SCRIPT = Path(__file__).parents[2] / "data/prepare.py"
LINE = "\t".join(["1", *["5"] * 13, *["0000002a"] * 26]) + "\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "train.txt").write_text(LINE * 100)
    return tmp_path / "train.txt"


def criteo_command(source: Path, output: Path, *options: str) -> list[str]:
    return ["criteo", "--input", str(source), "--output", str(output), "--workers", "1", *options]


def test_the_script_prepares_a_set(tmp_path: Path, source: Path) -> None:
    command = [sys.executable, str(SCRIPT), *criteo_command(source, tmp_path / "out", "--hash-rows", "10")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "86 train, 7 validation, 7 test samples, 26 sparse features" in done.stdout
    assert PreparedInfo.load(tmp_path / "out").origin["hash_rows"] == 10


def test_the_home_folder_is_known(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the ~ of --output=~/out as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["criteo", f"--input=~/{source.name}", "--output=~/out", "--hash-rows", "10"]) == 0
    assert (tmp_path / "out/dataset.json").is_file()


def test_preparation_does_not_load_torch() -> None:
    """It would need seconds, and hundreds of megabytes, for it."""
    code = "import sys; import dlrm_fused.datasets.preparation.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parents[1]).returncode == 0


def test_an_error_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(criteo_command(tmp_path / "nowhere", tmp_path / "out")) == 1
    assert capsys.readouterr().err == f"error: --input {tmp_path}/nowhere: no such file or folder\n"


def test_a_full_disk_is_told(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(NpyAppender, "append", full)
    assert cli.main(criteo_command(source, tmp_path / "out")) == 1
    assert f"error: --output {tmp_path}/out: the disk is full" in capsys.readouterr().err


def test_a_complete_set_is_replaced_only_when_told(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = criteo_command(source, tmp_path / "out")
    assert cli.main(command) == 0
    assert cli.main(command) == 1
    assert "holds a prepared set already; pass --overwrite" in capsys.readouterr().err
    assert cli.main([*command, "--overwrite", "--hash-rows", "7"]) == 0
    assert PreparedInfo.load(tmp_path / "out").schema.sparse_features[0].rows == 7


def test_an_interrupted_preparation_leaves_what_was_there_and_can_be_repeated(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = criteo_command(source, tmp_path / "out")
    assert cli.main([*command, "--held-out", "0.5"]) == 0
    with monkeypatch.context() as patch:

        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(criteo, "_encode_block", interrupt)
        assert cli.main([*command, "--overwrite"]) == 1
    assert "was complete; run the same command again" in capsys.readouterr().err
    assert PreparedInfo.load(tmp_path / "out").samples["train"] == 50
    assert cli.main([*command, "--overwrite"]) == 0
    assert not list(tmp_path.glob("out.*"))
    assert PreparedInfo.load(tmp_path / "out").samples["train"] == 86


def test_a_set_is_written_where_a_link_points(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk/set").mkdir(parents=True)
    (tmp_path / "out").symlink_to("disk/set")
    assert cli.main(criteo_command(source, tmp_path / "out")) == 0
    assert cli.main([*criteo_command(source, tmp_path / "out"), "--overwrite"]) == 0
    assert (tmp_path / "out").is_symlink()
    assert PreparedInfo.load(tmp_path / "disk/set").samples["train"] == 86
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert cli.main(criteo_command(source, Path("."))) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "empty", "out", source.name}
    assert PreparedInfo.load(tmp_path / "empty").samples["train"] == 86


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(DataError, match=r"holds other files, such as thesis\.tex"), new_output(tmp_path, overwrite):
            pass
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("options", [("--max-malformed", "2"), ("--hash-rows", "5", "--min-frequency", "5")])
def test_wrong_options_are_refused(tmp_path: Path, source: Path, options: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        cli.main(criteo_command(source, tmp_path / "out", *options))


@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize("history_length", [0, 5])
def test_exported_synthetic_samples_are_those_generated_on_the_fly(tmp_path: Path, history_length: int, jagged: bool) -> None:
    torch = pytest.importorskip("torch")
    from dlrm_fused.config import Split, SyntheticConfig
    from dlrm_fused.datasets.prepared import PreparedDataset
    from dlrm_fused.datasets.synthetic import SyntheticDataset

    sizes = ["--train-samples", "200", "--validation-samples", "20", "--test-samples", "30"]
    tables = ["--tables", "3", "--rows", "50", "60", "70", "--pooling", "1", "2", "1"]
    options = [
        "--history-length",
        str(history_length),
        "--history-items",
        "40",
        *(["--jagged", "--segments", "4"] if jagged else []),
    ]
    assert cli.main(["synthetic", "--output", str(tmp_path / "out"), "--seed", "3", *tables, *sizes, *options]) == 0
    settings = SyntheticConfig(13, 3, [50, 60, 70], [1, 2, 1], jagged, history_length=history_length, history_items=40)
    settings.segments = 4 if jagged else 1
    settings.train_samples, settings.validation_samples, settings.test_samples = 200, 20, 30
    generated, exported = SyntheticDataset(settings, 3, torch.device("cpu")), PreparedDataset(tmp_path / "out")
    for split in Split:
        rows = torch.arange(generated.samples(split))
        a, b = generated.read(split, rows), exported.read(split, rows)
        assert torch.equal(a.dense, b.dense)
        assert torch.equal(a.labels, b.labels)
        assert a.sparse.keys() == b.sparse.keys()
        assert torch.equal(a.sparse.lengths(), b.sparse.lengths())
        assert torch.equal(a.sparse.values().int(), b.sparse.values().int())
        assert (a.tokens is None) == (b.tokens is None) == (history_length == 0)
        if a.tokens is not None and b.tokens is not None:
            assert a.tokens.keys() == b.tokens.keys()
            assert torch.equal(a.tokens.lengths(), b.tokens.lengths())
            assert torch.equal(a.tokens.values(), b.tokens.values())
            assert torch.equal(a.history_lengths, b.history_lengths)
            assert torch.equal(a.token_times, b.token_times)


def test_more_synthetic_segments_than_dense_features_can_tell_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    wrong = ["--segments", "9", "--dense-features", "3"]
    assert cli.main(["synthetic", "--output", str(tmp_path / "out"), *wrong]) == 1
    assert "--segments=9: allowed: at most 8 with --dense-features=3" in capsys.readouterr().err


# What the preparations are made of


def test_appended_rows_read_back_as_one_array(tmp_path: Path) -> None:
    parts = [np.arange(6).reshape(3, 2), np.zeros((0, 2)), np.arange(4).reshape(2, 2)]
    with NpyAppender(tmp_path / "a.npy", np.int32, (2,)) as file:
        for part in parts:
            file.append(part)
    array = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert array.dtype == np.int32
    np.testing.assert_array_equal(array, np.concatenate(parts))


@pytest.mark.parametrize("text", [b"a\nbb\nccc\n", b"a\nbb\nccc", b"\n\n\n", b"a"])
@pytest.mark.parametrize("block_bytes", [1, 2, 3, 5, 100])
def test_blocks_hold_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, block_bytes: int) -> None:
    monkeypatch.setattr("dlrm_fused.datasets.preparation.blocks.BLOCK_BYTES", block_bytes)
    path = tmp_path / "file"
    path.write_bytes(text)
    blocks = list(read_blocks(path))
    parts = [block.data for block in blocks]
    assert b"".join(parts) == text
    assert all(part.endswith(b"\n") for part in parts[:-1])
    assert [block.first for block in blocks] == [b"".join(parts[:at]).count(b"\n") for at in range(len(parts))]
    assert sum(block.lines for block in blocks) == len(text.splitlines())
    assert sum(block.bytes_on_disk for block in blocks) == len(text)
    assert all(len(part) <= max(block_bytes + 3, len(text.split(b"\n")[0]) + 1) for part in parts)
