"""The exchange of ids and vectors over several nodes, in two levels: between nodes, within them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.core.piece_order import in_order
from torchembed.sharding.transport.collectives import exchange
from torchembed.sharding.transport.rank_exchange import Announced, RankExchange, Sizes
from torchembed.sharding.transport.two_level_mean import NodeGroups


class TwoLevelExchange(RankExchange):
    """Ranks send to those of their place in other nodes, and to those of their own node.

    Ids, and later gradients, go from place j of their samples' node to place j of the node that has
    the rows, which passes them on within the node. Vectors go the same way back: within the node to
    the place of the samples' rank, which sends them to that rank's node. Of two nodes A and B with
    two ranks each, where A0 has rows that all samples need, ids go

        B0 -> A0
        B1 -> A1 -> A0
        A1 -> A0

    So a rank exchanges with those of its node and with one of each other node, and not with all.
    What goes to and from a rank with many rows is spread over the links of its node. Each level
    needs a copy of what is sent, in another order.

    Args:
        group: of all ranks, node by node; carries CPU tensors too.
        nodes: for all exchanges but those of ``ahead``; carry CPU tensors too.
        ahead: on the CPU, for a thread that exchanges sizes ahead.
    """

    def __init__(self, group: dist.ProcessGroup, nodes: NodeGroups, ahead: NodeGroups) -> None:
        super().__init__(group)
        self._nodes, self._ahead = nodes, ahead
        self._num_nodes, self._per_node = nodes.between.size(), nodes.within.size()
        self._node, self._place = divmod(self.rank, self._per_node)

    def to_all(self, of_samples: Sequence[int]) -> Sizes:
        of_place = of_samples[self._place :: self._per_node]
        relayed = [[size] * self._per_node for size in of_place]
        return super().to_all(of_samples)._replace(relayed=relayed)

    def scaled(self, sizes: Sizes, of_rows: Sequence[int]) -> Sizes:
        assert sizes.relayed is not None
        first = self._node * self._per_node
        of_node = of_rows[first : first + self._per_node]
        relayed = [
            [count * size for count, size in zip(counts, of_node, strict=True)]
            for counts in sizes.relayed
        ]
        return super().scaled(sizes, of_rows)._replace(relayed=relayed)

    def announce(self, numbers: Tensor, *, ahead: bool) -> Announced:
        nodes = self._ahead if ahead else self._nodes
        relayed = torch.empty_like(numbers)
        dist.all_to_all_single(relayed, numbers, group=nodes.between)
        relayed = relayed.view(self._num_nodes, self._per_node, numbers.shape[1])
        by_place = relayed.transpose(0, 1).contiguous()
        received = torch.empty_like(by_place)
        dist.all_to_all_single(received, by_place, group=nodes.within)
        return Announced(received.transpose(0, 1).flatten(0, 1).tolist(), relayed.tolist())

    def out(self, tensor: Tensor, sizes: Sizes, *, in_backward: bool = False) -> Tensor:
        levels = self._levels(sizes)
        relayed = exchange(
            tensor,
            levels.sent_to_nodes,
            levels.relayed_of_nodes,
            self._nodes.between,
            in_backward=in_backward,
        )
        arrived = exchange(
            self._places_first(relayed, levels.relayed),
            levels.relayed_of_places,
            levels.received_from_places,
            self._nodes.within,
            in_backward=in_backward,
        )
        return self._nodes_first(arrived, levels.received)

    def back(self, tensor: Tensor, sizes: Sizes, *, in_backward: bool = False) -> Tensor:
        levels = self._levels(sizes)
        relayed = exchange(
            self._places_first(tensor, levels.received),
            levels.received_from_places,
            levels.relayed_of_places,
            self._nodes.within,
            in_backward=in_backward,
        )
        return exchange(
            self._nodes_first(relayed, levels.relayed),
            levels.relayed_of_nodes,
            levels.sent_to_nodes,
            self._nodes.between,
            in_backward=in_backward,
        )

    def _levels(self, sizes: Sizes) -> "_Levels":
        per_node = self._per_node
        assert sizes.relayed is not None
        starts = range(0, self._num_nodes * per_node, per_node)
        received = [sizes.received[start : start + per_node] for start in starts]
        return _Levels(
            sent_to_nodes=[sum(sizes.sent[start : start + per_node]) for start in starts],
            relayed=sizes.relayed,
            relayed_of_nodes=[sum(of_node) for of_node in sizes.relayed],
            relayed_of_places=[sum(to_place) for to_place in zip(*sizes.relayed, strict=True)],
            received=received,
            received_from_places=[sum(from_place) for from_place in zip(*received, strict=True)],
        )

    def _places_first(self, tensor: Tensor, pieces: list[list[int]]) -> Tensor:
        """Pieces of ``tensor``, with sizes by node and place, in the order of places and nodes."""
        num_nodes, per_node = self._num_nodes, self._per_node
        order = [node * per_node + place for place in range(per_node) for node in range(num_nodes)]
        return in_order(tensor, [size for of_node in pieces for size in of_node], order)

    def _nodes_first(self, tensor: Tensor, pieces: list[list[int]]) -> Tensor:
        """The inverse of :meth:`_places_first`."""
        num_nodes, per_node = self._num_nodes, self._per_node
        order = [place * num_nodes + node for node in range(num_nodes) for place in range(per_node)]
        of_places = [size for of_place in zip(*pieces, strict=True) for size in of_place]
        return in_order(tensor, of_places, order)


class _Levels(NamedTuple):
    """Sizes of an exchange in two levels, as this rank sees it."""

    sent_to_nodes: list[int]
    relayed: list[list[int]]
    """By the sender's node and the receiver's place."""
    relayed_of_nodes: list[int]
    relayed_of_places: list[int]
    received: list[list[int]]
    """By the sender's node and place."""
    received_from_places: list[int]
