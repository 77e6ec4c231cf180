"""Which lines of the host have copies on the device."""

import torch
from torch import Tensor

from torchembed.serving.levels.line_memory import HostLines

NUM_LINES, NUM_COPIES = 50, 8


def host_lines(device: torch.device, num_copies: int = NUM_COPIES) -> HostLines:
    """Lines of four bytes, which hold their numbers."""
    lines = HostLines(NUM_LINES, 4, num_copies, device)
    numbers = torch.arange(NUM_LINES, dtype=torch.int32, device=device)
    lines.write(numbers.long(), numbers[:, None].view(torch.uint8))
    return lines


def use(lines: HostLines, uses: dict[int, int]) -> None:
    """Note a lookup of each slot as often as ``uses`` says, and of no id between them."""
    slots = [slot for slot, count in uses.items() for slot in [slot] * count]
    lines.keep(torch.tensor([*slots, -1], device=lines.copies.device))


def copied(lines: HostLines) -> set[int]:
    """The lines that have a copy, each of which is equal to its line."""
    assert lines.line_copies is not None
    copies, copy_of_line = lines.line_copies
    found = (copy_of_line >= 0).nonzero().flatten()
    held: Tensor = copies[copy_of_line[found].long()].contiguous().view(torch.int32)
    assert held.flatten().tolist() == found.tolist()
    return set(found.tolist())


def test_all_lines_that_are_used_have_copies_while_there_is_room(device: torch.device) -> None:
    lines = host_lines(device)
    use(lines, {})
    assert copied(lines) == set()
    use(lines, {5: 1, 7: 3})
    use(lines, {7: 1, 9: 1})
    assert copied(lines) == {5, 7, 9}
    use(lines, dict.fromkeys(range(10, 15), 1))
    assert copied(lines) == {5, 7, 9, *range(10, 15)}


def test_lines_that_are_used_most_have_copies(device: torch.device) -> None:
    lines = host_lines(device)
    use(lines, {slot: 1 + slot for slot in range(20)})
    assert copied(lines) == set(range(12, 20))
    use(lines, {30: 1, 31: 15, 32: 40})
    assert copied(lines) == {*range(14, 20), 31, 32}
    use(lines, {30: 14})
    assert copied(lines) == {*range(14, 20), 31, 32}
    use(lines, {30: 1})
    # In place of line 14 or 31, which were used as often.
    assert {*range(15, 20), 30, 32} < copied(lines)


def test_a_line_that_is_used_as_often_as_others_takes_no_place(device: torch.device) -> None:
    lines = host_lines(device)
    use(lines, dict.fromkeys(range(NUM_COPIES), 2))
    for slot in range(20, 30):
        use(lines, {slot: 2})
    assert copied(lines) == set(range(NUM_COPIES))
    use(lines, {25: 1})
    assert 25 in copied(lines) and len(copied(lines)) == NUM_COPIES


def test_of_lines_that_are_used_as_often_as_many_as_there_is_room_for_have_copies(
    device: torch.device,
) -> None:
    lines = host_lines(device)
    use(lines, {40: 1})
    use(lines, dict.fromkeys(range(20), 2))
    held = copied(lines)
    assert len(held) == NUM_COPIES and held < set(range(20))
    use(lines, dict.fromkeys(range(20), 2))
    assert copied(lines) == held
    use(lines, dict.fromkeys(range(20, 40), 5))
    assert len(copied(lines)) == NUM_COPIES and copied(lines) < set(range(20, 40))


def test_lines_that_become_frequent_have_copies_soon(device: torch.device) -> None:
    lines = host_lines(device)
    before, after = range(NUM_COPIES), range(20, 20 + NUM_COPIES)
    for _ in range(100):
        use(lines, dict.fromkeys(before, 10))
    for _ in range(10):
        use(lines, dict.fromkeys(after, 10))
    assert copied(lines) == set(after)


def test_counts_of_uses_have_an_end(device: torch.device) -> None:
    lines = host_lines(device, num_copies=1)
    use(lines, {3: 70_000})
    use(lines, {3: 70_000, 4: 1})
    assert copied(lines) == {3}
    for _ in range(10):  # after each of which uses count half
        use(lines, {4: 100})
    assert copied(lines) == {4}


def test_copies_are_equal_to_lines_that_are_written(device: torch.device) -> None:
    lines = host_lines(device)
    use(lines, dict.fromkeys(range(NUM_COPIES), 2))
    numbers = torch.arange(NUM_LINES, dtype=torch.int32, device=device)[:, None]
    expected = numbers.clone()

    def write(*slots: int) -> None:
        """Write to ``slots`` and to none between them."""
        places = torch.tensor([slots[0], -1, *slots[1:]], device=device)
        values = 100 + expected[places]
        expected[places[places >= 0]] = values[places >= 0]
        lines.write(places, values.view(torch.uint8))

    def check() -> None:
        every = numbers.flatten().long()
        assert torch.equal(lines.read(every).view(torch.int32), expected)
        assert lines.line_copies is not None
        copies, copy_of_line = lines.line_copies
        copied = copy_of_line >= 0
        found = copies[copy_of_line[copied].long()].view(torch.int32)
        assert int(copied.sum()) == NUM_COPIES and torch.equal(found, expected[copied])

    write(0, 3, 30)
    check()
    use(lines, {3: 1, 30: 9, 31: 9})
    check()
    write(30, 31, 3, 32)
    check()
