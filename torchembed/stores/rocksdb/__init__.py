"""A store on disk, by RocksDB."""
