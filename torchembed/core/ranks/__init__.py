"""The ranks of a run: small collectives apart from the model's, and what all ranks agree on, fail
with and end with."""

from torchembed.core.ranks.collectives import (
    check_cpu_backend,
    default_timeout,
    from_first_rank,
    gather_objects,
    gather_on_first_rank,
    is_of_some,
    make_cpu_group,
    rank,
    sum_over_ranks,
    world_size,
)
from torchembed.core.ranks.minimum import any_rank, any_rank_each, start_minimum

__all__ = [
    "any_rank",
    "any_rank_each",
    "check_cpu_backend",
    "default_timeout",
    "from_first_rank",
    "gather_objects",
    "gather_on_first_rank",
    "is_of_some",
    "make_cpu_group",
    "rank",
    "start_minimum",
    "sum_over_ranks",
    "world_size",
]
