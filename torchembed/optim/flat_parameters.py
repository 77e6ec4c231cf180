"""Parameters as views of one flat buffer, and their gradients of another."""

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.autograd.gradient_slots import GradientSlot, gather_gradients
from torchembed.core import checks
from torchembed.core.own_storage import with_own_storage
from torchembed.optim.shared_storages import cast_shared, shared_storages
from torchembed.tables import table_of

_dtype_of, _version_of = operator.attrgetter("dtype"), operator.attrgetter("_version")
_ALIGNMENT = 128
"""Elements. Every parameter begins at a multiple of 256 bytes or more, as cuBLAS's kernels want."""


class FlatParameters:
    """Parameters of one device, laid out one after the other in flat buffers.

    Making one replaces the data of each parameter, in ``dtype``, by a view of ``values``, and makes
    its part of ``gradients`` the slot of its gradient. ``master`` holds the values in float32; it
    is ``values`` itself where these are float32. Elements between parameters are zero.

    A parameter that shares its storage with others, as the weights of a recurrent layer on a GPU,
    which cuDNN takes in a layout of its own, stays where it is, and ``values`` has a copy for the
    time of an update.

    Args:
        parameters: dense leaves on one device.
        dtype: of the values and gradients; float32, float16 or bfloat16.
    """

    def __init__(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.parameters = list(parameters)
        self._starts, size = [], 0
        for parameter in self.parameters:
            self._starts.append(size)
            size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        device = self.parameters[0].device
        self.values = torch.zeros(size, device=device, dtype=dtype)
        self.gradients = torch.zeros_like(self.values)
        self.master = self.values
        if dtype is not torch.float32:
            self.master = torch.zeros(size, device=device, dtype=torch.float32)
        self._ends = [*self._starts[1:], size]
        shared = shared_storages(self.parameters)
        apart = set(itertools.chain.from_iterable(shared))
        pairs = zip(self.parameters, self.views(self.values), strict=True)
        self._apart = {parameter: value for parameter, value in pairs if parameter in apart}
        """Parameters with memory of their own, and their ``values``."""
        for parameter, value, master, start, end in zip(
            self.parameters,
            self.views(self.values),
            self.views(self.master),
            self._starts,
            self._ends,
            strict=True,
        ):
            master.copy_(parameter.detach())
            value.copy_(parameter.detach())
            parameter.grad = None
            if parameter not in self._apart:
                parameter.data = with_own_storage(value)
            GradientSlot(parameter, self.gradients, start, end)
        for members in shared:
            cast_shared(members, dtype)
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self.values_are_current()

    @property
    def rounded(self) -> Tensor | None:
        """The values where they are 16-bit copies of ``master``."""
        return None if self.values is self.master else self.values

    def views(self, flat: Tensor) -> list[Tensor]:
        """The part of each parameter in a buffer of this layout, in the parameter's shape."""
        return [
            flat[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(self._starts, self.parameters, strict=True)
        ]

    def values_are_current(self) -> None:
        """Note that ``values`` and ``master`` agree."""
        # Every write to a parameter, also by load_state_dict, increments its version counter.
        self._versions = [parameter._version for parameter in self.parameters]

    def _apart_of(self, chosen: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters among ``chosen`` that have memory of their own, and their ``values``."""
        if not self._apart:
            return [], []
        found = [parameter for parameter in chosen if parameter in self._apart]
        return [p.detach() for p in found], [self._apart[p] for p in found]

    def gather_values(self, chosen: Sequence[Tensor]) -> None:
        """Copy those of ``chosen`` parameters that have memory of their own to ``values``, whatever
        has written to them since; of 16 bits, what counts is ``master``."""
        parameters, values = self._apart_of(chosen)
        if parameters and self.values is self.master:
            torch._foreach_copy_(values, parameters)  # type: ignore[attr-defined]

    def values_were_updated(self, updated: Sequence[Tensor]) -> None:
        """Give parameters their ``values``, and note that these and ``master`` have changed for
        some, so that a backward which needs their former values is an error."""
        parameters, values = self._apart_of(updated)
        if parameters:
            torch._foreach_copy_(parameters, values)  # type: ignore[attr-defined]
        torch.autograd.graph.increment_version(updated)
        self.values_are_current()

    def _is_foreign(self, parameter: Tensor) -> bool:
        """True where the values of ``parameter`` are none of this object's any more."""
        if parameter in self._apart:
            # As flatten_parameters() of a recurrent layer does, it may be given other memory.
            kind = parameter.dtype, parameter.device
            return kind != (self.values.dtype, self.values.device)
        address = next(
            a for p, a in zip(self.parameters, self._addresses, strict=True) if p is parameter
        )
        return parameter.data_ptr() != address or parameter.dtype is not self.values.dtype

    def take_changed_values(self) -> None:
        """Copy the values of parameters that other code has written to ``master``.

        Elements that equal those of ``master``, rounded, keep the digits that rounding dropped.

        Raises:
            RuntimeError: if a parameter has other memory than this object gave it, or another
                dtype or device.
        """
        # Each replay asks, so that C code goes over the parameters.
        addresses = list(map(Tensor.data_ptr, self.parameters))
        dtypes = set(map(_dtype_of, self.parameters))
        if addresses != self._addresses or dtypes != {self.values.dtype}:
            changed = next(filter(self._is_foreign, self.parameters), None)
            if changed is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(changed.shape)} was moved, cast or replaced "
                    "after its optimizer was made; make the optimizer after that"
                )
        versions = list(map(_version_of, self.parameters))
        if versions == self._versions:
            return
        if self.values is not self.master:
            for parameter, master in zip(self.parameters, self.views(self.master), strict=True):
                is_same = master.to(parameter.dtype) == parameter.detach()
                master.copy_(torch.where(is_same, master, parameter.detach().float()))
        self._versions = versions

    def gather_gradients(self, chosen: Sequence[Tensor]) -> list[slice]:
        """Copy gradients of ``chosen`` parameters from other memory to ``gradients``; returns the
        parts of it that are theirs.

        Neighbours are one part, so there is one in all where every parameter is chosen.
        """
        gather_gradients(chosen)
        parts: list[slice] = []
        among = set(chosen)
        for parameter, start, end in zip(self.parameters, self._starts, self._ends, strict=True):
            if parameter not in among:
                continue
            if parts and parts[-1].stop == start:
                parts[-1] = slice(parts[-1].start, end)
            else:
                parts.append(slice(start, end))
        return parts


def flatten_parameters(
    parameters: Sequence[Tensor], dtype: torch.dtype | None
) -> list[FlatParameters]:
    """Flat buffers for ``parameters``: one for each device and dtype, in their order.

    Args:
        dtype: of the values; that of each parameter where None.

    Raises:
        TypeError: for a table's weight, or a parameter that is not float32, float16 or bfloat16.
        ValueError: for a parameter on the meta device. Nothing is changed then.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if table_of(parameter) is not None:
            raise TypeError(
                "params must be dense parameters, got the weight of a table; give that one to "
                "torchembed.optim.Adagrad or another of the tables' optimizers"
            )
        checks.check_float("params", parameter)
        if parameter.is_meta:
            raise ValueError("params must be real, got one on the meta device; call to_empty()")
        key = parameter.device, dtype or parameter.dtype
        by_kind.setdefault(key, []).append(parameter)
    return [FlatParameters(same, of) for (_, of), same in by_kind.items()]
