"""The least code that trains a model of a config with TorchRec: what our trainer's throughput is compared with.

    torchrun --standalone --nproc-per-node=4 -m benchmarks.training.bare_torchrec_loop --config configs/X.yaml [key=value ...]

No logging, evaluation, checkpoints or schedule: TorchRec's model, planner, DistributedModelParallel and
TrainPipelineSparseDist, with the tables, layers, optimizers, precision and number format of embeddings of the config, and the
dense part compiled or not, as ``training.compile`` says. ``--data generated`` makes each batch as the trainer does; ``--data
resident`` repeats a few batches that already lie on the GPU, which no trainer can do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from benchmarks.common.harness import open_world, synchronize
from dlrm_fused.config import Config, DenseOptimizerKind, EmbeddingOptimizerKind, ModelKind, Precision, load_config
from dlrm_fused.datasets import open_dataset
from dlrm_fused.datasets.batch import Batch
from dlrm_fused.datasets.loader import TrainLoader
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.models.dense_part import DensePart, is_compiled
from dlrm_fused.sharding.parallel import pooled_dtype

_RESIDENT_BATCHES = 8
# The pipeline has begun with so many batches when a step ends.
_BATCHES_AHEAD = 2
_EMBEDDING_OPTIMIZERS = {
    EmbeddingOptimizerKind.rowwise_adagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbeddingOptimizerKind.adagrad: EmbOptimType.EXACT_ADAGRAD,
}


class _Task(torch.nn.Module):
    def __init__(self, model: DLRM, config: Config, device: torch.device) -> None:
        super().__init__()
        self.model = model
        if config.training.precision is Precision.fp8:
            raise SystemExit("training.precision=fp8: the bare loop has fp32, tf32, bf16")
        uses_bf16 = config.training.precision.is_bf16
        self.dense_part = DensePart(self._logits_of, device.type, uses_bf16, is_compiled(config.training.compile, device))
        self.samples = config.training.global_batch_size // dist.get_world_size()

    def _logits_of(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.over_arch(self.model.inter_arch(self.model.dense_arch(dense), pooled))
        return logits

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        losses, _ = self.dense_part(batch.dense, self.model.sparse_arch(batch.sparse), batch.labels, batch.weights)
        loss = losses / self.samples
        return loss, loss.detach()


def build(config: Config, schema: DatasetSchema, device: torch.device) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f.name, feature_names=[f.name], num_embeddings=f.rows, embedding_dim=config.embedding.dim)
            for f in schema.sparse_features
        ],
        device=torch.device("meta"),
    )
    shape, dense_features = config.model, len(schema.dense_features)
    if shape.kind is ModelKind.dcnv2:
        model: DLRM = DLRM_DCN(tables, dense_features, shape.bottom_mlp, shape.top_mlp, shape.cross_layers, shape.cross_rank)
    else:
        model = DLRM(tables, dense_features, shape.bottom_mlp, shape.top_mlp)
    optimizer = config.embedding.optimizer
    sharder = EmbeddingBagCollectionSharder(
        fused_params={
            "optimizer": _EMBEDDING_OPTIMIZERS[optimizer.kind],
            "learning_rate": optimizer.learning_rate,
            "eps": optimizer.eps,
            "output_dtype": SparseType[pooled_dtype(config, device).name.upper()],
        }
    )
    task = _Task(model, config, device)
    world_size = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world_size, compute_device=device.type, local_world_size=int(os.environ["LOCAL_WORLD_SIZE"])
        ),
        batch_size=config.training.global_batch_size // world_size,
        constraints={f.name: ParameterConstraints(pooling_factors=[f.pooling_factor]) for f in schema.sparse_features},
        debug=False,
    )
    plan = planner.collective_plan(task, [sharder], dist.GroupMember.WORLD)
    dmp = DistributedModelParallel(
        task,
        env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
        device=device,
        plan=plan,
        sharders=[sharder],
    )
    dense = {name: p for name, p in dmp.named_parameters() if ".embedding_bags." not in name}
    adagrad = config.training.dense_optimizer
    wrapped = KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adagrad(p, lr=adagrad.learning_rate, eps=adagrad.eps))
    return dmp, CombinedOptimizer([dmp.fused_optimizer, wrapped])


def batches(config: Config, kind: str, device: torch.device) -> tuple[DatasetSchema, Iterator[Batch]]:
    dataset = open_dataset(config, device)
    loader = TrainLoader(dataset, config, dist.get_rank(), dist.get_world_size(), device)
    if kind == "generated":
        return dataset.schema, loader
    resident = [batch.to(device) for batch in itertools.islice(loader, _RESIDENT_BATCHES)]
    return dataset.schema, itertools.cycle(resident)


def train(config: Config, arguments: argparse.Namespace, device: torch.device) -> tuple[float, float]:
    """Return the samples/s of all ranks after the warm-up, and the last loss of this one. Collective."""
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("highest" if config.training.precision is Precision.fp32 else "high")
    schema, stream = batches(config, arguments.data, device)
    model, optimizer = build(config, schema, device)
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    stream = itertools.islice(stream, arguments.warmup + arguments.steps + _BATCHES_AHEAD)
    for _ in range(arguments.warmup):
        pipeline.progress(stream)
    synchronize(device)
    dist.barrier()
    began = time.monotonic()
    for _ in range(arguments.steps):
        loss = pipeline.progress(stream)
    synchronize(device)
    dist.barrier()
    return arguments.steps * config.training.global_batch_size / (time.monotonic() - began), loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--data", choices=["generated", "resident"], default="generated")
    parser.add_argument("--warmup", type=int, default=200, help="steps that are not timed")
    parser.add_argument("--steps", type=int, default=1000, help="timed steps")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    kinds = config.embedding.optimizer.kind, config.training.dense_optimizer.kind
    if kinds[0] not in _EMBEDDING_OPTIMIZERS or kinds[1] is not DenseOptimizerKind.adagrad:
        parser.error(f"optimizers {kinds[0].name} and {kinds[1].name}: this loop has rowwise_adagrad or adagrad, and adagrad")
    with open_world() as world:
        rate, loss = train(config, arguments, world.device)
        world.log(json.dumps({"data": arguments.data, "samples_per_second": rate, "steps": arguments.steps, "loss": loss}))
        sys.stdout.flush()
        # The pipeline exchanges features of batches to come; Python would abort where it ends while PyTorch's threads run.
        os._exit(0)


if __name__ == "__main__":
    main()
