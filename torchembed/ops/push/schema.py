"""Defines the operations of exchanges by push and picks their kernels.

Peers' buffers and flags are in the schemas as tensors, since operations write them; kernels reach
them by ``addresses`` int64 ``[W]``, where those tensors begin.
"""

from torchembed.core.dispatch import define_op
from torchembed.ops.push import checks, reference

_TRITON = "torchembed.triton_kernels.push"
_COPIES = "Tensor copies, int max_rows, int max_columns, int vector"
_TO = "Tensor(a!)[] buffers, Tensor addresses, Tensor state"


def _fake(*arguments: object) -> None:
    return None


push_rectangles_op = define_op(
    f"push_rectangles(Tensor source, {_COPIES}, {_TO}, float? scale) -> ()",
    reference=reference.push_rectangles_reference,
    fake=_fake,
    triton=f"{_TRITON}:launch_push_rectangles",
    check=checks.check_push_rectangles,
)
collect_rectangles_op = define_op(
    f"collect_rectangles(Tensor buffer, Tensor state, int stride, {_COPIES}, int num_terms,"
    " Tensor(a!) out) -> ()",
    reference=reference.collect_rectangles_reference,
    fake=_fake,
    triton=f"{_TRITON}:launch_collect_rectangles",
    check=checks.check_collect_rectangles,
)
copy_rectangles_op = define_op(
    f"copy_rectangles(Tensor source, {_COPIES}, Tensor(a!) out) -> ()",
    reference=reference.copy_rectangles_reference,
    fake=_fake,
    triton=f"{_TRITON}:launch_copy_rectangles",
    check=checks.check_copy_rectangles,
)
push_mean_op = define_op(
    "push_mean(Tensor parts, Tensor parts_state, Tensor(a!)[] means, Tensor addresses,"
    " Tensor means_state, int share, int num_elements, int rank) -> ()",
    reference=reference.push_mean_reference,
    fake=_fake,
    triton=f"{_TRITON}:launch_push_mean",
    check=checks.check_push_mean,
)
push_barrier_op = define_op(
    "push_barrier(Tensor(a!)[] flags, Tensor addresses, Tensor(b!) state, Tensor(c!) failed,"
    " int rank, float limit_seconds) -> ()",
    reference=reference.push_barrier_reference,
    fake=_fake,
    triton=f"{_TRITON}:launch_push_barrier",
    check=checks.check_push_barrier,
)
push_pooled_lookup_op = define_op(
    "push_pooled_lookup(Tensor weight, Tensor rows, Tensor? offsets, int[] hotness,"
    f" Tensor? per_id_weights, int num_features, SymInt batch_size, {_COPIES}, {_TO}) -> ()",
    reference=reference.push_pooled_lookup_reference,
    fake=_fake,
    triton="torchembed.triton_kernels.pooled_lookup:launch_push_pooled_lookup",
    check=checks.check_push_pooled_lookup,
)
