"""Hooks see and change in a pipeline what they see and change in a loop by hand."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import (
    Case,
    assert_equal_rows,
    held_rows,
    make_model,
    make_optimizer,
)
from tests.support.steps_on_ranks import (
    MIXED,
    NO_RANK,
    NUM_STEPS,
    WithLoss,
    static_batch,
    train_plainly,
)
from tests.support.tape import taped_captures
from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers, step_by_hand
from tests.support.tiny_training import LOSS, assert_same_state, state_of
from torchembed.autograd.weight_gradients import DeferredWeightGradients
from torchembed.core.ranks import joint_notices
from torchembed.modules.dense.mlp import MLP
from torchembed.optim.joint import separate
from torchembed.step.engines.eager_engine import EagerEngine
from torchembed.step.engines.static_engine import StaticEngine
from torchembed.step.watches.hooks import PythonHooks
from torchembed.step.watches.watched_values import WatchedValues
from torchembed.training import TrainPipeline

Optimizers = Sequence[torch.optim.Optimizer]


class Hooks:
    """Hooks that note what they are called with, and change it."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def clip_rows(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        of_tables = separate([optimizer])[0]
        assert isinstance(of_tables, torchembed.optim.FusedOptimizer)
        for recorded in of_tables.recorded():
            gradient = recorded.gradients[0]
            self.calls.append(gradient.sum().item())
            gradient.clamp_(-0.01, 0.01)

    def note(self, *_: object) -> None:
        self.calls.append(1.0)

    def halve(self, gradient: Tensor) -> Tensor:
        self.calls.append(gradient.sum().item())
        return gradient / 2

    def double(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.calls.append(parameter.grad.sum().item())
        parameter.grad *= 2

    def scale_output(self, module: nn.Module, args: object, output: Tensor) -> Tensor | None:
        self.calls.append(1.0)
        return output / len(self.calls) if isinstance(module, nn.Linear) else None

    def scale_input(self, module: nn.Module, args: tuple[Tensor]) -> Tensor:
        self.calls.append(1.0)
        return args[0] / len(self.calls)

    def scale_gradient(self, module: nn.Module, gradients: tuple[Tensor, ...]) -> object:
        self.calls.append(gradients[0].sum().item())
        return (gradients[0] / len(self.calls),)

    def scale_input_gradient(
        self, module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
    ) -> object:
        self.calls.append(inputs[0].sum().item())
        return (inputs[0] / len(self.calls),)


def deep_model() -> TinyModel:
    """A model whose dense part is of torchembed's layers, whose gradients steps may defer."""
    model = TinyModel(is_deep=True)
    model.dense = MLP(10, (8, 1), batch_norm=True, activation_on_last=False)
    return model


def joint(model: nn.Module) -> Optimizers:
    return [torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.125)]


Register = Callable[[Hooks, TinyModel, Optimizers], RemovableHandle]

CASES: dict[str, tuple[Register, str]] = {
    "table step pre": (
        lambda hooks, _, optimizers: optimizers[0].register_step_pre_hook(hooks.clip_rows),
        "Hooks.clip_rows (step pre-hook of optimizer {first})",
    ),
    "table step post": (
        lambda hooks, _, optimizers: optimizers[0].register_step_post_hook(hooks.note),
        "Hooks.note (step post-hook of optimizer {first})",
    ),
    "global step pre": (
        lambda hooks, *_: register_optimizer_step_pre_hook(hooks.note),
        "Hooks.note (step pre-hook of all optimizers)",
    ),
    "gradient": (
        lambda hooks, model, _: model.dense[0].weight.register_hook(hooks.halve),
        "Hooks.halve (gradient hook of parameter dense.0.weight)",
    ),
    "post-accumulate": (
        lambda hooks, model, _: model.dense[0].bias.register_post_accumulate_grad_hook(
            hooks.double
        ),
        "Hooks.double (post-accumulate-grad hook of parameter dense.0.bias)",
    ),
    "forward": (
        lambda hooks, model, _: model.dense[0].register_forward_hook(hooks.scale_output),
        "Hooks.scale_output (forward hook of module dense.0)",
    ),
    "forward pre": (
        lambda hooks, model, _: model.dense[0].register_forward_pre_hook(hooks.scale_input),
        "Hooks.scale_input (forward pre-hook of module dense.0)",
    ),
    "backward": (
        lambda hooks, model, _: model.dense.register_full_backward_hook(hooks.scale_input_gradient),
        "Hooks.scale_input_gradient (backward hook of module dense)",
    ),
    "backward pre": (
        lambda hooks, model, _: model.dense.register_full_backward_pre_hook(hooks.scale_gradient),
        "Hooks.scale_gradient (backward pre-hook of module dense)",
    ),
    "of the model": (
        lambda hooks, model, _: model.register_forward_hook(hooks.note),
        "Hooks.note (forward hook of model TinyModel)",
    ),
    "global forward": (
        lambda hooks, *_: register_module_forward_hook(hooks.scale_output),
        "Hooks.scale_output (forward hook of all modules)",
    ),
}


