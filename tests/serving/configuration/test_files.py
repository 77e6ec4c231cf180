"""Configurations in files: what is read, what is refused, and what comes back."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchembed.serving.configuration import (
    BatchingConfig,
    CacheConfig,
    ModelConfig,
    PersistentConfig,
    RedisTlsConfig,
    RowsOf,
    ServerConfig,
    UpdateConfig,
    VolatileConfig,
    VolatileKind,
    parse_address,
    read_config,
    to_yaml,
)
from torchembed.serving.levels import CacheKind, RowFormat
from torchembed.stores import OverflowPolicy


def write(folder: Path, values: Any, name: str = "server.yaml") -> Path:
    path = folder / name
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def everything() -> ServerConfig:
    return ServerConfig(
        models_folder=Path("models"),
        models=(
            ModelConfig(
                name="ranker",
                versions=(3, 5),
                num_instances=2,
                batching=None,
                captured_sizes=(8, 64),
                hit_rate_threshold=0.8,
                default_values={"user": 0.5, "item": -1.0},
                rows=RowsOf.VERSION,
                cache=CacheConfig(
                    rows=1000,
                    row_format=RowFormat.FP8,
                    devices=("cuda:0", "cuda:1"),
                    refresh_share=0.25,
                    refresh_delay_seconds=5.0,
                    refresh_interval_seconds=1.5,
                ),
            ),
            ModelConfig(
                name="small",
                num_latest_versions=2,
                batching=BatchingConfig(max_samples=7, max_delay_microseconds=0),
                cache=CacheConfig(kind=CacheKind.STATIC),
            ),
        ),
        http_address="0.0.0.0:0",
        grpc_address="[::1]:8001",
        token="secret",
        grace_seconds=0.0,
        volatile=VolatileConfig(
            kind=VolatileKind.REDIS,
            addresses=("127.0.0.1:7000", "127.0.0.1:7001"),
            is_cluster=True,
            user_name="default",
            password="p",
            tls=RedisTlsConfig(ca_certificate=Path("ca.pem"), server_name="redis.localhost"),
            overflow_margin_rows=10_000,
            overflow_policy=OverflowPolicy.EVICT_LEAST_USED,
        ),
        persistent=PersistentConfig(path=Path("rows"), is_loaded=False),
        updates=UpdateConfig(
            brokers=("kafka:9092",),
            filters=(".+",),
            client_settings={"security.protocol": "SSL"},
        ),
    )


@pytest.mark.parametrize("config", [ServerConfig(models_folder=Path("m")), everything()])
def test_a_configuration_comes_back_from_its_yaml(config: ServerConfig, tmp_path: Path) -> None:
    assert read_config(write(tmp_path, to_yaml(config))) == config


def test_json_is_read_as_yaml_is(tmp_path: Path) -> None:
    values = yaml.safe_load(to_yaml(everything()))
    assert read_config(write(tmp_path, values, "server.json")) == everything()


def test_yaml_has_no_defaults() -> None:
    assert to_yaml(ServerConfig(models_folder=Path("m"))) == "models_folder: m\n"


def test_changes_replace_keys_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"models_folder": "a", "http_address": "h:1", "num_threads": 3})
    config = read_config(path, models_folder="b", http_address="i:2")
    assert (str(config.models_folder), config.http_address, config.num_threads) == ("b", "i:2", 3)


def test_keys_without_a_default_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="models_folder is missing; it has no default"):
        read_config(write(tmp_path, ""))


def test_secrets_are_not_shown() -> None:
    text = repr(everything())
    assert "secret" not in text and "'p'" not in text


@pytest.mark.parametrize(
    "values",
    [{"token": 4711}, {"volatile": {"kind": "redis", "addresses": ["h:1"], "password": 4711}}],
)
def test_secrets_are_not_shown_in_errors(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be a string, got another, which is not") as raised:
        read_config(write(tmp_path, {"models_folder": "m", **values}))
    assert "4711" not in str(raised.value)


FIRST, CACHE = "models[0].", "models[0].cache."


def model(**fields: Any) -> dict[str, Any]:
    return {"models": [{"name": "a", **fields}]}


def cache(**fields: Any) -> dict[str, Any]:
    return model(cache=fields)


def redis(**fields: Any) -> dict[str, Any]:
    return {"volatile": {"kind": "redis", **fields}}


REFUSED: list[tuple[Any, str]] = [
    ([1], "the file must be a mapping of keys, got [1]"),
    ({"model_folder": "m"}, "model_folder is unknown; did you mean models_folder? (known here:"),
    ({"xyz": 1}, "xyz is unknown (known here: models_folder, "),
    ({"models_folder": "m", "grace_seconds": 10**400}, "grace_seconds must be a number, got 1000"),
    (cache(rows=0), CACHE + "rows must be at least 1, got 0"),
    (cache(row=1), CACHE + "row is unknown; did you mean rows?"),
    (cache(kind="statc"), CACHE + "kind must be one of dynamic, static, uvm, got 'statc'; did"),
    (cache(rows=1, share=0.5), CACHE + "share must be left out where rows says how large"),
    (cache(kind="static", rows=5), CACHE + "rows must be left out for a static cache"),
    (cache(share=1.5), CACHE + "share must be above 0, at most 1, got 1.5"),
    (cache(devices=["gpu"]), CACHE + "devices[0] must be cpu or cuda:<number>, got 'gpu'"),
    (cache(devices="cuda"), CACHE + "devices must be a list, got 'cuda'"),
    (cache(refresh_interval_seconds=1), CACHE + "refresh_share must be above 0 where"),
    (
        cache(refresh_interval_seconds=1, refresh_share=1, kind="uvm"),
        CACHE + "refresh_interval_seconds must be 0 for a cache whose kind is not dynamic",
    ),
    (model(versions=[1, "2"]), FIRST + "versions[1] must be a whole number, got '2'"),
    (model(versions=[1, 1]), FIRST + "versions must name each version once, got [1, 1]"),
    (model(versions=[1, 0]), FIRST + "versions[1] must be at least 1, got 0"),
    (model(num_instances=True), FIRST + "num_instances must be a whole number, got True"),
    (model(captured_sizes=[8, 0]), FIRST + "captured_sizes[1] must be at least 1, got 0"),
    (model(hit_rate_threshold=float("nan")), FIRST + "hit_rate_threshold must be a number, got"),
    (model(default_values={"t": "x"}), FIRST + "default_values.t must be a number, got 'x'"),
    (model(batching={"max_samples": 0}), FIRST + "batching.max_samples must be at least 1, got"),
    (model(name="a/b"), FIRST + "name must be the name of a folder among the models, got 'a/b'"),
    ({"models": [{"name": "a"}] * 2}, "models[1].name must not come twice, got 'a' again"),
    ({"models": [{}]}, "models[0].name is missing; it has no default"),
    ({"models": ["a"]}, "models[0] must be a mapping of keys, got 'a'"),
    ({"http_address": "80"}, "http_address must be host:port, such as 127.0.0.1:8000, got '80'"),
    ({"http_address": "h:70000"}, "http_address must be host:port"),
    ({"http_address": None, "grpc_address": None}, "http_address or grpc_address must be given"),
    (redis(), "volatile.addresses must name at least one server of Redis"),
    (redis(addresses=["a"]), "volatile.addresses[0] must be host:port"),
    (redis(addresses=["a:1"], tls={"key": "k"}), "volatile.tls.certificate and key must be given"),
    ({"volatile": {"password": "p"}}, "volatile.password must be left out where kind is memory"),
    (
        {"volatile": {"overflow_resolution_target": 0}},
        "volatile.overflow_resolution_target must be above 0 and below 1, got 0",
    ),
    ({"volatile": None}, "volatile or persistent must be given"),
    ({"persistent": {"path": 5}}, "persistent.path must be a path, got 5"),
    ({"persistent": {}}, "persistent.path is missing; it has no default"),
    ({"updates": {"brokers": []}}, "updates.brokers must name at least one broker"),
    ({"updates": {"brokers": ["b"]}}, "updates.brokers[0] must be host:port"),
    (
        {"updates": {"brokers": ["b:1"], "filters": [".+", "("]}},
        "updates.filters[1] must be a regular expression, got '(': ",
    ),
    (
        {"updates": {"brokers": ["b:1"], "poll_timeout_seconds": 0}},
        "updates.poll_timeout_seconds must be above 0, got 0",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_the_path_of_its_key(
    values: Any, message: str, tmp_path: Path
) -> None:
    if isinstance(values, dict):
        values = {"models_folder": "m", **values}
    path = write(tmp_path, values, "server.json")
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        read_config(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "must be JSON"),
        ("a.yaml", "a: [", "must be YAML"),
        ("a.yaml", "!!python/object/apply:os.getcwd []", "must be YAML"),
        ("a.yaml", "models_folder: a\nmodels_folder: b\n", "key 'models_folder' comes twice"),
        ("a.yaml", "a: &a {b: 1}\nc: {<<: *a, b: 2, b: 3}\n", "key 'b' comes twice"),
        ("a.yaml", "[" * 5000, "must be YAML: maximum recursion depth"),
        ("a.json", "[" * 100_000, "must be JSON: maximum recursion depth"),
        ("a.json", '{"models": [{"name": "a", "name": "b"}]}', "key 'name' comes twice"),
    ],
)
def test_files_that_are_neither_yaml_nor_json_are_refused(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(write(tmp_path, text, name))


@pytest.mark.parametrize(("name", "kind"), [("a.yaml", "YAML"), ("a.json", "JSON")])
def test_files_in_other_encodings_are_refused_by_name(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes('{"models_folder": "modèle"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=f"^file {re.escape(str(path))} must be {kind}: "):
        read_config(path)
    path.write_bytes('\ufeff{"models_folder": "modèle"}'.encode())
    assert read_config(path).models_folder == Path("modèle")


def test_keys_of_yaml_are_merged(tmp_path: Path) -> None:
    text = """
    models_folder: m
    models:
      - {name: a, cache: &small {rows: 5, row_format: fp16}}
      - {name: b, cache: &others {<<: *small, rows: 7}}
      - {name: c, cache: {row_format: fp8, <<: *others}}
    """
    found = [model.cache for model in read_config(write(tmp_path, text)).models]
    assert [(cache.rows, cache.row_format.value) for cache in found] == [
        (5, "fp16"),
        (7, "fp16"),
        (7, "fp8"),
    ]


def test_values_are_checked_without_a_file_too() -> None:
    with pytest.raises(ValueError, match=r"^rows must be at least 1, got 0"):
        CacheConfig(rows=0)
    with pytest.raises(ValueError, match=r"^models\[0\] must be of ModelConfig, got 'a'"):
        ServerConfig(models_folder=Path("m"), models=("a",))  # pyright: ignore[reportArgumentType]
    with pytest.raises(dataclasses.FrozenInstanceError):
        CacheConfig().rows = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:80", ("localhost", 80)),
        ("[::]:0", ("::", 0)),
        ("1.2.3.4:65535", ("1.2.3.4", 65535)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address("a", text) == address


def test_sizes_of_caches() -> None:
    sizes = {
        100: CacheConfig(share=0.1),
        200: CacheConfig(),
        7: CacheConfig(rows=7),
        31: CacheConfig(bytes=1000),
        1000: CacheConfig(kind=CacheKind.STATIC),
        1: CacheConfig(share=1e-9),
    }
    for num_rows, cache in sizes.items():
        assert cache.num_rows(1000, 32) == num_rows
