"""The parts of a model's result that answers have, and their names."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchembed.modules.dense_part.errors import DeployError
from torchembed.modules.dense_part.forms import DEFAULT_ROWS

_AS_IT_IS, _SIGMOID = "as_it_is", "sigmoid"


class OutputChoice:
    """The outputs of a model, chosen from the result of its forward.

    Attributes:
        names: of the outputs, known once :meth:`outputs` was called.
    """

    def __init__(self, output: str | Mapping[str, str], names: Sequence[str | None] | None) -> None:
        """
        Args:
            output: ``"sigmoid"`` for probabilities of logits, ``"as_it_is"`` for no change; or one
                of them by the output's name.
            names: for each tensor of the result, None for those to leave out; or, of a result
                ``[B, n]``, of its ``n`` columns. None for those that the result gives itself.

        Raises:
            DeployError: for other words.
        """
        self._output, self._given, self.names = output, names, ()
        asked = [output] if isinstance(output, str) else list(output.values())
        for word in asked:
            if word not in (_AS_IT_IS, _SIGMOID):
                raise DeployError(
                    f'output must be "sigmoid" or "as_it_is", or one of them by name, got {word!r}'
                )

    def outputs(self, result: Any) -> dict[str, Tensor]:
        """The outputs in ``result``, float32, by name.

        Raises:
            DeployError: where they are not those that were asked for.
        """
        found = _named(result)
        given = self._given
        if given is not None and len(found) == 1 and len(given) > 1:
            (only,) = found.values()
            if only.dim() != 2 or only.shape[1] != len(given):
                raise DeployError(
                    f"output_names must be as many as the result has columns, got {list(given)} "
                    f"for shape {list(only.shape)}"
                )
            found = {str(n): column for n, column in enumerate(only.unbind(1))}
        if given is not None:
            if len(given) != len(found):
                raise DeployError(
                    f"output_names must be one for each of {list(found)}, None for those to leave "
                    f"out, got {list(given)}"
                )
            pairs = zip(given, found.values(), strict=True)
            found = _distinct((name, tensor) for name, tensor in pairs if name is not None)
        if not found or DEFAULT_ROWS in found:
            raise DeployError(
                f"outputs must be at least one, and none {DEFAULT_ROWS!r}, got {list(found)}"
            )
        self.names = tuple(found)
        if not isinstance(self._output, str) and set(self._output) - set(found):
            raise DeployError(f"output must name outputs, {list(found)}, got {list(self._output)}")
        return {name: self._changed(name, tensor) for name, tensor in found.items()}

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        word = self._output if isinstance(self._output, str) else self._output.get(name, _AS_IT_IS)
        # Float32 first: the sigmoid of a narrow dtype would be rounded twice.
        return tensor.float().sigmoid() if word == _SIGMOID else tensor.float()


def _named(result: Any) -> dict[str, Tensor]:
    """The tensors of a result by name."""
    if isinstance(result, Tensor):
        return {"output": result}
    if isinstance(result, Mapping):
        items = [(str(key), value) for key, value in result.items()]
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        items = list(zip(type(result)._fields, result, strict=True))  # type: ignore[attr-defined]
    elif isinstance(result, tuple | list):
        items = [(f"output_{number}", value) for number, value in enumerate(result)]
    else:
        items = []
    if not items or not all(isinstance(value, Tensor) for _, value in items):
        raise DeployError(
            "model must return a tensor, or tensors in a tuple, list or mapping, got "
            f"{type(result).__name__}"
        )
    return _distinct(items)


def _distinct(items: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Outputs by name, each of which has one of its own."""
    items = list(items)
    names = [name for name, _ in items]
    bad = [n for n in names if not isinstance(n, str) or not n or names.count(n) > 1]
    if bad:
        raise DeployError(
            f"outputs must have names that are strings, not empty and different, got {names}"
        )
    return dict(items)
