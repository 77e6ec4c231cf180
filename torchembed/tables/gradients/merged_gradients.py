"""Gradients of several lookups as one, so that one pass finds their runs and updates their rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.stand_ins import KeptTensors
from torchembed.ops.rowwise_update import RowGradients
from torchembed.tables.gradients.pending_gradients import RecordedGradients

_NUM_KEPT = 4


class GradientMerge:
    """Puts gradients of several groups' rows one after the other, as rows of one group.

    Args:
        rows_dtype: of the rows of the one group, int32 or int64.
    """

    def __init__(self, rows_dtype: torch.dtype) -> None:
        self._rows_dtype = rows_dtype
        self._shifts: KeptTensors[tuple[torch.device, tuple[tuple[int, int], ...]], Tensor]
        self._shifts = KeptTensors(_NUM_KEPT)

    def __call__(self, entries: Sequence[tuple[int, RecordedGradients]]) -> RecordedGradients:
        """The gradients of ``entries``, one or more, in their order; each is of rows that count
        from the number before it. Rows of -1 stay that. Waits, on the current stream, for all."""
        for _, entry in entries:
            entry.wait()
        gradients = [entry.gradients for _, entry in entries]
        firsts = [first for first, _ in entries]
        numbers = [entry.rows.numel() for _, entry in entries]
        rows = torch.cat([entry.rows.to(self._rows_dtype) for _, entry in entries])
        if any(firsts):
            rows = torch.where(rows < 0, rows, rows + self._repeated(firsts, numbers, rows.device))
        gradient_rows = scales = None
        if any(of_entry.gradient_rows is not None for of_entry in gradients):
            # Of each entry they count from its own first gradient.
            sizes = [of_entry.grad.shape[0] for of_entry in gradients]
            starts = [sum(sizes[:number]) for number in range(len(sizes))]
            given = [_numbers(of_entry, n) for of_entry, n in zip(gradients, numbers, strict=True)]
            gradient_rows = torch.cat(given) + self._repeated(starts, numbers, rows.device)
        if any(of_entry.scales is not None for of_entry in gradients):
            scales = torch.cat(
                [
                    torch.ones(n, device=rows.device) if given is None else given
                    for (_, _, given), n in zip(gradients, numbers, strict=True)
                ]
            )
        grads = torch.cat([of_entry.grad for of_entry in gradients])
        return RecordedGradients(rows, RowGradients(grads, gradient_rows, scales))

    def _repeated(
        self, values: Sequence[int], counts: Sequence[int], device: torch.device
    ) -> Tensor:
        """Each of ``values`` as often as ``counts`` says, in the dtype of rows; kept for the next
        step, but for one made in a capture, whose memory is the graph's."""
        form = device, tuple(zip(values, counts, strict=True))
        is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if is_capturing and form not in self._shifts:
            return self._filled(form)
        return self._shifts.get(form, lambda: self._filled(form))

    def _filled(self, form: tuple[torch.device, tuple[tuple[int, int], ...]]) -> Tensor:
        device, pieces = form
        # Filled on the device: a copy from the host would wait for a GPU.
        return torch.cat(
            [torch.full((n,), v, dtype=self._rows_dtype, device=device) for v, n in pieces]
        )


def _numbers(gradients: RowGradients, count: int) -> Tensor:
    """For each of ``count`` rows the number of its gradient."""
    if gradients.gradient_rows is not None:
        return gradients.gradient_rows
    return torch.arange(count, dtype=torch.int32, device=gradients.grad.device)
