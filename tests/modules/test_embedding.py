"""``EmbeddingBag`` and ``Embedding`` beside ``torch.nn``'s, with the same weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.bag_forms import DIM, FORMS, NUM_ROWS, ids
from tests.support.tolerance import assert_follows, assert_same_bits
from tests.support.values import normal

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class BagCase:
    """Both modules on one input: outputs, and gradients of the weight and of the ids' weights."""

    form: str
    dtype: torch.dtype = torch.float32
    id_dtype: torch.dtype = torch.int64
    is_weighted: bool = False
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(
        self, kind: type[nn.Module], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        input_ids, offsets, include_last_offset = FORMS[self.form]
        module = kind(
            NUM_ROWS,
            DIM,
            include_last_offset=include_last_offset,
            device=device,
            dtype=dtype,
            **self.settings,
        )
        weight = normal(NUM_ROWS, DIM, seed=2, dtype=self.dtype)
        module.load_state_dict({"weight": weight.to(dtype)})
        per_sample_weights = None
        if self.is_weighted:
            values = normal(*input_ids.shape, seed=3, dtype=self.dtype).to(device, dtype)
            per_sample_weights = values.requires_grad_()
        output = module(
            input_ids.to(device, self.id_dtype),
            None if offsets is None else offsets.to(device, self.id_dtype),
            per_sample_weights,
        )
        output.backward(normal(*output.shape, seed=4, dtype=self.dtype).to(device, dtype))
        assert module.weight.grad is not None
        weights_grad = None if per_sample_weights is None else per_sample_weights.grad
        return output, module.weight.grad, weights_grad

    def torch_formula(self, result: int) -> Callable[[torch.dtype], Tensor]:
        def formula(dtype: torch.dtype) -> Tensor:
            found = self.run(nn.EmbeddingBag, dtype, torch.device("cpu"))[result]
            return found.to_dense() if found.is_sparse else found

        return formula

    def check(self, device: torch.device) -> None:
        results = self.run(torchembed.EmbeddingBag, self.dtype, device)
        for number, result in enumerate(results):
            if result is not None:
                assert result.dtype == self.dtype
                assert result.is_sparse == (number == 1 and self.settings.get("sparse", False))
                dense = result.to_dense() if result.is_sparse else result
                assert_follows(dense, self.torch_formula(number))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bag_is_as_torchs(mode: str, form: str, dtype: torch.dtype, device: torch.device) -> None:
    for sparse in (False, True):
        for padding_idx in (None, 3, -NUM_ROWS):
            settings = {"mode": mode, "sparse": sparse, "padding_idx": padding_idx}
            BagCase(form, dtype, settings=settings).check(device)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", FORMS)
def test_a_weighted_bag_is_as_torchs(form: str, dtype: torch.dtype, device: torch.device) -> None:
    for padding_idx in (None, 3):
        settings = {"mode": "sum", "padding_idx": padding_idx}
        BagCase(form, dtype, torch.int32, is_weighted=True, settings=settings).check(device)


def test_bags_of_no_ids_are_zeros(device: torch.device) -> None:
    # torch.nn.EmbeddingBag fails here.
    bag = torchembed.EmbeddingBag(5, 3, device=device)
    output = bag(torch.zeros(4, 0, dtype=torch.int64, device=device))
    assert output.tolist() == [[0.0] * 3] * 4


def test_the_default_mode_is_mean(device: torch.device) -> None:
    BagCase("offsets").check(device)


def test_a_mean_of_large_float16_rows_does_not_overflow(device: torch.device) -> None:
    # The sum, 4 * 30000, is no float16; the mean is.
    bag = torchembed.EmbeddingBag(3, 2, padding_idx=0, dtype=torch.float16, device=device)
    bag.load_state_dict({"weight": torch.full((3, 2), 30000.0)})
    output = bag(torch.tensor([[1, 2, 1, 2]], device=device))
    assert output.tolist() == [[30000.0, 30000.0]]


def test_sparse_gradients_have_the_rows_that_torchs_have(device: torch.device) -> None:
    # SparseAdam moves every row that the gradient has, by its old momentum.
    input_ids = torch.tensor([[5, 3, 7], [3, 5, 3]])
    for ours, theirs in (
        (torchembed.EmbeddingBag, nn.EmbeddingBag),
        (torchembed.Embedding, nn.Embedding),
    ):
        found = []
        for kind, place in ((ours, device), (theirs, torch.device("cpu"))):
            module = kind(NUM_ROWS, DIM, padding_idx=3, sparse=True, device=place)
            module(input_ids.to(place)).sum().backward()
            found.append(module.weight.grad.coalesce().indices()[0].tolist())
        assert found == [[5, 7], [5, 7]]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 0, -2])
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_embedding_is_as_torchs(
    dtype: torch.dtype, padding_idx: int | None, sparse: bool, device: torch.device
) -> None:
    weight = normal(NUM_ROWS, DIM, seed=1, dtype=dtype)

    def run(
        kind: type[nn.Module], dtype: torch.dtype, device: torch.device, input_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        module = kind(
            NUM_ROWS, DIM, padding_idx=padding_idx, sparse=sparse, dtype=dtype, device=device
        )
        module.load_state_dict({"weight": weight.to(dtype)})
        output = module(input_ids.to(device))
        output.backward(normal(*output.shape, seed=2).to(weight.dtype).to(device, dtype))
        assert module.weight.grad.is_sparse == sparse
        return output, module.weight.grad.to_dense()

    # torch's own sparse gradient with padding does not take a single id.
    scalar = [] if sparse and padding_idx is not None else [()]
    for shape in (*scalar, (5,), (2, 3), (2, 3, 4), (0,), (2, 0, 3)):
        for id_dtype in (torch.int32, torch.int64):
            input_ids = ids(*shape, seed=len(shape), dtype=id_dtype)
            output, gradient = run(torchembed.Embedding, dtype, device, input_ids)
            assert output.shape == (*shape, DIM)
            assert_same_bits(output, run(nn.Embedding, dtype, torch.device("cpu"), input_ids)[0])
            assert gradient.dtype == dtype

            def formula(dtype: torch.dtype, input_ids: Tensor = input_ids) -> Tensor:
                return run(nn.Embedding, dtype, torch.device("cpu"), input_ids)[1]

            assert_follows(gradient, formula)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(torchembed.EmbeddingBag, nn.EmbeddingBag), (torchembed.Embedding, nn.Embedding)],
)
def test_state_dicts_are_exchanged_with_torchs(
    ours: type[nn.Module], theirs: type[nn.Module], device: torch.device
) -> None:
    from_ours, from_torch = ours(5, 3, device=device), theirs(5, 3)
    assert list(from_ours.state_dict()) == list(from_torch.state_dict())
    expected = from_torch.weight.detach().clone()
    from_ours.load_state_dict(from_torch.state_dict())
    assert_same_bits(from_ours.weight, expected)
    again = theirs(5, 3)
    again.load_state_dict(from_ours.state_dict())
    assert_same_bits(again.weight, expected)
    assert from_ours(torch.tensor([[4]], device=device)).flatten().tolist() == expected[4].tolist()


