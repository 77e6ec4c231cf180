"""A model's parameters, divided by who updates them in a plain loop."""

from typing import NamedTuple

from torch import nn

from torchembed.tables import table_of


class ModelParameters(NamedTuple):
    """A model's parameters, each once, in the model's order; either list may be empty."""

    embeddings: list[nn.Parameter]
    """Weights of torchembed's tables."""
    rest: list[nn.Parameter]
    """All others, those of ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag`` included."""


def split_parameters(model: nn.Module) -> ModelParameters:
    """Divide the parameters of ``model`` into those of embedding tables and the rest.

    In a loop of your own, ``embeddings`` go to one of torchembed's optimizers and ``rest`` to any
    optimizer. Call it after ``shard_embeddings``, which replaces the parameters of tables, and
    after ``fully_shard``, which replaces the others. Frozen parameters are included.

    Args:
        model: any module, sharded or not, also within ``DistributedDataParallel`` or after
            ``fully_shard``.

    Raises:
        TypeError: if ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; "
            "torchembed.optim.split_parameters divides parameters and groups of them"
        )
    embeddings, rest = [], []
    for parameter in model.parameters():
        (rest if table_of(parameter) is None else embeddings).append(parameter)
    return ModelParameters(embeddings, rest)
