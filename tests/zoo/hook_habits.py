"""Hooks of modules, parameters and optimizers."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchembed
from tests.zoo.entries import Case, Family, adagrad, beside_tables, parts
from tests.zoo.ranker import Ranker, with_adam
from tests.zoo.sizes import Sizes

HOOKS = Family("hooks")


class Seen:
    """Counts calls and keeps the last number that a hook saw."""

    def __init__(self) -> None:
        self.count, self.last = 0, torch.zeros(())

    def note(self, tensor: Tensor) -> None:
        """Count a call with ``tensor``."""
        self.count += 1
        self.last = tensor.detach().norm()

    def note_output(self, module: nn.Module, args: object, output: Tensor) -> None:
        """As a forward hook."""
        del module, args
        self.note(output)

    def kept(self) -> dict[str, Tensor]:
        """The tensors that are compared."""
        return {"seen.count": torch.tensor(self.count), "seen.last": self.last}


def _watched(sizes: Sizes) -> tuple[Ranker, Seen, Case]:
    model, seen = Ranker(sizes), Seen()
    case = Case(model=model, optimizers=[adagrad(model)], kept=seen.kept)
    return model, seen, case


@HOOKS.habit("forward hook that watches activations")
def forward_hook(sizes: Sizes) -> Case:
    model, seen, case = _watched(sizes)
    model.deep[0].register_forward_hook(seen.note_output)
    return case


@HOOKS.habit("forward hook that changes activations")
def changing_hook(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    model.deep[0].register_forward_hook(lambda module, args, output: output.clamp(-1, 1))
    return Case(model=model, optimizers=[adagrad(model)])


@HOOKS.habit("forward pre-hook on the tables")
def hook_of_tables(sizes: Sizes) -> Case:
    model, seen, case = _watched(sizes)
    model.tables.register_forward_pre_hook(lambda module, args: seen.note(args[0].values.float()))
    return case


@HOOKS.habit("full backward hook")
def backward_hook(sizes: Sizes) -> Case:
    model, seen, case = _watched(sizes)
    model.deep[2].register_full_backward_hook(lambda module, grads, outputs: seen.note(outputs[0]))
    return case


@HOOKS.habit("parameter hook that scales the gradient")
def parameter_hook(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    model.weight(0).register_hook(lambda grad: grad * 0.5)
    return Case(model=model, optimizers=[adagrad(model)])


@HOOKS.habit("parameter hook that counts")
def counting_parameter_hook(sizes: Sizes) -> Case:
    model, seen, case = _watched(sizes)
    model.weight(0).register_hook(seen.note)
    return case


@HOOKS.habit("hook after a gradient is accumulated")
def accumulated_hook(sizes: Sizes) -> Case:
    model = Ranker(sizes)

    def clip(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)

    for parameter in parts(model)[1]:
        parameter.register_post_accumulate_grad_hook(clip)
    return Case(model=model, optimizers=[adagrad(model)])


@HOOKS.habit("hook before an optimizer's step that clips the norm")
def clipping_hook(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = with_adam(model)
    _, dense = parts(model)

    def clip(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(dense, 0.1)

    case.optimizers[1].register_step_pre_hook(clip)
    return case


@HOOKS.habit("hook before a fused optimizer's step that clips the norm")
def clipping_hook_of_fused(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    _, dense = parts(model)
    case = Case(
        model=model,
        optimizers=beside_tables(model, lambda p: torchembed.optim.DenseAdam(p, lr=0.01)),
    )

    def clip(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(dense, 0.1)

    case.optimizers[1].register_step_pre_hook(clip)
    return case


@HOOKS.habit("hook before the tables' optimizer's step that clips all gradients")
def clipping_hook_of_tables(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = with_adam(model)
    of_tables = case.optimizers[0]

    def clip(*_: object) -> None:
        torchembed.optim.clip_grad_norm_(model.parameters(), 0.1, group=dist.group.WORLD)

    of_tables.register_step_pre_hook(clip)
    return case


@HOOKS.habit("hook after an optimizer's step that keeps weights small")
def post_hook(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = Case(model=model, optimizers=[adagrad(model)])

    @torch.no_grad()
    def bound(*_: object) -> None:
        model.weight(0).clamp_(-0.05, 0.05)

    case.optimizers[0].register_step_post_hook(bound)
    return case


@HOOKS.habit("hook that is registered in the middle")
def late_hook(sizes: Sizes) -> Case:
    model, seen, case = _watched(sizes)

    def before_step(number: int) -> None:
        if number == 7:
            model.deep[0].register_forward_hook(seen.note_output)

    case.before_step = before_step
    return case


@HOOKS.habit("hook that is removed in the middle")
def removed_hook(sizes: Sizes) -> Case:
    model, seen, case = _watched(sizes)
    handle = model.deep[0].register_forward_hook(seen.note_output)
    case.before_step = lambda number: handle.remove() if number == 2 else None
    return case


@HOOKS.habit("hooks on saved tensors")
def saved_tensors(sizes: Sizes) -> Case:
    class Offloading(Ranker):
        def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(_to_half, _from_half):
                return super().forward(dense, sparse)

    model = Offloading(sizes)
    return Case(model=model, optimizers=[adagrad(model)])


def _to_half(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def _from_half(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


@HOOKS.habit("layers wrapped to print their shapes")
def wrapped_forward(sizes: Sizes) -> Case:
    model, seen, case = _watched(sizes)
    _wrap(model.deep, seen)
    return case


def _wrap(layers: Iterable[nn.Module], seen: Seen) -> None:
    """Replace the forward of each layer by one that notes its result."""
    for layer in layers:
        forward = layer.forward

        def noted(x: Tensor, forward: Callable[[Tensor], Tensor] = forward) -> Tensor:
            output = forward(x)
            seen.count += 1
            return output

        layer.forward = noted