@pytest.mark.parametrize("kind", [torchembed.EmbeddingBag, torchembed.Embedding])
def test_from_pretrained(
    kind: type[torchembed.EmbeddingBag] | type[torchembed.Embedding], device: torch.device
) -> None:
    pretrained = normal(5, 3, seed=0, dtype=torch.bfloat16, device=device)
    module = kind.from_pretrained(pretrained, padding_idx=1)
    assert_same_bits(module.weight, pretrained)
    assert not module.weight.requires_grad
    assert module.weight.data_ptr() == pretrained.data_ptr()
    input_ids = torch.tensor([[4]], device=device)
    assert not module(input_ids).requires_grad
    assert module(input_ids).flatten().tolist() == pretrained[4].tolist()

    trained = kind.from_pretrained(pretrained, freeze=False)
    trained(input_ids).sum().backward()
    assert trained.weight.grad is not None
    assert trained.weight.grad.sum(1).tolist() == [0, 0, 0, 0, 3]

    part = kind.from_pretrained(pretrained[1:].t().contiguous().t())
    assert part(input_ids - 1).flatten().tolist() == pretrained[4].tolist()


@pytest.mark.parametrize("kind", [torchembed.EmbeddingBag, torchembed.Embedding])
def test_initial_rows_are_standard_normal_and_follow_the_seed(
    kind: type[torchembed.EmbeddingBag] | type[torchembed.Embedding], device: torch.device
) -> None:
    first, second = (kind(50, 40, seed=7, device=device) for _ in range(2))
    assert_same_bits(first.weight, second.weight)
    other = kind(50, 40, seed=8, device=device, padding_idx=-1)
    assert not torch.equal(first.weight, other.weight)
    # The mean of n normal numbers has the deviation 1 / sqrt(n); five of them are never exceeded.
    assert abs(first.weight.mean().item()) < 5 / 2000**0.5
    assert other.weight[-1].count_nonzero() == 0

    # Without a seed it comes from torch's generator.
    torch.manual_seed(1)
    drawn = [kind(4, 4, device=device) for _ in range(2)]
    torch.manual_seed(1)
    assert_same_bits(kind(4, 4, device=device).weight, drawn[0].weight)
    assert not torch.equal(*(module.weight for module in drawn))

    with torch.no_grad():
        other.weight.fill_(5.0)
    other.reset_parameters()
    again = kind(50, 40, seed=8, device=device, padding_idx=-1)
    assert_same_bits(other.weight, again.weight)


