"""Modules that exchange with other ranks, which are not copied."""

from typing import Any, NoReturn


class BoundToRanks:
    """A module whose lookups exchange with its counterparts on the other ranks."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied, since it exchanges with the modules of other "
            "ranks; copy the model before shard_embeddings, and load this one's state_dict() into "
            "a copy that was sharded alike"
        )
