"""Decide which tables of a sharded module fused communication covers, on all ranks alike, and say so once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict

import torch.distributed as dist
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingEnv2D

from dlrm_fused.compat import torchrec as compat
from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.sharding.options import FusedOptions
from dlrm_fused.sharding.support import TableSettings, by_table, summary
from dlrm_fused.symmetric import SymmetricGroup, symmetric_group
from dlrm_fused.symmetric.collective_errors import gather_or_raise

logger = logging.getLogger("dlrm_fused")


def check_options(module: compat.ShardedModule, options: FusedOptions, sharder: str) -> None:
    """Raise UsageError, on all ranks, if ranks have other options: they would make other collective calls, and wait for each
    other. Collective.

    Args:
        sharder: its name, for the message.
    """
    group = compat.environment(module).process_group
    if group is None or dist.get_backend(group) == "fake":
        return
    of_ranks = gather_or_raise(lambda: options, group, compat.device(module))
    first = asdict(of_ranks[0])
    for rank, other in enumerate(of_ranks):
        for key, value in asdict(other).items():
            if value != first[key]:
                raise UsageError(
                    f"{sharder}: {key} differs between ranks: {first[key]} on rank 0, {value} on "
                    f"rank {rank}; all ranks must give the same"
                )


def tables_of_bags(module: ShardedEmbeddingBagCollection) -> dict[str, list[TableSettings]]:
    """Return the tables of each sharding type of a sharded EmbeddingBagCollection."""
    return {
        kind: [
            TableSettings(
                name=info.embedding_config.name,
                sharding_type=kind,
                compute_kernel=info.param_sharding.compute_kernel,
                data_type=info.embedding_config.data_type,
                fused_params=info.fused_params or {},
                has_feature_processor=info.embedding_config.has_feature_processor,
                is_virtual=bool(info.embedding_config.use_virtual_table),
            )
            for info in infos
        ]
        for kind, infos in module.sharding_type_to_sharding_infos.items()
    }


def tables_of_sequences(module: ShardedEmbeddingCollection) -> dict[str, list[TableSettings]]:
    """Return the tables of each sharding type of a sharded EmbeddingCollection."""
    return {
        kind: list(
            {
                table.name: TableSettings(
                    name=table.name,
                    sharding_type=kind,
                    compute_kernel=group.compute_kernel.value,
                    data_type=table.data_type,
                    fused_params=group.fused_params or {},
                    is_virtual=bool(table.use_virtual_table),
                )
                for groups in compat.grouped_configs_per_rank(sharding)
                for group in groups
                for table in group.embedding_tables
            }.values()
        )
        for kind, sharding in zip(compat.sharding_types(module), compat.sequence_shardings(module), strict=True)
    }


class ModuleSupport:
    """The tables of a module that fused communication covers. Making one is collective.

    Attributes:
        reasons: by table, why it runs on TorchRec's path; None for the others.
        group: the ranks and their memory; None if no table is covered.
    """

    def __init__(
        self,
        module: compat.ShardedModule,
        options: FusedOptions,
        tables: Mapping[str, list[TableSettings]],
        *,
        by_kernels: bool,
        against_module: str | None = None,
    ) -> None:
        """Collective.

        Args:
            tables: those of each sharding type.
            by_kernels: whether our kernels look up and update them, or else FBGEMM does.
            against_module: a reason against all of them.

        Raises:
            UsageError: on all ranks, with ``strict`` if a table is not covered.
        """
        self._rank, self._path, self._logged = compat.environment(module).rank, compat.path(module), set[str]()
        self._strict, self._tables = options.strict, tables
        self.group: SymmetricGroup | None = None
        reasons = by_table(tables, by_kernels)
        of_module = against_module or _reason_against_module(module, options)
        if of_module is None and None in reasons.values():
            try:
                self.group = symmetric_group(compat.environment(module).process_group, compat.device(module))
            except CommunicationError as error:  # raised by all ranks
                of_module = str(error)
        self.reasons = {name: reason or of_module for name, reason in reasons.items()}
        self._announce()

    def covers(self, kind: str) -> bool:
        """Return whether the tables of a sharding type are covered: all of them are, or none."""
        return all(self.reasons[table.name] is None for table in self._tables[kind])

    def log_once(self, level: int, message: str) -> None:
        """Log a message on rank 0, unless it has been logged for this module."""
        if message not in self._logged and self._rank == 0:
            logger.log(level, message)
        self._logged.add(message)

    def _announce(self) -> None:
        uncovered = {name: reason for name, reason in self.reasons.items() if reason}
        if uncovered and self._strict:
            listed = "; ".join(f"{name}: {reason}" for name, reason in uncovered.items())
            raise UsageError(
                f"strict fused communication (strict=True, comm_strict=true) does not cover all tables: {listed}; change their "
                "plan, or let them run on TorchRec's own path with strict=False, comm_strict=false"
            )
        self.log_once(logging.WARNING if uncovered else logging.INFO, f"{self._path}: {summary(self.reasons)}")
        for name, reason in uncovered.items():
            self.log_once(logging.DEBUG, f"table {name} runs on TorchRec's own path, without fused communication: {reason}")


def _reason_against_module(module: compat.ShardedModule, options: FusedOptions) -> str | None:
    environment, device = compat.environment(module), compat.device(module)
    if isinstance(environment, ShardingEnv2D):
        return "2D parallelism"
    if environment.process_group is None or dist.get_backend(environment.process_group) == "fake":
        return "there is no process group"
    if device.type not in ("cpu", "cuda"):
        return f"device {device}"
    return options.reason_against_wire
