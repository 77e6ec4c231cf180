"""Values that no module holds: of loss functions, settings, closures and other objects."""

import types

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.zoo.entries import Case, Family, adagrad
from tests.zoo.ranker import Ranker, with_adam
from tests.zoo.sizes import Sizes
from torchembed import SparseFeatures

VALUES = Family("values")
log_loss = F.binary_cross_entropy_with_logits


@VALUES.habit("a loss function that counts its calls")
def counting_loss(sizes: Sizes) -> Case:
    class WarmsUp:
        def __init__(self) -> None:
            self.num_calls = 0

        def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
            self.num_calls += 1
            return log_loss(logits, labels) * min(1.0, self.num_calls / 10)

    model = Ranker(sizes)
    return Case(model=model, optimizers=[adagrad(model)], loss_fn=WarmsUp())


@VALUES.habit("a weight of the loss that the loop changes")
def weight_in_a_closure(sizes: Sizes) -> Case:
    weight = 1.0

    def weighted(logits: Tensor, labels: Tensor) -> Tensor:
        return log_loss(logits, labels) + weight * logits.square().mean()

    def before_step(number: int) -> None:
        nonlocal weight
        if number == 6:
            weight = 0.5

    model = Ranker(sizes)
    return Case(model=model, optimizers=[adagrad(model)], loss_fn=weighted, before_step=before_step)


@VALUES.habit("settings that the loop changes")
def changed_settings(sizes: Sizes) -> Case:
    settings = types.SimpleNamespace(temperature=1.0)

    class Tempered(Ranker):
        def __init__(self, sizes: Sizes) -> None:
            super().__init__(sizes)
            self.settings = settings

        def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
            return super().forward(dense, sparse) / self.settings.temperature

    def before_step(number: int) -> None:
        settings.temperature = 1.0 if number < 7 else 2.0

    model = Tempered(sizes)
    return Case(model=model, optimizers=[adagrad(model)], before_step=before_step)


@VALUES.habit("a meter that forward updates")
def meter(sizes: Sizes) -> Case:
    class Mean:
        """The mean of the values that it was given."""

        def __init__(self) -> None:
            self.total, self.count = torch.zeros((), device=sizes.device), 0

        def update(self, values: Tensor) -> None:
            self.total, self.count = self.total + values.detach().sum(), self.count + len(values)

    class Metered(Ranker):
        def __init__(self, sizes: Sizes) -> None:
            super().__init__(sizes)
            self.mean = Mean()

        def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
            logits = super().forward(dense, sparse)
            self.mean.update(logits)
            return logits

    model = Metered(sizes)
    return Case(
        model=model,
        optimizers=[adagrad(model)],
        kept=lambda: {"total": model.mean.total, "count": torch.tensor(model.mean.count)},
    )


@VALUES.habit("norms of gradients that the loop reads")
def norms_of_gradients(sizes: Sizes) -> Case:
    model, norms = Ranker(sizes), list[Tensor]()

    def after_step(number: int, loss: Tensor) -> None:
        del number, loss
        grads = [parameter.grad for parameter in model.deep.parameters()]
        norms.append(torch.stack([grad.norm() for grad in grads if grad is not None]))

    return Case(
        model=model,
        optimizers=[adagrad(model)],
        after_step=after_step,
        kept=lambda: {f"norms {number}": norm for number, norm in enumerate(norms)},
    )


@VALUES.habit("gradients that vectors retain")
def retained_gradients(sizes: Sizes) -> Case:
    class Retains(Ranker):
        kept: Tensor

        def features(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
            self.kept = super().features(dense, sparse)
            self.kept.retain_grad()
            return self.kept

    model, norms = Retains(sizes), list[Tensor]()

    def after_step(number: int, loss: Tensor) -> None:
        del number, loss
        assert model.kept.grad is not None
        norms.append(model.kept.grad.norm())

    return Case(
        model=model,
        optimizers=[adagrad(model)],
        after_step=after_step,
        kept=lambda: {f"norm {number}": norm for number, norm in enumerate(norms)},
    )


@VALUES.habit("weights averaged by a list of tensors")
def averaged_by_lists(sizes: Sizes) -> Case:
    case = with_adam(Ranker(sizes))
    averages = [parameter.detach().clone() for parameter in case.model.parameters()]

    def after_step(number: int, loss: Tensor) -> None:
        del number, loss
        with torch.no_grad():
            for average, parameter in zip(averages, case.model.parameters(), strict=True):
                average.lerp_(parameter, 0.1)

    case.after_step = after_step
    case.kept = lambda: {f"average {number}": average for number, average in enumerate(averages)}
    return case
