"""Models become folders: what is found in them, and what is refused."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.zoo.served_models import MODELS, ServedCase
from torchembed import SparseFeatures
from torchembed.modules.dense_part.forms import ArgumentKind
from torchembed.serving.models import DeployError, deploy, read_description, versions_in
from torchembed.serving.models.model_folder import check_files
from torchembed.serving.models.partial_folder import empty_partial_folder


@pytest.mark.parametrize("name", MODELS)
def test_all_shapes_of_models_are_deployed(name: str, tmp_path: Path) -> None:
    case = MODELS[name]()
    was_training = {n: m.training for n, m in case.model.named_modules()}
    weights = {n: p.detach().clone() for n, p in case.model.named_parameters()}

    folder = deploy(case.model, tmp_path, name="m", version=3, examples=case.examples(4))

    assert versions_in(tmp_path, "m") == [3]
    description = read_description(folder)
    assert [f.name for f in description.features] == case.features
    assert [i.name for i in description.inputs] == case.inputs
    assert {n: m.training for n, m in case.model.named_modules()} == was_training
    for parameter_name, parameter in case.model.named_parameters():
        assert torch.equal(parameter, weights[parameter_name]) and parameter.requires_grad


def _dlrm() -> ServedCase:
    return MODELS["dlrm"]()


def test_a_version_is_never_overwritten(tmp_path: Path) -> None:
    case = _dlrm()
    deploy(case.model, tmp_path, name="m", version=1, examples=case.examples(4))
    with pytest.raises(FileExistsError, match=r"version must not be there yet, and .*m/1 is"):
        deploy(case.model, tmp_path, name="m", version=1, examples=case.examples(4))


def test_a_version_is_written_by_one_at_a_time(tmp_path: Path) -> None:
    case, partial = _dlrm(), tmp_path / "m" / ".1.partial"
    with empty_partial_folder(partial):
        # As of another process that is killed later on.
        (partial / "tables").mkdir()
        (partial / "dense.pt2").write_bytes(b"of another")
        (partial / "link").symlink_to(tmp_path)
        message = r"by one deploy at a time, and another one is writing .*m/\.1\.partial; wait"
        with pytest.raises(FileExistsError, match=message):
            deploy(case.model, tmp_path, name="m", version=1, examples=case.examples(4))
        assert (partial / "dense.pt2").read_bytes() == b"of another"
    folder = deploy(case.model, tmp_path, name="m", version=1, examples=case.examples(4))
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["1"]
    check_files(folder, read_description(folder))
    assert not (folder / "link").exists()


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("s3://bucket/models", "folder must be a local folder, got s3://bucket/models; deploy to"),
        (
            Path("s3://bucket/models"),
            "path must be a string where it is a URL, got .* lost a slash",
        ),
    ],
)
def test_urls_are_refused(
    folder: str | Path, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    case = _dlrm()
    with pytest.raises(ValueError, match=message):
        deploy(case.model, folder, name="m", version=1, examples=case.examples(4))
    assert list(tmp_path.iterdir()) == []


class _Computes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = torchembed.Embedding(10, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.items(ids + 1).sum(1)


class _ReadsWeight(_Computes):
    def forward(self, ids: Tensor) -> Tensor:
        return self.items(ids) @ self.items.weight[:3].T


class _Specialized(_Computes):
    def forward(self, ids: Tensor) -> Tensor:
        return self.items(ids)[:, 0].reshape(4, 4) * 2


class _Counts(_Computes):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.get_buffer("count").add_(1)
        return self.items(ids).sum((1, 2))


class _Maxima(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = torchembed.EmbeddingBag(10, 4, mode="max")

    def forward(self, ids: Tensor) -> Tensor:
        return self.items(ids)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_Computes(), "ids of items must be an argument of the model, or columns of one"),
        (_ReadsWeight(), "must not read 'weight' of its tables items"),
        (_Specialized(), "one that torch.export takes with any number of samples"),
        (_Counts(), "must change nothing in evaluation, and its forward changes"),
        (_Maxima(), "must pool by sums or means to be served, got mode='max'"),
        (nn.Linear(2, 2), "must have tables of torchembed, and has none"),
    ],
)
def test_models_that_cannot_be_served_are_named(
    model: nn.Module, message: str, tmp_path: Path
) -> None:
    examples = torch.ones(4, 2, dtype=torch.int64)
    with pytest.raises(DeployError, match=message):
        deploy(model, tmp_path, name="m", version=1, examples=examples)
    assert versions_in(tmp_path, "m") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "../m"}, "name must be 1 to 120 letters"),
        ({"version": 0}, r"version must be a positive integer below 2\*\*63, got 0"),
        ({"version": True}, r"version must be a positive integer below 2\*\*63, got True"),
        ({"version": 2**63}, rf"version must be a positive integer .*, got {2**63}"),
        ({"output": "softmax"}, 'output must be "sigmoid" or "as_it_is"'),
        ({"output": {"buy": "sigmoid"}}, r"output must name outputs, \['output'\]"),
        ({"output_names": ["a", "b"]}, "as many as the result has columns"),
        ({"output_names": ["default_rows"]}, "none 'default_rows'"),
        ({"output_names": [None]}, "outputs must be at least one"),
        ({"defaults": {"x": 1.0}}, "defaults must name tables of the model"),
        ({"defaults": {"t0": float("nan")}}, "default of table t0 must be .*float32, got nan"),
        ({"defaults": {"t0": -1e39}}, r"default of table t0 must be a number .*, got -1e\+39"),
        ({"store_names": {"x": "y"}}, "store_names must name tables of the model"),
        ({"store_names": {"t0": "x", "t1": "x"}}, "store_names must be different for different"),
        ({"store_names": {"t0": ""}}, "store name of table t0 must be a string .*, got ''"),
        (
            {"dense_dtype": torch.float64},
            r"dense_dtype must be torch\.float16, torch\.bfloat16 or None, got torch\.float64",
        ),
    ],
)
def test_wrong_arguments_are_named(
    arguments: dict[str, object], message: str, tmp_path: Path
) -> None:
    case = _dlrm()
    given = {"name": "m", "version": 1, "examples": case.examples(4)} | arguments
    with pytest.raises(DeployError, match=message):
        deploy(case.model, tmp_path, **given)  # type: ignore[arg-type]


class _TwoFeatures(nn.Module):
    """Two towers, each with features of its own that may have the same names."""

    def __init__(self, *keys: str, tables: tuple[str, str] = ("a", "b")) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            torchembed.EmbeddingBagCollection(
                tables=[
                    torchembed.EmbeddingBagConfig(
                        name=table, num_embeddings=10, embedding_dim=4, feature_names=(key,)
                    )
                ]
            )
            for table, key in zip(tables, keys, strict=True)
        )

    def forward(self, query: SparseFeatures, item: SparseFeatures) -> Tensor:
        one, other = self.towers
        return (one(query).values() * other(item).values()).sum(1)


def _features(key: str, ids: Tensor) -> SparseFeatures:
    return SparseFeatures(keys=(key,), values=ids.flatten(), batch_size=len(ids), hotness=(2,))


def test_a_name_of_two_features_is_refused(tmp_path: Path) -> None:
    ids = torch.arange(6).view(3, 2)
    model = _TwoFeatures("category", "category")
    message = "feature category must be the same in all arguments.*, and its ids are not"
    for other in (ids.flip(0), ids + 2**60):
        examples = _features("category", ids), _features("category", other)
        with pytest.raises(DeployError, match=message):
            deploy(model, tmp_path, name="m", version=1, examples=examples)
    # The same feature may come twice.
    same = _features("category", ids), _features("category", ids.int())
    folder = deploy(model, tmp_path, name="m", version=1, examples=same)
    assert [f.name for f in read_description(folder).features] == ["category"]


class _Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torchembed.EmbeddingBag(10, 4, mode="sum")
        self.other = torchembed.EmbeddingBag(10, 4, mode="sum")

    def forward(self, ids: Tensor, one: Tensor, other: Tensor) -> Tensor:
        weighted = self.one(ids, per_sample_weights=one)
        return (weighted * self.other(ids, per_sample_weights=other)).sum(1)


def test_ids_of_two_weights_are_refused(tmp_path: Path) -> None:
    ids, weights = torch.arange(6).view(3, 2), torch.rand(3, 2)
    with pytest.raises(DeployError, match=r"feature ids must be the same .*, and its weights"):
        deploy(_Weighted(), tmp_path, name="m", version=1, examples=(ids, weights, weights + 1))


class _Nested(_Maxima):
    def __init__(self) -> None:
        super().__init__()
        self.items = torchembed.EmbeddingBag(10, 4, mode="sum")

    def forward(self, batch: dict) -> Tensor:
        return self.items(batch["ids"]).sum(1) + batch["x.y"] * 2 + batch["x"]["y"]


def test_a_name_of_two_inputs_is_refused(tmp_path: Path) -> None:
    batch = {"ids": torch.ones(3, 2).long(), "x.y": torch.rand(3), "x": {"y": torch.rand(3)}}
    with pytest.raises(DeployError, match=r"of its own for each tensor, .* named 'x\.y'"):
        deploy(_Nested(), tmp_path, name="m", version=1, examples=batch)


def test_examples_without_any_id_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(torchembed.EmbeddingBag(10, 4, mode="sum"))
    ids = torch.zeros(3, 0, dtype=torch.int64)
    with pytest.raises(DeployError, match=r"ids of 0 must be some in the examples, .* are none"):
        deploy(model, tmp_path, name="m", version=1, examples=ids)


class _Columns(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torchembed.EmbeddingBag(10, 4, mode="sum"), nn.Linear(4, 2))


@pytest.mark.parametrize("names", [["a", "a"], ["a", ""], ["a", 3]])
def test_names_of_outputs_are_different_strings(names: list[str], tmp_path: Path) -> None:
    message = re.escape(f"must have names that are strings, not empty and different, got {names}")
    ids = torch.ones(3, 2, dtype=torch.int64)
    with pytest.raises(DeployError, match=message):
        deploy(_Columns(), tmp_path, name="m", version=1, examples=ids, output_names=names)


class _Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = torchembed.EmbeddingBag(10, 4, mode="sum")

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        return self.items(ids).sum(1) + dense.real.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_inputs_that_requests_cannot_have_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    examples = torch.ones(3, 2, dtype=torch.int64), torch.ones(3, dtype=dtype)
    with pytest.raises(DeployError, match=f"input dense must .* FP32.* got {str(dtype)[6:]}; conv"):
        deploy(_Dense(), tmp_path, name="m", version=1, examples=examples)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (("/absolute", "b"), "names that folders can have, of up to 255 bytes, got '/absolute'"),
        (("a", "x" * 256), "names that folders can have"),
        (("a", "b\0"), r"names that folders can have.*'b\\x00'"),
        (("a/b", "a"), "must have folders of their own, and that of 'a/b' is in that of 'a'"),
    ],
)
def test_tables_have_folders_of_their_own(
    tables: tuple[str, str], message: str, tmp_path: Path
) -> None:
    ids = torch.ones(3, 2, dtype=torch.int64)
    examples = _features("x", ids), _features("y", ids)
    model = _TwoFeatures("x", "y", tables=tables)
    with pytest.raises(DeployError, match=message):
        deploy(model, tmp_path, name="m", version=1, examples=examples)
    assert list(tmp_path.iterdir()) == []


def test_one_sample_is_too_few_to_export(tmp_path: Path) -> None:
    case = _dlrm()
    with pytest.raises(DeployError, match="must hold at least 2 samples"):
        deploy(case.model, tmp_path, name="m", version=1, examples=case.examples(1))


def test_labels_and_losses_are_left_out(tmp_path: Path) -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = torchembed.Embedding(10, 4)

        def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            logits = self.items(batch["item"]).sum(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
            return loss, logits

    batch = {"item": torch.arange(4), "label": torch.rand(4)}
    names = [None, "click"]
    folder = deploy(Trained(), tmp_path, name="m", version=1, examples=batch, output_names=names)
    description = read_description(folder)
    assert [i.name for i in description.form().inputs] == ["item"]
    kinds = {a.name: a.kind for a in description.arguments}
    assert kinds["label"] is ArgumentKind.UNUSED
    with pytest.raises(DeployError, match="output output_0 must have an element for each of 4"):
        deploy(Trained(), tmp_path, name="m", version=2, examples=batch)


def test_a_dynamic_tables_missing_rows_need_a_number(tmp_path: Path) -> None:
    items = torchembed.Embedding(64, 4, dynamic=torchembed.Dynamic(missing="initial"))
    model = nn.Sequential(items)
    ids = torch.arange(4)
    with pytest.raises(DeployError, match=r"give defaults=\{'0': 0.0\}"):
        deploy(model, tmp_path, name="m", version=1, examples=ids)
    folder = deploy(model, tmp_path, name="m", version=1, examples=ids, defaults={"0": 0.5})
    assert read_description(folder).table("0").default == 0.5
