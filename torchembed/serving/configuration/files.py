"""Configurations in files: YAML or JSON."""

import json
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
    content = path.read_bytes()
    try:
        if path.suffix == ".json":
            return json.loads(content, object_pairs_hook=_without_duplicates)
        return yaml.load(content, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
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


_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Makes plain values alone, and refuses keys that come twice."""

    def __init__(self, stream: bytes) -> None:
        super().__init__(stream)
        self._checked: set[yaml.MappingNode] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put keys that ``<<`` merges beside a mapping's own, which come before them and may be the
        same: those are looked at before."""
        if node not in self._checked:
            self._checked.add(node)
            own = [key for key, _ in node.value if key.tag != _MERGE]
            keys = [self.construct_object(key, deep=True) for key in own]
            for i, key in enumerate(keys):
                if key in keys[:i]:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} comes twice", node.start_mark
                    )
        super().flatten_mapping(node)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"key {twice!r} comes twice")
    return values
