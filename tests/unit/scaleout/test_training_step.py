"""Steps of the trainer, simulated from its config, its model and the planner's plan."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrm_fused.compat.torch import ranks_without_peers
from dlrm_fused.config import Config, load_config
from dlrm_fused.datasets import open_dataset
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import ConfigError
from dlrm_fused.models import build_model
from dlrm_fused.models.flops import training_flops
from dlrm_fused.scaleout import collectives
from dlrm_fused.scaleout.__main__ import main
from dlrm_fused.scaleout.dense_trace import DenseWork, Exchange, Gradient, Kernel, trace
from dlrm_fused.scaleout.machine import Machine, read
from dlrm_fused.scaleout.scenario import load_scenario
from dlrm_fused.scaleout.step import Timeline, simulate
from dlrm_fused.scaleout.sweep import slowest_rank
from dlrm_fused.scaleout.topologies import Cluster, Switch, Topology
from dlrm_fused.scaleout.training_step import LOOKUP, LOOKUP_AND_POOLED, POOLED, Algorithms, SendingKernel, fused, tasks_of_step
from dlrm_fused.scaleout.workload import Workload, workload

DCNV2 = "configs/criteo_1tb_dcnv2_synthetic.yaml"
MACHINE = Machine("made up", 2e-6, 2e12, {"bf16": 5e14, "fp32": 5e13}, {"bf16": 1e9, "fp32": 1e8}, 2e12, 1e12, 2e12, 2e-5)
SMALL = [
    "data.synthetic.rows=[1000]",
    "data.synthetic.pooling=[2]",
    "data.synthetic.tables=4",
    "embedding.dim=32",
    "model.bottom_mlp=[64,32]",
]


def embedding_seconds(timeline: Timeline) -> float:
    """The embedding stage's forward time: from the start of the lookup until all pooled embeddings have arrived."""
    names = {span.task.name for span in timeline.spans}
    first, last = (LOOKUP_AND_POOLED, LOOKUP_AND_POOLED) if LOOKUP_AND_POOLED in names else (LOOKUP, POOLED)
    return timeline[last].end - timeline[first].start


def of(path: str, *settings: str) -> tuple[Config, DatasetSchema]:
    config = load_config(path, settings)
    return config, open_dataset(config, torch.device("cpu")).schema


EXPERTS = [*SMALL, "model.experts.count=8", "model.experts.top_k=2", "model.experts.hidden=32", "model.top_mlp=[64,32,1]"]
TRANSFORMER = [
    *("configs/transformer_large.yaml", "model.d_model=64", "model.heads=4", "model.layers=2"),
    *("data.synthetic.history_length=16", "data.synthetic.history_items=100", *SMALL),
]


def exchanges(pieces: Sequence[Kernel | Exchange]) -> list[Exchange]:
    return [piece for piece in pieces if isinstance(piece, Exchange)]


