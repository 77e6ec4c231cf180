"""The names of a step's parts in profiles."""

import torch
from torch.profiler import ProfilerActivity, profile

from torchembed.step.streams import named_range


def test_a_profile_shows_the_name() -> None:
    with named_range("before"):
        torch.ones(1)
    with (
        profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace,
        named_range("inside"),
    ):
        torch.ones(1)
    with named_range("after"):
        torch.ones(1)
    names = {event.name for event in trace.events() or ()}
    assert "inside" in names
    assert not {"before", "after"} & names
