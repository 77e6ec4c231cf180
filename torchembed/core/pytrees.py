"""Registration of batches and results as PyTorch's pytrees, so that ``torch.export``,
``torch.func`` and others find their tensors."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.utils import _pytree as pytree

from torchembed.core.features import SparseFeatures
from torchembed.core.lookup_results import JaggedTensor, KeyedTensor

_TENSORS = ("values", "offsets", "weights")


def _flatten_features(features: SparseFeatures) -> tuple[list[pytree.PyTree], pytree.Context]:
    tensors = [getattr(features, name) for name in _TENSORS]
    return tensors, (features.keys, features.batch_size, features.hotness)


def _unflatten_features(leaves: Iterable[pytree.PyTree], context: pytree.Context) -> SparseFeatures:
    # Without the checks of the constructor: a mapped tree may hold anything in place of tensors.
    made = object.__new__(SparseFeatures)
    keys, batch_size, hotness = context
    fields = {"keys": tuple(keys), "batch_size": batch_size}
    fields["hotness"] = None if hotness is None else tuple(hotness)
    for name, value in {**fields, **dict(zip(_TENSORS, leaves, strict=True))}.items():
        object.__setattr__(made, name, value)
    return made


def _flatten_keyed(tensor: KeyedTensor) -> tuple[list[Tensor], pytree.Context]:
    return [tensor.values()], (tuple(tensor.keys()), tuple(tensor.length_per_key()))


def _unflatten_keyed(leaves: Iterable[pytree.PyTree], context: pytree.Context) -> KeyedTensor:
    (values,) = leaves
    keys, widths = context
    return KeyedTensor(keys, widths, values)


def _flatten_jagged(tensor: JaggedTensor) -> tuple[list[Tensor], pytree.Context]:
    return [tensor.values(), tensor.offsets()], None


def _unflatten_jagged(leaves: Iterable[pytree.PyTree], context: pytree.Context) -> JaggedTensor:
    return JaggedTensor(*leaves)


def register_trees() -> None:
    """Register ``SparseFeatures``, ``KeyedTensor`` and ``JaggedTensor`` as pytrees, once."""
    _register(SparseFeatures, _flatten_features, _unflatten_features, _TENSORS)
    _register(KeyedTensor, _flatten_keyed, _unflatten_keyed, _TENSORS[:1])
    _register(JaggedTensor, _flatten_jagged, _unflatten_jagged, _TENSORS[:2])


def _register(
    kind: type,
    flatten: Callable[[pytree.PyTree], tuple[list[pytree.PyTree], pytree.Context]],
    unflatten: Callable[[Iterable[pytree.PyTree], pytree.Context], pytree.PyTree],
    names: Sequence[str],
) -> None:
    keys = [pytree.GetAttrKey(name) for name in names]

    def flatten_with_keys(
        tree: pytree.PyTree,
    ) -> tuple[list[tuple[pytree.GetAttrKey, pytree.PyTree]], pytree.Context]:
        leaves, context = flatten(tree)
        return list(zip(keys, leaves, strict=True)), context

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"torchembed.{kind.__name__}",
        flatten_with_keys_fn=flatten_with_keys,  # type: ignore[arg-type]
    )