class TestTrace:
    @staticmethod
    def traced(path: str, *settings: str, ranks: int = 1, samples: int = 64, compiled: bool = True) -> tuple[DenseWork, float]:
        """As of one of the ranks, which share layers; and the operations of the model's own count."""
        config, schema = of(path, "training.compile=never", "comm=baseline", *settings)
        with ranks_without_peers(ranks):
            task = build_model(config, schema, ranks, torch.device("cpu"), dist.group.WORLD)
            work = trace(task, schema, config.embedding, samples, torch.float32, compiled=compiled)
        flops = training_flops(config, schema)
        assert flops is not None
        return work, float(samples) * flops

    # The trace has no gradient of the inputs of the first layer, which the count includes.
    @pytest.mark.parametrize(
        ("config", "without"),
        [
            ([DCNV2], 0.001),
            (["configs/synthetic.yaml"], 0.05),
            (["configs/synthetic.yaml", "data.synthetic.labels=3"], 0.05),
        ],
    )
    def test_has_the_operations_that_the_model_counts(self, config: list[str], without: float) -> None:
        kernels, counted = self.traced(*config)
        traced = sum(kernel.flops for kernel in kernels.kernels)
        assert (1 - without) * counted <= traced <= counted

    def test_a_third_of_them_is_forward(self) -> None:
        kernels, counted = self.traced(DCNV2)
        forward = sum(kernel.flops for kernel in kernels.forward if isinstance(kernel, Kernel))
        assert forward == pytest.approx(counted / 3, rel=1e-3)

    def test_compiling_launches_fewer_kernels_and_moves_fewer_bytes(self) -> None:
        eager, compiled = self.traced(DCNV2, compiled=False)[0], self.traced(DCNV2)[0]
        for part in ("forward", "backward"):
            ours, theirs = getattr(compiled, part), getattr(eager, part)
            assert len(ours) < len(theirs)
            assert sum(kernel.bytes for kernel in ours) < sum(kernel.bytes for kernel in theirs)

    def test_of_experts_exchanges_rows_there_and_back_and_their_gradients(self) -> None:
        work, _ = self.traced("configs/synthetic.yaml", *EXPERTS, ranks=4)
        rows = 64 * 2 * 64 * 4.0  # two experts of a sample, 64 columns, fp32
        counts = Exchange("all_to_all", 8 * 8.0, 4, has_numbers=True)
        tokens = Exchange("all_to_all", rows, 4)
        slots = Exchange("all_reduce", 8 * 8.0, 4, has_numbers=True)
        assert exchanges(work.forward) == [counts, tokens, tokens, slots]
        assert exchanges(work.backward) == [tokens, tokens]

    def test_of_experts_does_as_much_on_any_number_of_ranks(self) -> None:
        one, four = (self.traced("configs/synthetic.yaml", *EXPERTS, ranks=ranks)[0] for ranks in (1, 4))
        assert sum(kernel.flops for kernel in one.kernels) == sum(kernel.flops for kernel in four.kernels)
        shards = {ranks: sum(g.bytes for g in work.gradients if g.is_sharded) for ranks, work in ((1, one), (4, four))}
        whole = {ranks: sum(g.bytes for g in work.gradients) for ranks, work in ((1, one), (4, four))}
        assert shards[1] == 0
        assert shards[4] == 8 / 4 * 2 * 64 * 32 * 4
        assert whole[1] - whole[4] == 3 * shards[4]

    def test_of_a_transformer_sums_each_row_parallel_product(self) -> None:
        work, counted = self.traced(*TRANSFORMER, ranks=2, samples=8)
        all_tokens, candidates = (2 * 8 * length * 64 * 2.0 for length in (1 + 16, 1))
        summed = [found for found in exchanges(work.forward) if found.collective == "all_reduce"]
        # Attention and feed-forward layer of each block; the last block computes the candidates only.
        assert [found.bytes for found in summed] == 2 * [all_tokens] + 2 * [candidates]
        flops = sum(kernel.flops for kernel in work.kernels)
        assert flops == pytest.approx(counted, rel=0.25)

    def test_gradients_are_there_when_they_are_computed(self) -> None:
        """The last layers' first; a compiled model gives all at once."""
        eager, compiled = (self.traced(DCNV2, compiled=compiled)[0].gradients for compiled in (False, True))
        assert len({gradient.after for gradient in eager}) > 10
        assert len({gradient.after for gradient in compiled}) == 1
        assert sum(g.bytes for g in eager) == sum(g.bytes for g in compiled)


class TestFused:
    COPY, PRODUCT, OTHER = Kernel("index_select", 0, 8, is_copy=True), Kernel("mm", 9, 9), Kernel("add", 0, 4)
    ROWS, COUNTS = Exchange("all_to_all", 1e6, 4), Exchange("all_to_all", 64, 4, has_numbers=True)
    SUM = Exchange("all_reduce", 1e6, 4)

    def test_a_product_sends_its_rows_and_copies_are_not_needed(self) -> None:
        pieces = [self.PRODUCT, self.COPY, self.ROWS, self.COPY, self.OTHER]
        assert list(fused(pieces, is_backward=False)) == [(2, SendingKernel(self.PRODUCT, self.ROWS)), (4, self.OTHER)]

    def test_tokens_are_sent_by_what_gathers_them(self) -> None:
        pieces = [self.OTHER, self.COUNTS, self.COPY, self.ROWS, self.COPY, self.PRODUCT]
        sent = (3, SendingKernel(self.COPY, self.ROWS))
        assert list(fused(pieces, is_backward=True)) == [(0, self.OTHER), sent, (5, self.PRODUCT)]

    def test_forward_a_row_parallel_product_sums(self) -> None:
        pieces = [self.OTHER, self.PRODUCT, self.SUM]
        assert list(fused(pieces, is_backward=False)) == [(0, self.OTHER), (2, SendingKernel(self.PRODUCT, self.SUM))]
        assert list(fused(pieces, is_backward=True)) == list(enumerate(pieces))


