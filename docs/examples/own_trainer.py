"""A trainer of one's own with TorchRec: torchrun --standalone --nproc-per-node=2 docs/examples/own_trainer.py"""

import os

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM

from dlrm_fused import FusedEmbeddingBagCollectionSharder

KEYS, ROWS, DIM, DENSE, BATCH = [f"feature_{i}" for i in range(8)], 1_000, 16, 4, 256


def make_batch(generator: torch.Generator, device: torch.device) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    lengths = torch.randint(1, 4, (len(KEYS) * BATCH,), generator=generator)
    values = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
    dense = torch.rand(BATCH, DENSE, generator=generator)
    labels = (dense.sum(dim=1) > DENSE / 2).float()
    return dense.to(device), KeyedJaggedTensor(KEYS, values, lengths=lengths).to(device), labels.to(device)


def main() -> list[float]:
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None)
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(name=f"t_{key}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[key]) for key in KEYS]
    dlrm = DLRM(EmbeddingBagCollection(tables, device=torch.device("meta")), DENSE, [32, DIM], [32, 1], dense_device=device)
    model = DistributedModelParallel(dlrm, device=device, sharders=[FusedEmbeddingBagCollectionSharder({"learning_rate": 0.1})])
    optimizer = torch.optim.Adagrad([p for name, p in model.named_parameters() if "embedding_bags" not in name], lr=0.05)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(100):
        dense, sparse, labels = make_batch(generator, device)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(dense, sparse).squeeze(1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"rank {dist.get_rank()}: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
