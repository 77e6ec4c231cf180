"""Losses, gradients and optimizers: how a loop updates weights."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.zoo.entries import Case, Family, adagrad, beside_tables, parts, placed
from tests.zoo.ranker import Ranker, with_adam
from tests.zoo.sizes import Sizes
from torchembed import SparseFeatures

GRADIENTS = Family("gradients")
MakeDense = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _trained_by(name: str, make: MakeDense) -> None:
    """An entry whose dense part an optimizer of torch trains."""
    GRADIENTS.habit(name)(
        lambda sizes: Case(model=(m := Ranker(sizes)), optimizers=beside_tables(m, make))
    )


_trained_by("torch's SGD with momentum", lambda p: torch.optim.SGD(p, 0.05, 0.9, nesterov=True))
_trained_by("torch's Adam with amsgrad", lambda p: torch.optim.Adam(p, 0.01, amsgrad=True))
_trained_by("torch's RMSprop", lambda p: torch.optim.RMSprop(p, 0.01))
_trained_by("torch's Adam, foreach", lambda p: torch.optim.Adam(p, 0.01, foreach=True))
_trained_by("torch's Adam, fused", lambda p: torch.optim.Adam(p, 0.01, fused=True))


def _ours(
    name: str, of_tables: type[torchembed.optim.FusedOptimizer], dense: type[Any], **settings: Any
) -> None:
    """An entry with two of torchembed's optimizers."""

    @GRADIENTS.habit(name)
    def make(sizes: Sizes) -> Case:
        model = Ranker(sizes)
        tables, others = parts(model)
        return Case(model=model, optimizers=[of_tables(tables, **settings), dense(others, lr=0.01)])


_ours("SGD of tables", torchembed.optim.SGD, torchembed.optim.DenseSGD, lr=0.1)
_ours("Adam of tables", torchembed.optim.Adam, torchembed.optim.DenseAdam, lr=0.01)
_ours(
    "row-wise Adagrad of tables",
    torchembed.optim.RowwiseAdagrad,
    torchembed.optim.DenseAdagrad,
    lr=0.1,
)
_ours(
    "weight decay of tables",
    torchembed.optim.Adagrad,
    torchembed.optim.DenseAdam,
    lr=0.1,
    weight_decay=0.01,
)