class TestMachine:
    def test_a_calibration_without_a_network_is_read_and_one_with_an_unknown_rate_is_refused(self, tmp_path: Path) -> None:
        path, written = tmp_path / "machine.json", asdict(MACHINE)
        for key in ("link_shares", "nvlink_shares", "fused_speeds"):
            del written[key]
        path.write_text(json.dumps({"machine": written}))
        assert read(path) == MACHINE
        for wrong in (
            {"link_share": {}},
            {"link_shares": {"all_to_all": 0}},
            {"nvlink_shares": {"stores": -1}},
            {"launch": -1},
        ):
            path.write_text(json.dumps({"machine": {**written, **wrong}}))
            with pytest.raises(ConfigError, match="measure again"):
                read(path)

    def test_a_kernel_takes_the_longer_of_its_operations_and_its_bytes(self) -> None:
        products, copies = Kernel("mm", 1e12, 1e6), Kernel("mm", 1e6, 1e12)
        assert MACHINE.seconds(products, "fp32") == pytest.approx(2e-6 + (1e12 + 1e8) / 5e13)
        assert MACHINE.seconds(copies, "fp32") == pytest.approx(2e-6 + 0.5)


class TestWorkload:
    def test_is_that_of_the_planned_tables(self) -> None:
        work = workload(*of(DCNV2, *SMALL, "embedding.sharding=table_wise", "training.global_batch_size=64"), 2, 8, 40)
        assert work.samples == 32
        assert work.pooled_bytes == 32 * 4 * 32 * 2  # bf16
        assert work.id_bytes == 32 * 4 * (2 * 4 + 4)  # two ids and a length
        assert work.lookup_bytes == pytest.approx(64 * 2 * 2 * 32 * 4)  # two of four tables, two ids a bag
        assert work.imbalance == 1

    def test_tables_and_the_states_of_their_optimizer_must_fit(self) -> None:
        """49 MiB of weights a rank; Adam has twice as much of states."""
        large = [*SMALL, "data.synthetic.rows=[200000]", "embedding.sharding=table_wise", "training.global_batch_size=64"]
        workload(*of(DCNV2, *large), 2, 8, 0.15)
        with pytest.raises(ConfigError, match=r"no plan for 2 ranks of 0\.15 GiB"):
            workload(*of(DCNV2, *large, "embedding.optimizer.kind=adam"), 2, 8, 0.15)

    def test_the_rank_with_most_tables_counts_for_all(self) -> None:
        settings = [*SMALL, "data.synthetic.tables=3", "embedding.sharding=table_wise"]
        assert workload(*of(DCNV2, *settings), 2, 8, 40).imbalance == pytest.approx(2 / 1.5)

    def test_row_wise_tables_send_partial_sums_of_every_rank(self) -> None:
        whole, cut = (
            workload(*of(DCNV2, *SMALL, f"embedding.sharding={sharding}"), 4, 8, 40) for sharding in ("table_wise", "row_wise")
        )
        assert cut.pooled_bytes == 4 * whole.pooled_bytes
        assert cut.lookup_bytes == pytest.approx(whole.lookup_bytes)

    def test_every_shard_of_columns_gets_the_ids_and_those_of_rows_their_own(self) -> None:
        shards = ["embedding.shard_columns=8", "training.global_batch_size=32"]
        whole, columns, rows = (
            workload(*of(DCNV2, *SMALL, f"embedding.sharding={sharding}", *shards), 4, 8, 40).id_bytes
            for sharding in ("table_wise", "column_wise", "row_wise")
        )
        lengths = 8 * 4 * 4  # of eight samples, four tables
        assert columns == 4 * whole
        assert rows == whole + 3 * lengths

    @pytest.mark.parametrize(
        ("tensor_parallel", "compile", "at_once"), [(1, "auto", True), (1, "never", False), (2, "auto", False)]
    )
    def test_a_captured_transformer_gives_gradients_at_once(self, tensor_parallel: int, compile: str, at_once: bool) -> None:
        settings = [f"model.tensor_parallel={tensor_parallel}", f"training.compile={compile}", "training.global_batch_size=16"]
        gradients = workload(*of(*TRANSFORMER, *settings), 2, 8, 40).dense.gradients
        assert (len({gradient.after for gradient in gradients}) == 1) is at_once

    def test_grid_plans_are_not_covered_across_hosts(self) -> None:
        config, schema = of(DCNV2, *SMALL, "embedding.sharding=grid_shard", "comm=fused")
        assert workload(config, schema, 4, 4, 40).is_covered
        assert not workload(config, schema, 8, 4, 40).is_covered

    def test_the_rank_of_the_table_with_most_ids_receives_most(self) -> None:
        settings = [*SMALL, "data.synthetic.pooling=[13,1,1,1]", "embedding.sharding=table_wise"]
        work = workload(*of(DCNV2, *settings, "training.global_batch_size=64"), 4, 8, 40)
        assert work.id_bytes == 16 * 4 * (13 + 3 + 4)
        assert work.id_imbalance == pytest.approx((13 + 1) / ((13 + 3 + 4) / 4))

    def test_across_hosts_fused_plans_divide_the_tables(self) -> None:
        """TorchRec's planner would do so table-row-wise, which fused communication lacks between hosts."""
        samples, ids, columns = 8192, 214, 128
        settings = ["comm=fused", f"training.global_batch_size={64 * samples}"]
        busiest = workload(*of(DCNV2, *settings), 64, 8, 130).lookup_bytes
        assert busiest < 2.5 * samples * ids * columns * 4

    def test_dense_gradients_do_not_depend_on_ranks(self) -> None:
        config, schema = of(DCNV2, *SMALL, "embedding.sharding=table_wise")
        one, many = workload(config, schema, 1, 8, 40), workload(config, schema, 16, 8, 40)
        assert one.parameter_bytes == many.parameter_bytes > 0

    def test_tokens_of_histories_have_embeddings_too(self) -> None:
        one, more = (
            workload(*of(*TRANSFORMER, "embedding.sharding=table_wise", *longer), 2, 2, 40)
            for longer in ([], ["data.synthetic.history_length=32"])
        )
        tokens = one.samples * 16 * 3 * 32 * 2  # 16 more, of three tables of 32 columns in bf16
        assert more.pooled_bytes - one.pooled_bytes == tokens


