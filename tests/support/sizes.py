"""Sizes of random cases."""

from typing import NamedTuple


class Sizes(NamedTuple):
    """How large random cases are: small where an interpreter runs the kernels."""

    batch_size: int
    num_parallel_ids: int
    """So many that CPU kernels divide them between three threads."""
    num_rows: int
    max_length: int
    dims: tuple[int, ...]
    num_examples: int
    """Examples that a property test draws."""
