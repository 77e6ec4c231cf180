"""All entries of the zoo."""

from tests.zoo.batch_habits import BATCHES
from tests.zoo.dynamic_tables import DYNAMIC, DYNAMIC_MODULES
from tests.zoo.gradient_habits import GRADIENTS
from tests.zoo.hook_habits import HOOKS
from tests.zoo.jagged_sequence_models import JAGGED_SEQUENCES
from tests.zoo.layer_habits import LAYERS
from tests.zoo.library_sequences import LIBRARY_SEQUENCES
from tests.zoo.pooled_models import POOLED
from tests.zoo.random_habits import RANDOM
from tests.zoo.schedule_habits import SCHEDULES
from tests.zoo.sequence_models import SEQUENCES
from tests.zoo.state_habits import STATE
from tests.zoo.stored_tables import STORED
from tests.zoo.task_models import TASKS
from tests.zoo.value_habits import VALUES

FAMILIES = (
    POOLED,
    SEQUENCES,
    JAGGED_SEQUENCES,
    LIBRARY_SEQUENCES,
    TASKS,
    BATCHES,
    LAYERS,
    STATE,
    HOOKS,
    SCHEDULES,
    RANDOM,
    GRADIENTS,
    VALUES,
    DYNAMIC,
    DYNAMIC_MODULES,
    STORED,
)
ENTRIES = {entry.name: entry for family in FAMILIES for entry in family.entries}