class TestStep:
    DENSE = DenseWork([Kernel("mm", 1e10, 1e6)], [Kernel("mm", 2e10, 2e6)], [Gradient(0, 1e7, is_sharded=False)])
    COPY = MACHINE.launch + 2 * 1e8 / 2e12  # of pooled embeddings
    WORK = Workload(1024, DENSE, 1, 1e5, 1, 1e9, 2e9, 1e8, 1e8, 1, True, 5e7)

    # Without gradients of dense layers, which are averaged while those of embeddings are copied.
    ALONE = replace(WORK, dense=replace(DENSE, gradients=[]))

    def saved(self, work: Workload) -> float:
        """By fusion, on 16 ranks."""
        return self.seconds(work, 16, is_fused=False) - self.seconds(work, 16, is_fused=True)

    def seconds(self, work: Workload, ranks: int, *, is_fused: bool) -> float:
        network = Switch(ranks, 1e11, 1e-6)
        return simulate(tasks_of_step(work, MACHINE, network, Algorithms(), "bf16", is_fused=is_fused), network).seconds

    def test_fused_hides_the_shorter_of_lookup_and_exchange(self) -> None:
        lookup, exchange = 1e9 / 2e12, 15 / 16 * 1e8 / 1e11
        assert self.saved(self.ALONE) == pytest.approx(
            min(lookup, exchange) * 63 / 64 + MACHINE.collective + 7 * self.COPY, rel=0.02
        )

    def test_torchrecs_copies_of_pooled_embeddings_belong_to_the_embedding_stage(self) -> None:
        network = Switch(16, 1e15, 0)  # sends in no time
        timeline = simulate(tasks_of_step(self.WORK, MACHINE, network, Algorithms(), "bf16", is_fused=False), network)
        lookup = MACHINE.launch + 1e9 / 2e12
        assert embedding_seconds(timeline) == pytest.approx(lookup + MACHINE.collective + 2 * self.COPY, rel=1e-3)

    def test_gradients_of_a_layers_input_are_summed_while_those_of_its_weight_are_computed(self) -> None:
        product, network = Kernel("mm", 2e10, 2e6), Switch(16, 1e11, 1e-6)
        alone, short, long = (
            self.seconds(replace(self.ALONE, dense=DenseWork([], [product, *summed, product])), 16, is_fused=False)
            for summed in ([], [Exchange("all_reduce", 1e4, 16)], [Exchange("all_reduce", 1e9, 16)])
        )
        assert short == pytest.approx(alone)
        travel = collectives.seconds(network, collectives.all_reduce_auto(network, 1e9))
        assert long - alone == pytest.approx(MACHINE.collective + travel - MACHINE.seconds(product, "bf16"), rel=1e-3)

    def test_a_rank_alone_communicates_nothing(self) -> None:
        alone = self.seconds(self.WORK, 1, is_fused=True)
        kernels = sum(MACHINE.seconds(kernel, "bf16") for kernel in self.DENSE.kernels)
        tables = 2 * MACHINE.launch + 1e9 / 2e12 + 2e9 / 1e12
        optimizer = MACHINE.launch + 5e7 / 2e12
        assert alone == pytest.approx(kernels + tables + optimizer + MACHINE.collective)

    def test_what_fused_does_not_cover_takes_the_time_of_the_baseline(self) -> None:
        uncovered = replace(self.WORK, is_covered=False)
        assert self.seconds(uncovered, 16, is_fused=True) == self.seconds(self.WORK, 16, is_fused=False)

    def test_the_librarys_collectives_reach_their_share_of_a_link_and_fused_ones_all_of_it(self) -> None:
        half = replace(MACHINE, link_shares={"all_to_all": 0.5})
        network = Switch(16, 1e11, 1e-6)
        (whole, shared), (fused_whole, fused_shared) = (
            [simulate(tasks_of_step(self.WORK, m, network, Algorithms(), "bf16", is_fused=f), network) for m in (MACHINE, half)]
            for f in (False, True)
        )
        exchange = 15 / 16 * 1e8 / 1e11
        # Pooled embeddings, and as many gradients of them; the ids of the next batch are sent beside the first.
        assert embedding_seconds(shared) - embedding_seconds(whole) == pytest.approx(exchange, rel=0.01)
        assert shared.seconds - whole.seconds == pytest.approx(2 * exchange, rel=0.01)
        assert fused_shared.seconds == fused_whole.seconds

    def test_all_wait_for_the_rank_that_receives_most_ids(self) -> None:
        network, ids = Switch(16, 1e11, 0), replace(self.ALONE, id_bytes=1e8, pooled_bytes=1, pooled_gradient_bytes=1)
        even, uneven = (
            simulate(tasks_of_step(work, MACHINE, network, Algorithms(), "bf16", is_fused=False), network)[
                "ids of the next batch"
            ]
            for work in (ids, replace(ids, id_imbalance=3))
        )
        assert uneven.end - uneven.start == pytest.approx(3 * (even.end - even.start))

    def test_within_a_host_of_gpus_collectives_and_stores_reach_their_share_of_nvlink(self) -> None:
        host = Cluster(hosts=1, ranks_per_host=8, nvlink=1e11, nic=1e10, nvlink_latency=1e-6, nic_latency=1e-5)
        of_nccl, of_stores = (replace(MACHINE, nvlink_shares={name: 0.5}) for name in ("all_to_all", "stores"))
        exchange = 7 / 8 * 1e8 / 1e11
        for is_fused, slower, alike in ((False, of_nccl, of_stores), (True, of_stores, of_nccl)):
            seconds = [
                simulate(tasks_of_step(self.WORK, machine, host, Algorithms(), "bf16", is_fused=is_fused), host).seconds
                for machine in (MACHINE, slower, alike)
            ]
            assert seconds[1] - seconds[0] == pytest.approx(2 * exchange, rel=0.02)
            assert seconds[2] == seconds[0]

    def test_fused_lookups_and_updates_run_at_their_own_speed(self) -> None:
        faster = replace(MACHINE, fused_speeds={"lookup": 2, "update": 4, "sort": 10})
        alone = Switch(1, 1e11, 1e-6)
        seconds = {
            is_fused: [
                simulate(tasks_of_step(self.WORK, machine, alone, Algorithms(), "bf16", is_fused=is_fused), alone).seconds
                for machine in (MACHINE, faster)
            ]
            for is_fused in (False, True)
        }
        assert seconds[True][0] - seconds[True][1] == pytest.approx(1e9 / 2e12 / 2 + 2e9 / 1e12 * (3 / 4 - 1 / 10))
        assert seconds[False][0] == seconds[False][1]

    def test_the_embedding_stage_lasts_from_the_lookup_until_pooled_embeddings_are_there(self) -> None:
        network = Switch(16, 1e11, 1e-6)
        lookup, exchange = 1e9 / 2e12, 15 / 16 * 1e8 / 1e11
        for is_fused, seconds in ((False, lookup + exchange + 2 * self.COPY), (True, lookup / 64 + exchange)):
            tasks = tasks_of_step(self.WORK, MACHINE, network, Algorithms(), "bf16", is_fused=is_fused, host_seconds=1e-2)
            assert embedding_seconds(simulate(tasks, network)) == pytest.approx(seconds, rel=0.05)

    def test_takes_at_least_what_the_host_needs_to_launch_it(self) -> None:
        network = Switch(8, 1e11, 1e-6)
        device = self.seconds(self.WORK, 8, is_fused=True)
        for host in (0.5 * device, 2 * device):
            tasks = tasks_of_step(self.WORK, MACHINE, network, Algorithms(), "bf16", is_fused=True, host_seconds=host)
            assert simulate(tasks, network).seconds == pytest.approx(max(host, device))

    def test_gradients_that_are_there_early_are_averaged_beside_the_backward_pass(self) -> None:
        tableless = replace(self.WORK, pooled_gradient_bytes=0, update_bytes=0)
        backward = [Kernel("mm", 2e12, 2e6), Kernel("mm", 2e12, 2e6)]
        late, early = (
            replace(tableless, dense=DenseWork([], backward, [Gradient(first, 3e7, False), Gradient(1, 3e7, False)]))
            for first in (1, 0)
        )
        averaging = 2 * 15 / 16 * 3e7 / 1e11
        saved = self.seconds(late, 16, is_fused=True) - self.seconds(early, 16, is_fused=True)
        assert saved == pytest.approx(averaging, rel=0.1)

    def test_fused_experts_hide_the_shorter_of_product_and_exchange(self) -> None:
        rows, product = Exchange("all_to_all", 1e8, 16), Kernel("bmm", 1e12, 1e6)
        work = replace(self.WORK, dense=DenseWork([product, rows], [Kernel("mm", 2e10, 2e6)]), group_ranks=16)
        exchange = 15 / 16 * 1e8 / 1e11
        assert self.saved(work) - self.saved(self.ALONE) == pytest.approx(exchange * 63 / 64 + MACHINE.collective, rel=0.05)

    def test_fused_experts_send_a_token_once_to_each_other_host(self) -> None:
        """With four experts on two hosts 15 of 16 tokens have some on the other one, and two rows on average."""
        seconds = self.seconds_of_experts_rows(Cluster(2, 4, 1e15, 1e9, 0.0, 0.0), 1, 4)
        assert seconds == [pytest.approx(0.5, rel=0.05), pytest.approx(0.5 * (15 / 16) / 2, rel=0.05)]

    @pytest.mark.parametrize("network", [Cluster(1, 8, 1e9, 1e9, 0.0, 0.0), Switch(8, 1e9, 0.0)])
    def test_within_a_host_fused_experts_send_a_token_to_each_of_its_experts(self, network: Topology) -> None:
        assert self.seconds_of_experts_rows(network, 1, 4) == [pytest.approx(7 / 8, rel=0.05)] * 2

    def seconds_of_experts_rows(self, network: Topology, *numbers: int) -> list[float]:
        """Return the seconds in which 1 GB of rows of a rank's tokens travel, by so many experts of a token."""
        seconds = []
        for top_k in numbers:
            dense = DenseWork([Kernel("bmm", 1e6, 1e6), Exchange("all_to_all", 1e9, 8)], [Kernel("mm", 1e6, 1e6)])
            work = replace(self.WORK, dense=dense, group_ranks=8, top_k=top_k)
            timeline = simulate(tasks_of_step(work, MACHINE, network, Algorithms(), "bf16", is_fused=True), network)
            (sent,) = (span for span in timeline.spans if "bmm and all_to_all" in span.task.name)
            seconds.append(sent.end - sent.start)
        return seconds

    def test_the_critical_path_fills_the_step(self) -> None:
        network = Switch(8, 1e11, 1e-6)
        timeline = simulate(tasks_of_step(self.WORK, MACHINE, network, Algorithms(), "bf16", is_fused=False), network)
        assert sum(span.end - span.start for span in timeline.critical_path()) == pytest.approx(timeline.seconds)


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps({"machine": asdict(MACHINE)}))
    path = tmp_path / "scenario.yaml"
    settings = "".join(f"    - {setting}\n" for setting in (*SMALL, "embedding.sharding=table_wise"))
    path.write_text(f"train:\n  config: {DCNV2}\n  settings:\n{settings}machine: {machine}\nhosts: [1, 2]\n")
    return path


