"""A sequence model of one's own with TorchRec: torchrun --standalone --nproc-per-node=2 docs/examples/sequence_model.py

Each user's next item is predicted from the items before, by attention over them, as SASRec does (Kang and McAuley, arXiv
1808.09781), against items drawn at random.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from dlrm_fused import FusedEmbeddingCollectionSharder

ITEMS, DIM, BATCH, LONGEST = 1_000, 32, 64, 20


class NextItem(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        features = ["history", "next", "random"]
        table = EmbeddingConfig(name="item", embedding_dim=DIM, num_embeddings=ITEMS, feature_names=features)
        self.items = EmbeddingCollection([table], device=torch.device("meta"))
        self.positions = nn.Parameter(torch.randn(LONGEST, DIM, device=device) * 0.02)
        self.attention = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.0, batch_first=True, device=device)

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        found = self.items(batch)
        history, wanted, others = (found[name].to_padded_dense(LONGEST) for name in ("history", "next", "random"))
        later = torch.ones(LONGEST, LONGEST, dtype=torch.bool, device=history.device).triu(1)
        encoded = self.attention(history + self.positions, src_mask=later)
        is_real = torch.arange(LONGEST, device=history.device) < found["history"].lengths()[:, None]
        margin = (encoded * (wanted - others)).sum(dim=-1)
        return nn.functional.softplus(-margin)[is_real].mean()


def make_batch(generator: torch.Generator, device: torch.device) -> KeyedJaggedTensor:
    """Users who look at one item after the other, from a random one on."""
    lengths = torch.randint(1, LONGEST + 1, (BATCH,), generator=generator)
    history = torch.cat([torch.randint(ITEMS, (1,), generator=generator) + torch.arange(length) for length in lengths]) % ITEMS
    drawn = torch.randint(ITEMS, history.shape, generator=generator)
    values = torch.cat([history, (history + 1) % ITEMS, drawn])
    return KeyedJaggedTensor(["history", "next", "random"], values, lengths=lengths.repeat(3)).to(device)


def main() -> list[float]:
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None)
    torch.manual_seed(0)
    model = DistributedModelParallel(
        NextItem(device), device=device, sharders=[FusedEmbeddingCollectionSharder({"learning_rate": 2.0})]
    )
    optimizer = torch.optim.Adam([p for name, p in model.named_parameters() if "items" not in name], lr=0.003)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(100):
        loss = model(make_batch(generator, device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"rank {dist.get_rank()}: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
