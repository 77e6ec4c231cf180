"""Models with our tables in plain loops, within whatever wraps them, equal the unsharded model."""

import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torchembed
from tests.support.ranks import run_on_ranks
from torchembed.training import CheckpointFolder, TrainingRun, whole_tables

NUM_STEPS, NUM_SAMPLES = 2, 16
PLACEMENTS = {"tables.embedding_bags.a": "row_wise", "tables.embedding_bags.b": "data_parallel"}
PLACEMENTS |= {"bag": "table_wise", "item": "column_wise"}


class Model(nn.Module):
    """Tables of all kinds under a small network, whose numbers are multiples of 1/2."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            torchembed.EmbeddingBagConfig(
                name=name, num_embeddings=50, embedding_dim=8, feature_names=(name,)
            )
            for name in ("a", "b")
        ]
        self.tables = torchembed.EmbeddingBagCollection(tables=configs)
        self.bag = torchembed.EmbeddingBag(50, 8, mode="sum")
        self.item = torchembed.Embedding(50, 8)
        self.top = nn.Sequential(nn.Linear(32, 4), nn.ReLU(), nn.Linear(4, 1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator) / 2)

    def forward(self, ids: Tensor) -> Tensor:
        sparse = torchembed.SparseFeatures(
            keys=("a", "b"), hotness=(1, 1), values=ids[:, :2].T.reshape(-1), batch_size=len(ids)
        )
        vectors = (self.tables(sparse).values(), self.bag(ids[:, 2:]), self.item(ids[:, 3]))
        return self.top(torch.cat(vectors, dim=1))


def batches(rank: int | None) -> list[tuple[Tensor, Tensor]]:
    """Ids and signs ``[B, 1]``; every second sample of each batch where ``rank`` is given."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(NUM_STEPS):
        ids = torch.randint(50, (NUM_SAMPLES, 5), generator=generator)
        signs = torch.randint(2, (NUM_SAMPLES, 1), generator=generator) * 2.0 - 1
        found.append((ids, signs) if rank is None else (ids[rank::2], signs[rank::2]))
    return found


def sharded(root: nn.Module, prefix: str = "") -> None:
    placements = {prefix + name: placement for name, placement in PLACEMENTS.items()}
    torchembed.shard_embeddings(root, init_device_mesh("cpu", (2,)), placements)


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    embeddings, rest = torchembed.split_parameters(model)
    return [torchembed.optim.SGD(embeddings, lr=0.25), torch.optim.SGD(rest, lr=0.25)]


