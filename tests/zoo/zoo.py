"""All entries of the zoo."""

from tests.zoo.pooled_models import POOLED
from tests.zoo.sequence_models import SEQUENCES
from tests.zoo.task_models import TASKS

FAMILIES = (POOLED, SEQUENCES, TASKS)
ENTRIES = {entry.name: entry for family in FAMILIES for entry in family.entries}
