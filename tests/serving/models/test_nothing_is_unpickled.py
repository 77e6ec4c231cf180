"""Deployed folders are read without unpickling anything, whatever they hold."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.served_lookups import options_over
from tests.zoo.served_models import MODELS
from torchembed.serving.models import ModelFolderError, ModelRepository, deploy
from torchembed.serving.models.dense_program import load_program
from torchembed.stores import MemoryStore


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The program of a deployed model. Torch's own imports, some of which use pickle, are done."""
    folder, case = tmp_path_factory.mktemp("models"), MODELS["dlrm"]()
    deployed = deploy(case.model, folder, name="m", version=1, examples=case.examples(4))
    load_program(deployed / "dense.pt2")
    return (deployed / "dense.pt2").read_bytes()


@pytest.fixture
def no_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would unpickle raises."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something is unpickled")

    for owner, name in (
        (pickle, "Unpickler"),
        (pickle, "load"),
        (pickle, "loads"),
        (torch, "load"),
        (torch._C, "_pickle_load_obj"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    with pytest.raises(AssertionError):
        pickle.loads(b"")


@pytest.mark.usefixtures("program", "no_pickles")
@pytest.mark.parametrize("name", MODELS)
def test_deploying_loading_and_answering_unpickle_nothing(name: str, tmp_path: Path) -> None:
    case = MODELS[name]()
    deploy(case.model, tmp_path, name="m", version=1, examples=case.examples(4))
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        repository.start()
        repository.model("m").answer(case.request(case.examples(3)))


class _Hostile:
    """Would write a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


Change = Callable[[str, bytes], bytes]


def rewritten(program: bytes, change: Change, added: dict[str, bytes]) -> bytes:
    """An archive with other entries; names of ``added`` are in the folder of the others."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(program)) as before, zipfile.ZipFile(written, "w") as after:
        (top, *_) = before.namelist()[0].split("/")
        for entry in before.infolist():
            after.writestr(entry.filename, change(entry.filename, before.read(entry)))
        for name, content in added.items():
            after.writestr(f"{top}/{name}", content)
    return written.getvalue()


_PICKLED_WEIGHTS = json.dumps(
    {
        "config": {
            "x": {
                "path_name": "weight_0",
                "is_param": True,
                "use_pickle": True,
                "tensor_meta": None,
            }
        }
    }
).encode()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("a pickle", "not a zip file"),
        ("a file of torch.save", "it holds"),
        ("pickled weights", "names pickles"),
        ("sample inputs", "must be empty"),
        ("an object among constants", "it holds"),
        ("the form before archives", "it holds"),
        ("half a file", "not a zip file"),
    ],
)
def test_hostile_programs_are_refused(
    program: bytes, tmp_path: Path, kind: str, message: str
) -> None:
    target, path = tmp_path / "written", tmp_path / "dense.pt2"
    hostile = pickle.dumps(_Hostile(target))

    def same(name: str, content: bytes) -> bytes:
        return content

    def with_pickled_weights(name: str, content: bytes) -> bytes:
        return _PICKLED_WEIGHTS if name.endswith("weights_config.json") else content

    match kind:
        case "a pickle":
            content = hostile
        case "a file of torch.save":
            saved = io.BytesIO()
            torch.save(_Hostile(target), saved)
            content = saved.getvalue()
        case "pickled weights":
            content = rewritten(program, with_pickled_weights, {"data/weights/weight_0": hostile})
        case "sample inputs":
            content = rewritten(program, same, {"data/sample_inputs/other.pt": hostile})
        case "an object among constants":
            content = rewritten(program, same, {"data/constants/opaque_obj_0": hostile})
        case "the form before archives":
            content = rewritten(program, same, {"serialized_state_dict.pt": hostile})
        case _:
            content = program[: len(program) // 2]
    path.write_bytes(content)
    with pytest.raises(ModelFolderError, match=message):
        load_program(path)
    assert not target.exists()
    pickle.loads(hostile)
    assert target.exists()
