"""Several labels: what the model shares between them, and how their losses add up.

All layers below the last one of the top MLP are shared, and so are the tables; the last has an output for each label. This is
Caruana, *Multitask Learning*, Machine Learning 28, 1997: one network with an output for each task. Where tasks have little in
common, experts with a gate for each of them do better (Ma et al., *Modeling Task Relationships in Multi-task Learning with
Multi-gate Mixture-of-Experts*, KDD 2018); they are not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlrm_fused.config import Config
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import ConfigError


def top_widths(config: Config, schema: DatasetSchema) -> list[int]:
    """Widths of the top MLP: those of ``model.top_mlp``, the last one for each label."""
    *hidden, of_a_label = config.model.top_mlp
    return [*hidden, of_a_label * len(schema.labels)]


def task_weights(setting: Mapping[str, float], labels: Sequence[str]) -> list[float]:
    """Weights of the labels' losses, 1 where ``training.task_weights`` says nothing.

    Raises:
        ConfigError: if it names a label that the data set has not, or there is a single one, whose weight would scale all.
    """
    if not setting:
        return [1.0] * len(labels)
    if len(labels) == 1:
        raise ConfigError(f"training.task_weights={dict(setting)}: the data set has one label; leave the weights out")
    unknown = [name for name in setting if name not in labels]
    if unknown:
        raise ConfigError(f"training.task_weights.{unknown[0]}: no such label; the data set has: {', '.join(labels)}")
    return [setting.get(name, 1.0) for name in labels]
