"""``EmbeddingBag`` and ``Embedding``, argument-compatible with ``torch.nn``'s."""

from typing import Any

import torch
from torch import Tensor, nn

from torchembed.core import checks
from torchembed.core.features import SparseFeatures, with_offsets
from torchembed.core.types import OnBadId, Pooling
from torchembed.modules.call_features import bags_as_feature, ids_as_feature, looked_up_ids
from torchembed.modules.calls_ahead import CallArguments
from torchembed.modules.configs import check_not_dynamic
from torchembed.modules.counted_tensor import CountedTensor, elements_of
from torchembed.modules.lookup.joined_lookup import JoinedSlot, LookupKind
from torchembed.modules.lookup.stateless_lookup import Lookup
from torchembed.modules.single_table import SingleTable
from torchembed.ops.eager_lookup import bags_of_positions, max_of_bags
from torchembed.tables import Dynamic, Storage


class EmbeddingBag(SingleTable):
    """Looks up and pools the rows of one table, as ``torch.nn.EmbeddingBag``, which it can replace.

    Arguments, shapes and the treatment of ``padding_idx`` are torch's, except that ``max_norm`` and
    ``scale_grad_by_freq`` raise an error. An empty bag gives zeros. Initial rows are standard
    normal and a function of (seed, row). Under a fused optimizer backward makes no ``weight.grad``
    of the table's size, but records the gradients of the rows that were looked up.

    Kernels compute sums and means of float32, float16 and bfloat16 rows. PyTorch's own operations
    compute ``mode="max"``, which takes memory for a vector of each id, float64 weights, and
    everything inside a transform of ``torch.func``. Fused optimizers refuse float64 weights.

    Args:
        on_bad_id: ``"raise"``, ``"clamp"`` or ``"zero"``, for ids outside ``[0, num_embeddings)``.
        seed: of the initial rows; drawn from torch's default generator if None.
        dynamic: makes each 64-bit integer an id, and ``num_embeddings`` the capacity.
            ``padding_idx`` is then an id, not a row number.
        storage: keeps the rows in host memory or on disk, behind a cache on ``device``; None keeps
            them on ``device``.
        others: as for ``torch.nn.EmbeddingBag``.

    Raises:
        ValueError, TypeError: for arguments that do not fit, in ``forward`` too.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        on_bad_id: OnBadId | str = OnBadId.RAISE,
        seed: int | None = None,
        dynamic: Dynamic | None = None,
        storage: Storage | None = None,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f'mode must be "sum", "mean" or "max", got {mode!r}')
        if mode == "max" and sparse:
            raise ValueError('sparse must be False where mode="max", as for torch.nn.EmbeddingBag')
        super().__init__(
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            padding_idx=padding_idx,
            refused={"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq},
            sparse=sparse,
            weight=_weight,
            is_frozen=False,
            device=device,
            dtype=dtype,
            on_bad_id=on_bad_id,
            seed=seed,
            dynamic=dynamic,
            storage=storage,
        )
        self.mode = mode
        self.include_last_offset = include_last_offset

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"

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

    def to_torch(self) -> nn.EmbeddingBag:
        """``torch.nn.EmbeddingBag`` with the same arguments, except ``on_bad_id``, and a copy of
        the weight.

        Raises:
            TypeError: for a dynamic table, and one on disk.
        """
        check_not_dynamic("this module", self.dynamic)
        self._table.check_whole("a module of torch")
        self._table.group.write_back()
        module = nn.EmbeddingBag(
            self.num_embeddings,
            self.embedding_dim,
            mode=self.mode,
            sparse=self.sparse,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
            _weight=self.weight.detach().clone(),
        )
        return self._as_torchs(module)

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Look up and pool the rows of ``input``.

        Args:
            input: ids ``[B, N]``, a bag of N ids for each sample; or ``[L]``, with ``offsets``.
                int32, int64, uint32 or uint64.
            offsets: ``[B]``, where each bag begins in ``input [L]``; ``[B + 1]`` with
                ``include_last_offset``. int32 or int64.
            per_sample_weights: floating, of the shape of ``input``: factors of the rows, for
                ``mode="sum"`` only.

        Returns:
            ``[B, D]``, dtype of ``weight``.
        """
        if isinstance(input, CountedTensor):
            return self._of_counted(input, offsets, per_sample_weights)
        answer = self._answered(CallArguments(input, offsets, per_sample_weights))
        if answer is not None and self._is_as_looked_up:
            return answer
        features = self._bags(input, offsets, per_sample_weights)
        if answer is not None:
            return self._of_answer(features, answer)
        return self._result(features, is_trained=self.training)

    @property
    def _is_as_looked_up(self) -> bool:
        """False where pooling leaves out padding in ways that kernels do not."""
        return self.mode == "sum" or (self.mode == "mean" and self.padding_idx is None)

    def _of_answer(self, features: SparseFeatures, answer: Tensor) -> Tensor:
        """The result of a call from what was looked up ahead: vectors of all ids, or sums."""
        ids = features.values
        if self.dynamic is not None:
            is_padding = self._is_padding(ids)
            if self.mode == "max":
                return self._maxima(features, answer, ~is_padding)
            return self._divided(features, answer, is_padding)
        ids = looked_up_ids(ids, self.num_embeddings, self.on_bad_id)
        is_padding = ids == (-1 if self.padding_idx is None else self.padding_idx)
        if self.mode == "max":
            return self._maxima(features, answer, (ids >= 0) & ~is_padding)
        return self._divided(features, answer, is_padding)

    def _of_counted(
        self, ids: CountedTensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> Tensor:
        """``forward`` of ids with spare ones behind them, which are looked up nowhere."""
        weights = elements_of(per_sample_weights)
        arguments = CallArguments(ids.elements, offsets, weights, ids.count)
        answer = self._answered(arguments) if self.dynamic is not None else None
        if answer is not None and self._is_as_looked_up:
            return answer
        features = bags_as_feature(arguments, self.mode, self.include_last_offset)
        if answer is not None:
            return self._of_answer(features, answer)
        return self._result(features, is_trained=self.training, count=ids.count)

    def lookup(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Lookup[Tensor]:
        """The vectors of ``forward``, and which ids were bad, without raising: for servers.

        Changes nothing, takes no part in autograd or in an optimizer's steps, and several threads
        may call it at once. Bad ids are looked up as the module treats them, under
        ``on_bad_id="raise"`` as under ``"zero"``.

        Raises:
            ValueError, TypeError: for an input that does not fit.
        """
        return self._stateless(self._bags(input, offsets, per_sample_weights))

    def joined_slot(self, arguments: CallArguments) -> tuple[LookupKind, JoinedSlot] | None:
        ids, offsets, *_ = arguments
        # Ids behind the last bag would come before the next call's.
        if offsets is not None and (self.include_last_offset or ids.dim() != 1):
            return None
        if offsets is None and ids.dim() != 2:
            return None
        if self.mode == "max":
            kind, num_bags = self._joined_kind(None, is_jagged=False), ids.numel()
        else:
            pooling = Pooling(self.mode) if self._is_as_looked_up else Pooling.SUM
            if not self._is_as_looked_up and self.weight.dtype is not torch.float32:
                return None  # its sums would be rounded before they are divided
            kind = self._joined_kind(pooling, is_jagged=offsets is not None)
            num_bags = len(ids if offsets is None else offsets)
        shape = num_bags, self.embedding_dim
        slot = JoinedSlot(self._table, ids.numel(), num_bags, shape, self.padding_idx)
        return None if kind is None else (kind, slot)

    def _result(
        self, features: SparseFeatures, *, is_trained: bool, count: Tensor | None = None
    ) -> Tensor:
        if torch.compiler.is_compiling():
            # The number of ids of a bag may be a variable of the program.
            features = with_offsets(features)
        rows, is_padding = self._rows(features, is_trained=is_trained)
        is_spare = None
        if count is not None:
            is_spare = torch.arange(rows.numel(), device=rows.device) >= count
            rows = rows.masked_fill(is_spare, -1)
        missing = self._missing(features, rows, is_padding, is_spare)
        if self.mode == "max":
            is_counted = rows >= 0 if self.dynamic is None else ~self._is_padding(features.values)
            return self._maxima(features, self._vectors(rows, missing), is_counted)
        # The mean does not count ids of the padding row, as in torch. The kernel would, so that
        # sums are looked up and divided here.
        divides = self.mode == "mean" and is_padding is not None
        dtype = self.weight.dtype
        pooled = self._pooled(
            features,
            rows,
            missing,
            Pooling.MEAN if self.mode == "mean" and not divides else Pooling.SUM,
            torch.promote_types(dtype, torch.float32) if divides else dtype,
        )
        if self.mode == "mean" and is_padding is not None:
            pooled = self._divided(features, pooled, is_padding)
        return pooled.to(dtype)

    def _divided(self, features: SparseFeatures, sums: Tensor, is_padding: Tensor) -> Tensor:
        """The means of the bags with ``sums [B, D]``, of ids that are no padding."""
        counted = torch.nn.functional.pad((~is_padding).cumsum(0), (1, 0))
        ends = features.offsets
        if ends is None:
            assert features.hotness is not None
            bags = torch.arange(features.batch_size + 1, device=sums.device)
            ends = bags * features.hotness[0]
        return sums / counted[ends.long()].diff().clamp_min(1).unsqueeze(1)

    def _maxima(self, features: SparseFeatures, vectors: Tensor, is_counted: Tensor) -> Tensor:
        """The maxima of the bags, ``[B, D]``, of those of ``vectors [L, D]`` that count: no padding
        and no bad ids."""
        batch_size, device = features.batch_size, vectors.device
        bags = bags_of_positions(
            vectors.shape[0], features.offsets, features.hotness, batch_size, device
        )
        return max_of_bags(vectors, is_counted, bags, batch_size)

    def _bags(
        self, ids: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> SparseFeatures:
        """The arguments of :meth:`forward`, checked, as one feature."""
        return bags_as_feature(
            CallArguments(ids, offsets, per_sample_weights), self.mode, self.include_last_offset
        )


class Embedding(SingleTable):
    """Looks up a row for each id in one table, as ``torch.nn.Embedding``, which it can replace.

    Arguments and the treatment of ``padding_idx`` are torch's, except that ``max_norm`` and
    ``scale_grad_by_freq`` raise an error. Initial rows are standard normal and a function of
    (seed, row). Under a fused optimizer backward makes no ``weight.grad`` of the table's size.

    Args:
        on_bad_id, seed, dynamic, storage: as for :class:`EmbeddingBag`.
        others: as for ``torch.nn.Embedding``.

    Raises:
        ValueError, TypeError: for arguments that do not fit, in ``forward`` too.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        on_bad_id: OnBadId | str = OnBadId.RAISE,
        seed: int | None = None,
        dynamic: Dynamic | None = None,
        storage: Storage | None = None,
    ) -> None:
        super().__init__(
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            padding_idx=padding_idx,
            refused={"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq},
            sparse=sparse,
            weight=_weight,
            is_frozen=_freeze,
            device=device,
            dtype=dtype,
            on_bad_id=on_bad_id,
            seed=seed,
            dynamic=dynamic,
            storage=storage,
        )

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, **settings: Any
    ) -> "Embedding":
        """A module with the weight ``embeddings [rows, D]``; frozen unless ``freeze`` is False."""
        checks.check_dim("embeddings", embeddings, 2)
        num_rows, dim = embeddings.shape
        return cls(num_rows, dim, _weight=embeddings, _freeze=freeze, **settings)

    def to_torch(self) -> nn.Embedding:
        """``torch.nn.Embedding`` with the same arguments, except ``on_bad_id``, and a copy of the
        weight.

        Raises:
            TypeError: for a dynamic table, and one on disk.
        """
        check_not_dynamic("this module", self.dynamic)
        self._table.check_whole("a module of torch")
        self._table.group.write_back()
        module = nn.Embedding(
            self.num_embeddings,
            self.embedding_dim,
            padding_idx=self.padding_idx,
            sparse=self.sparse,
            _weight=self.weight.detach().clone(),
        )
        return self._as_torchs(module)

    def forward(self, input: Tensor) -> Tensor:
        """Look up the rows of ``input``: ids ``[...]``, int32, int64, uint32 or uint64.

        Returns:
            ``[..., D]``, dtype of ``weight``.
        """
        answer = self._answered(CallArguments(input))
        if answer is not None:
            return answer
        vectors = self._result(ids_as_feature(input), is_trained=self.training)
        return vectors.view(*input.shape, self.embedding_dim)

    def lookup(self, input: Tensor) -> Lookup[Tensor]:
        """The vectors of ``forward``, and which ids were bad, without raising: for servers.

        Changes nothing, takes no part in autograd or in an optimizer's steps, and several threads
        may call it at once. Bad ids are looked up as the module treats them, under
        ``on_bad_id="raise"`` as under ``"zero"``.

        Raises:
            ValueError, TypeError: for an input that does not fit.
        """
        found = self._stateless(ids_as_feature(input))
        return found._replace(vectors=found.vectors.view(*input.shape, self.embedding_dim))

    def joined_slot(self, arguments: CallArguments) -> tuple[LookupKind, JoinedSlot] | None:
        ids = arguments.input
        kind, shape = self._joined_kind(None, is_jagged=False), (*ids.shape, self.embedding_dim)
        slot = JoinedSlot(self._table, ids.numel(), ids.numel(), shape, self.padding_idx)
        return None if kind is None else (kind, slot)

    def _result(self, features: SparseFeatures, *, is_trained: bool) -> Tensor:
        rows, is_padding = self._rows(features, is_trained=is_trained)
        vectors = self._vectors(rows, self._missing(features, rows, is_padding))
        if is_padding is not None:
            # Rows of -1 give zeros. The padding row's own values may be others, but get no
            # gradient.
            if self._padding_row is None:
                return vectors
            padding = self._padding_vector(self._padding_row)
            vectors = torch.where(is_padding.unsqueeze(1), padding, vectors)
        return vectors
