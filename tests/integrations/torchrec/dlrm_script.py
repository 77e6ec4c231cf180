"""A script in TorchRec's own style: planner, pipelines, metrics, DLRM. Nothing of it is ours.

Writes the losses, predictions and metrics of each rank to the folder it is given. Its three tables
are each placed in another way.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist
from torchrec.metrics.metric_module import RecMetricModule, generate_metric_module
from torchrec.metrics.metrics_config import (
    DefaultTaskInfo,
    MetricsConfig,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
)
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

PLACEMENTS = {"one": "table_wise", "two": "column_wise", "three": "data_parallel"}
KEYS, NUM_ROWS, BATCH_SIZE, NUM_BATCHES = list(PLACEMENTS), 100, 16, 8


def batches(first: int) -> Iterator[Batch]:
    for number in range(first, first + NUM_BATCHES):
        generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
        lengths = torch.randint(0, 4, (len(KEYS) * BATCH_SIZE,), generator=generator)
        values = torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=generator)
        dense = torch.randn(BATCH_SIZE, 4, generator=generator)
        labels = (dense.sum(dim=1) > 0).float()
        yield Batch(dense, KeyedJaggedTensor(KEYS, values, lengths=lengths), labels)


@torch.no_grad()
def predicted(pipeline: TrainPipelineSparseDist, stream: Iterator[Batch]) -> list[float]:
    found: list[float] = []
    while True:
        try:
            _, logits, _ = pipeline.progress(stream)
        except StopIteration:
            return found
        found += logits.detach().tolist()


def main(folder: Path) -> None:
    torch.manual_seed(1)
    rank, device = dist.get_rank(), torch.device("cpu")
    tables = [
        EmbeddingBagConfig(name=key, num_embeddings=NUM_ROWS, embedding_dim=8, feature_names=[key])
        for key in KEYS
    ]
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    model = DLRMTrain(DLRM(collection, 4, [16, 8], [16, 1], dense_device=device))
    _apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.05})
    sharders = [EmbeddingBagCollectionSharder()]
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    constraints = {
        key: ParameterConstraints(sharding_types=[placement], min_partition=4)
        for key, placement in PLACEMENTS.items()
    }
    planner = EmbeddingShardingPlanner(topology, batch_size=BATCH_SIZE, constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    of_dense = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.1))
    optimizer = CombinedOptimizer([sharded.fused_optimizer, of_dense])
    metrics = generate_metric_module(
        metric_class=RecMetricModule,
        metrics_config=MetricsConfig(
            rec_tasks=[DefaultTaskInfo],
            rec_metrics={RecMetricEnum.NE: RecMetricDef([DefaultTaskInfo], window_size=1000)},
            throughput_metric=None,
            state_metrics=[],
        ),
        batch_size=BATCH_SIZE,
        world_size=dist.get_world_size(),
        my_rank=rank,
        state_metrics_mapping={},
        device=device,
    )
    task: RecTaskInfo = DefaultTaskInfo
    losses, predictions = [], []
    pipeline = TrainPipelineSparseDist(sharded, optimizer, device)
    stream = batches(0)
    while True:
        pipeline._model.train()
        try:
            loss, logits, labels = pipeline.progress(stream)
        except StopIteration:
            break
        losses.append(float(loss))
        metrics.update(
            {
                task.prediction_name: logits.detach().sigmoid().double(),
                task.label_name: labels.double(),
                task.weight_name: torch.ones(BATCH_SIZE).double(),
            }
        )
    pipeline._model.eval()
    predictions += predicted(pipeline, batches(50))
    evaluation = EvalPipelineSparseDist(sharded, optimizer, device)
    predictions += predicted(evaluation, batches(100))
    # Not metrics.compute(): TorchRec's fails where torchmetrics is newer than its pin.
    sums = {key: value.tolist() for key, value in metrics.state_dict().items()}
    assert isinstance(pipeline, TrainPipelineSparseDist)
    kinds = sorted({type(part).__module__ for part in (pipeline, *sharded.modules())})
    result = {
        "losses": losses,
        "predictions": predictions,
        "metrics": sums,
        "kinds": kinds,
        "plan": str(plan),
    }
    (folder / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
