"""The Transformer over histories: what a candidate sees, that padding is not read, and that TorchRec's pipeline can take the
model apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.train_pipeline.utils import Tracer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.compat.torch import tensors_without_memory
from dlrm_fused.config import ExpertsConfig
from dlrm_fused.errors import UsageError
from dlrm_fused.models import jagged
from dlrm_fused.models.history import HistoryDLRM
from dlrm_fused.models.jagged import JaggedBatch, attend
from dlrm_fused.models.moe import MixtureOfExperts
from dlrm_fused.models.tensor_parallel import rms_norm
from dlrm_fused.models.transformer import HistoryTransformer
from dlrm_fused.ops.common import padding

HISTORY, DIM, WIDTH = 4, 4, 6  # T = 5 tokens
LENGTHS = torch.tensor([0, 2, 4], dtype=torch.int32)


def transformer(**changes: int) -> HistoryTransformer:
    torch.manual_seed(1)
    shape = {"token_width": WIDTH, "d_model": 8, "heads": 2, "layers": 2, "d_ff": 16, "history_length": HISTORY}
    return HistoryTransformer(**(shape | changes))


def tokens(samples: int = len(LENGTHS)) -> Tensor:
    return torch.randn(samples, HISTORY + 1, WIDTH, generator=torch.Generator().manual_seed(2))


def encode(model: HistoryTransformer, vectors: Tensor, lengths: Tensor = LENGTHS) -> Tensor:
    with torch.no_grad():
        return model(vectors.flatten(0, 1), lengths)


def test_more_samples_than_a_launch_takes_are_attended_to_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, values = torch.randn(3, 7, 2, 5, 8, generator=torch.Generator().manual_seed(3))
    seen = torch.arange(5) <= torch.tensor([0, 4, 2, 3, 1, 0, 4])[:, None]
    whole = attend(queries, keys, values), attend(queries[:, :, :1], keys, values, seen)
    monkeypatch.setattr(jagged, "_MOST_PROGRAMS", 2 * 3)
    launched = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def record(own: Tensor, *others: Tensor, **options: object) -> Tensor:
        launched.append(len(own))
        return attention(own, *others, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    parts = attend(queries, keys, values), attend(queries[:, :, :1], keys, values, seen)
    assert launched == [3, 3, 1] * 2
    assert all(map(torch.equal, parts, whole))


class TestWhatACandidateSees:
    @pytest.mark.parametrize("layers", [1, 2, 3])
    def test_its_history_and_itself(self, layers: int) -> None:
        model, vectors = transformer(layers=layers), tokens()
        before = encode(model, vectors)
        for sample, length in enumerate(LENGTHS.tolist()):
            for place in range(HISTORY + 1):
                changed = vectors.clone()
                changed[sample, place] += 1.0
                differs = (encode(model, changed) != before).any(dim=1)
                assert differs.tolist() == [i == sample and place <= length for i in range(len(LENGTHS))]

    def test_the_order_of_its_history(self) -> None:
        model, vectors = transformer(), tokens()
        swapped = vectors.clone()
        swapped[2, [0, 1]] = vectors[2, [1, 0]]
        assert not torch.allclose(encode(model, swapped)[2], encode(model, vectors)[2])

    def test_not_how_much_room_there_is_for_longer_histories(self) -> None:
        model = transformer()
        longer = transformer(history_length=HISTORY + 3)
        longer.load_state_dict({**model.state_dict(), "positions": longer.positions})
        with torch.no_grad():
            longer.positions[: HISTORY + 1] = model.positions
        padded = torch.nn.functional.pad(tokens(), (0, 0, 0, 3), value=7.0)
        torch.testing.assert_close(encode(longer, padded), encode(model, tokens()))


def with_experts() -> HistoryTransformer:
    torch.manual_seed(1)
    experts = [MixtureOfExperts(8, ExpertsConfig(count=4, top_k=2, hidden=16)) for _ in range(2)]
    return HistoryTransformer(token_width=WIDTH, d_model=8, heads=2, layers=2, d_ff=16, history_length=HISTORY, experts=experts)


def padded_reference(model: HistoryTransformer, vectors: Tensor, lengths: Tensor, real: Tensor | None) -> Tensor:
    """The encodings by layers that all read [b, T, ...], and of which the candidates are taken at the end."""
    places, last = torch.arange(HISTORY + 1), lengths.long()[:, None]
    x = model.input(vectors) + model.positions[(last - places).clamp(min=0)]
    has_experts = places <= last if real is None else (places <= last) & real[:, None]
    for block, _ in model.stages():
        projected = block.qkv(rms_norm(x, block.attention_norm)).unflatten(-1, (model.heads, 3, -1))
        queries, keys, values = projected.permute(3, 0, 2, 1, 4)
        scores = queries @ keys.mT / queries.shape[-1] ** 0.5
        scores = scores.masked_fill(places > places[:, None], float("-inf"))
        x = x + (scores.softmax(-1) @ values).transpose(1, 2).flatten(2) @ block.attention_out.weight.T
        normed = rms_norm(x, block.feed_forward_norm)
        if block.experts is None:
            hidden = torch.nn.functional.gelu(normed @ block.feed_forward_in.weight.T)
            x = x + hidden @ block.feed_forward_out.weight.T
        else:
            x = x + block.experts(normed.flatten(0, 1), has_experts.flatten()).view_as(x)
    return rms_norm(x, model.final_norm)[torch.arange(len(lengths)), lengths.long()]


def gradients(encoded: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    """Of a sum of the encodings' elements, each with another weight; zeros where nothing was computed of a tensor."""
    weights = torch.randn(encoded.shape, generator=torch.Generator().manual_seed(5))
    found = torch.autograd.grad((encoded * weights).sum(), of, allow_unused=True)
    return tuple(torch.zeros_like(x) if part is None else part for part, x in zip(found, of, strict=True))