@pytest.fixture
def _taped() -> Iterator[None]:
    with taped_captures():
        yield


@contextlib.contextmanager
def warned(texts: list[str]) -> Iterator[None]:
    """Adds the texts of the warnings within it to ``texts``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts += [str(warning.message) for warning in caught]
    assert {warning.filename for warning in caught} <= {__file__}


@pytest.mark.usefixtures("_taped")
@pytest.mark.parametrize("first", [0, 6])
@pytest.mark.parametrize("make", [make_optimizers, joint])
@pytest.mark.parametrize("case", CASES)
def test_hooks_train_as_in_the_loop_by_hand(
    case: str, make: Callable[[nn.Module], Optimizers], first: int
) -> None:
    """A hook is there from step ``first`` to step ``first + 4`` of 16 steps."""
    register, text = CASES[case]
    batches = fixed_batches(16)
    expected = Hooks()
    by_hand = deep_model()
    optimizers = make(by_hand)
    losses, handle = [], None
    for number, batch in enumerate(batches):
        if number == first:
            handle = register(expected, by_hand, optimizers)
        if number == first + 4 and handle is not None:
            handle.remove()
        losses.append(step_by_hand(by_hand, LOSS, optimizers, batch).item())

    found, texts = Hooks(), list[str]()
    model = deep_model()
    optimizers = make(model)
    pipeline = TrainPipeline(model, LOSS, optimizers, capture=True)
    iterator = iter(batches)
    for number in range(len(batches)):
        if number == first:
            handle = register(found, model, optimizers)
        if number == first + 4 and handle is not None:
            handle.remove()
        with warned(texts):
            assert pipeline.progress(iterator).loss.item() == losses[number]
        is_hooked = first <= number < first + 4
        # A batch that was read while the hook was there is trained as it was meant to be then.
        if is_hooked or not first <= number < first + 6:
            assert type(pipeline.engine) is (EagerEngine if is_hooked else StaticEngine)
    assert pipeline.engine.is_captured
    assert_same_state(model, state_of(by_hand))
    assert found.calls == expected.calls
    assert len(found.calls) >= 4
    assert texts == [
        "no CUDA graph can call hooks, so train steps run eagerly until these are removed: "
        + text.format(first=type(optimizers[0]).__name__)
    ]


def test_many_hooks_are_one_line_and_further_ones_say_nothing() -> None:
    model, hooks = deep_model(), Hooks()
    optimizers = make_optimizers(model)
    handles = [module.register_forward_hook(hooks.note) for module in model.modules()]
    pipeline, iterator = (
        TrainPipeline(model, LOSS, optimizers, capture=True),
        iter(fixed_batches(9)),
    )
    with pytest.warns(
        UserWarning, match=rf"\(forward hook of module \S+\), {len(handles) - 3} more"
    ):
        pipeline.progress(iterator)
    optimizers[1].register_step_post_hook(hooks.note)
    pipeline.progress(iterator)


def test_hooks_of_an_optimizer_that_steps_after_replays_are_called() -> None:
    batches, runs = fixed_batches(9), []
    for _ in range(2):
        model, hooks = deep_model(), Hooks()
        optimizers = make_optimizers(model)
        dense = optimizers[1].param_groups[0]["params"]

        def clip(optimizer: object, *_: object, hooks: Hooks = hooks, dense: Any = dense) -> None:
            del optimizer
            hooks.calls.append(nn.utils.clip_grad_norm_(dense, 0.05).item())

        optimizers[1].register_step_pre_hook(clip)
        optimizers[1].register_step_post_hook(hooks.note)
        runs.append((model, optimizers, hooks))
    (by_hand, optimizers, expected), (model, of_pipeline, found) = runs
    losses = [step_by_hand(by_hand, LOSS, optimizers, batch).item() for batch in batches]
    pipeline, iterator = TrainPipeline(model, LOSS, of_pipeline, capture=True), iter(batches)
    with taped_captures():
        assert [pipeline.progress(iterator).loss.item() for _ in batches] == losses
    assert pipeline.engine.is_captured
    assert found.calls == expected.calls
    assert_same_state(model, state_of(by_hand))


def test_hooks_that_would_see_other_gradients_are_noticed() -> None:
    model, hooks = deep_model(), Hooks()
    of_tables, adam = make_optimizers(model)
    adam.register_step_pre_hook(hooks.note)
    (first, *_), others = adam.param_groups[0]["params"], adam.param_groups[0]["params"][1:]
    sgd = torchembed.optim.DenseSGD([first], lr=0.1)
    adam.param_groups[0]["params"] = others
    for optimizers in ([adam, of_tables], [of_tables, sgd, adam]):
        values = WatchedValues(model, [], [])
        assert PythonHooks(model, optimizers, values).are_there
    assert not PythonHooks(model, [of_tables, adam], WatchedValues(model, [], [])).are_there


def test_hooks_of_torch_itself_are_captured() -> None:
    """Pruning computes weights by a hook, with tensors alone."""
    models = [deep_model() for _ in range(2)]
    for model in models:
        prune.random_unstructured(model.dense[0], "bias", amount=4)
        torch.manual_seed(0)
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [joint(model) for model in models]
    batches = fixed_batches(9)
    losses = [step_by_hand(models[0], LOSS, optimizers[0], batch).item() for batch in batches]
    pipeline, iterator = TrainPipeline(models[1], LOSS, optimizers[1], capture=True), iter(batches)
    assert [pipeline.progress(iterator).loss.item() for _ in batches] == losses
    assert pipeline.engine.is_captured
    assert_same_state(models[1], state_of(models[0]))


def test_a_gradient_hook_sees_the_gradient_where_others_are_deferred() -> None:
    layer, hooks = MLP(3, (4, 2)), Hooks()
    weights = [layer[0].weight, layer[2].weight]
    x = torch.rand(5, 3)
    expected = torch.autograd.grad(layer(x).sum(), weights)
    weights[0].register_hook(hooks.halve)
    with DeferredWeightGradients() as deferred:
        layer(x).sum().backward()
        assert not any(weights[0] is weight for weight in deferred.weights)
    assert hooks.calls == [expected[0].sum().item()]
    assert weights[0].grad is not None
    assert weights[1].grad is not None
    assert torch.equal(weights[0].grad, expected[0] / 2)
    assert torch.equal(weights[1].grad, expected[1])


CASE = Case(placements=MIXED, fixed=True)


def train_with_a_hook_of_one_rank(takes_up: bool) -> dict[str, Any]:
    """On a rank of gloo: its rows, the kinds of its steps, and what it was warned of."""
    rank, hooks, texts, kinds = dist.get_rank(), Hooks(), list[str](), list[str]()
    model = make_model(CASE, "meta")
    torchembed.shard_embeddings(model, CASE.mesh(), CASE.plan(dist.get_world_size()))
    with_loss, optimizer = WithLoss(model), make_optimizer(CASE, model)
    batches = (static_batch(CASE, rank, step, NO_RANK) for step in range(NUM_STEPS))
    with TrainPipeline(with_loss, None, [optimizer], device="cpu", capture=True) as pipeline:
        for step in range(NUM_STEPS):
            if step == 5:
                if rank == 1:
                    with_loss.register_forward_hook(hooks.note)
                if takes_up:
                    pipeline.take_up_changes()
            with warned(texts):
                pipeline.progress(batches)
            kinds.append(type(pipeline.engine).__name__)
    return {"rows": held_rows(model), "kinds": kinds, "texts": texts}


def hooks_of_one_rank() -> list[dict[str, Any]]:
    with mock.patch.object(joint_notices, "PATIENCE_SECONDS", 0.5):
        return [train_with_a_hook_of_one_rank(takes_up) for takes_up in (False, True)]


def test_hooks_of_one_rank_make_the_steps_of_all_eager() -> None:
    expected = train_plainly(CASE, 2, NO_RANK)
    of_ranks = run_on_ranks(2, hooks_of_one_rank)
    # Two batches were read, and agreed on, before there was a hook.
    for number, first_eager in enumerate((7, 5)):
        of_rank = [results[number] for results in of_ranks]
        assert_equal_rows([result["rows"] for result in of_rank], expected, str(CASE))
        kinds = ["StaticEngine"] * first_eager + ["EagerEngine"] * (NUM_STEPS - first_eager)
        assert [result["kinds"] for result in of_rank] == [kinds, kinds]
        assert of_rank[0]["texts"] == []
        (text,) = of_rank[1]["texts"]
        assert ("call take_up_changes() on every rank" in text) is (first_eager == 7)
        assert text.endswith("Hooks.note (forward hook of model WithLoss)")
