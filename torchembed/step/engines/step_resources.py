"""Resources that the steps of an engine share: they never run at once, and train one model."""

import torch

from torchembed.core import ranks
from torchembed.step.dense_updates import DenseUpdates, EarlyUpdates, LateUpdates, UpdatesOfMeans
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.step_optimizers import Assumptions, StepOptimizers
from torchembed.step.step_result import ResultMemory
from torchembed.step.streams import StepStreams


class StepResources:
    """Streams, memory pool and optimizers of the steps on several layouts, and what all their
    captures hold of the model.

    Args:
        program: what a step does.

    Attributes:
        optimizers: the program's.
        assumptions: the state of the model and the optimizers that steps rely on.
        streams: where the parts of a step run.
        copies: where batches are copied to input buffers; None on a CPU.
        pool: of the memory of all captures; None on a CPU.
        results: memory that all of them write results to.
        dense_updates: when dense weights are updated.
        has_captured: True if a step was captured.
    """

    def __init__(self, program: StepProgram) -> None:
        self._program, self._is_alone = program, ranks.world_size() == 1
        self.optimizers = StepOptimizers(program.optimizers)
        self.assumptions = Assumptions(program.trained, self.optimizers, program.device)
        self.streams = StepStreams.on(
            program.device,
            of_several_ranks=program.group is not None,
            fetches_rows=program.fetches_rows,
        )
        self.copies = torch.cuda.Stream(program.device) if program.is_cuda else None
        self.pool = torch.cuda.graph_pool_handle() if program.is_cuda else None
        self.results = ResultMemory()
        self.has_captured = False
        captured = self.optimizers.captured
        self.dense_updates: DenseUpdates = LateUpdates(captured)
        # No weight may change before all gradients are there where their norm decides.
        if program.is_cuda and program.max_grad_norm is None:
            if self.streams.dense is None:
                self.dense_updates = EarlyUpdates(captured, program.device)
            else:
                self.dense_updates = UpdatesOfMeans(captured, self.streams.dense)

    @property
    def are_stale(self) -> bool:
        """True if the model or an optimizer changed in a way that steps do not follow."""
        # Of several ranks, all begin anew at once, or from a batch on that they agree on.
        is_outdated = self._is_alone and self._program.values.outdated is not None
        return is_outdated or self.assumptions.are_stale
