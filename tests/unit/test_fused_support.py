"""Which tables the fused path covers, and the reasons against the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.modules.embedding_configs import DataType

from dlrm_fused.sharding import FusedEmbeddingBagCollectionSharder
from dlrm_fused.sharding.support import TableSettings, by_table, reason_against, summary

TABLE = TableSettings("user", "table_wise", "fused")


def with_arguments(**arguments: object) -> TableSettings:
    return replace(TABLE, fused_params=arguments)


@pytest.mark.parametrize("uses_kernels", [False, True])
@pytest.mark.parametrize(
    "table",
    [
        *(replace(TABLE, sharding_type=kind) for kind in ("table_wise", "column_wise", "table_column_wise", "row_wise")),
        *(replace(TABLE, data_type=data_type) for data_type in (DataType.FP32, DataType.FP16, DataType.BF16)),
        with_arguments(optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.1, eps=1e-6, beta1=0.9, weight_decay=0.0),
        with_arguments(optimizer=EmbOptimType.EXACT_ADAGRAD, eps=1e-6),
        *(
            with_arguments(optimizer=kind, beta1=0.8, beta2=0.99, weight_decay=0.1)
            for kind in (EmbOptimType.ADAM, EmbOptimType.PARTIAL_ROWWISE_ADAM)
        ),
        *(with_arguments(output_dtype=dtype) for dtype in (SparseType.FP16, SparseType.BF16, DataType.BF16)),
        with_arguments(
            optimizer=EmbOptimType.EXACT_SGD, weight_decay_mode=WeightDecayMode.DECOUPLE, output_dtype=SparseType.FP32
        ),
    ],
    ids=str,
)
def test_covered(table, uses_kernels):
    assert reason_against(table, uses_kernels) is None


@pytest.mark.parametrize("uses_kernels", [False, True])
@pytest.mark.parametrize(
    ("table", "reason"),
    [
        *(
            (replace(TABLE, sharding_type=kind), f"sharding type {kind}")
            for kind in ("data_parallel", "table_row_wise", "grid_shard")
        ),
        *(
            (replace(TABLE, compute_kernel=kernel), f"compute kernel {kernel}")
            for kernel in ("dense", "fused_uvm", "fused_uvm_caching", "key_value", "dram_virtual_table")
        ),
        (replace(TABLE, has_feature_processor=True), "it has a feature processor"),
        (replace(TABLE, is_virtual=True), "it is a virtual table"),
        (replace(TABLE, data_type=DataType.INT8), "weights of type INT8"),
        (with_arguments(output_dtype=SparseType.INT8), "output_dtype=INT8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_not_covered(table, reason, uses_kernels):
    assert reason_against(table, uses_kernels) == reason


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"optimizer": EmbOptimType.LAMB}, "optimizer LAMB"),
        ({"weight_decay": 0.1}, "weight_decay=0.1"),
        ({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay": 0.1}, "weight_decay=0.1"),
        ({"optimizer": EmbOptimType.ADAM, "uvm_non_rowwise_momentum": True}, "uvm_non_rowwise_momentum=True"),
        ({"max_norm": 1.0}, "max_norm=1.0"),
        ({"gradient_clipping": True}, "gradient_clipping=True"),
        ({"weight_decay_mode": WeightDecayMode.COUNTER}, "weight_decay_mode=COUNTER"),
        ({"something_new": 1}, "argument something_new of FBGEMM's lookup"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_only_fbgemm_computes_is_covered_where_fbgemm_computes(arguments, reason):
    assert reason_against(with_arguments(**arguments), uses_kernels=True) == reason
    assert reason_against(with_arguments(**arguments), uses_kernels=False) is None


def test_tables_of_one_sharding_type_are_covered_together():
    groups = {
        "table_wise": [TABLE, replace(TABLE, name="item", data_type=DataType.INT8)],
        "row_wise": [replace(TABLE, name="city", sharding_type="row_wise")],
    }
    assert by_table(groups, uses_kernels=False) == {
        "user": "it shares the table_wise lookups with table item (weights of type INT8)",
        "item": "weights of type INT8",
        "city": None,
    }


class TestNumberFormatsOfQuantizedCommunication:
    @staticmethod
    def options(**precisions):
        registry = get_qcomm_codecs_registry(QCommsConfig(**precisions), device=torch.device("cuda"))
        return FusedEmbeddingBagCollectionSharder(qcomm_codecs_registry=registry).options

    def test_none(self):
        options = FusedEmbeddingBagCollectionSharder().options
        assert (options.forward_wire, options.backward_wire) == (torch.float32, torch.float32)
        assert options.reason_against_wire is None

    def test_are_taken_over(self):
        options = self.options(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
        assert (options.forward_wire, options.backward_wire) == (torch.float16, torch.bfloat16)
        assert options.reason_against_wire is None

    def test_others_are_not_covered(self):
        options = self.options(forward_precision=CommType.INT8, backward_precision=CommType.FP32)
        assert options.reason_against_wire == "forward_wire=torch.uint8"

    def test_a_loss_scale_is_not_covered(self):
        options = self.options(forward_precision=CommType.FP16, backward_precision=CommType.FP16, backward_loss_scale=8.0)
        assert options.reason_against_wire == "backward communication with a loss scale"

    def test_ours_come_first(self):
        sharder = FusedEmbeddingBagCollectionSharder(forward_wire=torch.bfloat16, backward_wire=torch.float16)
        assert (sharder.options.forward_wire, sharder.options.backward_wire) == (torch.bfloat16, torch.float16)


def test_tables_of_one_module_have_one_output_dtype():
    half = replace(TABLE, name="half", fused_params={"output_dtype": SparseType.FP16})
    reasons = by_table({"table_wise": [TABLE], "row_wise": [half]}, uses_kernels=True)
    assert reasons == dict.fromkeys([TABLE.name, "half"], "tables of one module differ in output_dtype")
    assert by_table({"table_wise": [half]}, uses_kernels=True) == {"half": None}


class TestSummary:
    def test_of_a_module_all_of_whose_tables_are_fused(self):
        assert summary({"city": None, "user": None}) == "fused communication for 2 of 2 embedding tables"

    def test_small_tables_that_the_planner_replicates(self):
        reasons = {"city": "sharding type data_parallel", "day": "sharding type data_parallel", "user": None, "item": "2D"}
        assert summary(reasons).startswith(
            "fused communication for 1 of 4 embedding tables; not for 2: sharding type data_parallel"
        )
        assert "ParameterConstraints(sharding_types=['table_wise'])" in summary(reasons)
        assert "embedding.sharding=table_wise" in summary(reasons)

    def test_tables_without_an_optimizer_in_backward(self):
        reasons = by_table({"table_wise": [replace(TABLE, compute_kernel="dense")]}, uses_kernels=False)
        assert summary(reasons).startswith("fused communication for 0 of 1 embedding tables; not for 1: compute kernel dense")
        assert "torchrec.optim.apply_optimizer_in_backward" in summary(reasons)
        assert "compute_kernel='fused'" in summary(reasons)

    def test_another_reason_stands_for_itself(self):
        line = summary({"user": "device meta"})
        assert line == "fused communication for 0 of 1 embedding tables; not for 1: device meta [user]"

    def test_every_reason_has_its_tables_the_commonest_first(self):
        reasons = {"item": "2D", "city": "no", "user": None, "day": "no"}
        assert (
            summary(reasons)
            == "fused communication for 1 of 4 embedding tables; not for 2: no [city, day]; not for 1: 2D [item]"
        )

    def test_of_very_many_tables_twenty_are_named(self):
        line = summary({f"t{i}": "2D" for i in range(22)})
        assert line.endswith("not for 22: 2D [" + ", ".join(f"t{i}" for i in range(20)) + " and 2 more]")

    def test_the_setting_of_a_single_table_is_named_too(self):
        for kind in ("data_parallel", "table_row_wise", "grid_shard"):
            assert "embedding.tables.<name>.sharding=table_wise" in summary({"city": f"sharding type {kind}"})
