"""The whole tables of a model, for graphs that look them up."""

from torch import Tensor

from torchembed.checkpoints.exports.whole_model import whole_tables
from torchembed.modules.dense_part.errors import DeployError
from torchembed.modules.dense_part.take_apart import TakenApart


def used_tables(parts: TakenApart) -> dict[str, Tensor]:
    """The whole weight of each table that is looked up, by its name in ``state_dict``: copies on
    rank 0's CPU, none on other ranks. Collective.

    Raises:
        DeployError: for dynamic tables, whose rows have ids of their own.
    """
    dynamic = [t.name for t in parts.recording.tables.values() if t.num_ids is None]
    if dynamic:
        raise DeployError(
            f"tables {dynamic} must not be dynamic, since graphs look rows up by their numbers; "
            "export with with_tables=False and look vectors up elsewhere, or deploy the model"
        )
    names = {table.weight_name for table in parts.recording.tables.values()}
    return {
        name: weight
        for name, weight in whole_tables(parts.model)
        if name in names and weight is not None
    }
