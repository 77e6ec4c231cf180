"""State dicts without the rows of tables on disk, for who saves these otherwise."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_may_be_meta: ContextVar[bool] = ContextVar("may_be_meta", default=False)


def rows_may_be_meta() -> bool:
    """True within :func:`meta_rows_in_state_dicts`."""
    return _may_be_meta.get()


@contextlib.contextmanager
def meta_rows_in_state_dicts() -> Iterator[None]:
    """A context in which state dicts of modules and optimizers, and loading these, leave rows of
    tables on disk out: tensors on the meta device stand for them. Outside of it they raise."""
    token = _may_be_meta.set(True)
    try:
        yield
    finally:
        _may_be_meta.reset(token)