def take_steps(called: nn.Module, optimizers: Sequence[Any]) -> None:
    for ids, signs in batches(dist.get_rank()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (called(ids) * signs).mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def alone() -> nn.Module:
    model = Model()
    of_all = optimizers(model)
    for ids, signs in batches(None):
        for optimizer in of_all:
            optimizer.zero_grad()
        (model(ids) * signs).mean().backward()
        for optimizer in of_all:
            optimizer.step()
    return model


def plain() -> nn.Module:
    model = Model()
    sharded(model)
    take_steps(model, optimizers(model))
    return model


def within_ddp() -> nn.Module:
    model = Model()
    sharded(model)
    wrapper = DistributedDataParallel(model)
    take_steps(wrapper, optimizers(wrapper))
    return model


def divide(module: nn.Module) -> None:
    """``fully_shard`` over the ranks, on the CPU: by itself it takes a GPU where there is one."""
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def after_fully_shard(modules: Callable[[Model], Sequence[nn.Module]]) -> Callable[[], nn.Module]:
    def trained() -> nn.Module:
        model = Model()
        sharded(model)
        for module in modules(model):
            divide(module)
        _, rest = torchembed.split_parameters(model)
        assert any(isinstance(parameter, DTensor) for parameter in rest)
        take_steps(model, optimizers(model))
        return model

    return trained


def whole_divided_by_fully_shard() -> nn.Module:
    """Tables that are not sharded, and that an optimizer of torch trains."""
    model = Model()
    divide(model)
    assert torchembed.split_parameters(model).embeddings == []
    take_steps(model, [torch.optim.SGD(model.parameters(), lr=0.25)])
    return model


def in_lightning(*, is_joint: bool) -> Callable[[], nn.Module]:
    def trained() -> nn.Module:
        import lightning

        class Lit(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = is_joint

            def configure_model(self) -> None:
                self.model = Model()
                sharded(self, "model.")

            def configure_optimizers(self) -> Any:
                if is_joint:
                    return torchembed.optim.SGD.with_dense(self.parameters(), lr=0.25)
                return optimizers(self)

            def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor | None:
                ids, signs = batch
                loss = (self.model(ids) * signs).mean()
                if is_joint:
                    return loss
                for optimizer in self.optimizers():  # type: ignore[union-attr]
                    optimizer.zero_grad()
                self.manual_backward(loss)
                for optimizer in self.optimizers():  # type: ignore[union-attr]
                    optimizer.step()
                return None

        lit = Lit()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            use_distributed_sampler=False,
            max_epochs=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        of_rank = batches(dist.get_rank())
        trainer.fit(lit, torch.utils.data.DataLoader(of_rank, batch_size=None))  # type: ignore[arg-type]
        return lit.model

    return trained


def in_accelerate(*, is_joint: bool) -> Callable[[], nn.Module]:
    def trained() -> nn.Module:
        from accelerate import Accelerator

        accelerator, model = Accelerator(cpu=True), Model()
        sharded(model)
        called = accelerator.prepare(model)
        assert isinstance(called, DistributedDataParallel)
        made = optimizers(model)
        if is_joint:
            made = [torchembed.optim.SGD.with_dense(model.parameters(), lr=0.25)]
        prepared = [accelerator.prepare(optimizer) for optimizer in made]
        for ids, signs in batches(dist.get_rank()):
            for optimizer in prepared:
                optimizer.zero_grad()
            accelerator.backward((called(ids) * signs).mean())
            for optimizer in prepared:
                optimizer.step()
        return model

    return trained


LOOPS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "DDP": within_ddp,
    "FSDP2 of the model": after_fully_shard(lambda model: [model]),
    "FSDP2 of its dense part": after_fully_shard(lambda model: [model.top]),
    "FSDP2 of layers and the model": after_fully_shard(lambda m: [m.top[0], m.top[2], m]),
    "FSDP2 of unsharded tables": whole_divided_by_fully_shard,
    "Lightning": in_lightning(is_joint=False),
    "Lightning, one optimizer": in_lightning(is_joint=True),
    "Accelerate": in_accelerate(is_joint=False),
    "Accelerate, one optimizer": in_accelerate(is_joint=True),
}


def values_of(model: nn.Module) -> dict[str, Any]:
    """Every parameter, whole; tables on rank 0 alone."""
    found = {n: table for n, table in whole_tables(model) if table is not None}
    _, rest = torchembed.split_parameters(model)
    for name, parameter in model.named_parameters():
        if any(parameter is other for other in rest):
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            found[name] = whole.detach()
    return {name: value.numpy().copy() for name, value in found.items()}


def divided_run() -> TrainingRun:
    model = Model()
    sharded(model)
    divide(model)
    embeddings, rest = torchembed.split_parameters(model)
    of_tables = torchembed.optim.Adagrad(embeddings, lr=0.25)
    return TrainingRun(model=model, optimizers=[of_tables, torch.optim.AdamW(rest, lr=0.125)])


def resumed(folder: str) -> list[dict[str, Any]]:
    """The parameters after steps, a checkpoint and steps, and of a run that resumed from it."""
    first, second = divided_run(), divided_run()
    take_steps(first.model, first.optimizers)
    with contextlib.closing(CheckpointFolder(folder)) as checkpoints:
        checkpoints.save(1, first)
    with contextlib.closing(CheckpointFolder(folder)) as checkpoints:
        assert checkpoints.load(second) == 1
    for run in (first, second):
        take_steps(run.model, run.optimizers)
    return [values_of(run.model) for run in (first, second)]


def norms() -> list[float]:
    """The norm of all gradients: of the model alone, sharded, and divided by ``fully_shard``."""
    found = []
    for kind in ("alone", "sharded", "divided"):
        model = Model()
        if kind != "alone":
            sharded(model)
        if kind == "divided":
            divide(model)
        optimizers(model)
        ids, signs = batches(None if kind == "alone" else dist.get_rank())[0]
        (model(ids) * signs).mean().backward()
        group = None if kind == "alone" else dist.group.WORLD
        found.append(float(torchembed.optim.clip_grad_norm_(model.parameters(), 1e9, group=group)))
    return found


def refusals() -> list[str]:
    """Errors of optimizers of whole tables that ``fully_shard`` divides."""
    messages = []
    model = Model()
    of_tables, _ = optimizers(model)
    divide(model)
    ids, _ = batches(dist.get_rank())[0]
    model(ids).mean().backward()
    with pytest.raises(RuntimeError) as error:
        of_tables.step()
    messages.append(str(error.value))
    model.zero_grad()
    with pytest.raises(TypeError) as other:
        torchembed.optim.SGD([model.bag.weight], lr=0.25)
    return [*messages, str(other.value)]


class Outcome(NamedTuple):
    """What a rank has seen."""

    of_loops: dict[str, dict[str, Any]]
    """The parameters after each loop, by name."""
    refusals: list[str]
    resumed: list[dict[str, Any]]
    norms: list[float]


def all_loops(folder: str) -> Outcome:
    rank = dist.get_rank()
    # As torchrun sets it; Lightning and Accelerate join the process group that is there.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Lightning makes a leaf as torch no longer does.
        warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.` is", FutureWarning)
        # Where there is a GPU, these loops leave it; and processors, where there are many.
        warnings.filterwarnings("ignore", "GPU available but not used", UserWarning)
        warnings.filterwarnings("ignore", ".*does not have many workers", UserWarning)
        of_loops = {name: values_of(loop()) for name, loop in LOOPS.items()}
        of_loops["alone"] = values_of(alone())
        return Outcome(of_loops, refusals(), resumed(folder), norms())


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    pytest.importorskip("lightning", reason="checks loops of Lightning")
    pytest.importorskip("accelerate", reason="checks loops of Accelerate")
    return run_on_ranks(2, all_loops, str(tmp_path_factory.mktemp("run")))


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_equals_the_unsharded_model(of_ranks: list[Outcome], name: str) -> None:
    # Multiples of powers of two, so that sums have the same bits in any order.
    for rank, of_rank in enumerate(of_ranks):
        expected, found = of_ranks[0].of_loops["alone"], of_rank.of_loops[name]
        assert rank or found.keys() == expected.keys()
        for parameter, values in found.items():
            np.testing.assert_array_equal(values, expected[parameter], err_msg=parameter)


def test_tables_that_fully_shard_has_taken_are_refused(
    of_ranks: list[Outcome],
) -> None:
    for of_rank in of_ranks:
        at_step, at_making = of_rank.refusals
        assert at_step.startswith("fully_shard has divided table a over ranks since its optimizer")
        assert at_making.startswith("params must be weights of torchembed tables, got an ordinary")


def test_a_run_within_fsdp_resumes(of_ranks: list[Outcome]) -> None:
    for of_rank in of_ranks:
        went_on, resumed = of_rank.resumed
        for name, values in went_on.items():
            np.testing.assert_array_equal(values, resumed[name], err_msg=name)


def test_norms_count_all_gradients(of_ranks: list[Outcome]) -> None:
    # Each is a square root of a sum of squares in float32, whose order differs.
    rtol = 2 * sum(p.numel() for p in Model().parameters()) ** 0.5 * torch.finfo().eps
    for of_rank in of_ranks:
        alone, *others = of_rank.norms
        np.testing.assert_allclose(others, alone, rtol=rtol)


def test_parameters_are_divided() -> None:
    model = Model()
    model.frozen = nn.Embedding(5, 2)
    model.twice = nn.ModuleList([model.bag, model.top])
    embeddings, rest = torchembed.split_parameters(model)
    tables = [*model.tables.parameters(), model.bag.weight, model.item.weight]
    assert list(map(id, embeddings)) == list(map(id, tables))
    assert list(map(id, rest)) == list(map(id, [*model.top.parameters(), model.frozen.weight]))
    assert torchembed.split_parameters(nn.ReLU()) == ([], [])
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got generator; torche"):
        torchembed.split_parameters(model.parameters())  # type: ignore[arg-type]
