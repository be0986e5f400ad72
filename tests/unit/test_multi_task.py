"""Training on several labels and weighted samples: the loss by its definition, and the models' one output for each label."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm_fused.config import Compile, Config, Precision, Split
from dlrm_fused.datasets.batch import Batch, Samples, sparse_from_features
from dlrm_fused.datasets.loader import TrainLoader
from dlrm_fused.datasets.preparation import cli
from dlrm_fused.datasets.prepared import PreparedDataset
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature
from dlrm_fused.datasets.synthetic import SyntheticDataset
from dlrm_fused.errors import ConfigError
from dlrm_fused.models import Output, RankingTask, build_model
from dlrm_fused.models.dense_part import cross_entropy
from dlrm_fused.models.multi_task import task_weights
from tests.unit.small_models import config_of

CPU = torch.device("cpu")
LABELS = ("clicked", "bought", "returned")


def drawn(samples: int, labels: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels [b, L], and weights [b], some of which are 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, labels, generator=generator)
    true = (torch.rand(samples, labels, generator=generator) < 0.3).float()
    return logits, true, torch.randint(0, 4, (samples,), generator=generator).float()


class TestLoss:
    def test_is_the_sum_over_labels_and_samples_of_both_weights_times_the_cross_entropy(self) -> None:
        logits, true, weights = drawn(20, 3)
        loss, _ = cross_entropy(logits, true, weights, [1.0, 0.5, 2.0])
        probability = logits.double().sigmoid()
        entropy = -(true * probability.log() + (1 - true) * (1 - probability).log())
        expected = (torch.tensor([1.0, 0.5, 2.0]) * weights.unsqueeze(1) * entropy).sum()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)

    def test_of_one_label_it_is_the_weighted_cross_entropy_bit_for_bit(self) -> None:
        logits, true, weights = drawn(20, 1)
        loss, returned = cross_entropy(logits, true[:, 0], weights)
        assert loss == binary_cross_entropy_with_logits(logits[:, 0], true[:, 0], weight=weights, reduction="sum")
        assert torch.equal(returned, logits[:, 0])

    def test_a_label_of_weight_0_is_left_out(self) -> None:
        logits, true, weights = drawn(20, 2)
        both, _ = cross_entropy(logits, true, weights, [1.0, 0.0])
        alone, _ = cross_entropy(logits[:, :1], true[:, 0], weights)
        assert both == alone


class Linear(torch.nn.Module):
    """Logits that are linear in the dense features."""

    def __init__(self, features: int, labels: int) -> None:
        super().__init__()
        self.sparse_arch = torch.nn.Identity()
        self.layer = torch.nn.Linear(features, labels)

    def forward(self, dense: Tensor, _: object) -> Tensor:
        logits: Tensor = self.layer(dense)
        return logits


def step(rows: list[int], weights: Tensor, labels: int) -> tuple[float, list[Tensor]]:
    """The loss over the samples ``rows`` of one batch, times their number, and its gradients."""
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(8, 4, generator=generator)
    true = (torch.rand(8, labels, generator=generator) < 0.4).float()[rows]
    torch.manual_seed(2)
    task = RankingTask(Linear(4, labels), Precision.fp32, 1, CPU, Compile.never, [1.0, 0.5][:labels], has_sample_weights=True)
    ids = sparse_from_features(["id"], [torch.zeros(len(rows), dtype=torch.int32).numpy()], [1], len(rows))
    true = true if labels > 1 else true[:, 0]
    batch = Batch(dense[rows], ids, true, torch.ones(len(rows)), len(rows), sample_weights=weights)
    loss, _ = task(batch)
    (loss * len(rows)).backward()
    return loss.item() * len(rows), [parameter.grad for parameter in task.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("labels", [1, 2])
class TestSampleWeights:
    def test_a_sample_of_weight_0_is_as_one_that_is_not_there(self, labels: int) -> None:
        loss, gradients = step(list(range(8)), torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 1]), labels)
        without, gradients_without = step([0, 2, 3, 5, 6, 7], torch.ones(6), labels)
        assert loss == pytest.approx(without, rel=1e-6)
        torch.testing.assert_close(gradients, gradients_without, rtol=1e-5, atol=1e-6)

    def test_a_sample_of_weight_2_is_as_two_samples(self, labels: int) -> None:
        loss, gradients = step([0, 1, 2], torch.tensor([1.0, 2, 2]), labels)
        twice, gradients_twice = step([0, 1, 1, 2, 2], torch.ones(5), labels)
        assert loss == pytest.approx(twice, rel=1e-6)
        torch.testing.assert_close(gradients, gradients_twice, rtol=1e-5, atol=1e-6)


class TestTaskWeights:
    def test_are_1_where_none_is_given(self) -> None:
        assert task_weights({}, LABELS) == [1, 1, 1]
        assert task_weights({"bought": 0.5}, LABELS) == [1, 0.5, 1]

    def test_of_an_unknown_label_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"training.task_weights.sold: no such label; the data set has: clicked, bought"):
            task_weights({"bought": 1, "sold": 1}, LABELS)

    def test_of_a_single_label_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"training.task_weights=\{'label': 0.5\}: the data set has one label; leave the"):
            task_weights({"label": 0.5}, ("label",))

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ("training.task_weights.bought=-1", r"training.task_weights.bought=-1.0: allowed: 0 or more"),
            ("training.task_weights.bought=.inf", r"training.task_weights.bought=inf: allowed: a finite number"),
            ("training.task_weights.bought=much", r"training.task_weights.bought=much: allowed: a number"),
            ("training.task_weights=0.5", r"training.task_weights=0.5: allowed: a number for each label, by its name"),
        ],
    )
    def test_that_are_no_weights_are_refused(self, tmp_path, setting: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            config_of(tmp_path, setting)


EXPERTS = ["model.experts.count=8", "model.experts.top_k=3", "model.experts.hidden=40"]
HISTORY = ["model.d_model=16", "model.tensor_parallel=1", "data.synthetic.history_length=6", "data.synthetic.history_items=9"]
MODELS = {
    "dlrm": [],
    "dcnv2": ["model.kind=dcnv2", "model.cross_rank=7"],
    "transformer": ["model.kind=transformer", *HISTORY],
    "experts": EXPERTS,
    "transformer_of_experts": ["model.kind=transformer", *HISTORY, *EXPERTS],
}


def forward(config: Config, dataset: SyntheticDataset) -> tuple[RankingTask, Output]:
    """A model on one rank of the CPU, and what it makes of five samples."""
    torch.manual_seed(0)
    task = build_model(config, dataset.schema, 1, CPU)
    task.model.sparse_arch.to_empty(device=CPU)
    samples = dataset.read(Split.train, torch.arange(5))
    batch = Batch(samples.dense, samples.sparse, samples.labels, torch.ones(5), 5, samples.tokens, samples.history_lengths)
    return task, task(batch)[1]


@pytest.mark.parametrize("model", MODELS)
class TestModels:
    def test_have_an_output_for_each_label_and_share_all_else(self, tmp_path, model: str) -> None:
        """By the names and shapes of the parameters: one label's are those of a checkpoint without several labels."""
        shapes = []
        for labels in (1, 3):
            config = config_of(tmp_path, *MODELS[model], f"data.synthetic.labels={labels}")
            task, output = forward(config, SyntheticDataset(config.data.synthetic, 1, CPU))
            assert output.logits.shape == output.labels.shape == ((5,) if labels == 1 else (5, labels))
            shapes.append({name: tuple(parameter.shape) for name, parameter in task.model.named_parameters()})
        one, three = shapes
        differ = {name: (one.get(name), three.get(name)) for name in one | three if one.get(name) != three.get(name)}
        weight, bias = sorted(differ, reverse=True)
        assert (differ[weight], differ[bias]) == (((1, 10), (3, 10)), ((1,), (3,)))


