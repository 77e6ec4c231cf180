"""Weights, buffers and modes that the model or its loop changes between steps."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchembed
from tests.zoo.entries import Case, Family, adagrad, parts
from tests.zoo.ranker import Ranker, with_adam
from tests.zoo.sizes import Sizes
from torchembed import SparseFeatures

STATE = Family("state")


def _with_adagrad(model: Ranker) -> Case:
    return Case(model=model, optimizers=[adagrad(model)])


@STATE.model("running mean that forward binds anew")
class Rebound(Ranker):
    """A buffer is replaced by a new tensor in each forward."""

    mean: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.register_buffer("mean", torch.zeros(sizes.num_dense + self.width))

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.features(dense, sparse)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.deep(x - self.mean)


@STATE.model("running mean that forward changes in place")
class InPlace(Rebound):
    """The same by ``lerp_``."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.features(dense, sparse)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.deep(x - self.mean)


@STATE.model("batch norm")
class BatchNorm(Ranker):
    """Features are normalized over the batch."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.norm = nn.BatchNorm1d(sizes.num_dense + self.width)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return self.deep(self.norm(self.features(dense, sparse)))


@STATE.model("queue of negatives with a Python pointer")
class Queue(Ranker):
    """Features of former batches, in a ring whose place Python counts."""

    queue: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.register_buffer("queue", torch.zeros(4, self.width))
        self.place = 0

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.vectors(sparse).flatten(1)
        scores = (x @ self.queue.clone().T).mean(1, keepdim=True)
        self.queue[self.place] = x.detach().mean(0)
        self.place = (self.place + 1) % len(self.queue)
        return self.deep(torch.cat([dense, x], dim=1)) - scores


@STATE.model("queue of negatives with a pointer on the device")
class DeviceQueue(Ranker):
    """The same, with the place in a buffer."""

    queue: Tensor
    place: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.register_buffer("queue", torch.zeros(4, self.width))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        x = self.vectors(sparse).flatten(1)
        scores = (x @ self.queue.clone().T).mean(1, keepdim=True)
        self.queue.index_copy_(0, self.place, x.detach().mean(0, keepdim=True))
        self.place.add_(1).remainder_(len(self.queue))
        return self.deep(torch.cat([dense, x], dim=1)) - scores


@STATE.habit("attribute that forward sets and the loop reads")
def read_attribute(sizes: Sizes) -> Case:
    class Telling(Ranker):
        mean = torch.zeros(())

        def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
            logits = super().forward(dense, sparse)
            self.mean = logits.detach().mean()
            return logits

    model, seen = Telling(sizes), []
    case = _with_adagrad(model)
    case.after_step = lambda *_: seen.append(model.mean.clone())
    case.kept = lambda: {"means": torch.stack(seen)}
    return case


@STATE.habit("auxiliary loss that a layer leaves in an attribute")
def auxiliary_loss(sizes: Sizes) -> Case:
    class Gated(Ranker):
        def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
            x = self.features(dense, sparse)
            self.penalty = x.square().mean()
            return self.deep(x)

    model = Gated(sizes)
    case = _with_adagrad(model)

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return loss + 0.01 * model.penalty

    case.loss_fn = loss_fn
    return case


@STATE.habit("EMA of the dense weights")
def ema(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = with_adam(model)
    average = AveragedModel(model.deep, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    case.after_step = lambda *_: average.update_parameters(model.deep)
    case.kept = lambda: {f"ema.{name}": t for name, t in average.state_dict().items()}
    return case


@STATE.habit("EMA with warm-up, in forward")
def ema_in_forward(sizes: Sizes) -> Case:
    class Averaged(Ranker):
        def __init__(self, sizes: Sizes) -> None:
            super().__init__(sizes)
            self.register_buffer("average", torch.zeros(sizes.hidden, 1))
            self.num_steps = 0

        @torch.no_grad()
        def _update(self) -> None:
            self.num_steps += 1
            decay = min(0.99, (1 + self.num_steps) / (10 + self.num_steps))
            weight = self.weight(4).T
            self.get_buffer("average").mul_(decay).add_(weight, alpha=1 - decay)

        def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
            self._update()
            return super().forward(dense, sparse)

    return _with_adagrad(Averaged(sizes))


@STATE.habit("target network that follows the model")
def target_network(sizes: Sizes) -> Case:
    class WithTarget(Ranker):
        def __init__(self, sizes: Sizes) -> None:
            super().__init__(sizes)
            self.target = copy.deepcopy(self.deep).requires_grad_(False)

        def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
            x = self.features(dense, sparse)
            return self.deep(x) + 0.1 * self.target(x.detach())

    model = WithTarget(sizes)
    tables, dense = parts(model)
    trained = [p for p in dense if p.requires_grad]
    case = Case(
        model=model,
        optimizers=[
            torchembed.optim.Adagrad(tables, lr=0.05),
            torchembed.optim.DenseAdagrad(trained, lr=0.05),
        ],
    )

    @torch.no_grad()
    def follow(*_: object) -> None:
        for slow, fast in zip(model.target.parameters(), model.deep.parameters(), strict=True):
            slow.lerp_(fast, 0.2)

    case.after_step = follow
    return case


@STATE.habit("weights clamped after each step")
def clamped(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = _with_adagrad(model)

    def clamp(*_: object) -> None:
        for parameter in model.deep.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    case.after_step = clamp
    return case


@STATE.habit("state dict loaded in the middle")
def loaded(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = _with_adagrad(model)
    first = copy.deepcopy(model.state_dict())

    def before_step(number: int) -> None:
        if number == 7:
            model.load_state_dict(first)

    case.before_step = before_step
    return case


@STATE.habit("state dict loaded by assignment")
def assigned(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = with_adam(model)
    first = {k: v.clone() for k, v in model.deep.state_dict().items()}

    def before_step(number: int) -> None:
        if number == 7:
            for name, parameter in model.deep.named_parameters():
                parameter.data = first[name].clone()

    case.before_step = before_step
    return case


@STATE.habit("optimizer's state loaded in the middle")
def loaded_optimizer(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = with_adam(model)
    kept: list[dict[str, Any]] = []

    def before_step(number: int) -> None:
        if number == 5:
            kept.extend(copy.deepcopy(o.state_dict()) for o in case.optimizers)
        if number == 8:
            for optimizer, state in zip(case.optimizers, kept, strict=True):
                optimizer.load_state_dict(state)

    case.before_step = before_step
    return case


@STATE.habit("buffer replaced between steps")
def replaced_buffer(sizes: Sizes) -> Case:
    class Weighted(Ranker):
        factor: Tensor

        def __init__(self, sizes: Sizes) -> None:
            super().__init__(sizes)
            self.register_buffer("factor", torch.ones(()))

        def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
            return super().forward(dense, sparse) * self.factor

    model = Weighted(sizes)
    case = _with_adagrad(model)

    def before_step(number: int) -> None:
        model.factor = torch.tensor(1.0 + 0.1 * number, device=sizes.device)

    case.before_step = before_step
    return case


@STATE.habit("number of a module changed between steps")
def changed_number(sizes: Sizes) -> Case:
    class Scaled(Ranker):
        factor = 1.0

        def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
            return super().forward(dense, sparse) * self.factor

    model = Scaled(sizes)
    case = _with_adagrad(model)

    def before_step(number: int) -> None:
        model.factor = 1.0 if number < 7 else 0.5

    case.before_step = before_step
    return case


@STATE.habit("dropout rate changed between steps")
def changed_dropout(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    dropout = nn.Dropout(0.5)
    model.deep.insert(0, dropout)
    case = _with_adagrad(model)

    def before_step(number: int) -> None:
        if number == 7:
            dropout.p = 0.1

    case.before_step = before_step
    return case


@STATE.habit("frozen in the middle")
def frozen_later(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = with_adam(model)

    def before_step(number: int) -> None:
        if number == 6:
            model.deep[0].requires_grad_(False)
        if number == 9:
            model.deep[0].requires_grad_(True)

    case.before_step = before_step
    return case


@STATE.habit("tables frozen in the middle")
def tables_frozen_later(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = with_adam(model)
    case.before_step = lambda number: model.tables.requires_grad_(number < 6)
    return case


@STATE.habit("frozen layers")
def frozen(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    model.deep[0].requires_grad_(False)
    tables, dense = parts(model)
    trained = [p for p in dense if p.requires_grad]
    adam = torch.optim.Adam(trained, lr=0.01)
    return Case(model=model, optimizers=[torchembed.optim.Adagrad(tables, lr=0.05), adam])


@STATE.habit("evaluation between steps")
def evaluated(sizes: Sizes) -> Case:
    model = BatchNorm(sizes)
    model.deep.insert(0, nn.Dropout(0.2))
    case = _with_adagrad(model)
    dense = torch.randn(sizes.batch_size, sizes.num_dense)
    held_out = SparseFeatures(
        keys=tuple(f"f{n}" for n in range(sizes.num_features)),
        values=torch.zeros(sizes.num_features * sizes.batch_size, dtype=torch.int64),
        hotness=(1,) * sizes.num_features,
        batch_size=sizes.batch_size,
    )
    scores: list[Tensor] = []

    def after_step(number: int, loss: Tensor) -> None:
        if number % 4 == 3:
            model.eval()
            with torch.no_grad():
                scores.append(model(dense, held_out).clone())
            model.train()

    case.after_step = after_step
    case.kept = lambda: {"scores": torch.stack(scores)}
    return case


@STATE.habit("batch norm frozen in the middle")
def frozen_norm(sizes: Sizes) -> Case:
    model = BatchNorm(sizes)
    case = _with_adagrad(model)
    case.before_step = lambda number: model.norm.train(number < 6)
    return case


@STATE.habit("losses kept in a list")
def kept_losses(sizes: Sizes) -> Case:
    model, losses = Ranker(sizes), []
    case = _with_adagrad(model)
    case.after_step = lambda number, loss: losses.append(loss)
    case.kept = lambda: {"losses": torch.stack(losses)}
    return case


@STATE.habit("layer replaced in the middle")
def replaced_layer(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = _with_adagrad(model)

    def before_step(number: int) -> None:
        if number == 7:
            model.deep[1] = nn.GELU()

    case.before_step = before_step
    return case
