"""Answers that are captured once and replayed, against those that are computed one by one."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import torchembed
from tests.zoo.served_models import MODELS
from torchembed.serving.levels import EmbeddingCache, LeveledLookup, RowLevels, ServedTable
from torchembed.serving.models import ModelOptions, ModelRepository, deploy
from torchembed.serving.models.captured_forward import (
    CapturedForwards,
    MissedRowsError,
    can_be_captured,
    captured_bytes,
)
from torchembed.serving.models.dense_program import (
    PROGRAM_FILE,
    WEIGHTS_FILE,
    DenseProgram,
    DenseWeights,
    load_program,
    read_weights,
)
from torchembed.serving.models.lookup_parts import lookup_parts
from torchembed.serving.models.model_folder import read_description, version_folder
from torchembed.serving.models.request import check_request
from torchembed.stores import MemoryStore, RowStore

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Lookups(list[LeveledLookup]):
    """Makes lookups over a store on a device, and keeps them."""

    def __init__(self, store: RowStore, device: str, num_rows: int) -> None:
        self._store, self._device, self._num_rows = store, device, num_rows

    def __call__(self, tables: Mapping[ServedTable, int]) -> LeveledLookup:
        served = list(tables)
        cache = EmbeddingCache(served, self._device, num_rows=self._num_rows)
        self.append(LeveledLookup(cache, RowLevels([self._store], served), hit_rate_threshold=2.0))
        return self[-1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["dlrm", "dcnv2"])
def test_captured_answers_are_those_that_are_computed(
    name: str, device: str, tmp_path: Path
) -> None:
    torch.manual_seed(2)
    case = MODELS[name]()
    deploy(case.model, tmp_path, name="m", version=1, examples=case.examples(4))
    answers: list[list[np.ndarray]] = []
    counts: list[object] = []
    # Larger requests than graphs, some whose rows are cached and some that miss them.
    requests = [case.request(case.examples(n)) for n in (1, 4, 3, 9, 8, 4, 2, 16, 29, 33, 20)]
    for captured_sizes in [(), (8, 4)]:
        with MemoryStore() as store:
            lookups = Lookups(store, device, 10_000)
            options = ModelOptions(
                make_lookup=lookups, device=torch.device(device), captured_sizes=captured_sizes
            )
            with ModelRepository(tmp_path, options) as repository:
                repository.start()
                model = repository.model("m")
                before = {t: c.num_hits + c.num_misses for t, c in cached(lookups[0]).items()}
                found = [model.answer(request) for request in requests + requests]
                assert not any(answer.num_default_rows for answer in found)
                answers.append([answer.outputs["output"] for answer in found])
                after = cached(lookups[0])
                counts.append({t: c.num_hits + c.num_misses - before[t] for t, c in after.items()})
    for found, expected in zip(answers[1], answers[0], strict=True):
        # The same numbers, but products may be added up in another order for another form.
        np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6)
    assert counts[0] == counts[1]


def cached(lookup: LeveledLookup):
    return lookup.statistics().tables


@pytest.mark.parametrize("device", DEVICES)
def test_captured_answers_miss_rows_and_take_new_weights(device: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    case = MODELS["dlrm"]()
    deploy(case.model, tmp_path, name="m", version=1, examples=case.examples(4))
    folder = version_folder(tmp_path, "m", 1)
    description = read_description(folder)
    tables = [
        ServedTable(name=table.name, dim=table.dim, default=0.5) for table in description.tables
    ]
    program = DenseProgram(load_program(folder / PROGRAM_FILE), torch.device(device))
    tensors = read_weights(folder / WEIGHTS_FILE, description.weights, torch.device(device))
    weights = DenseWeights(tuple(tensors), "1")
    with MemoryStore() as store, Lookups(store, device, 1_000)(dict.fromkeys(tables, 9)) as lookup:
        by_table = dict.fromkeys([table.name for table in tables], lookup)
        (part,) = lookup_parts(description, by_table, {name: name for name in by_table})
        assert can_be_captured(description, [part], torch.device(device))
        forwards = CapturedForwards(description, part, program, weights, (4,))
        request = check_request(description, case.request(case.examples(3)))
        with pytest.raises(MissedRowsError):
            forwards.answer(request, weights)
        for table in tables:
            keys = torch.arange(100)
            lookup.apply_rows(table.name, keys, torch.randn(100, table.dim))
            place = lookup.cache.tables.index(table)
            lookup.look_up(keys, torch.full((100,), place, dtype=torch.int32))
        first = forwards.answer(request, weights)
        doubled = DenseWeights(tuple(2 * tensor for tensor in tensors), "2")
        second, third = forwards.answer(request, doubled), forwards.answer(request, weights)
        assert first["output"].shape[0] == 3
        assert not np.allclose(first["output"], second["output"])
        np.testing.assert_array_equal(first["output"], third["output"])
        larger = check_request(description, case.request(case.examples(13)))
        parts = [larger.part(n, min(n + 4, 13)) for n in range(0, 13, 4)]
        of_parts = [forwards.answer(part, weights)["output"] for part in parts]
        whole = forwards.answer(larger, weights)["output"]
        np.testing.assert_array_equal(whole, np.concatenate(of_parts))


@pytest.mark.parametrize("name", ["weighted", "tasks", "sequence"])
def test_other_models_are_computed(name: str, tmp_path: Path) -> None:
    case = MODELS[name]()
    deploy(case.model, tmp_path, name="m", version=1, examples=case.examples(4))
    description = read_description(version_folder(tmp_path, "m", 1))
    tables = [ServedTable(name=table.name, dim=table.dim) for table in description.tables]
    with MemoryStore() as store, Lookups(store, "cpu", 100)(dict.fromkeys(tables, 9)) as lookup:
        by_table = dict.fromkeys([table.name for table in tables], lookup)
        parts = list(lookup_parts(description, by_table, {name: name for name in by_table}))
        assert not can_be_captured(description, parts, torch.device("cpu"))


def test_sizes_of_graphs_are_checked() -> None:
    with (
        MemoryStore() as store,
        pytest.raises(ValueError, match=r"captured_sizes must be at least 1"),
    ):
        ModelOptions(make_lookup=Lookups(store, "cpu", 1), captured_sizes=(4, 0))


def test_the_memory_of_captured_answers_is_counted_before_they_are_loaded(tmp_path: Path) -> None:
    bag = torchembed.EmbeddingBag(100, 8, mode="sum")
    model = torch.nn.Sequential(bag, torch.nn.Linear(8, 1))
    deploy(model, tmp_path, name="m", version=1, examples=torch.randint(100, (4, 3)))
    description = read_description(version_folder(tmp_path, "m", 1))
    weights, program = (description.files[name].num_bytes for name in (WEIGHTS_FILE, PROGRAM_FILE))
    # Of each sample three ids of 8 bytes, twice, a vector of 8 numbers and an output; two graphs of
    # the largest size.
    needed = weights + (4 + 16 + 16) * (2 * 3 * 8 + 8 * 4 + 4)
    assert captured_bytes(description, (16, 4, 4)) == needed
    assert captured_bytes(description, ()) == 0
    with MemoryStore() as store:
        options = ModelOptions(
            make_lookup=Lookups(store, "cpu", 100),
            captured_sizes=(4, 16),
            row_bytes=lambda num_rows, line_bytes: num_rows * line_bytes,
        )
        total = weights + program + needed + 100 * 32
        with ModelRepository(tmp_path, options, max_bytes=total) as repository:
            repository.start()
        short = ModelRepository(tmp_path, options, max_bytes=total - 1)
        message = rf"captured answers {needed:,}; its largest .*, fewer or smaller captured_sizes, "
        with short, pytest.raises(ValueError, match=message):
            short.start()


def test_a_model_with_a_padding_id_has_no_captured_answers(tmp_path: Path) -> None:
    bag = torchembed.EmbeddingBag(100, 8, mode="sum", padding_idx=0)
    model = torch.nn.Sequential(bag, torch.nn.Linear(8, 1))
    deploy(model, tmp_path, name="m", version=1, examples=torch.randint(100, (4, 3)))
    assert captured_bytes(read_description(version_folder(tmp_path, "m", 1)), (4,)) == 0
