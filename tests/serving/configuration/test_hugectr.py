"""HugeCTR's ps.json: each key has its effect, is named as left out, or is refused."""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from torchembed.serving.configuration import (
    BatchingConfig,
    CacheConfig,
    HugectrRows,
    ModelConfig,
    PersistentConfig,
    RedisTlsConfig,
    ServerConfig,
    UpdateConfig,
    VolatileConfig,
    VolatileKind,
    read_config,
    read_hugectr_config,
    to_yaml,
)
from torchembed.serving.levels import CacheKind, RowFormat
from torchembed.serving.server.stores import open_stores
from torchembed.stores import OverflowPolicy

MODEL: dict[str, Any] = {
    "model": "wdl",
    "sparse_files": ["/wdl/0_sparse.model", "/wdl/1_sparse.model"],
    "embedding_vecsize_per_table": [1, 16],
}
EVERY_KEY: dict[str, Any] = {
    "supportlonglong": True,
    "fuse_embedding_table": False,
    "models": [
        {
            **MODEL,
            "dense_file": "/wdl/_dense.model",
            "network_file": "/wdl/wdl.json",
            "num_of_worker_buffer_in_pool": 3,
            "num_of_refresher_buffer_in_pool": 1,
            "deployed_device_list": [0, 1],
            "max_batch_size": 1024,
            "default_value_for_each_table": [0.5, -1],
            "maxnum_des_feature_per_sample": 13,
            "maxnum_catfeature_query_per_table_per_sample": [2, 26],
            "embedding_table_names": ["wide", "deep"],
            "refresh_delay": 5,
            "refresh_interval": 2.5,
            "hit_rate_threshold": 0.8,
            "gpucacheper": 0.5,
            "gpucache": True,
            "embedding_cache_type": "dynamic",
            "cache_refresh_percentage_per_iteration": 0.25,
            "thread_pool_size": 16,
            "label_dim": 1,
            "slot_num": 28,
            "use_context_stream": True,
            "use_hctr_cache_implementation": True,
            "init_ec": True,
            "enable_pagelock": False,
            "fp8_quant": True,
        }
    ],
    "volatile_db": {
        "type": "redis_cluster",
        "address": "127.0.0.1:7003,127.0.0.1:7004;127.0.0.1:7005",
        "user_name": "somebody",
        "password": "secret",
        "num_partitions": 4,
        "allocation_rate": 268435456,
        "shared_memory_size": 17179869184,
        "shared_memory_name": "map",
        "shared_memory_auto_remove": True,
        "num_node_connections": 7,
        "max_batch_size": 1000,
        "enable_tls": True,
        "tls_ca_certificate": "ca.crt",
        "tls_client_certificate": "client.pem",
        "tls_client_key": "key.pem",
        "tls_server_name_identification": "redis.localhost",
        "overflow_margin": 10000000,
        "overflow_policy": "evict_least_used",
        "overflow_resolution_target": 0.75,
        "initialize_after_startup": True,
        "initial_cache_rate": 0.5,
        "cache_missed_embeddings": True,
        "update_filters": [".+"],
    },
    "persistent_db": {
        "type": "rocks_db",
        "path": "/rows",
        "num_threads": 12,
        "read_only": False,
        "max_batch_size": 2000,
        "initialize_after_startup": False,
        "update_filters": ["^hps_wdl$"],
    },
    "update_source": {
        "type": "kafka_message_queue",
        "brokers": "127.0.0.1:9092;127.0.0.1:9093",
        "metadata_refresh_interval_ms": 1000,
        "poll_timeout_ms": 250,
        "receive_buffer_size": 262144,
        "max_batch_size": 100,
        "failure_backoff_ms": 20,
        "max_commit_interval": 8,
    },
}


def read(folder: Path, values: Any) -> Any:
    path = folder / "ps.json"
    path.write_text(json.dumps(values))
    return read_hugectr_config(path, "models")


