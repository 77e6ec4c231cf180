"""The type of ``ctx``, which an ``autograd.Function`` hands from forward to backward."""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.function import FunctionCtx


class FunctionContext(FunctionCtx):
    """A context of ``torch.autograd.Function``; for annotations, since torch makes its own.

    ``forward`` may set any attribute, and ``backward`` reads them.
    """

    if TYPE_CHECKING:
        needs_input_grad: tuple[bool, ...]
        """For each argument of forward, True if backward must return its gradient."""
        saved_tensors: tuple[Tensor, ...]
        """The tensors that ``save_for_backward`` was given."""

        def save_for_backward(self, *tensors: Tensor | None) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...
