"""A config from a YAML file and overrides, and back.

Everything is compared with the schema before OmegaConf merges it, so that what is wrong is told by the name of its setting.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationValidationError, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from dlrm_fused.config.checks import check_consistency
from dlrm_fused.config.keys import allowed, is_group, known_keys, leaves, member_type, nearest, type_of
from dlrm_fused.config.registry import DataSource
from dlrm_fused.config.schema import PARQUET_WINDOW_ROWS, Config, DataConfig
from dlrm_fused.errors import ConfigError

_MISSING = "???"  # OmegaConf's word for a value that is still to come


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``key=value`` overrides, and check the result.

    Raises:
        ConfigError: one line that names the key, its value, what is allowed and, for an unknown key, the nearest one.
    """
    updates = [
        (read_yaml(Path(path), "configs"), str(path)),
        *((parse_override(override), "the command line") for override in overrides),
    ]
    trees = [cast(dict[Any, Any], OmegaConf.to_container(update, resolve=False)) for update, _ in updates]
    for tree, (_, origin) in zip(trees, updates, strict=True):
        _check_tree(tree, Config, "", origin)
    config = _merge(updates)
    _check_references(config, Config, "")
    typed = cast(Config, OmegaConf.to_object(config))
    _apply_defaults_of_source(typed.data, [tree.get("data", {}) for tree in trees])
    for group, name in ((typed, "output_dir"), (typed.data, "path"), (typed.checkpoint, "warm_start")):
        # Shells leave the ~ of output_dir=~/runs as it is.
        setattr(group, name, os.path.expanduser(getattr(group, name)))
    check_consistency(typed)
    return typed


def to_yaml(config: Config) -> str:
    """Return the resolved config, every setting included, as YAML that :func:`load_config` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(config)))


def flatten(config: Config) -> dict[str, object]:
    """Every setting by its dotted key, members by name as a whole, enumerations by name; for comparing two configs."""
    return {key: _plain(value) for key, value in leaves(config)}


def _plain(value: Any) -> Any:
    """Return a group as a dictionary, an enumeration by name, and other values as they are."""
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {name: _plain(member) for name, member in value.items()}
    return value.name if isinstance(value, Enum) else value


def read_yaml(path: Path, examples: str) -> DictConfig:
    """Return the settings in a file; ``examples`` is a folder of such files. Raises ConfigError."""
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        known = sorted(str(p) for p in Path(examples).glob("*.yaml"))
        raise ConfigError(f"config {path}: no such file; there are: {', '.join(known) or f'none in {examples}/'}") from None
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: not readable as YAML: {_yaml_reason(error)}") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"config {path}: expected a mapping of settings, such as name: my_run, found a list")
    return loaded


def _yaml_reason(error: Exception) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


def parse_override(override: str) -> DictConfig:
    """Return the setting in ``key=value``. Raises ConfigError."""
    key, separator, _ = override.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_][\w.\-]*", key):
        raise ConfigError(f"override {override!r}: expected key=value, such as training.max_steps=100")
    try:
        return OmegaConf.from_dotlist([override])
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"override {override!r}: {_first_line(error)}") from None


def _merge(updates: Sequence[tuple[DictConfig, str]]) -> DictConfig:
    """Return the defaults with the settings of all updates, each from an origin."""
    config = _defaults()
    try:
        # One call merges all: OmegaConf copies everything whenever it merges.
        return cast(DictConfig, OmegaConf.merge(config, *(update for update, _ in updates)))
    except OmegaConfBaseException:
        for update, origin in updates:
            try:
                config = cast(DictConfig, OmegaConf.merge(config, update))
            except OmegaConfBaseException as error:
                key = str(error.full_key)
                raise _not_allowed(key, OmegaConf.select(update, key), type_of(key), origin) from None
        raise


@cache
def _defaults() -> DictConfig:
    """Return the defaults of all settings, with their types; the caller must not change them."""
    return cast(DictConfig, OmegaConf.structured(Config))


def _apply_defaults_of_source(data: DataConfig, updates: Iterable[Mapping[str, Any]]) -> None:
    """Give settings of ``data`` that no update has the defaults of its source, where these differ from the schema's."""
    if data.source is DataSource.parquet and not any("shuffle_window_rows" in update for update in updates):
        data.shuffle_window_rows = PARQUET_WINDOW_ROWS


def _check_tree(tree: Mapping[Any, Any], group: Any, prefix: str, origin: str) -> None:
    """Refuse unknown settings of a group of this type, and values of another shape than theirs: a group, a list or a single
    value. References are texts."""
    for name, value in tree.items():
        key, kind = f"{prefix}{name}", member_type(group, name)
        if kind is None:
            raise _unknown(key, value, origin)
        if not _has_shape(value, kind):
            raise _not_allowed(key, value, kind, origin)
        if is_group(kind):
            _check_tree(value, kind, f"{key}.", origin)


def _has_shape(value: Any, kind: Any) -> bool:
    if is_group(kind):
        return isinstance(value, dict)
    if kind in (list[int], list[str]) and isinstance(value, list):
        return all(_has_shape(member, int) for member in value)
    return not isinstance(value, (dict, list)) and value != _MISSING


def _not_allowed(key: str, value: Any, kind: Any, origin: str) -> ConfigError:
    return ConfigError(f"{key}={'null' if value is None else value}: allowed: {allowed(kind)} (from {origin})")


def _unknown(key: str, value: Any, origin: str) -> ConfigError:
    if key in known_keys():  # a name with dots in it, which only overrides divide
        for part in reversed(key.split(".")):
            value = f"{{{part}: {value}}}"
        return ConfigError(f"{key}: unknown setting (from {origin}); in a file, write it as {value}")
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return ConfigError(f"{key}: unknown setting (from {origin}); the nearest existing one is {nearest(key)}")


def _check_references(config: DictConfig, group: Any, prefix: str) -> None:
    """Refuse references that lead nowhere, or to another type than their setting's."""
    for name in map(str, config):
        key, kind = f"{prefix}{name}", member_type(group, name)
        try:
            value = config[name]
            if isinstance(value, ListConfig):
                list(value)  # members are references of their own
        except InterpolationValidationError:
            reference = cast(dict[Any, Any], OmegaConf.to_container(config, resolve=False))[name]
            raise ConfigError(f"{key}={reference}: allowed: {allowed(kind)}") from None
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}: {_first_line(error)}") from None
        if isinstance(value, DictConfig):
            _check_references(value, kind, f"{key}.")


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]
