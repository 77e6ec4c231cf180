"""``EmbeddingBag`` and ``Embedding``, argument-compatible with ``torch.nn``'s."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchembed.core import checks
from torchembed.core.features import SparseFeatures
from torchembed.core.types import OnBadId, Pooling
from torchembed.modules.bad_ids import check_offsets
from torchembed.modules.slots import Slots
from torchembed.modules.table_lookup import look_up, look_up_pooled
from torchembed.modules.table_module import TableModule, as_on_bad_id
from torchembed.ops.eager_lookup import bags_of_positions, max_of_bags
from torchembed.ops.row_gradients import WeightGradient
from torchembed.tables import Normal, Table, TableSpec


class _SingleTable(TableModule):
    """One table under the parameter ``weight``."""

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        refused: dict[str, Any],
        sparse: bool,
        weight: Tensor | None,
        is_frozen: bool,
        device: Any,
        dtype: torch.dtype | None,
        on_bad_id: OnBadId | str,
        seed: int | None,
    ) -> None:
        super().__init__()
        for name, value in refused.items():
            if value is not None and value is not False:
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
            dtype = weight.dtype
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in (*checks.FLOAT_DTYPES, torch.float64):
            raise TypeError(f"dtype must be float32, float16, bfloat16 or float64, got {dtype}")
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
        spec = TableSpec(
            name="weight",
            num_rows=num_embeddings,
            dim=embedding_dim,
            dtype=dtype,
            initializer=Normal(),
            seed=seed,
        )
        self._table = Table(spec)
        self._table.holder = self
        self._hold([self._table], [None], device if weight is None else "meta")
        if weight is None:
            self.weight = self._table.parameter
            self._zero_padding()
        else:
            self.weight = nn.Parameter(weight)
        self.weight.requires_grad_(not is_frozen)
        self._table_set.form_groups()
        self._slots = Slots(self._table_set, [self._table], ["input"], as_on_bad_id(on_bad_id))
        self._weight_form = WeightGradient.SPARSE if sparse else WeightGradient.DENSE

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if param is not None and name == "weight":
            self._table.parameter = param

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        return ((self._table, self),)

    def held_weight(self) -> Tensor:
        """``weight``: the parameter, or what was put in its place."""
        return self.weight

    def _zero_padding(self) -> None:
        if self.padding_idx is not None and not self.weight.is_meta:
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

    def _rows(self, features: SparseFeatures) -> tuple[Tensor, Tensor | None]:
        """Rows of the table, -1 for the padding row, and where that was looked up."""
        (entry,) = self._slots.by_group()
        rows = self._slots.rows(entry, features)
        if self.padding_idx is None:
            return rows, None
        is_padding = rows == self.padding_idx
        return rows.masked_fill(is_padding, -1), is_padding

    def _vectors(self, rows: Tensor) -> Tensor:
        """``[L, D]``, in the dtype of the weight; zeros for rows of -1."""
        group = self._table.group
        return look_up(
            group, rows, sink=group.record, output_dtype=None, weight_form=self._weight_form
        )


class EmbeddingBag(_SingleTable):
    """``torch.nn.EmbeddingBag`` with fused optimizers.

    Arguments, shapes and the treatment of ``padding_idx`` are torch's; ``max_norm`` and
    ``scale_grad_by_freq`` are refused with an error. Initial rows are standard normal, as torch's,
    but functions of (seed, row).

    Kernels look up and pool float32, float16 and bfloat16 rows under ``"sum"`` and ``"mean"``.
    PyTorch's own operations find the maxima of ``"max"``, from a vector for each id, and do all of
    a float64 weight and of what is inside a transform of ``torch.func``. Fused optimizers train a
    maximum, too, where every id counts as looked up; float64 weights they refuse.

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
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f'mode must be "sum", "mean" or "max", got {mode!r}')
        if mode == "max" and sparse:
            raise ValueError('sparse must be False where mode="max", as for torch.nn.EmbeddingBag')
        refused = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq}
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            refused,
            sparse,
            _weight,
            False,
            device,
            dtype,
            on_bad_id,
            seed,
        )
        self.mode = mode
        self.include_last_offset = include_last_offset

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, **settings: Any
    ) -> "EmbeddingBag":
        """A module with the weight ``embeddings [rows, D]``; frozen unless ``freeze`` is False."""
        checks.check_dim("embeddings", embeddings, 2)
        num_rows, dim = embeddings.shape
        module = cls(num_rows, dim, _weight=embeddings, **settings)
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
        rows, is_padding = self._rows(features)
        if self.mode == "max":
            return self._maxima(features, rows)
        # As torch's, the mean does not count ids of the padding row; it is divided here then.
        divides = self.mode == "mean" and is_padding is not None
        dtype, group = self.weight.dtype, self._table.group
        pooled = look_up_pooled(
            group,
            rows,
            offsets=features.offsets,
            hotness=features.hotness,
            batch_size=features.batch_size,
            num_features=1,
            per_id_weights=features.weights,
            pooling=Pooling.MEAN if self.mode == "mean" and not divides else Pooling.SUM,
            sink=group.record,
            output_dtype=torch.promote_types(dtype, torch.float32) if divides else dtype,
            weight_form=self._weight_form,
        ).squeeze(1)
        if self.mode == "mean" and is_padding is not None:
            counted = torch.nn.functional.pad((~is_padding).cumsum(0), (1, 0))
            ends = features.offsets
            if ends is None:
                ends = torch.arange(features.batch_size + 1, device=rows.device) * input.shape[1]
            pooled = pooled / counted[ends.long()].diff().clamp_min(1).unsqueeze(1)
        return pooled.to(dtype)

    def _maxima(self, features: SparseFeatures, rows: Tensor) -> Tensor:
        """``[B, D]``; what is looked up as row -1, padding and bad ids, does not count."""
        vectors, batch_size = self._vectors(rows), features.batch_size
        bags = bags_of_positions(
            rows.numel(), features.offsets, features.hotness, batch_size, rows.device
        )
        return max_of_bags(vectors, rows >= 0, bags, batch_size)

    def _bags(
        self, ids: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> SparseFeatures:
        checks.check_dtype("input", ids, checks.ID_DTYPES, "call .long()")
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise ValueError(f'per_sample_weights needs mode="sum", got mode={self.mode!r}')
            if per_sample_weights.shape != ids.shape:
                raise ValueError(
                    f"per_sample_weights must have the shape of input, {tuple(ids.shape)}, "
                    f"got {tuple(per_sample_weights.shape)}"
                )
            per_sample_weights = per_sample_weights.reshape(-1)
        if ids.dim() == 2:
            if offsets is not None:
                raise ValueError("offsets must be None where input is two-dimensional")
            return SparseFeatures(
                keys=("input",),
                values=ids.reshape(-1),
                batch_size=ids.shape[0],
                hotness=(ids.shape[1],),
                weights=per_sample_weights,
            )
        if ids.dim() != 1:
            raise ValueError(f"input must have 1 or 2 dimensions, got shape {tuple(ids.shape)}")
        if offsets is None:
            raise ValueError("offsets must be given where input is one-dimensional, got None")
        checks.check_dim("offsets", offsets, 1)
        if not self.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_full((1,), ids.numel())])
        elif offsets.numel() == 0:
            raise ValueError("offsets must hold at least one element under include_last_offset")
        check_offsets(offsets, ids.numel())
        return SparseFeatures(
            keys=("input",),
            values=ids,
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
            _freeze,
            device,
            dtype,
            on_bad_id,
            seed,
        )

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, **settings: Any
    ) -> "Embedding":
        """A module with the weight ``embeddings [rows, D]``; frozen unless ``freeze`` is False."""
        checks.check_dim("embeddings", embeddings, 2)
        num_rows, dim = embeddings.shape
        return cls(num_rows, dim, _weight=embeddings, _freeze=freeze, **settings)

    def forward(self, input: Tensor) -> Tensor:
        """The rows of ``input [...]``, as ``[..., D]``, dtype of ``weight``."""
        checks.check_dtype("input", input, checks.ID_DTYPES, "call .long()")
        features = SparseFeatures(
            keys=("input",), values=input.reshape(-1), batch_size=input.numel(), hotness=(1,)
        )
        rows, is_padding = self._rows(features)
        vectors = self._vectors(rows)
        if is_padding is not None:
            # The padding row is looked up like others, but gets no gradient.
            padding = self.weight.detach()[self.padding_idx]
            vectors = torch.where(is_padding.unsqueeze(1), padding, vectors)
        return vectors.view(*input.shape, self.embedding_dim)
