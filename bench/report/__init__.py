"""Results as files, and the tables of them in ``docs/performance.md``."""
