"""``EmbeddingBag`` and ``Embedding``, argument-compatible with ``torch.nn``'s."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchembed.core import checks
from torchembed.core.features import SparseFeatures
from torchembed.core.types import OnBadId, Pooling
from torchembed.modules.slots import Slots
from torchembed.modules.table_module import TableModule, as_on_bad_id
from torchembed.ops.pooled_lookup import pooled_lookup
from torchembed.ops.row_gradients import WeightGradient
from torchembed.ops.sequence_lookup import sequence_lookup
from torchembed.tables import Normal, Table, TableSpec, group_weight


class _SingleTable(TableModule):
    """One table under the parameter ``weight``."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        refused: dict[str, Any],
        sparse: bool,
        weight: Tensor | None,
        device: Any,
        dtype: torch.dtype | None,
        on_bad_id: OnBadId | str,
        seed: int | None,
    ) -> None:
        super().__init__()
        for name, value in refused.items():
            if value:
                raise ValueError(
                    f"{name}={value!r} is not supported; use torch.nn.{type(self).__name__} for it"
                )
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"padding_idx must be in [-{num_embeddings}, {num_embeddings}), got {padding_idx}"
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.sparse = sparse
        if weight is not None:
            checks.check_dim("_weight", weight, 2)
            if tuple(weight.shape) != (num_embeddings, embedding_dim):
                raise ValueError(
                    f"_weight must be {(num_embeddings, embedding_dim)}, got {tuple(weight.shape)}"
                )
            device, dtype = weight.device, weight.dtype
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64))
        spec = TableSpec(
            name="weight",
            num_rows=num_embeddings,
            dim=embedding_dim,
            dtype=torch.get_default_dtype() if dtype is None else dtype,
            initializer=Normal(),
            seed=seed,
        )
        self._table = Table(spec)
        self._hold([self._table], [None], device)
        self.register_parameter("weight", self._table.parameter)
        self._slots = Slots(self._table_set, [self._table], ["input"], as_on_bad_id(on_bad_id))
        if weight is not None:
            self._table.parameter.data.copy_(weight)
        elif not self.weight.is_meta:
            self._zero_padding()
        self._weight_form = WeightGradient.SPARSE if sparse else WeightGradient.DENSE

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        return ((self._table, self),)

    def _zero_padding(self) -> None:
        if self.padding_idx is not None:
            self.weight.data[self.padding_idx].zero_()

    def reset_parameters(self) -> None:
        """Give every row its initial value again: standard normal, zeros for the padding row."""
        super().reset_parameters()
        self._zero_padding()

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}"

    def check_ids(self) -> None:
        """Wait for the GPU and raise for a bad id of any batch so far; on the CPU nothing waits."""
        self._slots.bad_ids.check(wait=True)

    def _rows(self, features: SparseFeatures) -> Tensor:
        """Rows of the table, -1 for the padding row."""
        (entry,) = self._slots.by_group()
        rows = self._slots.rows(entry, features)
        return rows if self.padding_idx is None else rows.masked_fill(rows == self.padding_idx, -1)

    def _lookup_arguments(self) -> dict[str, Any]:
        group = self._table.group
        sink = None if group.rule is None else group.record
        return {"weight_form": self._weight_form, "sink": sink}


