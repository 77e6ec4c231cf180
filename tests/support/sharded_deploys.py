"""Ranks that deploy a model whose tables they share."""

from pathlib import Path

import torch
import torch.distributed as dist

import torchembed
from tests.support.sharded_cases import made_mesh
from tests.zoo.served_models import MODELS, ServedCase
from torchembed.serving.models import DeployError, deploy

PLACEMENTS = {"t0": "row_wise", "t1": "data_parallel", "t2": "table_wise"}
BY_COLUMNS = {"t0": "row_wise", "t1": "column_wise", "t2": "table_wise"}


def seeded(name: str) -> ServedCase:
    """The same model wherever it is made."""
    torch.manual_seed(1)
    return MODELS[name]()


def deploy_on_ranks(folder: Path, names: list[str]) -> list[str]:
    """Deploy models; returns what a version that is there already, one rank's wrong argument, and
    columns that are divided are answered by."""
    errors = []
    mesh = made_mesh("cpu", dist.get_world_size())

    def sharded(name: str, places: dict[str, str]) -> ServedCase:
        case, tables = seeded(name), "embedding_bag_collection.embedding_bags"
        placements = {f"{tables}.{table}": place for table, place in places.items()}
        torchembed.shard_embeddings(case.model, mesh, placements)
        return case

    for name in names:
        case = sharded(name, PLACEMENTS)
        # Each rank has samples of its own.
        torch.manual_seed(dist.get_rank())
        examples = case.examples(4)
        deploy(case.model, folder, name=name, version=1, examples=examples)
        for version in (1, 2 - 2 * (dist.get_rank() == 1)):
            try:
                deploy(case.model, folder, name=name, version=version, examples=examples)
            except (DeployError, FileExistsError, RuntimeError) as error:
                errors.append(f"{type(error).__name__}: {error}")
    case = sharded("dlrm", BY_COLUMNS)
    try:
        deploy(case.model, folder, name="dlrm", version=3, examples=case.examples(4))
    except (DeployError, ValueError, RuntimeError) as error:
        errors.append(f"{type(error).__name__}: {error}")
    return errors
