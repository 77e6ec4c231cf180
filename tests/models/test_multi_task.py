"""``SharedBottom``, ``MMoE`` and ``PLE`` against their papers' formulas, and whose gradients reach
what."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.model_batches import Clicks, clicks, collection
from tests.support.tolerance import assert_follows
from torchembed.models import PLE, MMoE, SharedBottom
from torchembed.models.task_towers import TaskTowers
from torchembed.training import MultiTaskLoss, Task, TaskKind

TASKS = ("like", "forward", "rating")
Values = dict[str, Tensor]
Maker = Callable[..., TaskTowers]


def shared_bottom(device: torch.device | str, **arguments: Any) -> SharedBottom:
    given = {"task_names": TASKS, "bottom_layer_sizes": [6, 5], "tower_layer_sizes": [4]}
    return SharedBottom(collection(device, 4, 3), **given | arguments, dense_device=device)  # type: ignore[arg-type]


def mmoe(device: torch.device | str, **arguments: Any) -> MMoE:
    given = {"task_names": TASKS, "num_experts": 4, "expert_layer_sizes": [6, 5]}
    given |= {"tower_layer_sizes": [4]}
    return MMoE(collection(device, 4, 3), **given | arguments, dense_device=device)  # type: ignore[arg-type]


def ple(device: torch.device | str, **arguments: Any) -> PLE:
    given = {"task_names": TASKS, "num_levels": 3, "num_task_experts": 2, "num_shared_experts": 3}
    given |= {"expert_layer_sizes": [6, 5], "tower_layer_sizes": [4]}
    return PLE(collection(device, 4, 3), **given | arguments, dense_device=device)  # type: ignore[arg-type]


EACH = pytest.mark.parametrize("make", [shared_bottom, mmoe, ple])


def layers(values: Values, prefix: str, x: Tensor, *, ends_linear: bool = False) -> Tensor:
    """An MLP by its parameters, a rectifier after each layer, but the last of a tower."""
    indices = sorted(int(n.split(".")[-2]) for n in values if n.startswith(f"{prefix}."))[::2]
    for index in indices:
        x = x @ values[f"{prefix}.{index}.weight"].T + values[f"{prefix}.{index}.bias"]
        if not (ends_linear and index == indices[-1]):
            x = x.relu()
    return x


def gate(values: Values, prefix: str, x: Tensor, experts: list[Tensor]) -> Tensor:
    """Experts weighted by ``exp(score) / sum of exp(scores)``."""
    exponents = (x @ values[f"{prefix}.scores.weight"].T).exp()
    weights = exponents / exponents.sum(1, keepdim=True)
    mixed = torch.zeros_like(experts[0])
    for number, expert in enumerate(experts):
        mixed = mixed + weights[:, number : number + 1] * expert
    return mixed


def vectors_of_shared_bottom(values: Values, x: Tensor) -> list[Tensor]:
    return [layers(values, "bottom", x)] * 3


def vectors_of_mmoe(values: Values, x: Tensor) -> list[Tensor]:
    experts = [layers(values, f"experts.{n}", x) for n in range(4)]
    return [gate(values, f"gates.{task}", x, experts) for task in range(3)]


def vectors_of_ple(values: Values, x: Tensor) -> list[Tensor]:
    tasks, shared = [x] * 3, x
    for level in range(3):
        prefix = f"levels.{level}"
        own = [
            [layers(values, f"{prefix}.task_experts.{k}.{n}", tasks[k]) for n in range(2)]
            for k in range(3)
        ]
        of_shared = [layers(values, f"{prefix}.shared_experts.{n}", shared) for n in range(3)]
        gates = f"{prefix}.task_gates"
        tasks, before = (
            [gate(values, f"{gates}.{k}", tasks[k], own[k] + of_shared) for k in range(3)],
            shared,
        )
        if level < 2:
            everyone = [*own[0], *own[1], *own[2], *of_shared]
            shared = gate(values, f"{prefix}.shared_gate", before, everyone)
    return tasks


FORMULAS = {
    shared_bottom: vectors_of_shared_bottom,
    mmoe: vectors_of_mmoe,
    ple: vectors_of_ple,
}


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.startswith("embedding_bag_collection")
    }


def flat(*groups: Sequence[Tensor]) -> list[Tensor]:
    """All elements of each group: gradients of so many small tensors are compared together."""
    return [torch.cat([tensor.flatten() for tensor in group]) for group in groups]


@pytest.mark.parametrize("num_dense", [0, 5])
@EACH
def test_follows_the_formula(make: Maker, num_dense: int, device: torch.device) -> None:
    torch.manual_seed(0)
    model = make(device, dense_in_features=num_dense)
    batch = clicks(device, num_dense=num_dense)
    pooled = model.embedding_bag_collection(batch.sparse).values().detach()
    x = torch.cat([batch.dense, pooled], dim=1)
    parameters = dense_parameters(model)
    grads = [batch.grad[:, 0] * factor for factor in (1, 2, 3)]

    def expected(dtype: torch.dtype) -> list[Tensor]:
        values = {n: p.detach().to(dtype).requires_grad_() for n, p in parameters.items()}
        vectors = FORMULAS[make](values, x.to(dtype))
        outputs = [
            layers(values, f"towers.{task}", vector, ends_linear=True)[:, 0]
            for task, vector in enumerate(vectors)
        ]
        of_outputs = [grad.to(dtype) for grad in grads]
        return flat(outputs, torch.autograd.grad(outputs, list(values.values()), of_outputs))

    outputs = model(batch.dense, batch.sparse)
    assert tuple(outputs) == TASKS
    found = list(outputs.values())
    of_parameters = torch.autograd.grad(found, list(parameters.values()), grads)
    for which, result in enumerate(flat(found, of_parameters)):
        assert_follows(result, lambda dtype, which=which: expected(dtype)[which])


def reached(model: nn.Module) -> set[str]:
    """The parts of the model, without the tables, that the last backward gave a gradient other
    than zeros, or one at all."""
    return {n for n, p in dense_parameters(model).items() if p.grad is not None and p.grad.any()}


def parts(names: set[str]) -> set[str]:
    """The first two words of names: which tower, gate or expert."""
    return {".".join(name.split(".")[:2]) for name in names}


@pytest.mark.parametrize("task", TASKS)
@EACH
def test_gradients_of_a_task_never_reach_anothers_tower(
    make: Maker, task: str, device: torch.device
) -> None:
    torch.manual_seed(0)
    model = make(device)
    batch = clicks(device)
    model(None, batch.sparse)[task].square().sum().backward()
    own = TASKS.index(task)
    found = reached(model)
    assert {part for part in parts(found) if part.startswith("towers.")} == {f"towers.{own}"}
    others = [n for n in range(3) if n != own]
    for other in others:
        for parameter in model.towers[other].parameters():
            assert parameter.grad is None
    if make is mmoe:
        assert {part for part in parts(found) if part.startswith("gates.")} == {f"gates.{own}"}
    if make is ple:
        # Below the last level others' experts reach the task by the shared gate.
        for kind in ("task_experts", "task_gates"):
            last = {n.split(".")[3] for n in found if n.startswith(f"levels.2.{kind}.")}
            assert last == {str(own)}


@EACH
def test_a_task_without_known_labels_trains_nothing_of_its_own(
    make: Maker, device: torch.device
) -> None:
    torch.manual_seed(0)
    model = make(device)
    batch = clicks(device)
    loss_fn = MultiTaskLoss(
        [Task(name=task, kind=TaskKind.REGRESSION, mask=f"{task}?") for task in TASKS]
    )
    num_samples = len(batch.grad)
    labels = {task: torch.full((num_samples,), torch.nan, device=device) for task in TASKS}
    known = {
        f"{task}?": torch.zeros(num_samples, dtype=torch.bool, device=device) for task in TASKS
    }
    labels["like"], known["like?"] = batch.grad[:, 0], known["like?"].logical_not()
    loss_fn(model(None, batch.sparse), labels | known).backward()
    assert parts(reached(model)) & {f"towers.{n}" for n in range(3)} == {"towers.0"}
    for parameter in model.parameters():
        assert parameter.grad is not None and not parameter.grad.isnan().any()


@EACH
def test_empty_batches_and_single_tasks(make: Maker, device: torch.device) -> None:
    model = make(device, task_names=["type"], tower_layer_sizes=[], dropout=0.5)
    for batch_size in (0, 1):
        batch = clicks(device, batch_size=batch_size)
        outputs = model(batch.dense, batch.sparse)
        assert {name: output.shape for name, output in outputs.items()} == {"type": (batch_size,)}
        outputs["type"].sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all()


@EACH
def test_trains_under_autocast(make: Maker, device: torch.device) -> None:
    model = make(device)
    batch: Clicks = clicks(device)
    labels = {task: torch.ones(len(batch.grad), device=device) for task in TASKS}
    loss_fn = MultiTaskLoss([Task(name=task, kind=TaskKind.BINARY) for task in TASKS])
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = loss_fn(model(None, batch.sparse), labels)
    assert loss.dtype == torch.float32
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all()


@EACH
def test_missing_dense_features_and_names_are_named(make: Maker, device: torch.device) -> None:
    model = make(device, dense_in_features=5)
    with pytest.raises(ValueError, match=r"^dense_features must be \[B, 5\], got None$"):
        model(None, clicks(device).sparse)
    for names in ([], ["like", "like"]):
        with pytest.raises(ValueError, match=r"^task_names must be different and at least one, "):
            make("meta", task_names=names)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (mmoe, "num_experts"),
        (ple, "num_levels"),
        (ple, "num_task_experts"),
        (ple, "num_shared_experts"),
    ],
)
def test_numbers_of_experts_and_levels_are_at_least_one(make: Maker, argument: str) -> None:
    with pytest.raises(ValueError, match=rf"^{argument} must be at least 1, got 0$"):
        make("meta", **{argument: 0})


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (shared_bottom, "bottom_layer_sizes"),
        (mmoe, "expert_layer_sizes"),
        (ple, "expert_layer_sizes"),
    ],
)
def test_no_layers_below_the_towers_are_an_error(make: Maker, argument: str) -> None:
    with pytest.raises(ValueError, match=rf"^{argument} must hold one width or more, got none$"):
        make("meta", **{argument: []})


@EACH
def test_outputs_start_where_they_are_told_to(make: Maker, device: torch.device) -> None:
    model = make(device)
    sparse = clicks(device).sparse
    before = model(None, sparse)
    old = {name: float(model.towers[n][-1].bias.detach()) for n, name in enumerate(TASKS)}  # type: ignore[index]
    wanted = {"rating": 3.5, "like": -0.25, "forward": 100.0}
    model.start_at(wanted)
    for name, output in model(None, sparse).items():
        # The sum of a few products and a bias, in another order or not, and the difference here.
        bound = 8 * (wanted[name] + abs(old[name]) + 8) * torch.finfo(torch.float32).eps
        moved = (output - before[name]).detach()
        assert (moved - (wanted[name] - old[name])).abs().max() <= abs(bound)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_starts_of_wrong_tasks_and_of_no_number_are_named(device: torch.device) -> None:
    model = mmoe(device)
    wanted = dict.fromkeys(TASKS, 0.5)
    for given in (wanted | {"share": 1.0}, {"like": 1.0}):
        with pytest.raises(
            ValueError,
            match=r"^outputs must have a number for each of the tasks \['like', 'forward', "
            r"'rating'\] and no others, got \['like'",
        ):
            model.start_at(given)
    with pytest.raises(
        ValueError, match=r"^outputs must be finite, got inf for like; a binary task"
    ):
        model.start_at(wanted | {"like": math.inf})
