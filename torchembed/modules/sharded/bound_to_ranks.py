"""Modules that exchange with other ranks, which are not copied."""

from typing import Any, NoReturn

from torch import nn

from torchembed.sharding.transport.table_ranks import TableRanks


class BoundToRanks:
    """A module whose lookups exchange with its counterparts on the other ranks."""

    _ranks: TableRanks

    @property
    def ranks(self) -> TableRanks:
        """The ranks that share its tables."""
        return self._ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied, since it exchanges with the modules of other "
            "ranks; copy the model before shard_embeddings, and load this one's state_dict() into "
            "a copy that was sharded alike"
        )

    def take_mode_and_hooks(self, source: nn.Module) -> None:
        """Be in training or evaluation as ``source`` is, which this module stands for, and call its
        hooks of forward and backward."""
        assert isinstance(self, nn.Module)
        self.train(source.training)
        for attribute in _OF_HOOKS:
            setattr(self, attribute, getattr(source, attribute))


_OF_HOOKS = [n for n in vars(nn.Module()) if "forward" in n or "backward" in n]
"""Attributes by which a module has hooks of its forward and backward."""
