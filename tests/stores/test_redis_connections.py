"""How stores reach their Redis: encrypted, by a login, and in a cluster."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.crc
import torch

from tests.support.certificates import Certificate, certificate
from tests.support.partition_keys import lines_of
from tests.support.redis_servers import RedisServer, redis_server
from torchembed.stores import (
    OverflowPolicy,
    RedisLayout,
    RedisOptions,
    RedisStore,
    RedisTls,
    RowStoreError,
    StoreAccessError,
    StoreUnavailableError,
    VolatileOptions,
)
from torchembed.stores.redis.layout import PartitionNames, partition_names

LINE_BYTES = 24
KEYS = torch.arange(-50, 50)
LINES = lines_of(KEYS, LINE_BYTES).contiguous()


def exchange_rows(options: RedisOptions) -> None:
    """Write rows and read them."""
    with RedisStore(options, VolatileOptions(num_partitions=16)) as store:
        table = store.table("t", LINE_BYTES)
        table.write(KEYS, LINES)
        lines = torch.empty_like(LINES)
        assert table.read(KEYS, lines).all()
        assert torch.equal(lines, LINES)
        assert store.tables() == {"t": LINE_BYTES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def certificates(folder: Path) -> tuple[Certificate, Certificate]:
    """The server's, made out to its address, and a client's."""
    return certificate(folder, "server", "IP:127.0.0.1"), certificate(folder, "client", "DNS:c")


def tls_server(server: Certificate, clients: Certificate | None) -> list[str]:
    """Arguments of a server that takes encrypted connections on its port alone."""
    authority = clients or server
    return [
        *("--tls-cert-file", str(server.file), "--tls-key-file", str(server.key)),
        *("--tls-ca-cert-file", str(authority.file)),
        *("--tls-auth-clients", "yes" if clients else "no"),
    ]


@pytest.fixture(scope="module")
def tls_redis(certificates: tuple[Certificate, Certificate]) -> Iterator[RedisServer]:
    with encrypted(*certificates) as server:
        yield server


def encrypted(server: Certificate, clients: Certificate | None):  # type: ignore[no-untyped-def]
    return redis_server(*tls_server(server, clients), is_encrypted=True)


def test_encrypted_connections_with_certificates_of_both_sides(
    tls_redis: RedisServer, certificates: tuple[Certificate, Certificate]
) -> None:
    server, client = certificates
    tls = RedisTls(
        ca_certificate=server.file, client_certificate=client.file, client_key=client.key
    )
    exchange_rows(RedisOptions(addresses=(tls_redis.address,), tls=tls))


def test_connections_that_are_not_as_the_server_or_the_client_wants(
    tls_redis: RedisServer, certificates: tuple[Certificate, Certificate]
) -> None:
    server, client = certificates
    options = RedisOptions(addresses=(tls_redis.address,), timeout_seconds=5.0)
    with pytest.raises(StoreUnavailableError, match=r"the Redis at 127.* does not answer"):
        exchange_rows(options)
    own = {"client_certificate": client.file, "client_key": client.key}
    with pytest.raises(StoreUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
        exchange_rows(dataclasses.replace(options, tls=RedisTls(**own)))
    with pytest.raises(StoreUnavailableError, match="does not answer"):
        exchange_rows(dataclasses.replace(options, tls=RedisTls(ca_certificate=server.file)))


def test_the_host_name_of_a_certificate(folder: Path) -> None:
    other = certificate(folder, "other", "DNS:elsewhere.example")
    with encrypted(other, None) as server:
        options = RedisOptions(addresses=(server.address,), tls=RedisTls(ca_certificate=other.file))
        with pytest.raises(StoreUnavailableError, match="certificate verify failed: IP address"):
            exchange_rows(options)
        unchecked = RedisTls(ca_certificate=other.file, checks_host_name=False)
        exchange_rows(dataclasses.replace(options, tls=unchecked))
        named = RedisTls(ca_certificate=other.file, server_name="elsewhere.example")
        exchange_rows(dataclasses.replace(options, tls=named))
        wrong = dataclasses.replace(named, server_name="nowhere.example")
        with pytest.raises(StoreUnavailableError, match="Hostname mismatch"):
            exchange_rows(dataclasses.replace(options, tls=wrong))
    with pytest.raises(ValueError, match="server_name must be a name, and checks_host_name be"):
        RedisTls(server_name="n", checks_host_name=False)


def test_a_login_by_password_and_by_user() -> None:
    with redis_server("--requirepass", "secret") as server:
        options = RedisOptions(addresses=(server.address,))
        exchange_rows(dataclasses.replace(options, password="secret"))
        for password in (None, "wrong"):
            with pytest.raises(StoreAccessError, match="refuses user_name and password, or their"):
                exchange_rows(dataclasses.replace(options, password=password))
        with server.client(password="secret") as client:
            client.acl_setuser("writer", True, passwords="+word", keys="*", categories=["+@all"])
            client.acl_setuser(
                "reader", True, passwords="+pass", keys="*", categories=["+@read", "+@connection"]
            )
        exchange_rows(RedisOptions.from_url(f"redis://writer:word@{server.address}"))
        with pytest.raises(StoreAccessError, match="refuses user_name"):
            exchange_rows(dataclasses.replace(options, user_name="writer", password="pass"))
        reader = dataclasses.replace(options, user_name="reader", password="pass")
        with pytest.raises(StoreAccessError, match=r"or their rights: .*no permissions"):
            exchange_rows(reader)
        reading = dataclasses.replace(reader, is_read_only=True)
        with RedisStore(reading, VolatileOptions(num_partitions=16)) as store:
            lines = torch.empty_like(LINES)
            assert store.table("t", LINE_BYTES).read(KEYS, lines).all()
            assert torch.equal(lines, LINES)
            assert store.table("t", LINE_BYTES).num_rows() == len(KEYS)


def test_a_cluster_holds_partitions_on_all_its_servers(cluster: list[RedisServer]) -> None:
    # Any one of its nodes tells of the others.
    exchange_rows(RedisOptions(addresses=(cluster[1].address,), is_cluster=True))
    for server in cluster:
        with server.client() as client:
            assert client.dbsize() > 0


def test_a_node_of_a_cluster_is_no_single_server(cluster: list[RedisServer]) -> None:
    def use_each() -> None:
        for server in cluster:
            exchange_rows(RedisOptions(addresses=(server.address,)))

    with pytest.raises(RowStoreError, match="is a node of a cluster; set is_cluster=True"):
        use_each()


@pytest.mark.parametrize("policy", OverflowPolicy)
def test_slots_that_move_to_another_server(
    cluster: list[RedisServer], policy: OverflowPolicy
) -> None:
    """While the slot of a table's one partition moves, and afterwards, its rows are found."""
    addresses = tuple(server.address for server in cluster)
    options = VolatileOptions(
        num_partitions=1, overflow_margin_rows=len(KEYS), overflow_policy=policy
    )
    with RedisStore(RedisOptions(addresses=addresses, is_cluster=True), options) as store:
        table = store.table("moving", LINE_BYTES)
        table.write(KEYS, LINES)
        names = partition_names(RedisLayout.TORCHEMBED, "moving", 0)
        slot = redis.crc.key_slot(names.values)
        (source,) = [server for server in cluster if holds(server, names)]
        target = next(server for server in cluster if server is not source)
        with source.client() as client:
            moved = [name for name in names if client.exists(name)]
        set_slot(target, slot, "IMPORTING", id_of(source))
        set_slot(source, slot, "MIGRATING", id_of(target))
        with source.client() as client:
            client.migrate("127.0.0.1", target.port, moved, 0, 10_000)
        lines = torch.empty_like(LINES)
        assert table.read(KEYS, lines).all()
        assert torch.equal(lines, LINES)
        # Redis refuses what names several keys of the slot, unless all are there by now.
        with pytest.raises(StoreUnavailableError, match="request during rehashing of slot"):
            table.write(KEYS[:5], LINES[:5])
        for server in cluster:
            set_slot(server, slot, "NODE", id_of(target))
        assert table.read(KEYS, lines).all()
        table.write(KEYS, LINES)
        more = torch.arange(1000, 1001)
        table.write(more, lines_of(more, LINE_BYTES).contiguous())
        assert table.num_rows() == 80
        store.sync()
        assert store.num_lost_accesses == 0
        with target.client() as client:
            assert client.hlen(names.values) == 80


def holds(server: RedisServer, names: PartitionNames) -> bool:
    with server.client() as client:
        return names.values in client.execute_command("KEYS", "*")


def id_of(server: RedisServer) -> str:
    with server.client() as client:
        return client.execute_command("CLUSTER MYID").decode()


def set_slot(server: RedisServer, slot: int, state: str, node: str) -> None:
    with server.client() as client:
        client.execute_command("CLUSTER SETSLOT", slot, state, node)