class TestPaddingIsNotRead:
    @pytest.mark.parametrize("groups", [{"cpu": 4}, {}], ids=["groups", "one group, as on GPUs"])
    @pytest.mark.parametrize("build", [transformer, with_experts])
    @pytest.mark.parametrize(
        "lengths",
        [[3, 0, 4, 1, 2, 4, 0, 1, 1], [0, 4], [0, 0, 0], [4, 4], [2], []],
        ids=["mixed", "none and all", "no histories", "full", "one sample", "no sample"],
    )
    @pytest.mark.parametrize("some_are_padding", [False, True])
    def test_encodings_and_gradients_are_those_of_padded_layers(
        self, monkeypatch: pytest.MonkeyPatch, groups: dict[str, int], build: type, lengths: list[int], some_are_padding: bool
    ) -> None:
        monkeypatch.setattr(padding, "_GROUPS", groups)
        model, of = build(), torch.tensor(lengths, dtype=torch.int32)
        real = torch.arange(len(lengths)) % 3 < 2 if some_are_padding else None
        vectors = tokens(len(lengths)).requires_grad_()
        inputs = vectors, *model.parameters()
        expected = padded_reference(model, vectors, of, real)
        expected_gradients = gradients(expected, *inputs)
        room = len(lengths) * (HISTORY + 1)
        count = sum(lengths) + len(lengths)
        # Ranks that share layers have as many rows as the rank with the most, and exports have all of them.
        for rows in {None, count, min(count + 3, room), max(count, room - 1), room}:
            encoded = model(vectors.flatten(0, 1), of, real, rows)
            torch.testing.assert_close(encoded, expected)
            torch.testing.assert_close(gradients(encoded, *inputs), expected_gradients)

    def test_layers_multiply_rows_of_real_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, rows = transformer(), []
        linear = torch.nn.functional.linear
        monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *others: rows.append(len(x)) or linear(x, *others))
        encode(model, tokens())
        of_all, of_candidates = int(LENGTHS.sum()) + len(LENGTHS), len(LENGTHS)
        # The input, four products of the first block; of the second, queries, keys with values, and the other three.
        assert rows == [of_all] * 5 + [of_candidates, of_all] + [of_candidates] * 3

    def test_a_gpu_is_asked_nothing_if_the_number_of_tokens_is_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tensors without memory have no values that could be asked for."""
        monkeypatch.setattr(padding, "_GROUPS", {})
        with tensors_without_memory():
            model, vectors = transformer(), torch.empty(len(LENGTHS) * (HISTORY + 1), WIDTH)
            lengths = torch.empty(len(LENGTHS), dtype=torch.int32)
            model(vectors, lengths, None, 9).sum().backward()
            with pytest.raises(RuntimeError, match="_local_scalar_dense"):
                model(vectors, lengths)

    @pytest.mark.parametrize("rows", range(9, 16))
    def test_rows_beyond_the_real_tokens_are_padding_of_the_first_samples(self, rows: int) -> None:
        batch = JaggedBatch.of(LENGTHS.long(), HISTORY + 1, rows)
        assert int(batch.counts.sum()) == rows == len(batch.samples) == len(batch.places)
        taken = [(sample, place) for sample, count in enumerate(batch.counts.tolist()) for place in range(count)]
        assert list(zip(batch.samples.tolist(), batch.places.tolist(), strict=True)) == taken
        assert int(batch.real_rows(None).sum()) == 9
        assert torch.equal(batch.places[batch.candidate_rows], LENGTHS.long())
        assert batch.counts.tolist() == [1 + min(4, rows - 9), 3 + max(0, rows - 13), 5]

    @pytest.mark.parametrize("before", [9, 12, 15])
    @pytest.mark.parametrize("rows", [9, 10, 13, 15])
    def test_real_tokens_keep_their_rows_with_other_padding(self, before: int, rows: int) -> None:
        batch = JaggedBatch.of(LENGTHS.long(), HISTORY + 1, before)
        x = torch.stack((batch.samples, batch.places), dim=1)
        found, trimmed = batch.trimmed(x, rows)
        assert len(found) == len(trimmed.samples) == rows
        real = trimmed.real_rows(None)
        assert int(real.sum()) == 9
        assert torch.equal(found[real], torch.stack((trimmed.samples, trimmed.places), dim=1)[real])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 9}, "d_model=9: must be a positive multiple of heads=2"),
        ({"heads": 0}, "heads=0: must be 1 or more"),
        ({"layers": 0}, "layers=0: must be 1 or more"),
        ({"history_length": 0}, "history_length=0: must be 1 or more"),
        ({"d_ff": 0}, "d_ff=0: must be a positive multiple of the 1 tensor-parallel ranks"),
    ],
)
def test_impossible_shapes(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        transformer(**changes)


def tables(**features: int) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=rows, embedding_dim=DIM)
        for name, rows in features.items()
    ]
    return EmbeddingBagCollection(configs, device=torch.device("cpu"))


def bags(keys: list[str], count: int, rows: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 3, (len(keys) * count,), generator=generator)
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)


class TestHistoryDLRM:
    def model(self) -> HistoryDLRM:
        torch.manual_seed(1)
        return HistoryDLRM(
            tables(user=20, item=30), tables(token_item=30, response=4), transformer(token_width=2 * DIM), 3, [8, DIM], [8, 1]
        )

    def inputs(self) -> tuple[Tensor, KeyedJaggedTensor, KeyedJaggedTensor, Tensor]:
        samples = len(LENGTHS)
        dense = torch.randn(samples, 3, generator=torch.Generator().manual_seed(4))
        return (
            dense,
            bags(["user", "item"], samples, 20),
            bags(["token_item", "response"], samples * (HISTORY + 1), 4),
            LENGTHS,
        )

    def test_every_parameter_gets_a_gradient(self) -> None:
        model = self.model()
        logits = model(*self.inputs())
        assert logits.shape == (len(LENGTHS), 1)
        logits.sum().backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())

    def test_the_pipeline_finds_both_lookups_and_their_inputs(self) -> None:
        model = self.model()
        leaves = [
            "dense_arch",
            "transformer",
            "over_arch",
            "sparse_arch.in_feature_order",
            "sparse_arch.tokens_in_feature_order",
        ]
        lookups = ["sparse_arch.embedding_bag_collection", "sparse_arch.token_embedding_bag_collection"]
        graph = Tracer(leaf_modules=[*leaves, *lookups]).trace(model)
        inputs = {node.target: [argument.op for argument in node.args] for node in graph.nodes if node.target in lookups}
        assert inputs == {name: ["placeholder"] for name in lookups}
