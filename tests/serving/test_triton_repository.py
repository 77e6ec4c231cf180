"""What is written for Triton, read back by the protocol buffers that its clients have."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format, text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from tests.support.pooled_sums import PooledSums
from torchembed.serving.interface import ModelForm, TensorForm
from torchembed.serving.triton import TritonOptions, write_triton_model
from torchembed.serving.triton.text_form import text_form

FIXED = PooledSums("fixed", "3", is_jagged=False).form
JAGGED = PooledSums("jagged", "1", is_jagged=True).form


def written(folder: Path, form: ModelForm, **options: Any) -> dict[str, Any]:
    """The configuration of a written model, as a dictionary."""
    model = write_triton_model(folder, form, "a.b:c", {"x": '"1"\n'}, TritonOptions(**options))
    config = model_config_pb2.ModelConfig()  # type: ignore[attr-defined]
    text_format.Parse((model / "config.pbtxt").read_text(), config)
    return json_format.MessageToDict(config, preserving_proto_field_name=True)


def test_models_with_jagged_features_take_requests_as_they_come(tmp_path: Path):
    config = written(tmp_path, JAGGED, num_instances=2, python_path=(tmp_path,))
    parameters = {key: value["string_value"] for key, value in config.pop("parameters").items()}
    assert json.loads(parameters.pop("arguments")) == {"x": '"1"\n'}
    assert json.loads(parameters.pop("python_path")) == [str(tmp_path.resolve())]
    assert parameters == {"loader": "a.b:c"}
    assert config == {
        "name": "jagged",
        "backend": "python",
        "version_policy": {"specific": {"versions": ["1"]}},
        "input": [
            {"name": "numbers", "data_type": "TYPE_FP32", "dims": ["-1", "3"]},
            {"name": "ids", "data_type": "TYPE_INT64", "dims": ["-1"]},
            {"name": "ids.lengths", "data_type": "TYPE_INT32", "dims": ["-1"]},
        ],
        "output": [
            {"name": "sums", "data_type": "TYPE_FP32", "dims": ["-1"]},
            {"name": "rows", "data_type": "TYPE_FP32", "dims": ["-1", "3"]},
            {"name": "default_rows", "data_type": "TYPE_INT32", "dims": ["-1"]},
        ],
        "instance_group": [{"kind": "KIND_CPU", "count": 2}],
    }


def test_models_of_fixed_hotness_can_be_batched(tmp_path: Path):
    config = written(tmp_path, FIXED, max_batch_size=64, max_queue_delay_microseconds=250)
    assert config["max_batch_size"] == 64
    assert config["dynamic_batching"] == {"max_queue_delay_microseconds": "250"}
    assert config["input"] == [
        {"name": "numbers", "data_type": "TYPE_FP32", "dims": ["3"]},
        {"name": "ids", "data_type": "TYPE_INT64", "dims": ["2"]},
    ]
    assert config["output"] == [
        {"name": "sums", "data_type": "TYPE_FP32", "dims": ["1"], "reshape": {}},
        {"name": "rows", "data_type": "TYPE_FP32", "dims": ["3"]},
        {"name": "default_rows", "data_type": "TYPE_INT32", "dims": ["1"], "reshape": {}},
    ]


def test_every_dtype_has_its_name_in_triton(tmp_path: Path):
    kinds = {
        "?": "BOOL", "i1": "INT8", "i2": "INT16", "i4": "INT32", "i8": "INT64", "u1": "UINT8",
        "u2": "UINT16", "u4": "UINT32", "u8": "UINT64", "f2": "FP16", "f4": "FP32", "f8": "FP64",
    }  # fmt: skip
    inputs = tuple(TensorForm(name=kind, dtype=np.dtype(kind), shape=(-1,)) for kind in kinds)
    form = ModelForm(name="all", version="1", inputs=inputs, outputs=())
    given_types = {
        tensor["name"]: tensor["data_type"] for tensor in written(tmp_path, form)["input"]
    }
    assert given_types == {kind: f"TYPE_{name}" for kind, name in kinds.items()}


def test_a_model_is_replaced_whole(tmp_path: Path):
    write_triton_model(tmp_path, FIXED, "a:b", {})
    later = ModelForm(name="fixed", version="4", inputs=FIXED.inputs, outputs=FIXED.outputs)
    model = write_triton_model(tmp_path, later, "a:b", {})
    assert sorted(path.name for path in model.iterdir()) == ["4", "config.pbtxt"]
    assert [path.name for path in tmp_path.iterdir()] == ["fixed"]


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        (JAGGED, {"max_batch_size": 8}, "max_batch_size must be 0, since ids.lengths is not of"),
        (FIXED, {"max_batch_size": -1}, "max_batch_size must be at least 0, got -1"),
        (FIXED, {"num_instances": 0}, "num_instances must be at least 1, got 0"),
        (FIXED, {"environment": Path("/nowhere")}, "/nowhere has no bin/activate"),
        (
            ModelForm(name="m", version="v2", inputs=(), outputs=()),
            {},
            "form.version must be a positive integer, got 'v2'",
        ),
        (
            ModelForm(name="../m", version="2", inputs=(), outputs=()),
            {},
            "form.name must be a name of letters",
        ),
        (
            ModelForm(
                name="m",
                version="2",
                inputs=(TensorForm(name="text", dtype=np.dtype(object), shape=(-1,)),),
                outputs=(),
            ),
            {},
            "text must be of numbers or booleans to be served by Triton, got object",
        ),
    ],
)
def test_what_triton_cannot_serve_is_refused(
    tmp_path: Path, form: ModelForm, options: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=re.escape(message)):
        written(tmp_path / "models", form, **options)
    assert not (tmp_path / "models").exists()


def test_a_loader_that_names_no_function_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"loader must be 'module:function', got 'a\.b'"):
        write_triton_model(tmp_path, FIXED, "a.b", {})


@given(st.text(), st.lists(st.integers(-(1 << 31), (1 << 31) - 1)), st.booleans())
def test_the_text_form_is_read_back_as_it_was(text: str, dims: list[int], is_optional: bool):
    form = text_form({"input": {"name": text, "dims": dims, "optional": is_optional}})
    (given_input,) = text_format.Parse(form, model_config_pb2.ModelConfig()).input  # type: ignore[attr-defined]
    assert given_input.name == text
    assert list(given_input.dims) == dims
    assert given_input.optional == is_optional
