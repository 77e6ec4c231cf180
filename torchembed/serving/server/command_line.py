"""The flags of a server's command line, and the configuration that they give."""

import argparse
import dataclasses
import logging
from pathlib import Path

from torchembed.serving.configuration import (
    PersistentConfig,
    RedisTlsConfig,
    ServerConfig,
    UpdateConfig,
    VolatileConfig,
    VolatileKind,
    read_config,
    read_hugectr_config,
)
from torchembed.stores import RedisOptions

_log = logging.getLogger("torchembed.serving")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags but ``--models``."""
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--config", type=Path, help="a YAML or JSON file; flags change its values")
    files.add_argument("--ps-json", type=Path, help="a file of HugeCTR's parameter server")
    parser.add_argument("--http", metavar="HOST:PORT", help="by default 127.0.0.1:8000")
    parser.add_argument("--grpc", metavar="HOST:PORT", help="by default 127.0.0.1:8001")
    parser.add_argument(
        "--redis",
        metavar="URL",
        help="volatile rows there; redis://host:port[,host:port...]",
    )
    parser.add_argument("--persistent", type=Path, help="a folder for RocksDB, below the others")
    parser.add_argument("--kafka", metavar="BROKERS", help="apply the updates that come there")


def config_of(flags: argparse.Namespace, models: Path | None) -> ServerConfig:
    """The configuration that flags give, with the file if they name one.

    Args:
        models: the folder of models; None where the file names it.

    Raises:
        FileNotFoundError: where there is no such file.
        ValueError: for values that cannot be, and where nothing names the models.
    """
    if flags.ps_json is not None:
        if models is None:
            raise ValueError("--models must name the folder of models beside --ps-json, got none")
        found = read_hugectr_config(flags.ps_json, models)
        for sentence in found.left_out:
            _log.warning("%s: %s", flags.ps_json, sentence)
        config = found.server
    elif flags.config is not None:
        changes = {} if models is None else {"models_folder": str(models)}
        config = read_config(flags.config, **changes)
    elif models is not None:
        config = ServerConfig(models_folder=models)
    else:
        raise ValueError("--models or --config must be given, got neither")
    changed: dict[str, object] = {}
    if flags.http is not None:
        changed["http_address"] = flags.http
    if flags.grpc is not None:
        changed["grpc_address"] = flags.grpc
    if flags.redis is not None:
        changed["volatile"] = _redis(flags.redis)
    if flags.persistent is not None:
        changed["persistent"] = PersistentConfig(path=flags.persistent)
    if flags.kafka is not None:
        changed["updates"] = UpdateConfig(brokers=tuple(flags.kafka.split(",")))
    return dataclasses.replace(config, **changed)


def _redis(text: str) -> VolatileConfig:
    """Volatile rows in the Redis of a URL, or of ``host:port``."""
    options = RedisOptions.from_url(text if "://" in text else f"redis://{text}")
    tls = None
    if options.tls is not None:
        files = (options.tls.ca_certificate, options.tls.client_certificate, options.tls.client_key)
        ca, certificate, key = (None if file is None else Path(file) for file in files)
        tls = RedisTlsConfig(ca_certificate=ca, certificate=certificate, key=key)
    return VolatileConfig(
        kind=VolatileKind.REDIS,
        addresses=options.addresses,
        is_cluster=options.is_cluster,
        user_name=options.user_name,
        password=options.password,
        tls=tls,
    )