class WeightedSamples:
    """Samples of two labels whose weight is their number."""

    schema = DatasetSchema(("number",), (SparseFeature("id", 10),), labels=("clicked", "bought"), has_weights=True)
    generator_device = None

    def samples(self, split: Split) -> int:
        return 30

    def read(self, split: Split, rows: Tensor) -> Samples:
        ids = sparse_from_features(["id"], [(rows % 10).int().numpy()], [1], rows.numel())
        labels = torch.stack([rows % 2, rows % 3 == 0], dim=1).float()
        return Samples(rows.float().unsqueeze(1), ids, labels, weights=rows.float())


def test_padding_of_a_batch_has_labels_of_the_same_shape_and_weight_0() -> None:
    config = Config()
    config.training.global_batch_size, config.data.shuffle_window_rows = 7, 0
    batches = []
    for rank in range(3):
        with TrainLoader(WeightedSamples(), config, rank, 3, CPU) as loader:
            batches.append(next(loader))
    assert all(batch.labels.shape == (3, 2) for batch in batches)
    together = {
        name: torch.cat([getattr(batch, name) for batch in batches]) for name in ("weights", "sample_weights", "labels")
    }
    real = together["weights"] > 0
    assert together["sample_weights"][real].tolist() == list(range(7))
    assert together["sample_weights"][~real].tolist() == [0, 0]
    assert together["labels"][real].tolist() == [[i % 2, i % 3 == 0] for i in range(7)]


class TestSyntheticLabels:
    def test_the_first_is_that_of_a_set_with_one_label(self) -> None:
        one, three = (SyntheticDataset(replace(Config().data.synthetic, tables=3, labels=n), 5, CPU) for n in (1, 3))
        rows = torch.arange(500)
        alone, among = (dataset.read(Split.train, rows) for dataset in (one, three))
        assert three.schema.labels == ("label_0", "label_1", "label_2")
        assert torch.equal(alone.labels, among.labels[:, 0])
        assert torch.equal(alone.dense, among.dense)
        assert torch.equal(alone.sparse.values(), among.sparse.values())

    def test_are_written_to_a_prepared_set(self, tmp_path) -> None:
        sizes = [f"--{split}-samples" for split in ("train", "validation", "test")]
        options = ["--tables", "2", "--rows", "20", "--labels", "2", *(word for size in sizes for word in (size, "60"))]
        assert cli.main(["synthetic", "--output", str(tmp_path / "set"), *options]) == 0
        settings = replace(Config().data.synthetic, tables=2, rows=[20], labels=2)
        rows = torch.arange(60)
        written = PreparedDataset(tmp_path / "set").read(Split.test, rows).labels
        assert torch.equal(written, SyntheticDataset(settings, 1, CPU).read(Split.test, rows).labels)

    def test_each_has_effects_of_its_own_and_is_as_easy_to_predict(self) -> None:
        settings = replace(Config().data.synthetic, tables=6, rows=[200], labels=2, test_samples=20_000)
        dataset = SyntheticDataset(settings, 1, CPU)
        labels = dataset.read(Split.test, torch.arange(20_000)).labels
        assert abs(float(labels.T.corrcoef()[0, 1])) < 0.1
        for label in (0, 1):
            # Of a normal logit with standard deviation 2.
            assert dataset.best_attainable_auc(label=label).auc == pytest.approx(0.86, abs=0.02)
