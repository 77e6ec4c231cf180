"""The opening of RocksDB, to write or to read."""

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from torchembed.stores.rocksdb.faults import faults_named
from torchembed.stores.rocksdb.options import Compression, RocksDBOptions
from torchembed.stores.rocksdb.writes import refuse_stalls

if TYPE_CHECKING:
    import rocksdict

# At most so many of the database's files are open, since a process may have few (ulimit -n).
_MAX_OPEN_FILES = 512
_FILE_BYTES = 256 << 20


def import_rocksdict() -> ModuleType:
    """The package rocksdict, or an ``ImportError`` that says how to install it."""
    try:
        import rocksdict
    except ImportError as error:
        raise ImportError(
            f"RocksDBStore needs the package rocksdict, and it cannot be imported ({error}); "
            "pip install 'torchembed[disk]'"
        ) from error
    return rocksdict


def opened(
    path: Path,
    options: RocksDBOptions,
    *,
    create: bool = False,
    is_read_only: bool = False,
    store: Path | None = None,
) -> "rocksdict.Rdict":
    """The database in ``path``; errors name ``store``, or the folder that ``path`` is in."""
    rocksdict = import_rocksdict()
    compressions = {
        Compression.NONE: rocksdict.DBCompressionType.none(),
        Compression.LZ4: rocksdict.DBCompressionType.lz4(),
        Compression.ZSTD: rocksdict.DBCompressionType.zstd(),
    }
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_block_cache(rocksdict.Cache(options.block_cache_bytes))
    blocks.set_bloom_filter(10, False)
    blocks.set_format_version(5)
    chosen = rocksdict.Options(raw_mode=True)
    chosen.create_if_missing(create)
    chosen.set_block_based_table_factory(blocks)
    chosen.set_compression_type(compressions[options.compression])
    chosen.set_write_buffer_size(options.write_buffer_bytes)
    chosen.set_target_file_size_base(_FILE_BYTES)
    chosen.set_max_open_files(_MAX_OPEN_FILES)
    chosen.set_max_background_jobs(options.num_threads)
    chosen.set_keep_log_file_num(4)
    chosen.set_paranoid_checks(True)
    # The log may end in the middle of a write, after the end of the process. Damage before that is
    # an error: RocksDB's own choice is to forget all that follows it.
    chosen.set_wal_recovery_mode(rocksdict.DBRecoveryMode.tolerate_corrupted_tail_records())
    access = rocksdict.AccessType
    access = access.read_only() if is_read_only else access.read_write()
    with faults_named(store or path.parent):
        db = rocksdict.Rdict(str(path), chosen, access_type=access)
    refuse_stalls(db)
    return db
