"""Options of stores in RocksDB."""

import dataclasses
import enum

from torchembed.stores.arguments import check_positive


class Compression(enum.Enum):
    """Compression of blocks of lines on disk. Trained rows shrink little."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RocksDBOptions:
    """Settings of :class:`~torchembed.stores.RocksDBStore`, which may differ each time it is
    opened.

    Args:
        write_buffer_bytes: lines that are kept in memory before they are written to sorted files;
            up to twice that, in all tables together.
        block_cache_bytes: memory for blocks of lines that were read. The operating system caches
            files too, so more pays only where blocks are compressed.
        compression: of blocks that are written from now on.
        sync_writes: whether each write and deletion returns only once it survives the end of the
            machine, as after ``sync()``. Without it, once it survives the end of the process.
        num_threads: threads that sort and merge files behind those that read and write.
        num_read_threads: threads among which the lines of one call are divided that reads many.
    """

    write_buffer_bytes: int = 64 << 20
    block_cache_bytes: int = 32 << 20
    compression: Compression = Compression.NONE
    sync_writes: bool = False
    num_threads: int = 2
    num_read_threads: int = 8

    def __post_init__(self) -> None:
        check_positive("write_buffer_bytes", self.write_buffer_bytes)
        check_positive("block_cache_bytes", self.block_cache_bytes)
        check_positive("num_threads", self.num_threads)
        check_positive("num_read_threads", self.num_read_threads)
        if not isinstance(self.compression, Compression):
            raise TypeError(f"compression must be a Compression, got {self.compression!r}")
        if not isinstance(self.sync_writes, bool):
            raise TypeError(f"sync_writes must be a bool, got {self.sync_writes!r}")
