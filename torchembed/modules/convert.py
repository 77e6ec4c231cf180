"""``convert``: torchembed's modules in place of those of ``torch.nn``, over the same weights."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from torchembed.core import checks
from torchembed.modules.embedding import Embedding, EmbeddingBag
from torchembed.modules.single_table import SingleTable

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Attributes of a module that hold what was registered on it."""


def convert(model: nn.Module) -> nn.Module:
    """Put torchembed's modules in place of each ``torch.nn.Embedding`` and
    ``torch.nn.EmbeddingBag`` in ``model``.

    Changes ``model`` in place. The parameters stay the same objects, with their names, gradients
    and ``requires_grad``, over the same memory unless rows are not contiguous there: a state dict,
    a tie to another module, and an optimizer that has them are those from before. Such an
    optimizer goes on training them; an optimizer of torchembed's takes them over when it is made.
    A module that ``model`` has under several names stays one. Modules of derived classes stay as
    they are.

    Outputs are the same bits on a CPU: rows, maxima, and sums and means of float32 and float64
    rows. Sums with ``per_sample_weights`` and sums of 16-bit rows are rounded otherwise, and so may
    all sums be on a GPU. What refers to a former module from outside of ``model`` still has that
    one.

    Args:
        model: any module; not itself one of those, since it is changed in place.

    Returns:
        ``model``.

    Raises:
        TypeError: where ``model`` is no module, or is itself one of those.
        ValueError: where modules have what torchembed's do not support: ``max_norm``,
            ``scale_grad_by_freq``, weights of another dtype than float32, float16, bfloat16 and
            float64, parametrizations, hooks, other parameters, buffers or modules, or weights that
            ``fully_shard`` has divided. Names all of them; nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if _is_torchs(model):
        name = type(model).__name__
        raise TypeError(
            f"model must contain embeddings, got one {name} itself; for that one call "
            f"torchembed.{name}.from_pretrained(embedding.weight, freeze=False)"
        )
    found = {module: name for name, module in model.named_modules() if _is_torchs(module)}
    reasons = [f"{name}: {why}" for module, name in found.items() for why in _hindrances(module)]
    if reasons:
        raise ValueError(
            f"model has embeddings that torchembed cannot replace: {'; '.join(reasons)}; "
            "nothing was converted"
        )
    # Seeds are of rows that reset_parameters() makes, and of rounding. Drawn ones would change
    # what the program draws afterwards.
    made = {module: _converted(module, seed) for seed, module in enumerate(found)}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in made:
                module._modules[name] = made[child]
    return model


def _is_torchs(module: nn.Module) -> bool:
    return type_before_parametrizations(module) in (nn.Embedding, nn.EmbeddingBag)


def _hindrances(module: nn.Module) -> Iterator[str]:
    """Properties of ``module`` that ours would not have."""
    assert isinstance(module, nn.Embedding | nn.EmbeddingBag)
    if module.max_norm is not None:
        yield f"max_norm={module.max_norm}"
    if module.scale_grad_by_freq:
        yield "scale_grad_by_freq=True"
    weight = module._parameters.get("weight")
    if weight is None:
        yield "its weight is no parameter but computed, as by a parametrization or pruning"
    elif type(weight) is not nn.Parameter or type(weight.data) is not torch.Tensor:
        yield f"its weight is a {type(weight.data).__name__}, not a plain tensor"
    elif weight.dtype not in (*checks.FLOAT_DTYPES, torch.float64):
        yield f"its weight is {weight.dtype}"
    others = [n for n in (*module._parameters, *module._buffers) if n != "weight"]
    others += module._modules
    if others:
        yield f"it holds {', '.join(others)} as well"
    if any(getattr(module, name) for name in _HOOKS):
        yield "hooks are registered on it; remove them, and register them again"


def _converted(module: nn.Module, seed: int) -> SingleTable:
    """The counterpart of ``module``, with its own parameter."""
    assert isinstance(module, nn.Embedding | nn.EmbeddingBag)
    settings = {
        "padding_idx": module.padding_idx,
        "sparse": module.sparse,
        "_weight": module.weight.detach(),
        "seed": seed,
    }
    shape = module.num_embeddings, module.embedding_dim
    made: SingleTable
    if isinstance(module, nn.EmbeddingBag):
        last = module.include_last_offset
        made = EmbeddingBag(*shape, mode=module.mode, include_last_offset=last, **settings)
    else:
        made = Embedding(*shape, **settings)
    made.register_parameter("weight", module._parameters["weight"])
    made.table_set.form_groups()
    return made.train(module.training)
