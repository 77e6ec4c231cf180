"""``cached_lookup`` on the CPU, by the C++ library's kernels of its parts."""

from torchembed import _native
from torchembed.core.cached_lookups import CachedLookup, LookupResults
from torchembed.core.dispatch import Kernel
from torchembed.ops.cached_lookup.reference import results_of, touch_of
from torchembed.ops.hash_table.schema import find_slots_op, touch_slots_op


def _look_up(*arguments: object) -> LookupResults:
    call = CachedLookup(*arguments)  # pyright: ignore[reportArgumentType]
    slots = find_slots_op(*call[:5])
    touch = touch_of(call, slots)
    if touch is not None:
        touch_slots_op(*touch)
    return results_of(call, slots)


def cached_lookup_by_parts() -> Kernel | str:
    """The kernel, or why there is none."""
    part = _native.native_op("find_slots")
    return part if isinstance(part, str) else _look_up