def test_every_key_has_its_effect_or_is_named(tmp_path: Path) -> None:
    config = read(tmp_path, EVERY_KEY)
    assert config.server == ServerConfig(
        models_folder=Path("models"),
        models=(
            ModelConfig(
                name="wdl",
                num_instances=3,
                batching=BatchingConfig(max_samples=1024),
                hit_rate_threshold=0.8,
                default_values={"wide": 0.5, "deep": -1.0},
                hugectr_rows={
                    "wide": HugectrRows(folders=(Path("/wdl/0_sparse.model"),), dim=1),
                    "deep": HugectrRows(folders=(Path("/wdl/1_sparse.model"),), dim=16),
                },
                cache=CacheConfig(
                    share=0.5,
                    row_format=RowFormat.FP8,
                    devices=("cuda:0", "cuda:1"),
                    refresh_share=0.25,
                    refresh_delay_seconds=5.0,
                    refresh_interval_seconds=2.5,
                ),
            ),
        ),
        volatile=VolatileConfig(
            kind=VolatileKind.REDIS,
            is_cluster=True,
            addresses=("127.0.0.1:7003", "127.0.0.1:7004", "127.0.0.1:7005"),
            user_name="somebody",
            password="secret",
            num_partitions=4,
            num_connections=7,
            max_batch_rows=1000,
            tls=RedisTlsConfig(
                ca_certificate=Path("ca.crt"),
                certificate=Path("client.pem"),
                key=Path("key.pem"),
                server_name="redis.localhost",
            ),
            overflow_margin_rows=10_000_000,
            overflow_policy=OverflowPolicy.EVICT_LEAST_USED,
            overflow_resolution_target=0.75,
            initial_share=0.5,
            inserts_missed_rows=True,
        ),
        persistent=PersistentConfig(
            path=Path("/rows"),
            is_loaded=False,
            num_threads=12,
            max_batch_rows=2000,
        ),
        updates=UpdateConfig(
            brokers=("127.0.0.1:9092", "127.0.0.1:9093"),
            filters=(r"hps_et\.(?:.+)\..+", r"hps_et\.(?:hps_wdl)\..+"),
            max_batch_messages=100,
            poll_timeout_seconds=0.25,
            metadata_refresh_seconds=1.0,
            failure_back_off_seconds=0.02,
        ),
    )
    first = "models[0]."
    assert {sentence.split(": ")[0] for sentence in config.left_out} == {
        *(first + key for key in ("dense_file", "network_file", "deployed_device_list")),
        *(first + key for key in ("maxnum_des_feature_per_sample", "label_dim", "slot_num")),
        *(first + key for key in ("maxnum_catfeature_query_per_table_per_sample", "init_ec")),
        *(first + key for key in ("num_of_refresher_buffer_in_pool", "thread_pool_size")),
        *(first + key for key in ("use_context_stream", "use_hctr_cache_implementation")),
        first + "enable_pagelock",
        *(f"volatile_db.shared_memory_{key}" for key in ("size", "name", "auto_remove")),
        "volatile_db.allocation_rate",
        "update_source.max_commit_interval",
        "update_source.receive_buffer_size",
        "update_filters",
    }


def test_it_can_be_written_as_yaml(tmp_path: Path) -> None:
    server = read(tmp_path, EVERY_KEY).server
    path = tmp_path / "server.yaml"
    path.write_text(to_yaml(server))
    assert read_config(path) == server


def test_the_least_file_has_hugectr_s_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, {"models": [{"model": "m", "sparse_files": ["a", "b"]}]})
    assert config.server == ServerConfig(
        models_folder=Path("models"),
        models=(
            ModelConfig(
                name="m",
                num_instances=2,
                batching=BatchingConfig(max_samples=64),
                hit_rate_threshold=0.9,
                hugectr_rows={
                    "sparse_embedding0": HugectrRows(folders=(Path("a"),)),
                    "sparse_embedding1": HugectrRows(folders=(Path("b"),)),
                },
                cache=CacheConfig(share=0.2, devices=("cuda:0",)),
            ),
        ),
        volatile=VolatileConfig(
            num_partitions=min(16, os.cpu_count() or 1),
            overflow_policy=OverflowPolicy.EVICT_RANDOM,
            inserts_missed_rows=False,
        ),
    )
    assert config.left_out == ()


def test_numbers_and_truths_may_be_strings_and_defaults_too_many(tmp_path: Path) -> None:
    values = {
        "supportlonglong": "true",
        "models": [
            {
                "model": "m",
                "sparse_files": ["a"],
                "max_batch_size": "64",
                "gpucache": "false",
                "gpucacheper": "0.5",
                "deployed_device_list": ["0"],
                "default_value_for_each_table": ["0.5", "0.0"],
            }
        ],
    }
    config = read(tmp_path, values)
    (model,) = config.server.models
    assert model.batching == BatchingConfig(max_samples=64)
    assert model.cache == CacheConfig(share=0.5, devices=("cpu",))
    assert model.default_values == {"sparse_embedding0": 0.5}
    assert [s.split(":")[0] for s in config.left_out] == ["models[0].gpucache"]


