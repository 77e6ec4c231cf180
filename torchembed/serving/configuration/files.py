"""Configurations in files: YAML or JSON."""

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from torchembed.serving.configuration.reading import config_from_values, values_of
from torchembed.serving.configuration.server_config import ServerConfig


def read_values(path: str | Path) -> Any:
    """The plain values of a YAML or JSON file, told apart by its name.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: where it is neither, or a key comes twice in it.
    """
    path = Path(path)
    text = path.read_text()
    try:
        if path.suffix == ".json":
            return json.loads(text, object_pairs_hook=_without_duplicates)
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ValueError(f"file {path} must be {kind}: {error}") from error


def read_config(path: str | Path, **changes: Any) -> ServerConfig:
    """The configuration of a server in a YAML or JSON file.

    Args:
        changes: plain values of keys, in place of the file's.

    Raises:
        FileNotFoundError: where there is no file.
        ValueError: for keys and values that cannot be; it names the file and the key's path.
    """
    values = read_values(path)
    if values is None:
        values = {}
    try:
        if isinstance(values, dict):
            values = {**values, **changes}
        return config_from_values(ServerConfig, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def to_yaml(config: ServerConfig) -> str:
    """The file that :func:`read_config` reads as ``config``; its secrets stand in it."""
    return yaml.safe_dump(values_of(config), sort_keys=False)


class _Loader(yaml.SafeLoader):
    """Makes plain values alone, and refuses keys that come twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} comes twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"key {twice!r} comes twice")
    return values
