"""Lines of vectors that ranks send each other, and their form in 8 bits an element."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.ops.row_codec import decode_rows, encode_rows


class SentLines(NamedTuple):
    """The form of the lines of vectors that one rank sends another one, one after the other."""

    num_lines: int
    widths: tuple[int, ...]
    """Elements of each of a line's vectors."""

    @property
    def num_elements(self) -> int:
        """Elements of all vectors."""
        return self.num_lines * sum(self.widths)

    @property
    def num_codes(self) -> int:
        """Bytes of all vectors in 8 bits an element, with a scale for each vector."""
        return self.num_elements + self.num_lines * len(self.widths)


def encoded(elements: Tensor, sent: Sequence[SentLines]) -> Tensor:
    """The vectors ``elements [sum of num_elements]``, each by
    :func:`~torchembed.ops.row_codec.encode_rows`; uint8 ``[sum of num_codes]``."""
    return _by_width(elements, sent, encode_rows, 0, 1)


def decoded(codes: Tensor, sent: Sequence[SentLines], dtype: torch.dtype) -> Tensor:
    """The elements, in ``dtype``, of what :func:`encoded` gives."""
    return _by_width(codes, sent, lambda rows: decode_rows(rows, dtype), 1, 0)


def _by_width(
    flat: Tensor,
    sent: Sequence[SentLines],
    convert: Callable[[Tensor], Tensor],
    more_before: int,
    more_after: int,
) -> Tensor:
    """``convert`` all vectors, which have ``more_before`` elements than their width before it and
    ``more_after`` after it."""
    sent = [lines for lines in sent if lines.num_elements]
    different = {width for lines in sent for width in lines.widths}
    if len(different) <= 1:
        # The usual case, in one call.
        width = next(iter(different), 1)
        return convert(flat.view(-1, width + more_before)).flatten()
    sizes = [
        lines.num_elements + more_before * lines.num_lines * len(lines.widths) for lines in sent
    ]
    parts = []
    for (num_lines, widths), part in zip(sent, flat.split(sizes), strict=True):
        runs = [(width, len(list(run))) for width, run in itertools.groupby(widths)]
        columns = [count * (width + more_before) for width, count in runs]
        of_runs = part.view(num_lines, sum(columns)).split(columns, dim=1)
        converted = [
            convert(of_run.reshape(-1, width + more_before)).view(
                num_lines, count * (width + more_after)
            )
            for of_run, (width, count) in zip(of_runs, runs, strict=True)
        ]
        parts.append(torch.cat(converted, dim=1).flatten())
    return torch.cat(parts)
