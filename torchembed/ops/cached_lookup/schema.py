"""Defines ``cached_lookup`` and picks its kernels."""

from torchembed.core.cached_lookups import CachedLookup, empty_lookup
from torchembed.core.dispatch import define_op
from torchembed.ops.cached_lookup.checks import check_cached_lookup, check_cached_lookup_contents
from torchembed.ops.cached_lookup.native import cached_lookup_by_parts
from torchembed.ops.cached_lookup.reference import cached_lookup_reference

cached_lookup_op = define_op(
    "cached_lookup(Tensor keys, Tensor tables, Tensor digests, Tensor slot_keys, Tensor geometry,"
    " Tensor lines, ScalarType line_dtype, int dim, bool reads, Tensor? copies,"
    " Tensor? copy_of_line, Tensor(a!)? touched, Tensor(b!)? epoch, Tensor(c!)? counters,"
    " Tensor(d!) progress) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=cached_lookup_reference,
    fake=lambda call: empty_lookup(call.keys, call.dim, reads=call.reads),
    triton="torchembed.triton_kernels.cached_lookup:launch_cached_lookup",
    native=cached_lookup_by_parts(),
    check=check_cached_lookup,
    check_contents=check_cached_lookup_contents,
    record=CachedLookup,
)