def test_a_memory_database_with_the_margin_and_batches_of_earlier_releases(tmp_path: Path) -> None:
    volatile = {
        "type": "hash_map",
        "max_get_batch_size": 100000,
        "max_set_batch_size": 5000,
        "overflow_policy": "evict_oldest",
        "overflow_margin": 10,
        "initialize_after_startup": False,
        "initial_cache_rate": 1.0,
    }
    database = {"type": "disabled"}
    values = {"models": [MODEL], "volatile_db": volatile, "persistent_db": database}
    found = read(tmp_path, values).server.volatile
    assert (found.max_batch_rows, found.overflow_margin_rows) == (5000, 10)
    assert (found.initial_share, found.overflow_policy) == (0.0, OverflowPolicy.EVICT_OLDEST)


def test_fused_tables_may_have_several_files(tmp_path: Path) -> None:
    model = {
        "model": "m",
        "embedding_table_names": ["b", "a"],
        "sparse_files": {"a": ["x", "y"], "b": ["z"]},
        "embedding_vecsize_per_table": [4, 8],
    }
    config = read(tmp_path, {"fuse_embedding_table": True, "models": [model]})
    assert config.server.models[0].hugectr_rows == {
        "b": HugectrRows(folders=(Path("z"),), dim=4),
        "a": HugectrRows(folders=(Path("x"), Path("y")), dim=8),
    }


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("static", CacheKind.STATIC),
        ("uvm", CacheKind.UVM),
        ("stochastic", CacheKind.DYNAMIC),
        ("Dynamic", CacheKind.DYNAMIC),
    ],
)
def test_kinds_of_caches(kind: str, expected: CacheKind, tmp_path: Path) -> None:
    config = read(tmp_path, {"models": [{**MODEL, "embedding_cache_type": kind}]})
    assert config.server.models[0].cache.kind is expected
    assert len(config.left_out) == (kind == "stochastic")


def test_the_default_filter_takes_the_updates_of_all_models(tmp_path: Path) -> None:
    source = {"type": "kafka_message_queue", "brokers": "b:1"}
    for filters in ({}, {"update_filters": ["^hps_.+$"]}):
        values = {"models": [MODEL], "update_source": source, "volatile_db": filters}
        updates = read(tmp_path, values).server.updates
        assert updates == UpdateConfig(brokers=("b:1",), metadata_refresh_seconds=30.0)


def test_a_persistent_database_is_read_only_where_nothing_updates_it(tmp_path: Path) -> None:
    database = {"type": "rocks_db", "path": "/rows", "read_only": True}
    persistent = read(tmp_path, {"models": [MODEL], "persistent_db": database}).server.persistent
    assert persistent == PersistentConfig(path=Path("/rows"), is_read_only=True, num_threads=16)


def test_certificates_of_redis_are_made_out_to_its_address_or_to_a_name(tmp_path: Path) -> None:
    database = {"type": "redis_cluster", "enable_tls": True}
    for given, expected in ({}, None), ({"tls_server_name_identification": "redis"}, "redis"):
        values = {"models": [MODEL], "volatile_db": {**database, **given}}
        assert read(tmp_path, values).server.volatile.tls.server_name == expected


def test_nobody_logs_in_to_redis_without_a_password(tmp_path: Path) -> None:
    for given, expected in (
        ({}, (None, None)),
        ({"password": "p"}, ("default", "p")),
        ({"user_name": "u", "password": "p"}, ("u", "p")),
    ):
        database = {"type": "redis_cluster", **given}
        config = read(tmp_path, {"models": [MODEL], "volatile_db": database}).server
        assert (config.volatile.user_name, config.volatile.password) == expected
        with contextlib.ExitStack() as stack:
            assert open_stores(config, stack).names == ("redis",)


def changed(**fields: Any) -> dict[str, Any]:
    return {"models": [{**MODEL, **fields}]}


