"""Exports the part of a model after its tables as one program of torch.export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from dlrm_fused.config import Config
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import ConfigError
from dlrm_fused.models.embedding_tables import pooled_columns
from dlrm_fused.models.expert_parallel import ExpertComputation
from dlrm_fused.models.history import HistoryDLRM
from dlrm_fused.models.interaction import Interaction
from dlrm_fused.models.moe import MixtureOfExperts
from dlrm_fused.ops.moe.activations import ACTIVATIONS

_EXAMPLES = 3  # rows of the example inputs; 1 would be taken for a constant


def export_dense_part(model: nn.Module, config: Config, schema: DatasetSchema) -> ExportedProgram:
    """Return the program that maps n rows, for any n, to probabilities, [n] or [n, L] of several labels. Its inputs:

    dense [n, dense features]; pooled embeddings side by side, [n, columns of all]; of a model that reads histories also the
    tokens' embeddings, [n * T, columns of all], T = history length + 1, and history lengths [n] int64; of one that reads times
    also those of tokens, [n, T] int64.

    Args:
        model: the model of the config, its dense weights on the CPU; it loses its tables.

    Raises:
        ConfigError: if the model is of a kind that cannot be called without its tables.
    """
    if not isinstance(model, HistoryDLRM) and not hasattr(model, "logits_of"):
        raise ConfigError(f"model.kind={config.model.kind.name}: a model without a method logits_of cannot be exported")
    model.sparse_arch = nn.Identity()
    for layer in list(model.modules()):
        if isinstance(layer, MixtureOfExperts):
            layer.computation = ExportableExperts(activation=config.model.experts.activation.name)
        if isinstance(layer, Interaction):
            layer.number_features()
    rows = Dim("rows", min=1)
    example: list[Tensor] = [
        torch.zeros(_EXAMPLES, len(schema.dense_features)),
        torch.zeros(_EXAMPLES, pooled_columns(config.embedding, schema.sparse_features)),
    ]
    shapes: list[Any] = [{0: rows}, {0: rows}]
    if isinstance(model, HistoryDLRM):
        tokens = schema.history_length + 1
        example += [
            torch.zeros(_EXAMPLES * tokens, pooled_columns(config.embedding, schema.token_features)),
            torch.zeros(_EXAMPLES, dtype=torch.int64),
        ]
        shapes += [{0: tokens * rows}, {0: rows}]
        if model.reads_times:
            example.append(torch.zeros(_EXAMPLES, tokens, dtype=torch.int64))
            shapes.append({0: rows})
    with torch.no_grad():
        return torch.export.export(
            _Probabilities(model).eval(), tuple(example), dynamic_shapes={"inputs": tuple(shapes)}, strict=False
        )


class _Probabilities(nn.Module):
    """A model without its tables, whose outputs are probabilities."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the probabilities, as the program of :func:`export_dense_part` does."""
        return self._logits(*inputs).squeeze(-1).float().sigmoid()

    def _logits(self, dense: Tensor, pooled: Tensor, *histories: Tensor) -> Tensor:
        model: Any = self.model
        if isinstance(model, HistoryDLRM):
            # A program's shapes do not depend on histories: padding is computed like real tokens.
            tokens, lengths, *times = histories
            token_times = times[0] if times else None
            encoded = model.transformer(tokens, lengths, token_count=tokens.shape[0], token_times=token_times)
            return model.over_arch(model.dense_arch(dense), pooled, encoded)
        has_experts = any(isinstance(layer, MixtureOfExperts) for layer in model.modules())
        return model.logits_of(dense, pooled, *([None] if has_experts else []))


@dataclass(frozen=True)
class ExportableExperts(ExpertComputation):
    """Computes experts of one process by operators whose shapes alone depend on the data; the other ways count tokens on the
    host, which a program cannot."""

    def with_slots(
        self, x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        activation = ACTIVATIONS[self.activation]
        result = torch.zeros_like(x)
        for expert, (into, out) in enumerate(zip(w_in, w_out, strict=True)):
            token, slot = (experts == expert).nonzero(as_tuple=True)
            hidden = activation.of(x[token] @ into.T)
            result = result.index_add(0, token, (hidden @ out.T) * gates[token, slot, None])
        return result, None
