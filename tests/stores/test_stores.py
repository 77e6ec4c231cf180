"""What every store does, in memory and on disk alike."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.redis_servers import RedisServer
from torchembed.core.key_partitions import partition_of
from torchembed.stores import (
    Compression,
    MemoryStore,
    RedisOptions,
    RedisStore,
    RocksDBOptions,
    RocksDBStore,
    RowStore,
    RowStoreError,
    RowTable,
    VolatileMemoryStore,
    VolatileOptions,
)

KEYS = [-(2**63), -(2**32), -257, -1, 0, 1, 255, 256, 2**32, 2**63 - 1]
LINE_BYTES = 5


@pytest.fixture(params=["memory", "rocksdb", "volatile memory", "redis", "redis cluster"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RowStore]:
    stores: dict[str, Callable[[], RowStore]] = {
        "memory": MemoryStore,
        "rocksdb": lambda: RocksDBStore(tmp_path / "store"),
        "volatile memory": VolatileMemoryStore,
        "redis": lambda: redis_store(request.getfixturevalue("single_redis")),
        "redis cluster": lambda: redis_store(*request.getfixturevalue("cluster")),
    }
    with stores[request.param]() as store:
        yield store


def redis_store(*servers: RedisServer) -> RedisStore:
    addresses = tuple(server.address for server in servers)
    options = RedisOptions(addresses=addresses, is_cluster=len(servers) > 1)
    return RedisStore(options, VolatileOptions(num_partitions=4, max_batch_rows=150))


def lines_of(keys: Tensor, version: int = 0) -> Tensor:
    """Lines that differ by key and version."""
    generator = torch.Generator().manual_seed(version)
    salt = torch.randint(256, (LINE_BYTES,), generator=generator)
    digits = keys[:, None] >> torch.arange(0, 8 * LINE_BYTES, 8)
    return (digits * 31 + salt).to(torch.uint8)


def filled(store: RowStore, keys: list[int]) -> RowTable:
    table = store.table("t", LINE_BYTES)
    table.write(torch.tensor(keys), lines_of(torch.tensor(keys)))
    return table


def test_every_integer_is_a_key_and_chunks_come_in_order(store: RowStore) -> None:
    table = filled(store, KEYS[::-1])
    for max_rows in (1, 3, len(KEYS), 100):
        chunks = list(table.chunks(max_rows))
        assert all(len(chunk.keys) == len(chunk.lines) <= max_rows for chunk in chunks)
        keys = torch.cat([chunk.keys for chunk in chunks])
        assert keys.tolist() == KEYS
        assert torch.equal(torch.cat([chunk.lines for chunk in chunks]), lines_of(keys))
    assert table.num_rows() == len(KEYS)


def test_reading_says_what_it_found_and_leaves_the_other_lines(store: RowStore) -> None:
    table = filled(store, [7, -3])
    keys = torch.tensor([8, -3, 7, -3, 9])
    lines = torch.full((5, LINE_BYTES), 99, dtype=torch.uint8)
    found = table.read(keys, lines)
    assert found.tolist() == [False, True, True, True, False]
    assert torch.equal(lines[found], lines_of(keys[found]))
    assert (lines[~found] == 99).all()


def test_the_last_line_of_a_key_counts(store: RowStore) -> None:
    table = store.table("t", LINE_BYTES)
    keys = torch.tensor([5, 1, 5, 5, 1] * 20)
    lines = torch.arange(100 * LINE_BYTES).reshape(100, LINE_BYTES).to(torch.uint8)
    table.write(keys, lines)
    read = torch.zeros(2, LINE_BYTES, dtype=torch.uint8)
    assert table.read(torch.tensor([1, 5]), read).all()
    assert torch.equal(read, lines[[99, 98]])
    assert table.num_rows() == 2


def test_keys_need_not_be_contiguous(store: RowStore) -> None:
    table = store.table("t", LINE_BYTES)
    keys = torch.arange(20).view(10, 2)[:, 1]
    table.write(keys, lines_of(keys))
    lines = torch.zeros(10, LINE_BYTES, dtype=torch.uint8)
    assert table.read(keys, lines).all()
    assert torch.equal(lines, lines_of(keys))
    table.delete(keys[::2])
    (chunk,) = table.chunks(20)
    assert chunk.keys.tolist() == [3, 7, 11, 15, 19]


def test_deleting_twice_and_what_is_not_there(store: RowStore) -> None:
    table = filled(store, KEYS)
    table.delete(torch.tensor([0, 0, 12345, -1]))
    assert table.num_rows() == len(KEYS) - 2
    read = torch.zeros(2, LINE_BYTES, dtype=torch.uint8)
    assert table.read(torch.tensor([0, 1]), read).tolist() == [False, True]


def test_nothing_is_a_legal_argument(store: RowStore) -> None:
    table = store.table("t", LINE_BYTES)
    keys, lines = torch.empty(0, dtype=torch.int64), torch.empty(0, LINE_BYTES, dtype=torch.uint8)
    table.write(keys, lines)
    table.delete(keys)
    assert table.read(keys, lines).shape == (0,)
    assert list(table.chunks(4)) == []
    assert table.num_rows() == 0


def test_tables_are_apart(store: RowStore) -> None:
    names = ["a", "b", "ab", "\u00e4/ \n", "x" * 500]
    tables = [store.table(name, 1 + n) for n, name in enumerate(names)]
    keys = torch.tensor(KEYS)
    for n, table in enumerate(tables):
        table.write(keys[n:], torch.full((len(KEYS) - n, 1 + n), n, dtype=torch.uint8))
    tables[1].delete(keys)
    for n, table in enumerate(tables):
        (lines,) = (c.lines for c in table.chunks(100)) if n != 1 else [torch.empty(0, 2)]
        assert lines.shape == (0 if n == 1 else len(KEYS) - n, 1 + n)
        assert (lines == n).all()
    assert store.tables() == {name: 1 + n for n, name in enumerate(names)}


def test_a_snapshot_stays_as_it_was(store: RowStore) -> None:
    table = filled(store, KEYS)
    snapshot = store.snapshot()
    table.delete(torch.tensor(KEYS[:3]))
    table.write(torch.tensor([0, 77]), lines_of(torch.tensor([0, 77]), version=1))
    store.table("later", 3)
    seen = snapshot.table("t", LINE_BYTES)
    (chunk,) = seen.chunks(100)
    assert chunk.keys.tolist() == KEYS
    assert torch.equal(chunk.lines, lines_of(chunk.keys))
    assert snapshot.tables() == {"t": LINE_BYTES}
    again = snapshot.snapshot()
    snapshot.close()
    assert again.table("t", LINE_BYTES).num_rows() == len(KEYS)
    again.close()
    assert table.num_rows() == len(KEYS) - 2


def test_a_snapshot_outlives_its_store(store: RowStore) -> None:
    filled(store, KEYS)
    with store.snapshot() as snapshot:
        store.close()
        assert snapshot.table("t", LINE_BYTES).num_rows() == len(KEYS)


def test_what_a_snapshot_refuses(store: RowStore) -> None:
    filled(store, KEYS)
    keys = torch.tensor([1])
    with store.snapshot() as snapshot:
        table = snapshot.table("t", LINE_BYTES)
        snapshot.sync()
        for write in (
            lambda: table.write(keys, lines_of(keys)),
            lambda: table.delete(keys),
            lambda: snapshot.table("new", 3),
        ):
            with pytest.raises(RowStoreError, match="a snapshot cannot be written; write to the"):
                write()


def test_a_closed_store_refuses_everything_but_to_be_closed(store: RowStore) -> None:
    table = filled(store, KEYS)
    chunks = table.chunks(2)
    next(chunks)
    store.close()
    store.close()
    keys = torch.tensor([1])
    uses: list[Callable[[], object]] = [
        lambda: table.read(keys, lines_of(keys)),
        lambda: table.write(keys, lines_of(keys)),
        lambda: table.delete(keys),
        lambda: table.chunks(1),
        lambda: next(chunks),
        table.num_rows,
        store.tables,
        store.snapshot,
        store.sync,
        lambda: store.table("t", LINE_BYTES),
    ]
    for use in uses:
        with pytest.raises(
            RowStoreError, match=r"store in .* is closed; (open it again|make another)"
        ):
            use()


def test_another_length_of_lines_is_refused(store: RowStore) -> None:
    store.table("t", 8)
    with pytest.raises(ValueError, match="line_bytes of table 't' must be 8, with which it was"):
        store.table("t", 12)


K, L = torch.tensor([1, 2]), torch.zeros(2, LINE_BYTES, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("keys", "lines", "error", "message"),
    [
        (K.int(), L, TypeError, "keys must be int64, got int32; call .long"),
        (K.tolist(), L, TypeError, "keys must be a tensor of int64, got list"),
        (K[None], L, ValueError, r"keys must have 1 dimension\(s\), got shape \(1, 2\)"),
        (K.to("meta"), L, ValueError, "keys must be on the CPU, got meta; call .cpu"),
        (K, L.float(), TypeError, "lines must be uint8, got float32; call .view"),
        (
            K,
            L[:1],
            ValueError,
            r"lines must have shape \(2, 5\) \(number of keys, line_bytes\), got",
        ),
        (K, L[:, :4], ValueError, r"lines must have shape \(2, 5\).*got \(2, 4\)"),
        (K, torch.zeros(5, 2, dtype=torch.uint8).T, ValueError, "lines must be contiguous"),
        (K, L.to("meta"), ValueError, "lines must be on the CPU, got meta; call .cpu"),
    ],
)
def test_wrong_tensors_are_named_and_change_nothing(
    store: RowStore, keys: Tensor, lines: Tensor, error: type[Exception], message: str
) -> None:
    table = filled(store, [1])
    for use in (table.write, table.read):
        with pytest.raises(error, match=message):
            use(keys, lines)
    assert table.num_rows() == 1


def test_a_call_does_not_write_more_than_stores_hold_at_once(store: RowStore) -> None:
    table = store.table("wide", 1 << 24)
    # Zeros of numpy take no memory until they are used.
    lines = torch.from_numpy(np.zeros((65, 1 << 24), dtype=np.uint8))
    with pytest.raises(
        ValueError, match="lines must hold at most 1073741824 bytes, got 1090519040;"
    ):
        table.write(torch.arange(65), lines)


@pytest.mark.parametrize(
    ("name", "line_bytes", "error", "message"),
    [
        (b"t", 4, TypeError, "name must be a str, got b't'"),
        ("", 4, ValueError, "name must not be empty; give the table a name"),
        ("t", 0, ValueError, "line_bytes must be positive, got 0"),
        ("t", 4.0, TypeError, "line_bytes must be an int, got 4.0"),
        ("t", True, TypeError, "line_bytes must be an int, got True"),
        ("t", 1 << 25, ValueError, "line_bytes must be at most 16777216, got 33554432"),
    ],
)
def test_tables_that_cannot_be(
    store: RowStore, name: str, line_bytes: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        store.table(name, line_bytes)
    assert store.tables() == {}


def test_chunks_have_a_row_at_least(store: RowStore) -> None:
    with pytest.raises(ValueError, match="max_rows must be positive, got 0"):
        store.table("t", 4).chunks(0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"write_buffer_bytes": 0}, ValueError, "write_buffer_bytes must be positive, got 0"),
        ({"block_cache_bytes": 1.5}, TypeError, "block_cache_bytes must be an int, got 1.5"),
        ({"compression": "lz4"}, TypeError, "compression must be a Compression, got 'lz4'"),
        ({"sync_writes": 1}, TypeError, "sync_writes must be a bool, got 1"),
    ],
)
def test_wrong_options_are_named(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        RocksDBOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("compression", Compression)
def test_lines_survive_any_options(tmp_path: Path, compression: Compression) -> None:
    """With buffers so small that lines go through files of every kind."""
    options = RocksDBOptions(
        write_buffer_bytes=1 << 16,
        block_cache_bytes=1 << 12,
        compression=compression,
        sync_writes=compression is Compression.LZ4,
    )
    keys = torch.arange(3000) * 2
    for version in range(3):
        with RocksDBStore(tmp_path / "store", options) as store:
            store.table("t", LINE_BYTES).write(keys[version:], lines_of(keys[version:], version))
    with RocksDBStore(tmp_path / "store") as store:
        lines = torch.zeros(len(keys) + 1, LINE_BYTES, dtype=torch.uint8)
        found = store.table("t", LINE_BYTES).read(torch.cat([keys, torch.tensor([1])]), lines)
    assert found.tolist() == [True] * 3000 + [False]
    expected = torch.cat([lines_of(keys[n : n + 1], n) for n in (0, 1)] + [lines_of(keys[2:], 2)])
    assert torch.equal(lines[:-1], expected)


def test_a_checkpoint_is_a_store_of_its_own(tmp_path: Path) -> None:
    with RocksDBStore(tmp_path / "store") as store:
        table = filled(store, KEYS)
        store.checkpoint(tmp_path / "saved")
        table.delete(torch.tensor(KEYS))
        with pytest.raises(FileExistsError, match="path must be free; remove what is there"):
            store.checkpoint(tmp_path / "saved")
        with RocksDBStore(tmp_path / "saved") as saved:
            copy = saved.table("t", LINE_BYTES)
            assert copy.num_rows() == len(KEYS)
            copy.delete(torch.tensor(KEYS[:1]))
        assert table.num_rows() == 0
    with RocksDBStore(tmp_path / "saved") as saved:
        assert saved.table("t", LINE_BYTES).num_rows() == len(KEYS) - 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "store"]


def test_threads_read_whole_lines_while_others_write(store: RowStore) -> None:
    """Each write gives all keys one version: a line that mixes two was read half written."""
    table = store.table("t", 64)
    keys, failures = torch.arange(500), []
    done = threading.Event()

    def write(first: int) -> None:
        for version in range(first, first + 30):
            table.write(keys, torch.full((500, 64), version, dtype=torch.uint8))

    def read() -> None:
        lines = torch.zeros(500, 64, dtype=torch.uint8)
        while not done.is_set():
            if not table.read(keys, lines).all() or (lines != lines[:, :1]).any():
                failures.append("read")
            if sum(len(chunk.keys) for chunk in table.chunks(128)) != 500:
                failures.append("chunks")

    write(0)
    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(first,)) for first in (100, 200)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert failures == []
    lines = torch.zeros(500, 64, dtype=torch.uint8)
    table.read(keys, lines)
    # In Redis each partition's part of a batch is done whole, and others' batches may come between.
    num_parts, num_rows = 1, len(keys)
    if isinstance(store, RedisStore):
        num_parts, num_rows = store.options.num_partitions, store.options.max_batch_rows
    for of_batch, batch in zip(keys.split(num_rows), lines.split(num_rows), strict=True):
        parts = partition_of(of_batch, num_parts)
        for part in range(num_parts):
            assert batch[parts == part].unique().tolist() in ([129], [229])


def test_a_dropped_table_has_no_lines_and_is_made_anew(store: RowStore) -> None:
    other = store.table("other", LINE_BYTES)
    other.write(torch.tensor([1]), lines_of(torch.tensor([1])))
    for _ in range(2):
        filled(store, KEYS).drop()
        is_named = isinstance(store, RedisStore)
        assert store.tables() == {"other": LINE_BYTES} | ({"t": LINE_BYTES} if is_named else {})
        assert store.table("t", LINE_BYTES).num_rows() == 0
    assert other.num_rows() == 1
    with store.snapshot() as snapshot, pytest.raises(RowStoreError, match="cannot be written"):
        snapshot.table("other", LINE_BYTES).drop()


@pytest.mark.parametrize("kind", ["memory", "volatile memory", "rocksdb"])
def test_a_dropped_table_refuses_what_is_asked_of_it(kind: str, tmp_path: Path) -> None:
    stores: dict[str, Callable[[], RowStore]] = {
        "memory": MemoryStore,
        "volatile memory": VolatileMemoryStore,
        "rocksdb": lambda: RocksDBStore(tmp_path / "store"),
    }
    keys = torch.tensor([1])
    calls: list[Callable[[RowTable], object]] = [
        lambda table: table.read(keys, lines_of(keys)),
        lambda table: table.write(keys, lines_of(keys)),
        lambda table: table.delete(keys),
        lambda table: list(table.chunks(1)),
        lambda table: table.num_rows(),
        lambda table: table.drop(),
    ]
    with stores[kind]() as store:
        table = filled(store, KEYS)
        table.drop()
        for call in calls:
            with pytest.raises(RowStoreError, match="'t' was dropped; open it again by table"):
                call(table)
