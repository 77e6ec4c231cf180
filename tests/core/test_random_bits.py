"""Counter-based random bits against integers, known answers and the bounds of chance."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import oracle
from torchembed.core.random_bits import mix64, name_key, random_bits, random_uniform, signed64

INT64 = st.integers(-(2**63), 2**63 - 1)


def test_known_answers_of_splitmix64(device: torch.device) -> None:
    # The generator's first outputs from the seeds 1234567 and 0, as published with other libraries.
    outputs = random_bits(torch.tensor(1234567, device=device), torch.arange(5, device=device))
    assert outputs.tolist() == [
        6457827717110365317,
        3203168211198807973,
        signed64(9817491932198370423),
        4593380528125082431,
        signed64(16408922859458223821),
    ]
    first = random_bits(torch.tensor([0], device=device), torch.tensor([0], device=device))
    assert first.tolist() == [signed64(0xE220A8397B1DCDAF)]


@settings(max_examples=200, derandomize=True, database=None)
@given(INT64, INT64)
def test_equals_python_integers(key: int, counter: int) -> None:
    bits = random_bits(torch.tensor(key), torch.tensor(counter)).item()
    assert bits == signed64(oracle.random_bits(key, counter))


def test_mixing_is_a_bijection() -> None:
    values = torch.arange(-50_000, 50_000)
    assert mix64(values).unique().numel() == values.numel()
    assert mix64(torch.zeros(1, dtype=torch.int64)).item() == 0


def test_keys_and_counters_broadcast(device: torch.device) -> None:
    keys = torch.tensor([[3], [4]], device=device)
    counters = torch.arange(3, device=device)
    bits = random_bits(keys, counters)
    assert bits.shape == (2, 3) and bits.dtype == torch.int64
    assert bits[1, 2].item() == random_bits(keys[1, 0], counters[2]).item()


def test_uniform_takes_the_upper_24_bits(device: torch.device) -> None:
    key, counters = torch.tensor(-5, device=device), torch.arange(100, device=device)
    uniform = random_uniform(key, counters)
    assert uniform.dtype == torch.float32
    expected = [(oracle.random_bits(-5, counter) >> 40) / 2**24 for counter in range(100)]
    assert uniform.tolist() == expected


@pytest.mark.parametrize("along", ["counters", "keys"])
def test_uniform_is_uniform(along: str) -> None:
    num_draws = 200_000
    varying, fixed = torch.arange(num_draws), torch.tensor(77)
    pair = (fixed, varying) if along == "counters" else (varying, fixed)
    draws = random_uniform(*pair).double().sort().values
    assert draws[0] >= 0 and draws[-1] < 1
    # Dvoretzky, Kiefer, Wolfowitz: the empirical distribution is off by more once in 10**9 times.
    ranks = torch.arange(1, num_draws + 1, dtype=torch.float64) / num_draws
    distance = torch.maximum((ranks - draws).abs(), (ranks - 1 / num_draws - draws).abs()).max()
    assert distance < math.sqrt(math.log(2e9) / (2 * num_draws))


@pytest.mark.parametrize("shift", [1, 2, 64])
def test_neighbouring_draws_are_not_correlated(shift: int) -> None:
    num_draws = 200_000
    draws = random_uniform(torch.tensor(3), torch.arange(num_draws + shift)).double() - 0.5
    # Products of independent draws lie in [-1/4, 1/4]: Hoeffding again.
    mean = (draws[shift:] * draws[:-shift]).mean().abs()
    assert mean < 0.5 * math.sqrt(math.log(2e9) / (2 * num_draws))


def test_every_bit_is_fair() -> None:
    num_draws = 100_000
    bits = random_bits(torch.tensor(11), torch.arange(num_draws))
    bound = math.sqrt(math.log(2e9 * 64) / (2 * num_draws))
    for position in range(64):
        mean = ((bits >> position) & 1).double().mean().item()
        assert abs(mean - 0.5) < bound


def test_name_keys_are_the_same_in_every_release() -> None:
    # Checkpoints and resumed runs depend on these.
    assert name_key(0) == 4066689987807800415
    assert name_key(0, "user") == -2499408726214274758
    assert name_key(7, "user", "rows") == 8090712532040294674


def test_name_keys_tell_names_apart() -> None:
    keys = [
        name_key(0, "a", "bc"),
        name_key(0, "ab", "c"),
        name_key(0, "abc"),
        name_key(1, "abc"),
        name_key(0, "abc", ""),
        name_key(-1, "abc"),
    ]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1), (2**64, 0), (-1, -1)],
)
def test_signed64(value: int, expected: int) -> None:
    assert signed64(value) == expected
