"""``collate``, for a ``DataLoader`` whose samples have sparse features."""

from collections.abc import Sequence

from torch.utils.data._utils.collate import collate as collate_by_type
from torch.utils.data._utils.collate import default_collate_fn_map

from torchembed.core.features import SparseFeatures
from torchembed.core.trees import Tree


def collate(samples: Sequence[Tree]) -> Tree:
    """Collate ``samples`` to a batch: ``DataLoader(dataset, collate_fn=torchembed.data.collate)``.

    Does what ``torch.utils.data.default_collate`` does; besides, None in every sample, as where
    there are no dense features, stays None, and :class:`~torchembed.SparseFeatures` of one sample
    each, anywhere in a sample, become one of all samples::

        def __getitem__(self, index):
            bags = {"user": [self.users[index]], "genre": [self.genres[index]]}
            return Batch(self.dense[index], SparseFeatures.from_dict(bags), self.labels[index])

    Raises:
        ValueError: if there is no sample, if samples' features differ in their keys, or if some
            have weights.
        TypeError: for what ``default_collate`` does not take, and None in some samples alone.
    """
    if not samples:
        raise ValueError("samples must hold at least one sample, got none")
    kinds = {SparseFeatures: _concatenate, type(None): _none, **default_collate_fn_map}
    return collate_by_type(samples, collate_fn_map=kinds)


def _concatenate(samples: Sequence[SparseFeatures], **_: object) -> SparseFeatures:
    return SparseFeatures.concatenate(samples)


def _none(samples: Sequence[object], **_: object) -> None:
    if any(sample is not None for sample in samples):
        raise TypeError("samples must all have None in one place, or none of them")
