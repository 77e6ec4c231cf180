"""The base of ``EmbeddingBag`` and ``Embedding``: one table, under the parameter ``weight``."""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from torchembed.core.features import SparseFeatures
from torchembed.core.types import OnBadId, Pooling
from torchembed.modules.calls_ahead import CallArguments, ModuleOfOneTable
from torchembed.modules.configs import check_seed, table_spec
from torchembed.modules.index_in_state_dict import IndexInStateDict
from torchembed.modules.lookup.bad_ids import deferred_id_checks
from torchembed.modules.lookup.forward_admission import admission_in_forward, admits_in_forward
from torchembed.modules.lookup.joined_lookup import JoinedSlot, LookupKind
from torchembed.modules.lookup.slots import Slots
from torchembed.modules.lookup.stateless_lookup import Lookup, find_bad_ids
from torchembed.modules.lookup.table_lookup import look_up, look_up_pooled
from torchembed.modules.table_arguments import check_arguments, checked_dtype
from torchembed.modules.table_module import as_on_bad_id
from torchembed.modules.traced.traced_lookup import traced_pooled, traced_vectors
from torchembed.modules.traced.traced_missing import traced_missing
from torchembed.modules.traced.traced_rows import traced_bad_ids, traced_rows
from torchembed.ops.row_gradients import WeightGradient
from torchembed.tables import (
    Dynamic,
    FetchedRows,
    Missing,
    MissingVectors,
    Normal,
    Storage,
    Table,
    TableGroup,
    TieredGroup,
    check_own_rows,
)

M = TypeVar("M", nn.EmbeddingBag, nn.Embedding)