class EmbeddingBag(_SingleTable):
    """``torch.nn.EmbeddingBag`` with ``mode`` ``"sum"`` or ``"mean"``, and fused optimizers.

    Arguments, shapes and the treatment of ``padding_idx`` are torch's; ``max_norm``,
    ``scale_grad_by_freq`` and ``mode="max"`` are refused with an error. Initial rows are standard
    normal, as torch's, but functions of (seed, row).

    Args:
        on_bad_id: ``"raise"``, ``"clamp"`` or ``"zero"``, for ids outside the table.
        seed: of the initial rows; drawn from torch's default generator where None.
        others: as for ``torch.nn.EmbeddingBag``.

    Raises:
        IndexError: in ``forward``, for a bad id: at once on the CPU, at a later call on a GPU.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        on_bad_id: OnBadId | str = OnBadId.RAISE,
        seed: int | None = None,
    ) -> None:
        refused = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq}
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            refused,
            sparse,
            _weight,
            device,
            dtype,
            on_bad_id,
            seed,
        )
        if mode not in ("sum", "mean"):
            raise ValueError(
                f'mode must be "sum" or "mean", got {mode!r}; use torch.nn.EmbeddingBag for others'
            )
        self.mode = mode
        self.include_last_offset = include_last_offset

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, **settings: Any
    ) -> "EmbeddingBag":
        """A module with a copy of ``embeddings [rows, D]``; frozen unless ``freeze`` is False."""
        module = cls(*embeddings.shape, _weight=embeddings, **settings)
        module.weight.requires_grad_(not freeze)
        return module

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pool ``input``: ``[B, N]``, bags of N ids; or ``[L]`` with ``offsets [B]`` of the bags.

        Returns:
            ``[B, D]``, dtype of ``weight``.
        """
        features = self._bags(input, offsets, per_sample_weights)
        rows = self._rows(features)
        divide = self.mode == "mean" and self.padding_idx is not None
        pooled = pooled_lookup(
            group_weight(self._table.group),
            rows,
            offsets=features.offsets,
            hotness=features.hotness,
            batch_size=features.batch_size,
            per_id_weights=features.weights,
            pooling=Pooling.MEAN if self.mode == "mean" and not divide else Pooling.SUM,
            output_dtype=self.weight.dtype,
            **self._lookup_arguments(),
        ).squeeze(1)
        if divide:
            # As torch's, the mean does not count ids of the padding row.
            counted = torch.nn.functional.pad((rows >= 0).cumsum(0), (1, 0))
            ends = features.offsets
            if ends is None:
                ends = torch.arange(features.batch_size + 1, device=rows.device) * input.shape[1]
            counts = counted[ends.long()].diff()
            pooled = pooled / counts.clamp_min(1).unsqueeze(1).to(pooled.dtype)
        return pooled

    def _bags(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> SparseFeatures:
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise ValueError(f'per_sample_weights needs mode="sum", got mode={self.mode!r}')
            if per_sample_weights.shape != input.shape:
                raise ValueError(
                    f"per_sample_weights must have the shape of input, {tuple(input.shape)}, "
                    f"got {tuple(per_sample_weights.shape)}"
                )
            per_sample_weights = per_sample_weights.reshape(-1)
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError("offsets must be None where input is two-dimensional")
            return SparseFeatures(
                keys=("input",),
                values=input.reshape(-1),
                batch_size=input.shape[0],
                hotness=(input.shape[1],),
                weights=per_sample_weights,
            )
        checks.check_dim("input", input, 1)
        if offsets is None:
            raise ValueError("offsets must be given where input is one-dimensional, got None")
        checks.check_dim("offsets", offsets, 1)
        if not self.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_full((1,), input.numel())])
        elif offsets.numel() == 0:
            raise ValueError("offsets must hold at least one element under include_last_offset")
        return SparseFeatures(
            keys=("input",),
            values=input,
            batch_size=offsets.numel() - 1,
            offsets=offsets,
            weights=per_sample_weights,
        )


class Embedding(_SingleTable):
    """``torch.nn.Embedding`` with fused optimizers.

    Arguments and the treatment of ``padding_idx`` are torch's; ``max_norm`` and
    ``scale_grad_by_freq`` are refused with an error. Initial rows are standard normal, as torch's,
    but functions of (seed, row).

    Args:
        on_bad_id, seed: as for :class:`EmbeddingBag`.
        others: as for ``torch.nn.Embedding``.

    Raises:
        IndexError: in ``forward``, for a bad id: at once on the CPU, at a later call on a GPU.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        on_bad_id: OnBadId | str = OnBadId.RAISE,
        seed: int | None = None,
    ) -> None:
        refused = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq}
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            refused,
            sparse,
            _weight,
            device,
            dtype,
            on_bad_id,
            seed,
        )
        self.weight.requires_grad_(not _freeze)

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, **settings: Any
    ) -> "Embedding":
        """A module with a copy of ``embeddings [rows, D]``; frozen unless ``freeze`` is False."""
        return cls(*embeddings.shape, _weight=embeddings, _freeze=freeze, **settings)

    def forward(self, input: Tensor) -> Tensor:
        """The rows of ``input [...]``, as ``[..., D]``, dtype of ``weight``."""
        features = SparseFeatures(
            keys=("input",), values=input.reshape(-1), batch_size=input.numel(), hotness=(1,)
        )
        rows = self._rows(features)
        vectors = sequence_lookup(
            group_weight(self._table.group),
            rows,
            output_dtype=self.weight.dtype,
            **self._lookup_arguments(),
        )
        if self.padding_idx is not None:
            # The padding row is looked up like others, but gets no gradient.
            is_padding = (features.values == self.padding_idx).unsqueeze(1)
            vectors = torch.where(is_padding, self.weight.detach()[self.padding_idx], vectors)
        return vectors.view(*input.shape, self.embedding_dim)