REFUSED: list[tuple[Any, str]] = [
    ([], "the file must be an object of keys, got []"),
    ({"models": []}, "models must be a list of at least one model, got []"),
    ({"models": [MODEL], "supportlonglong": False}, "supportlonglong must be true, since keys"),
    ({"models": [MODEL], "volatile": {}}, "volatile is no key of HugeCTR; did you mean volatile_"),
    (
        changed(gpucachper=0.5),
        "models[0].gpucachper is no key of HugeCTR; did you mean gpucacheper",
    ),
    (changed(model=""), "models[0].model must name the model, got ''"),
    (changed(i64_input_key=False), "models[0].i64_input_key must be true, since keys have 64 bits"),
    (changed(gpucacheper=1.5), "models[0].gpucacheper must be above 0, at most 1, got 1.5"),
    (changed(gpucacheper="x"), "models[0].gpucacheper must be a number, got 'x'"),
    (changed(max_batch_size=0), "models[0].max_batch_size must be at least 1, got 0"),
    (changed(gpucache="maybe"), "models[0].gpucache must be true or false, got 'maybe'"),
    (changed(embedding_cache_type="lru"), "models[0].embedding_cache_type must be one of dynamic"),
    (changed(deployed_device_list=[-1]), "models[0].deployed_device_list[0] must be at least 0"),
    (
        changed(embedding_vecsize_per_table=[1]),
        "models[0].embedding_vecsize_per_table must have one for each of the 2 tables in",
    ),
    (
        changed(embedding_table_names=["a", "a"]),
        "models[0].embedding_table_names must be distinct, got ['a', 'a']",
    ),
    (
        changed(default_value_for_each_table=[0.0]),
        "models[0].default_value_for_each_table must have a number for each of 2 tables, got 1",
    ),
    (
        changed(sparse_files=["a", 1]),
        "models[0].sparse_files[1] must be a string, got 1",
    ),
    (
        {"models": [MODEL, MODEL]},
        "models[1].name must not come twice, got 'wdl' again",
    ),
    (
        {"fuse_embedding_table": True, **changed(sparse_files={"a": "/one"})},
        "models[0].sparse_files must be lists of folders of sparse models, got {'a': '/one'}",
    ),
    (
        {"fuse_embedding_table": True, **changed(sparse_files={"a": 5})},
        "models[0].sparse_files must be lists of folders of sparse models, got {'a': 5}",
    ),
    (changed(hit_rate_threshold=10**400), "models[0].hit_rate_threshold must be a number, got 1"),
    ({"models": [MODEL], "volatile_db": []}, "volatile_db must be an object of keys, got []"),
    ({"models": [MODEL], "persistent_db": 0}, "persistent_db must be an object of keys, got 0"),
    ({"models": [MODEL], "update_source": ""}, "update_source must be an object of keys, got ''"),
    (
        {"models": [MODEL], "volatile_db": {"type": "redis"}},
        "volatile_db.type must be one of hash_map, parallel_hash_map, multi_process_hash_map, red",
    ),
    (
        {"models": [MODEL], "volatile_db": {"max_batch_size": 262_144}},
        "volatile_db.max_batch_size must be from 1 to 262143, got 262144",
    ),
    (
        {"models": [MODEL], "volatile_db": {"password": 4711}},
        "volatile_db.password must be a string, got another, which is not shown",
    ),
    (
        {"models": [MODEL], "volatile_db": {"overflow_policy": "lru"}},
        "volatile_db.overflow_policy must be one of evict_oldest, evict_least_used, evict_random",
    ),
    (
        {"models": [MODEL], "volatile_db": {"type": "disabled"}},
        "volatile or persistent must be given, where rows are, got neither",
    ),
    (
        {"models": [MODEL], "volatile_db": {"initial_cache_rate": 0.5}},
        "volatile.initial_share must be 0 or 1 where no persistent level has the other rows",
    ),
    (
        {
            "models": [MODEL],
            "persistent_db": {"type": "rocks_db", "path": "/rows", "read_only": True},
            "update_source": {"type": "kafka_message_queue"},
        },
        "updates must be left out where persistent.is_read_only is true, since its rows do not",
    ),
    (
        {"models": [MODEL], "persistent_db": {"type": "rocks_db"}},
        "persistent_db.path must be a folder where type is rocks_db, got none",
    ),
    (
        {"models": [MODEL], "update_source": {"broker": "b:1"}},
        "update_source.broker is no key of HugeCTR; did you mean brokers?",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_the_path_of_its_key(
    values: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'ps.json'}: {message}")):
        read(tmp_path, values)
