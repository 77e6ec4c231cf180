"""Errors of a store itself, whatever its caller gave it.

Faults of the operating system (no such folder, no permission, a full disk) are ``OSError``, as
elsewhere in Python, and mistakes of callers are ``ValueError`` and ``TypeError``.
"""


class RowStoreError(RuntimeError):
    """A store cannot do what was asked of it: it is closed, or read-only, or failed before."""


class StoreInUseError(RowStoreError):
    """Another store, of this process or another one, has the folder open."""


class CorruptStoreError(RowStoreError):
    """A store on disk does not hold what was written there."""


class StoreUnavailableError(RowStoreError):
    """The server of a store does not answer now; the same store works again once it does."""


class StoreAccessError(RowStoreError):
    """The server of a store does not let this process in, or not do what it asked."""


class StoreFullError(RowStoreError):
    """The server of a store has no room for what was to be written; it can be read."""