@GRADIENTS.habit("an optimizer for each part")
def each_part(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    tables, _ = parts(model)
    first, *others = (layer for layer in model.deep if list(layer.parameters()))
    rest = [p for layer in others for p in layer.parameters()]
    return Case(
        model=model,
        optimizers=[
            torchembed.optim.Adagrad(tables[:1], lr=0.05),
            torchembed.optim.SGD(tables[1:], lr=0.05),
            torchembed.optim.DenseAdam(list(first.parameters()), lr=0.01),
            torch.optim.SGD(rest, lr=0.05),
        ],
    )


@GRADIENTS.habit("tables trained by torch's optimizer")
def torch_tables(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    return Case(model=model, optimizers=[torch.optim.Adam(placed(model).parameters(), lr=0.01)])


@GRADIENTS.habit("sparse nn.Embedding with SparseAdam")
def sparse_embedding(sizes: Sizes) -> Case:
    return _beside(sizes, sparse=True)


@GRADIENTS.habit("nn.Embedding beside torchembed's tables")
def dense_embedding(sizes: Sizes) -> Case:
    return _beside(sizes, sparse=False)


def _beside(sizes: Sizes, *, sparse: bool) -> Case:
    class Beside(Ranker):
        def __init__(self, sizes: Sizes) -> None:
            super().__init__(sizes)
            self.other = nn.Embedding(sizes.num_rows, 1, sparse=sparse)

        def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
            ids = sparse.values[: len(dense)]
            return super().forward(dense, sparse) + self.other(ids)

    model = Beside(sizes)
    tables, dense = parts(model)
    others = [p for p in dense if p is not model.other.weight]
    make = torch.optim.SparseAdam if sparse else torch.optim.Adam
    return Case(
        model=model,
        optimizers=[
            torchembed.optim.Adagrad(tables, lr=0.05),
            torch.optim.Adam(others, lr=0.01),
            make([model.other.weight], lr=0.01),
        ],
    )


class EveryOther(torchembed.optim.DenseAdagrad):
    """Accumulates the gradients of two calls."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, lr=lr)
        self.num_calls = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.num_calls += 1
        return super().step(closure) if self.num_calls % 2 == 0 else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.num_calls % 2 == 0:
            super().zero_grad(set_to_none)


@GRADIENTS.habit("gradients accumulated over two steps by a fused optimizer")
def accumulated(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    return Case(model=model, optimizers=beside_tables(model, lambda p: EveryOther(p, 0.05)))


class EveryOtherAdam(torch.optim.Adam):
    """The same of torch's."""

    num_calls = 0

    def step(self, closure: Any = None) -> Any:
        self.num_calls += 1
        return super().step(closure) if self.num_calls % 2 == 0 else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.num_calls % 2 == 0:
            super().zero_grad(set_to_none)


@GRADIENTS.habit("gradients accumulated over two steps by torch's Adam")
def accumulated_by_torch(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    return Case(model=model, optimizers=beside_tables(model, lambda p: EveryOtherAdam(p, 0.01)))


class Turns(torchembed.optim.DenseSGD):
    """Steps in every second call only, as one of two players."""

    def __init__(self, params: list[nn.Parameter], *, is_first: bool) -> None:
        super().__init__(params, lr=0.05)
        self.num_calls = int(is_first)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.num_calls += 1
        return super().step(closure) if self.num_calls % 2 else None


@GRADIENTS.habit("optimizers in turns")
def turns(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    tables, _ = parts(model)
    first = list(model.deep[0].parameters())
    others = [p for layer in (model.deep[2], model.deep[4]) for p in layer.parameters()]
    return Case(
        model=model,
        optimizers=[
            torchembed.optim.Adagrad(tables, lr=0.05),
            Turns(first, is_first=True),
            Turns(others, is_first=False),
        ],
    )


class SkipsNaN(torch.optim.Adam):
    """Leaves out steps whose gradients are not finite."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        if all(bool(grad.isfinite().all()) for grad in grads if grad is not None):
            return super().step(closure)
        return None


@GRADIENTS.habit("steps skipped for gradients that are not finite")
def skips_nan(sizes: Sizes) -> Case:
    class Unstable(Ranker):
        def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
            return super().forward(dense, sparse).clamp(max=0.4).log1p()

    model = Unstable(sizes)
    return Case(model=model, optimizers=beside_tables(model, lambda p: SkipsNaN(p, 0.01)))


@GRADIENTS.habit("loss scaled by hand")
def scaled_loss(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = with_adam(model)
    case.loss_fn = lambda logits, labels: 128 * F.binary_cross_entropy_with_logits(logits, labels)
    return case


class Scaled(torch.optim.Adam):
    """Steps by way of a gradient scaler."""

    def __init__(self, params: list[nn.Parameter], scaler: torch.amp.GradScaler) -> None:
        super().__init__(params, lr=0.01)
        self.scaler, self._is_within = scaler, False

    def step(self, closure: Any = None) -> Any:
        if self._is_within:
            return super().step(closure)
        self._is_within = True
        try:
            return self.scaler.step(self)
        finally:
            self._is_within = False


@GRADIENTS.habit("GradScaler")
def grad_scaler(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    scaler = torch.amp.GradScaler(sizes.device.type, init_scale=2.0**4, growth_interval=3)
    tables, dense = parts(model)

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return scaler.scale(F.binary_cross_entropy_with_logits(logits, labels))

    return Case(
        model=model,
        optimizers=[torchembed.optim.Adagrad(tables, lr=0.05), Scaled(dense, scaler)],
        loss_fn=loss_fn,
        after_step=lambda *_: scaler.update(),
    )


@GRADIENTS.habit("fp16 autocast with a GradScaler")
def half_autocast(sizes: Sizes) -> Case:
    case = grad_scaler(sizes)
    case.autocast = torch.float16
    return case


@GRADIENTS.habit("generator and discriminator in turns by a flag")
def players(sizes: Sizes) -> Case:
    class Players(Ranker):
        def __init__(self, sizes: Sizes) -> None:
            super().__init__(sizes)
            self.critic = nn.Linear(1, 1)
            self.is_critics_turn = False

        def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
            made = super().forward(dense, sparse)
            if self.is_critics_turn:
                return self.critic(made.detach())
            return -self.critic(made) + 0.0 * made

    model = Players(sizes)
    case = with_adam(model)

    def before_step(number: int) -> None:
        model.is_critics_turn = number % 2 == 1

    case.before_step = before_step
    return case


@GRADIENTS.habit("bf16 autocast")
def autocast(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    return Case(model=model, optimizers=[adagrad(model)], autocast=torch.bfloat16)


@GRADIENTS.habit("dense weights of 16 bits")
def half_weights(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    tables, dense = parts(model)
    of_dense = torchembed.optim.DenseAdam(dense, lr=0.01, dtype=torch.bfloat16)

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits.float(), labels)

    return Case(
        model=model,
        optimizers=[torchembed.optim.Adagrad(tables, lr=0.05), of_dense],
        loss_fn=loss_fn,
        autocast=torch.bfloat16,
    )


def _with_loss(name: str, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    """An entry with a loss of its own."""
    GRADIENTS.habit(name)(
        lambda sizes: Case(
            model=(model := Ranker(sizes)), optimizers=[adagrad(model)], loss_fn=loss_fn
        )
    )


def _focal(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def _smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels * 0.9 + 0.05)


def _weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels, pos_weight=torch.tensor(3.0))


def _hardest(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return losses.topk(len(losses) // 2).values.mean()


def _pairwise(logits: Tensor, labels: Tensor) -> Tensor:
    wins = (labels[:, None] > labels).float()
    return (F.softplus(logits - logits[:, None]) * wins).sum() / wins.sum().clamp(min=1)


_with_loss("label smoothing", _smoothed)
_with_loss("focal loss", _focal)
_with_loss("loss with a weight of positives", _weighted)
_with_loss("loss of the hardest samples", _hardest)
_with_loss("pairwise loss", _pairwise)
_with_loss("squared error", F.mse_loss)


@GRADIENTS.habit("penalty on dense weights in the loss")
def penalty(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = Case(model=model, optimizers=[adagrad(model)])

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        norms = sum(p.square().sum() for p in model.deep.parameters())
        return F.binary_cross_entropy_with_logits(logits, labels) + 1e-3 * norms

    case.loss_fn = loss_fn
    return case


@GRADIENTS.habit("two backwards")
def two_backwards(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = Case(model=model, optimizers=[adagrad(model)])

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        # A loss of its own for the last layer, whose gradients are added to.
        penalty = model.weight(4).square().sum()
        penalty.backward()
        return F.binary_cross_entropy_with_logits(logits, labels)

    case.loss_fn = loss_fn
    return case


@GRADIENTS.habit("gradient penalty")
def gradient_penalty(sizes: Sizes) -> Case:
    class Penalized(nn.Module):
        def __init__(self, sizes: Sizes) -> None:
            super().__init__()
            self.ranker = Ranker(sizes)

        def forward(self, batch: Any) -> Tensor:
            x = self.ranker.features(batch.dense, batch.sparse)
            logits = self.ranker.deep(x)[:, 0]
            loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
            (grad,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
            return loss + 0.1 * grad.square().sum(1).mean()

    model = Penalized(sizes)
    return Case(model=model, optimizers=[adagrad(model)], loss_fn=None)


@GRADIENTS.habit("adversarial noise by a gradient")
def adversarial(sizes: Sizes) -> Case:
    class Adversarial(nn.Module):
        def __init__(self, sizes: Sizes) -> None:
            super().__init__()
            self.ranker = Ranker(sizes)

        def forward(self, batch: Any) -> Tensor:
            x = self.ranker.features(batch.dense, batch.sparse)
            apart = x.detach().requires_grad_(True)
            loss = F.binary_cross_entropy_with_logits(self.ranker.deep(apart)[:, 0], batch.labels)
            (grad,) = torch.autograd.grad(loss, apart)
            logits = self.ranker.deep(x + 0.1 * grad.sign())[:, 0]
            return F.binary_cross_entropy_with_logits(logits, batch.labels)

    model = Adversarial(sizes)
    return Case(model=model, optimizers=[adagrad(model)], loss_fn=None)