class TestCommand:
    def test_prints_a_table_and_writes_csv_and_timelines(
        self, scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert (
            main(["--config", str(scenario), "--output", str(tmp_path / "out"), "samples_per_rank=64", "epoch_samples=1000000"])
            == 0
        )
        rows = list(csv.DictReader((tmp_path / "out/steps.csv").open()))
        assert [(row["hosts"], row["ranks"], row["comm"]) for row in rows] == [
            (hosts, ranks, comm) for hosts, ranks in (("1", "8"), ("2", "16")) for comm in ("baseline", "fused")
        ]
        for row in rows:
            seconds = float(row["step_ms"]) / 1e3
            assert float(row["samples_per_second"]) == pytest.approx(64 * int(row["ranks"]) / seconds)
            timeline = json.loads((tmp_path / f"out/{row['hosts']}_hosts_{row['comm']}.json").read_text())
            assert max(e["ts"] + e["dur"] for e in timeline["traceEvents"] if e["ph"] == "X") == pytest.approx(1e6 * seconds)
        assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)

    def test_sweeps_all_combinations(self, scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        shapes = "sweep={network.nic_gb_per_second: [25, 50], train.settings.training.precision: [bf16, fp32]}"
        assert main(["--config", str(scenario), "--output", str(tmp_path / "out"), "hosts=[2]", shapes]) == 0
        rows = list(csv.DictReader((tmp_path / "out/steps.csv").open()))
        chosen = [(row["network.nic_gb_per_second"], row["train.settings.training.precision"]) for row in rows[::2]]
        assert chosen == [("25", "bf16"), ("25", "fp32"), ("50", "bf16"), ("50", "fp32")]
        steps = [float(row["step_ms"]) for row in rows if row["comm"] == "baseline"]
        assert steps[0] > steps[2]  # more bandwidth
        assert steps[1] > steps[0]  # fp32
        assert len(list((tmp_path / "out").glob("*.json"))) == len(rows)

    def test_shares_of_nvlink_come_from_another_calibration(
        self, scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        several = tmp_path / "several.json"
        several.write_text(json.dumps({"machine": asdict(replace(MACHINE, nvlink_shares={"all_to_all": 0.01}))}))
        steps = {}
        for name, shares in (("all of it", []), ("little", [f"nvlink={several}"])):
            assert main(["--config", str(scenario), "--output", str(tmp_path / name), "hosts=[1]", *shares]) == 0
            rows = list(csv.DictReader((tmp_path / name / "steps.csv").open()))
            steps[name] = {row["comm"]: float(row["step_ms"]) for row in rows}
        assert steps["little"]["baseline"] > 2 * steps["all of it"]["baseline"]
        assert steps["little"]["fused"] == steps["all of it"]["fused"]
        capsys.readouterr()
        assert main(["--config", str(scenario), "nvlink=none.json"]) == 1
        assert "nvlink=none.json: no such file" in capsys.readouterr().err
        (tmp_path / "one.json").write_text(json.dumps({"machine": asdict(MACHINE)}))
        assert main(["--config", str(scenario), f"nvlink={tmp_path / 'one.json'}"]) == 1
        assert "no shares of NVLink" in capsys.readouterr().err

    def test_draws_what_assumptions_are_worth(self, scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        picture = tmp_path / "tornado.png"
        asked = "sensitivity={slices: [8, 64], network.nic_gb_per_second: [5, 500], seed: [0, 1]}"
        assert main(["--config", str(scenario), "--tornado", str(picture), "hosts=[2]", asked]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "network.nic_gb_per_second" in lines[1]  # what changes most comes first
        assert "seed" in lines[-1]  # without straggling it changes nothing
        assert picture.stat().st_size > 1000

    def test_draws_scaling(self, scenario: Path, tmp_path: Path) -> None:
        picture = tmp_path / "scaling.png"
        assert main(["--config", str(scenario), "--plot", str(picture)]) == 0
        assert picture.stat().st_size > 1000

    def test_stragglers_are_drawn_by_the_seed_and_are_more_among_more_ranks(self, scenario: Path) -> None:
        given = load_scenario(scenario, ["straggling=0.1", "seed=3"])
        assert slowest_rank(given, 64) == slowest_rank(given, 64) > 1
        assert slowest_rank(given, 4096) > slowest_rank(given, 8)
        assert slowest_rank(load_scenario(scenario, []), 4096) == 1

    @pytest.mark.parametrize(
        ("override", "told"),
        [
            ("slices=0", "slices=0: allowed: above 0"),
            ("slices=many", "many"),
            ("straggling=-0.1", "straggling=-0.1: allowed: 0 or more"),
            ("machine_rates.lookup=0", "machine_rates.lookup=0.0: allowed: above 0"),
            ("host_ms.fused=-1", "host_ms.fused=-1.0: allowed: 0 or more"),
            ("sweep={slices: []}", "sweep.slices=[]: give at least one value"),
            ("sweep={slice: [1]}", "slice=1"),
            ("sweep={slices: [0]}", "slices=0: allowed: above 0"),
            ("sweep={train.settings.embedding.dims: [4]}", "dims"),
            ("slice=3", "slice"),
            ("slices", "'slices': expected key=value"),
            ("hosts=[]", "hosts=[]: name at least one"),
            ("hosts=[0]", "hosts[0]=0: allowed: above 0"),
            ("hosts=[33]", "hosts_per_pod = 32"),
            ("samples_per_rank=-1", "samples_per_rank=-1: allowed: 0 or more"),
            ("memory_gib=0", "memory_gib=0.0: allowed: above 0"),
            ("memory_gib=0.001", "no plan for 8 ranks of 0.001 GiB"),
            ("network.kind=mesh", "mesh"),
            ("network.kind=torus", "network.ranks_per_host=8: allowed with network.kind=torus: 1"),
            ("network.oversubscription=0.5", "network.oversubscription=0.5: allowed: 1"),
            ("network.nic_gb_per_second=0", "network.nic_gb_per_second=0.0: allowed: above 0"),
            ("network.nic_latency_us=-1", "network.nic_latency_us=-1.0: allowed: 0 or more"),
            ("all_to_all=ring", "all_to_all=ring: allowed: direct, pairwise, hierarchical"),
            ("all_reduce=fast", "all_reduce=fast: allowed: auto, ring"),
            ("machine=none.json", "machine=none.json: no such file"),
            (f"machine={DCNV2}", "not a calibration"),
            ("machine=''", "machine is not set"),
            ("train.config=none.yaml", "none.yaml: no such file"),
            (
                "train.settings=[model.kind=transformer]",
                "data.synthetic.history_length=0: allowed: 1 or more with model.kind=transformer",
            ),
            ("train.settings=['model.experts.count=4','model.top_mlp=[64,32,1]']", "model.experts.parallel=0, all 8 ranks"),
            (
                "network={kind: torus, ranks_per_host: 1} ; hosts=[4] ; "
                "train.settings=['model.experts.count=4','model.experts.parallel=2','model.top_mlp=[64,32,1]']",
                "layers that 2 of 4 ranks share: allowed on torus: all ranks, one rank",
            ),
        ],
    )
    def test_says_in_a_line_what_is_wrong(
        self, scenario: Path, override: str, told: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--config", str(scenario), *override.split(" ; ")]) == 1
        lines = capsys.readouterr().err.strip().splitlines()
        assert told in lines[-1]
        assert len(lines) == 1
