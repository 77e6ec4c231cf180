"""A state written to the files of all ranks, and read from them.

The stages are those of ``torch.distributed.checkpoint``, whose ``save`` and ``load`` know no time
limit of their own and do not say which rank a failing collective waited for.
"""

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from torchembed.checkpoints.files.save_planner import ChunkedSavePlanner
from torchembed.core import ranks
from torchembed.core.ranks.collective_errors import raise_on_all_ranks
from torchembed.core.ranks.cpu_group import CpuGroup


def write_state(
    state: dict[str, object], writer: StorageWriter, group: CpuGroup, what: str
) -> None:
    """Write every rank's part of a state, then, on rank 0, the metadata that describes all parts.

    Collective.

    Args:
        state: this rank's part, by name.
        what: the action, as "could not ..." goes on.

    Raises:
        OSError: if writing fails here, or ranks do not come, which are named.
        RuntimeError: if another rank fails, which is named.
    """
    planner, is_first = ChunkedSavePlanner(), ranks.rank() == 0

    def plan() -> SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    # What can fail on one rank runs through raise_on_all_ranks before each collective, so that no
    # rank waits in one for a rank that has raised.
    planned = group.gather_on_first_rank(raise_on_all_ranks(plan, what, group), what)

    def divide() -> tuple[list[SavePlan], Metadata] | None:
        if planned is None:
            return None
        plans, metadata = planner.create_global_plan(planned)
        return writer.prepare_global_plan(plans), metadata

    divided = raise_on_all_ranks(divide, what, group)
    mine = group.scatter_from_first_rank(None if divided is None else divided[0], what)

    def write() -> list[WriteResult]:
        return writer.write_data(planner.finish_plan(mine), planner).wait()

    results = group.gather_on_first_rank(raise_on_all_ranks(write, what, group), what)

    def finish() -> None:
        if divided is not None and results is not None:
            writer.finish(divided[1], results)

    raise_on_all_ranks(finish, what, group)


def read_state(
    state: dict[str, object], reader: StorageReader, metadata: Metadata, group: CpuGroup, what: str
) -> None:
    """Fill the tensors of ``state`` in place and replace its other values; collective.

    Raises:
        OSError: if reading fails here, or ranks do not come, which are named.
        RuntimeError: if another rank fails, which is named.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    is_first = ranks.rank() == 0

    def plan() -> LoadPlan:
        planner.set_up_planner(state, metadata, is_first)
        reader.set_up_storage_reader(metadata, is_first)
        return reader.prepare_local_plan(planner.create_local_plan())

    planned = group.gather_on_first_rank(raise_on_all_ranks(plan, what, group), what)

    def divide() -> list[LoadPlan] | None:
        if planned is None:
            return None
        return reader.prepare_global_plan(planner.create_global_plan(planned))

    mine = group.scatter_from_first_rank(raise_on_all_ranks(divide, what, group), what)

    def read() -> None:
        reader.read_data(planner.finish_plan(mine), planner).wait()

    raise_on_all_ranks(read, what, group)
