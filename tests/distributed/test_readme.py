"""What README.md shows to each of its three readers runs as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from dlrm_fused.sharding.sharded_module import FusedShardedEmbeddingBagCollection
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import run_ranks, run_script, summary

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "README.md").read_text().split("## Which reader are you?")[1].split("\n## ")[0]
CPU = torch.device("cpu")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)


def test_who_trains_with_this_trainer(tmp_path: Path) -> None:
    (commands,) = blocks("bash")
    launches = [shlex.split(line) for line in commands.splitlines() if line.startswith("torchrun")]
    assert [launch[:3] for launch in launches] == [["torchrun", "--standalone", "--nproc-per-node=2"]] * 3
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for launch in launches:
        script, *arguments = [argument for argument in launch[3:] if argument != "--"]
        ended = run_script(2, ROOT / script, arguments, tmp_path, timeout=300)
        assert ended.statuses == [0, 0], ended.output
    assert "continuing runs/first from step 50" in ended.output
    assert summary(tmp_path / "runs/first")["steps"] == 100
    assert "tensorboard --logdir runs" in commands
    assert any((tmp_path / "runs/first/tensorboard").iterdir())


def test_who_has_a_torchrec_trainer() -> None:
    assert run_ranks(2, _shard_and_train) == [True, True]


def _shard_and_train() -> bool:
    code, _ = blocks("python")
    with process_group(Rank.from_environment(), CPU):
        table = EmbeddingBagConfig(name="item_table", embedding_dim=8, num_embeddings=1_000, feature_names=["item"])
        model = nn.Sequential(EmbeddingBagCollection([table], device=torch.device("meta")))
        names = {"model": model, "device": CPU, "DistributedModelParallel": DistributedModelParallel}
        exec(code, names)
        pooled = names["model"](KeyedJaggedTensor(["item"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1])))["item"]
        pooled.sum().backward()
        return any(isinstance(module, FusedShardedEmbeddingBagCollection) for module in names["model"].modules())


def test_who_uses_operators() -> None:
    x, weight = torch.randn(3, 64), torch.randn(32, 64)
    (of_0, on_0), (of_1, on_1) = run_ranks(2, _multiply, x, weight)
    assert of_0.equal(of_1)
    torch.testing.assert_close(of_0, x @ weight.T)
    assert on_0 == on_1 == "cpu"


def _multiply(x: Tensor, weight: Tensor) -> tuple[Tensor, str]:
    _, code = blocks("python")
    with process_group(Rank.from_environment(), CPU):
        rank = dist.get_rank()
        names: dict[str, object] = {"x": x.chunk(2, dim=1)[rank].contiguous(), "device": CPU}
        names["weight"] = weight.chunk(2, dim=1)[rank].contiguous()
        exec(code, names)
        y = names["y"]
        assert isinstance(y, Tensor)
        return y.clone(), y.device.type
