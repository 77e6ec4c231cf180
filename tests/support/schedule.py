"""Which files of tests several processes take first, and which of them one process runs."""

from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadFileScheduling

TOGETHER = ("tests/integrations/torchrec/",)
"""Folders whose files share what one launch of ranks computes."""

LONGEST_FIRST = (
    "tests/integrations/torchrec/",
    "tests/zoo/",
    "tests/packaging/test_distributions.py",
    "tests/triton_kernels/test_compiles.py",
    "tests/recipes/",
    "tests/serving/",
    "tests/export/",
    "tests/ops/test_hash_table.py",
    "tests/ops/test_hash_table_kernels.py",
    "tests/ops/test_hash_table_machine.py",
    "tests/ops/test_hash_table_quality.py",
    "tests/ops/test_pointwise_attention.py",
    "tests/ops/test_pooled_lookup.py",
    "tests/bench/test_models.py",
    "tests/step/test_changes_on_ranks.py",
    "tests/packaging/test_examples.py",
    "tests/packaging/test_site.py",
    "tests/sharding/test_planner_at_scale.py",
    "tests/sharding/test_disk_in_plans.py",
    "tests/step/test_dynamic_tables_in_steps.py",
    "tests/sharding/test_sharded_training.py",
    "tests/modules/test_programs_of_collections.py",
    "tests/modules/test_programs_of_dynamic_tables.py",
    "tests/modules/test_programs_of_single_tables.py",
    "tests/modules/test_tiered_modules.py",
    "tests/step/test_disk_tables_in_steps.py",
    "tests/step/test_disk_modules_in_steps.py",
    "tests/step/test_disk_faults.py",
    "tests/sharding/test_stored_modules_on_ranks.py",
    "tests/sharding/test_tiered_tables_on_ranks.py",
    "tests/step/test_joined_calls.py",
    "tests/sharding/test_dynamic_tables_on_ranks.py",
    "tests/sharding/test_sharded_modules.py",
    "tests/sharding/test_two_level_mean.py",
    "tests/step/test_static_steps_on_ranks.py",
    "tests/training/test_dying_ranks.py",
    "tests/training/test_plain_loops.py",
    "tests/step/test_sequences_on_ranks.py",
    "tests/checkpoints/",
    "tests/stores/",
    "tests/core/test_ranks.py",
    "tests/training/test_disk_read_ahead.py",
    "tests/bench/step/",
    "tests/bench/tiers/",
    "tests/bench/training/",
    "tests/step/test_jagged_steps_on_ranks.py",
    "tests/step/test_padded_sequences.py",
    "tests/step/test_watched_values.py",
    "tests/step/test_hooks.py",
    "tests/step/test_counted_parts.py",
)
"""Those that take over ten seconds: begun late, one would leave the other processes idle."""


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests of ``LONGEST_FIRST`` in its order, then the others as they come."""

    def place(item: pytest.Item) -> int:
        found = (n for n, start in enumerate(LONGEST_FIRST) if item.nodeid.startswith(start))
        return next(found, len(LONGEST_FIRST))

    return sorted(items, key=place)


class ByFile(LoadFileScheduling):
    """Gives a process whole files, and whole folders of those in ``TOGETHER``."""

    def _split_scope(self, nodeid: str) -> str:
        folders = (folder for folder in TOGETHER if nodeid.startswith(folder))
        return next(folders, super()._split_scope(nodeid))
