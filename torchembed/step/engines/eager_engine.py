"""Steps without anything done ahead of them: on batches of any kind, and of any model."""

from collections.abc import Sequence

from torchembed.modules.lookup.bad_ids import ChecksAtOnce, deferred_id_checks
from torchembed.step.batches.batch_layout import to_device
from torchembed.step.dense_updates import PlainUpdates
from torchembed.step.eager_lookups import EagerLookups
from torchembed.step.forward_backward_update import ForwardBackwardUpdate, StepProgram
from torchembed.step.stages import LookedUpBatch, ReadBatch, TrainedBatch
from torchembed.step.step_optimizers import StepOptimizers
from torchembed.step.streams import StepStreams


class EagerEngine:
    """Copies each batch to the device when it is trained; never waits for a GPU by itself.

    Modules of one table are looked up together, ahead of forward.

    Args:
        program: what a step does.
        checks_at_once: whether lookups raise for bad ids where there is one CPU, so that nothing
            needs to be predicated; else the step changes nothing and says so in its result.
    """

    is_stale = False
    is_captured = False

    def __init__(self, program: StepProgram, *, checks_at_once: bool = False) -> None:
        self._program = program
        self._optimizers = StepOptimizers(program.optimizers, in_given_order=True)
        updates = PlainUpdates(self._optimizers.captured)
        is_alone = program.group is None and not program.is_cuda
        # Nothing has been updated in forward.
        at_once = ChecksAtOnce("That step changed nothing")
        id_checks = (lambda: at_once) if checks_at_once and is_alone else deferred_id_checks
        self._train = ForwardBackwardUpdate(
            program, self._optimizers, StepStreams(), updates, id_checks, notes_sizes=False
        )
        self._lookups = EagerLookups(program.model, program.group, id_checks)

    def prefetch(self, batch: ReadBatch) -> None:
        """Nothing is done ahead."""

    def has_prepared(self, now: ReadBatch) -> bool:
        del now
        return False

    def run(self, now: ReadBatch, upcoming: Sequence[ReadBatch] = ()) -> TrainedBatch:
        del upcoming
        if not self._lookups.can_join:
            return self.train(LookedUpBatch(to_device(now.data, self._program.device)), now.data)
        with self._lookups.around_step(to_device(now.data, self._program.device)) as batch:
            return self.train(batch, now.data)

    def train(self, batch: LookedUpBatch, source: object) -> TrainedBatch:
        """Train a batch on the device.

        Args:
            source: what the device may still read once this has returned.
        """
        return self._train(batch).held_until(None, source=source)

    def release(self) -> None:
        """Look further batches up as first ones."""
        self._lookups.release()
