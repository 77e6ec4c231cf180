"""Models whose tables ranks share are deployed as those of one process."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.ranks import run_on_ranks
from tests.support.served_lookups import options_over
from tests.support.sharded_deploys import deploy_on_ranks, seeded
from torchembed.serving.models import ModelRepository, deploy, read_description, versions_in
from torchembed.serving.models.model_folder import open_table
from torchembed.stores import MemoryStore

NAMES = ["dlrm", "dcnv2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[list[str]]]:
    folder = tmp_path_factory.mktemp("deployed")
    errors = run_on_ranks(2, deploy_on_ranks, folder / "ranks", NAMES)
    for name in NAMES:
        case = seeded(name)
        deploy(case.model, folder / "one", name=name, version=1, examples=case.examples(4))
    return folder / "ranks", folder / "one", errors


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_answers_are_those_of_one_process(
    name: str, folders: tuple[Path, Path, list[list[str]]]
) -> None:
    sharded, whole, _ = folders
    tables = read_description(sharded / name / "1").tables
    assert tables == read_description(whole / name / "1").tables
    for table in tables:
        found = {}
        for folder in (sharded, whole):
            chunks = list(open_table(folder / name / "1", table.name))
            keys = torch.cat([chunk.keys for chunk in chunks])
            found[folder] = torch.cat([chunk.rows for chunk in chunks])[keys.argsort()]
            assert torch.equal(keys.sort().values, torch.arange(table.num_rows))
        assert torch.equal(found[sharded], found[whole])
    case = seeded(name)
    request = case.request(case.examples(20))
    answers = []
    for folder in (sharded, whole):
        with MemoryStore() as store, ModelRepository(folder, options_over(store)) as repository:
            repository.load(name)
            answers.append(repository.model(name).answer(request).outputs)
    assert answers[0].keys() == answers[1].keys()
    for output, array in answers[0].items():
        np.testing.assert_array_equal(array, answers[1][output])


def test_all_ranks_are_told_what_keeps_a_version_from_being_written(
    folders: tuple[Path, Path, list[list[str]]],
) -> None:
    sharded, _, errors = folders
    for of_rank in errors:
        *of_names, of_columns = of_rank
        assert len(of_names) == 2 * len(NAMES)
        assert "must not have its columns divided over ranks" in of_columns
        for is_there, is_wrong in zip(of_names[::2], of_names[1::2], strict=True):
            assert "version must not be there yet" in is_there
            assert "version must be a positive integer below 2**63, got 0" in is_wrong
    for name in NAMES:
        assert versions_in(sharded, name) == [1]
