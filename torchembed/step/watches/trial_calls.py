"""Operations of trials, in which the model is called without a step."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchembed.step.watches.checked_indices import check_indices

if TYPE_CHECKING:
    from torch._ops import OpOverload


class Draw(NamedTuple):
    """Random numbers that were drawn."""

    operation: str
    shapes: list[tuple[int, ...]]


class TrialCalls(TorchDispatchMode):
    """Context that notes what draws random numbers, and refuses indices that are out of range.

    Attributes:
        draws: in the order of the operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []

    def __torch_dispatch__(
        self,
        func: "OpOverload",
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # On a GPU it would end the process, where it is no more than this trial's.
        check_indices(func, args, kwargs)
        outcome = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            results = outcome if isinstance(outcome, (tuple, list)) else (outcome,)
            shapes = [tuple(result.shape) for result in results if isinstance(result, Tensor)]
            self.draws.append(Draw(func._schema.name, shapes))
        return outcome
