"""``python -m torchembed.serving``: serves the models of a folder."""

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from torchembed.serving.configuration import (
    PersistentConfig,
    ServerConfig,
    UpdateConfig,
    VolatileConfig,
    VolatileKind,
    read_config,
)
from torchembed.serving.interface import UnknownModelError
from torchembed.serving.server import Server
from torchembed.stores import RowStoreError


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns:
        The exit status: 0 after a graceful end, 2 where the server could not start.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        server = Server(_config(arguments))
        with server:
            server.start()
            for name, protocol in (("http", server.http), ("grpc", server.grpc)):
                if protocol is not None:
                    print(f"{name}: {protocol.address}", flush=True)
            print("ready", flush=True)
            server.serve()
    except (ImportError, OSError, RowStoreError, UnknownModelError, ValueError) as error:
        print(f"torchembed.serving: {error}", file=sys.stderr)
        return 2
    return 0


def _config(arguments: Sequence[str] | None) -> ServerConfig:
    """The configuration that the command line gives, with its file if it names one."""
    parser = argparse.ArgumentParser(
        prog="python -m torchembed.serving",
        description="Serve the models of a folder by the Open Inference Protocol.",
    )
    parser.add_argument("--models", type=Path, help="the folder that deploy() wrote into")
    parser.add_argument("--config", type=Path, help="a YAML or JSON file; flags change its values")
    parser.add_argument("--http", metavar="HOST:PORT", help="by default 127.0.0.1:8000")
    parser.add_argument("--grpc", metavar="HOST:PORT", help="by default 127.0.0.1:8001")
    parser.add_argument("--redis", metavar="HOST:PORT", help="volatile rows in this Redis")
    parser.add_argument("--persistent", type=Path, help="a folder for RocksDB, below the others")
    parser.add_argument("--kafka", metavar="BROKERS", help="apply the updates that come there")
    given = parser.parse_args(arguments)
    if given.config is not None:
        changes = {} if given.models is None else {"models_folder": str(given.models)}
        config = read_config(given.config, **changes)
    elif given.models is not None:
        config = ServerConfig(models_folder=given.models)
    else:
        parser.error("--models or --config must be given")
    changed: dict[str, object] = {}
    if given.http is not None:
        changed["http_address"] = given.http
    if given.grpc is not None:
        changed["grpc_address"] = given.grpc
    if given.redis is not None:
        changed["volatile"] = VolatileConfig(kind=VolatileKind.REDIS, addresses=(given.redis,))
    if given.persistent is not None:
        changed["persistent"] = PersistentConfig(path=given.persistent)
    if given.kafka is not None:
        changed["updates"] = UpdateConfig(brokers=tuple(given.kafka.split(",")))
    return dataclasses.replace(config, **changed)


if __name__ == "__main__":
    sys.exit(main())
