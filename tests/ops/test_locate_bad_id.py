"""``locate_bad_id`` against Python integers."""

import pytest
import torch

from torchembed.ops.linearize_ids import locate_bad_id

NOWHERE = -9


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_features", [1, 3, 2000])
@pytest.mark.parametrize("stride", [1, 2])
def test_position_value_feature_and_its_first_id(
    stride: int, num_features: int, dtype: torch.dtype, device: torch.device
) -> None:
    num_ids = 2 * num_features + 1  # the last one is of no feature
    values = torch.arange(num_ids, dtype=dtype, device=device) * 5
    bounds = torch.arange(0, 2 * num_features + 1, 2, dtype=dtype, device=device)
    spread = bounds.repeat_interleave(stride)[::stride]
    for position in {0, 1, 2 * num_features - 1, num_ids // 2 - 1}:
        first_bad = torch.tensor([position], device=device)
        location = torch.full((4,), NOWHERE, device=device)
        locate_bad_id(values, first_bad, spread, location)
        feature = position // 2
        assert location.tolist() == [position, 5 * position, feature, 2 * feature]
        location = torch.full((2,), NOWHERE, device=device)
        locate_bad_id(values, first_bad, None, location)
        assert location.tolist() == [position, 5 * position]


@pytest.mark.parametrize("has_bounds", [True, False])
def test_no_bad_id(has_bounds: bool, device: torch.device) -> None:
    values = torch.tensor([3, 4], device=device)
    bounds = torch.tensor([0, 2], device=device) if has_bounds else None
    location = torch.full((4 if has_bounds else 2,), NOWHERE, device=device)
    locate_bad_id(values, torch.tensor([2], device=device), bounds, location)
    assert location[0] == 2


def test_empty_features(device: torch.device) -> None:
    values, bounds = torch.tensor([3, 4], device=device), torch.tensor([0, 0, 1, 1, 2])
    location = torch.zeros(4, dtype=torch.int64, device=device)
    locate_bad_id(values, torch.tensor([1], device=device), bounds.to(device), location)
    assert location.tolist() == [1, 4, 3, 1]


@pytest.mark.gpu
def test_writes_to_the_memory_of_the_host(device: torch.device) -> None:
    values, first_bad = torch.tensor([3, 4], device=device), torch.tensor([1], device=device)
    for bounds in (None, torch.tensor([0, 2], device=device)):
        location = torch.zeros(2 if bounds is None else 4, dtype=torch.int64, pin_memory=True)
        locate_bad_id(values, first_bad, bounds, location)
        torch.cuda.synchronize()
        assert location.tolist() == [1, 4, 0, 0][: location.numel()]


@pytest.mark.gpu
def test_refuses_other_memory_of_the_host(device: torch.device) -> None:
    values, first_bad = torch.tensor([3, 4], device=device), torch.tensor([1], device=device)
    with pytest.raises(ValueError, match="location must be on the device of values, cuda"):
        locate_bad_id(values, first_bad, None, torch.zeros(2, dtype=torch.int64))