@pytest.mark.parametrize("kind", [torchembed.EmbeddingBag, torchembed.Embedding])
def test_modules_are_made_on_the_meta_device(
    kind: type[torchembed.EmbeddingBag] | type[torchembed.Embedding], device: torch.device
) -> None:
    with torch.device("meta"):
        module = kind(5, 3, seed=1, padding_idx=2)
    assert module.weight.is_meta
    module.to_empty(device=device)
    module.reset_parameters()
    expected = kind(5, 3, seed=1, padding_idx=2, device=device)
    assert_same_bits(module.weight, expected.weight)
    input_ids = torch.tensor([[4, 2]], device=device)
    assert_same_bits(module(input_ids), expected(input_ids))


def test_the_weight_may_be_replaced(device: torch.device) -> None:
    module = torchembed.Embedding(5, 3, device=device)
    input_ids = torch.tensor([4], device=device)
    module(input_ids)
    module.weight = nn.Parameter(torch.ones(5, 3, device=device))
    assert module(input_ids).tolist() == [[1.0] * 3]
    module.weight.data = torch.full((5, 3), 2.0, device=device)
    assert module(input_ids).tolist() == [[2.0] * 3]
    module(input_ids).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad[4].tolist() == [1.0] * 3
    module.weight = nn.Parameter(torch.ones(1, 3, device=device))
    with pytest.raises(ValueError, match=r"must have shape \(5, 3\), got \(1, 3\)"):
        module(input_ids)


def test_a_weight_is_tied_to_a_decoder(device: torch.device) -> None:
    module = torchembed.Embedding(5, 3, device=device)
    decoder = nn.Linear(3, 5, bias=False, device=device)
    decoder.weight = module.weight
    decoder(module(torch.tensor([4], device=device))).sum().backward()
    assert module.weight.grad is not None

    def formula(dtype: torch.dtype) -> Tensor:
        weight = module.weight.detach().cpu().to(dtype)
        expected = weight[4].repeat(5, 1)
        expected[4] += weight.sum(0)
        return expected

    assert_follows(module.weight.grad, formula)


def test_the_padding_row_is_looked_up_but_not_trained(device: torch.device) -> None:
    module = torchembed.Embedding(5, 3, padding_idx=2, device=device, on_bad_id="clamp")
    with torch.no_grad():
        module.weight[2] = 9.0
    optimizer = torchembed.optim.SGD([module.weight], lr=1.0)
    output = module(torch.tensor([2, 0], device=device))
    assert output[0].tolist() == [9.0] * 3
    before = module.weight.detach().clone()
    output.sum().backward()
    optimizer.step()
    assert (module.weight - before).sum(1).tolist() == [-3, 0, 0, 0, 0]


def test_a_clamped_id_may_meet_the_padding_row(device: torch.device) -> None:
    input_ids = torch.tensor([[9, 1]], device=device)
    embedding = torchembed.Embedding(5, 3, padding_idx=4, device=device, on_bad_id="clamp")
    with torch.no_grad():
        embedding.weight[4] = 9.0
    assert embedding(input_ids)[0, 0].tolist() == [9.0] * 3
    bag = torchembed.EmbeddingBag(5, 3, padding_idx=4, device=device, on_bad_id="clamp")
    assert_same_bits(bag(input_ids)[0], bag.weight[1])


def test_a_mean_with_padding_counts_zeroed_ids(device: torch.device) -> None:
    # As without padding: a bad id under "zero" is an id whose vector is zeros.
    input_ids = torch.tensor([[9, 1, 4]], device=device)
    bag = torchembed.EmbeddingBag(5, 3, padding_idx=4, device=device, on_bad_id="zero")
    assert_same_bits(bag(input_ids)[0], bag.weight[1] / 2)


def test_repr_names_the_sizes() -> None:
    assert repr(torchembed.Embedding(5, 3)) == "Embedding(5, 3)"
    assert repr(torchembed.Embedding(5, 3, padding_idx=-1)) == "Embedding(5, 3, padding_idx=4)"
    assert repr(torchembed.EmbeddingBag(5, 3, mode="max")) == "EmbeddingBag(5, 3, mode='max')"