class SingleTable(IndexInStateDict, ModuleOfOneTable):
    """One table under the parameter ``weight``, looked up by the feature ``input``."""

    weight: nn.Parameter

    def __init__(
        self,
        *,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        refused: dict[str, object],
        sparse: bool,
        weight: Tensor | None,
        is_frozen: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        on_bad_id: OnBadId | str,
        seed: int | None,
        dynamic: Dynamic | None,
        storage: Storage | None,
    ) -> None:
        """
        Args:
            refused: arguments of torch's module that are not supported, by name; an error for one
                that is set.
            weight: ``[num_embeddings, embedding_dim]``, the memory of the parameter; rows get their
                initial values where it is None.
            is_frozen: True for a weight that requires no gradient.
            others: as for the subclasses.
        """
        super().__init__()
        check_arguments(
            type(self).__name__,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            padding_idx=padding_idx,
            refused=refused,
            weight=weight,
            dynamic=dynamic,
        )
        self.dynamic, self.storage = dynamic, storage
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        if padding_idx is not None and dynamic is None:
            padding_idx %= num_embeddings
        self.padding_idx = padding_idx
        self.sparse = sparse
        dtype = checked_dtype(
            dtype if weight is None else weight.dtype,
            embedding_dim=embedding_dim,
            dynamic=dynamic,
            storage=storage,
        )
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
        check_seed(seed)
        spec = table_spec(
            dynamic,
            name="weight",
            num_rows=num_embeddings,
            dim=embedding_dim,
            dtype=dtype,
            initializer=Normal(),
            seed=seed,
            storage=storage,
            zero_row=padding_idx if dynamic is None else None,
        )
        self._table = Table(spec)
        self._table.holder, self._table.may_join = self, True
        self._hold([self._table], [None], device if weight is None else "meta")
        if weight is None:
            self.weight = self._table.parameter
        else:
            self.weight = nn.Parameter(weight)
            if storage is not None:
                self._table.cache_device = torch.empty(0, device=device or weight.device).device
        self.weight.requires_grad_(not is_frozen)
        self._table_set.form_groups()
        self._on_bad_id = as_on_bad_id(on_bad_id)
        self._slots = Slots(self._table_set, [self._table], ["input"], self._on_bad_id)
        self._weight_form = WeightGradient.SPARSE if sparse else WeightGradient.DENSE

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and name == "weight":
            check_own_rows(self._table, param)
        super().register_parameter(name, param)
        if param is not None and name == "weight":
            self._table.parameter = param

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        return ((self._table, self),)

    def held_weight(self) -> Tensor:
        """``weight``: the parameter, or what was put in its place."""
        return self.weight

    @property
    def _padding_row(self) -> int | None:
        """The row of ``padding_idx``; None where there is none, as in a dynamic table."""
        return self.padding_idx if self.dynamic is None else None

    def _padding_vector(self, row: int) -> Tensor:
        """The vector ``[D]`` of the padding ``row``, without a gradient."""
        if (
            self.storage is None
            or torch.compiler.is_compiling()
            or not self._table.holds_parameter()
        ):
            return self.weight.detach()[row]
        group = self._table.group
        assert isinstance(group, TieredGroup)
        return group.gathered_rows(torch.full((1,), row, device=group.device))[0]

    def reseed(self, seed: int) -> None:
        """Let initial rows from now on, and the rounding of rows, follow from ``seed``."""
        self._table.reseed(seed)

    def reset_parameters(self) -> None:
        """Give every row its initial value again: standard normal, zeros for the padding row."""
        super().reset_parameters()

    def _as_torchs(self, module: M) -> M:
        """A ``module`` of ``torch.nn``, put into this one's mode, and frozen if this one is."""
        module.weight.requires_grad_(self.weight.requires_grad)
        return module.train(self.training)

    def extra_repr(self) -> str:
        sizes = f"{self.num_embeddings}, {self.embedding_dim}"
        return sizes if self.padding_idx is None else f"{sizes}, padding_idx={self.padding_idx}"

    def check_ids(self) -> None:
        """Wait for the GPU and raise for a bad id of any batch so far; on the CPU nothing waits."""
        self._slots.bad_ids.check(wait=True)
        traced_bad_ids.check(wait=True)

    def _rows(self, features: SparseFeatures, *, is_trained: bool) -> tuple[Tensor, Tensor | None]:
        """Rows of the table, -1 for the padding row, and a mask of ids that are the padding row."""
        if self.dynamic is not None and self.padding_idx is not None:
            is_padding = self._is_padding(features.values)
            return self._rows_of(features, ~is_padding, is_trained=is_trained), is_padding
        rows = self._rows_of(features, None, is_trained=is_trained)
        if self.padding_idx is None:
            return rows, None
        is_padding = rows == self.padding_idx
        return rows.masked_fill(is_padding, -1), is_padding

    def _is_padding(self, ids: Tensor) -> Tensor:
        """True for those of the ``ids [L]`` of a dynamic table that are padding."""
        if self.padding_idx is None:
            return torch.zeros_like(ids, dtype=torch.bool)
        return ids == self.padding_idx

    def _rows_of(
        self, features: SparseFeatures, is_valid: Tensor | None, *, is_trained: bool
    ) -> Tensor:
        """Rows of the table, -1 for ids that have none."""
        if torch.compiler.is_compiling():
            if self.storage is not None:
                self._table_set.follow_parameters()
            return traced_rows(
                features,
                [self._table],
                features.keys,
                self._on_bad_id,
                is_trained=is_trained,
                is_valid=is_valid,
            )
        admission = None
        if is_trained and self._changes_on_admission and admits_in_forward(self):
            self._grow_in_forward()
            admission = admission_in_forward(None)
        return self._slots.rows(features, admission, is_valid)

    @property
    def _changes_on_admission(self) -> bool:
        return self.dynamic is not None or self.storage is not None

    def _fetched(self, rows: Tensor) -> FetchedRows | None:
        """The rows that a lookup of ``rows [L]`` of the table has brought to the device; None where
        none are to be, since no update may follow or they live there."""
        if self.storage is None or torch.compiler.is_compiling() or not admits_in_forward(self):
            return None
        return self._slots.fetch(rows, admission_in_forward(None))

    @property
    def updated_group(self) -> TableGroup:
        """The group that one update trains: that of the table, or of several modules' tables."""
        return self._table.group.joined or self._table.group

    def joined_slot(self, arguments: CallArguments) -> tuple[LookupKind, JoinedSlot] | None:
        raise NotImplementedError

    def current_kind(self, kind: LookupKind) -> LookupKind:
        return kind._replace(group=self.updated_group)

    def is_current(self, kind: LookupKind) -> bool:
        return self._joined_kind(kind.pooling, is_jagged=kind.is_jagged) == kind

    @property
    def is_on_several_ranks(self) -> bool:
        return self._table.gradient_reduction is not None

    @property
    def on_bad_id(self) -> OnBadId:
        """The treatment of ids outside the table."""
        return self._on_bad_id

    def _joined_kind(self, pooling: Pooling | None, *, is_jagged: bool) -> LookupKind | None:
        """The kind of joined lookup of a call; None where no fused optimizer updates the table by
        itself or together with others, all of which train, and for evaluation, which changes no
        table."""
        group = self.updated_group
        trains = all(t.parameter.requires_grad and t.holds_parameter() for t in group.tables)
        admits = self.training or not self._changes_on_admission
        if group.rule is None or not trains or not admits:
            return None
        return LookupKind(group, pooling, self._on_bad_id, is_jagged)

    def _result(self, features: SparseFeatures, *, is_trained: bool) -> Tensor:
        """The result of ``forward`` for ``features``; ``is_trained`` where it admits their rows."""
        raise NotImplementedError

    def _stateless(self, features: SparseFeatures) -> Lookup[Tensor]:
        """The vectors and the bad ids of a batch; changes nothing, and threads may call it at
        once."""
        with torch.no_grad(), deferred_id_checks():
            vectors = self._result(features, is_trained=False)
            return Lookup(vectors, find_bad_ids(features, [self._table.spec.num_ids]))

    def _missing(
        self, features: SparseFeatures, rows: Tensor, *are_no_ids: Tensor | None
    ) -> MissingVectors | None:
        """The vectors of ids of a dynamic table that have no row; None where they are zeros.

        Args:
            are_no_ids: bool ``[L]``, True for padding, spare ids and so on; or None.
        """
        if self._table.spec.missing is Missing.ZEROS:
            return None
        is_id = torch.ones_like(rows, dtype=torch.bool)
        for mask in are_no_ids:
            is_id = is_id if mask is None else is_id & ~mask
        if torch.compiler.is_compiling():
            return traced_missing(features, [self._table], rows, is_id)
        return self._slots.missing(features, rows, is_id)

    def _vectors(self, rows: Tensor, missing: MissingVectors | None) -> Tensor:
        """``[L, D]``, in the dtype of the weight; zeros for rows of -1 that are not ``missing``."""
        if torch.compiler.is_compiling():
            return traced_vectors([self._table], rows, None, self._weight_form, missing)
        group = self._table.group
        return look_up(
            group,
            rows,
            sink=group.record,
            output_dtype=None,
            weight_form=self._weight_form,
            missing=missing,
            fetched=self._fetched(rows),
        )

    def _pooled(
        self,
        features: SparseFeatures,
        rows: Tensor,
        missing: MissingVectors | None,
        pooling: Pooling,
        output_dtype: torch.dtype,
    ) -> Tensor:
        """The pooled vectors of the bags of ``features``, ``[B, D]``.

        Args:
            rows: ``[L]``, of its ids.
            missing: the vectors of ids without one.
        """
        if torch.compiler.is_compiling():
            pooled = traced_pooled(
                [self._table],
                features,
                rows,
                [1],
                pooling,
                output_dtype,
                self._weight_form,
                missing,
            )
            return pooled.squeeze(1)
        group = self._table.group
        return look_up_pooled(
            group,
            rows,
            offsets=features.offsets,
            hotness=features.hotness,
            batch_size=features.batch_size,
            num_features=1,
            per_id_weights=features.weights,
            pooling=pooling,
            sink=group.record,
            output_dtype=output_dtype,
            weight_form=self._weight_form,
            known_map=self._slots.gradient_map(features, pooling),
            missing=missing,
            fetched=self._fetched(rows),
        ).squeeze(1)
