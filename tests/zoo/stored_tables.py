"""Models whose tables live in host memory, behind caches that hold some of their rows."""

from tests.zoo.batches import bags, histories, jagged_sessions
from tests.zoo.entries import Case, Family
from tests.zoo.histories_in_tables import ModulesOfHistory, SumsOfSessions
from tests.zoo.pooled_models import tables
from tests.zoo.ranker import Ranker, with_adam
from tests.zoo.sizes import Sizes
from torchembed import HostMemory

STORED = Family("host memory")


@STORED.habit("bags in host memory", bags)
def bags_in_host_memory(sizes: Sizes) -> Case:
    """Rows with two states of an optimizer, of tables that share a cache."""
    # As many rows as a batch has ids.
    storage = HostMemory(cache_rows=min(3 * sizes.batch_size, sizes.num_rows))
    return with_adam(Ranker(sizes, tables(sizes, storage=storage)))


def _most_rows(sizes: Sizes) -> HostMemory:
    return HostMemory(cache_rows=sizes.num_rows * 7 // 8)


@STORED.model("history in host memory", jagged_sessions, computes_loss=True)
class StoredHistory(SumsOfSessions):
    """Vectors of histories of any length."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, num_embeddings=sizes.num_rows, storage=_most_rows(sizes))


@STORED.model("modules in host memory", histories, computes_loss=True)
class StoredModulesOfHistory(ModulesOfHistory):
    """Modules with a cache each."""

    def __init__(self, sizes: Sizes) -> None:
        stored = {"storage": _most_rows(sizes)}
        super().__init__(sizes, sizes.num_rows, stored, stored, stored)
