"""The messages of ``inference.GRPCInferenceService``, by names and numbers of the public protocol.

They live in a pool of their own: a program may hold a client's classes of the same names as well.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

_PACKAGE = "inference"
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _FIELD.TYPE_BOOL,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "uint32": _FIELD.TYPE_UINT32,
    "uint64": _FIELD.TYPE_UINT64,
    "float": _FIELD.TYPE_FLOAT,
    "double": _FIELD.TYPE_DOUBLE,
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
    "DataType": _FIELD.TYPE_ENUM,
}

# A line is "number name type": "type*" is a repeated field, "<type>" a map from strings, and of the
# fields "type?" a message has one.
_NAMED_VERSION = ("1 name string", "2 version string")
_MESSAGES: dict[str, tuple[str, ...]] = {
    "ServerLiveRequest": (),
    "ServerLiveResponse": ("1 live bool",),
    "ServerReadyRequest": (),
    "ServerReadyResponse": ("1 ready bool",),
    "ModelReadyRequest": _NAMED_VERSION,
    "ModelReadyResponse": ("1 ready bool",),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": ("1 name string", "2 version string", "3 extensions string*"),
    "ModelMetadataRequest": _NAMED_VERSION,
    "ModelMetadataResponse": (
        "1 name string",
        "2 versions string*",
        "3 platform string",
        "4 inputs ModelMetadataResponse.TensorMetadata*",
        "5 outputs ModelMetadataResponse.TensorMetadata*",
    ),
    "ModelMetadataResponse.TensorMetadata": (
        "1 name string",
        "2 datatype string",
        "3 shape int64*",
    ),
    "InferParameter": (
        "1 bool_param bool?",
        "2 int64_param int64?",
        "3 string_param string?",
        "4 double_param double?",
        "5 uint64_param uint64?",
    ),
    "InferTensorContents": (
        "1 bool_contents bool*",
        "2 int_contents int32*",
        "3 int64_contents int64*",
        "4 uint_contents uint32*",
        "5 uint64_contents uint64*",
        "6 fp32_contents float*",
        "7 fp64_contents double*",
        "8 bytes_contents bytes*",
    ),
    "ModelInferRequest": (
        "1 model_name string",
        "2 model_version string",
        "3 id string",
        "4 parameters <InferParameter>",
        "5 inputs ModelInferRequest.InferInputTensor*",
        "6 outputs ModelInferRequest.InferRequestedOutputTensor*",
        "7 raw_input_contents bytes*",
    ),
    "ModelInferRequest.InferInputTensor": (
        "1 name string",
        "2 datatype string",
        "3 shape int64*",
        "4 parameters <InferParameter>",
        "5 contents InferTensorContents",
    ),
    "ModelInferRequest.InferRequestedOutputTensor": (
        "1 name string",
        "2 parameters <InferParameter>",
    ),
    "ModelInferResponse": (
        "1 model_name string",
        "2 model_version string",
        "3 id string",
        "4 parameters <InferParameter>",
        "5 outputs ModelInferResponse.InferOutputTensor*",
        "6 raw_output_contents bytes*",
    ),
    "ModelInferResponse.InferOutputTensor": (
        "1 name string",
        "2 datatype string",
        "3 shape int64*",
        "4 parameters <InferParameter>",
        "5 contents InferTensorContents",
    ),
    "ModelConfigRequest": _NAMED_VERSION,
    "ModelConfigResponse": ("1 config ModelConfig",),
    "ModelConfig": (
        "1 name string",
        "2 platform string",
        "4 max_batch_size int32",
        "5 input ModelInput*",
        "6 output ModelOutput*",
        "17 backend string",
    ),
    "ModelInput": ("1 name string", "2 data_type DataType", "4 dims int64*"),
    "ModelOutput": ("1 name string", "2 data_type DataType", "3 dims int64*"),
    "ModelStatisticsRequest": _NAMED_VERSION,
    "ModelStatisticsResponse": ("1 model_stats ModelStatistics*",),
    "ModelStatistics": (
        "1 name string",
        "2 version string",
        "3 last_inference uint64",
        "4 inference_count uint64",
        "5 execution_count uint64",
        "6 inference_stats InferStatistics",
        "7 batch_stats InferBatchStatistics*",
    ),
    "InferStatistics": (
        "1 success StatisticDuration",
        "2 fail StatisticDuration",
        "3 queue StatisticDuration",
        "4 compute_input StatisticDuration",
        "5 compute_infer StatisticDuration",
        "6 compute_output StatisticDuration",
    ),
    "InferBatchStatistics": (
        "1 batch_size uint64",
        "2 compute_input StatisticDuration",
        "3 compute_infer StatisticDuration",
        "4 compute_output StatisticDuration",
    ),
    "StatisticDuration": ("1 count uint64", "2 ns uint64"),
    "ModelRepositoryParameter": (
        "1 bool_param bool?",
        "2 int64_param int64?",
        "3 string_param string?",
        "4 bytes_param bytes?",
    ),
    "RepositoryIndexRequest": ("1 repository_name string", "2 ready bool"),
    "RepositoryIndexResponse": ("1 models RepositoryIndexResponse.ModelIndex*",),
    "RepositoryIndexResponse.ModelIndex": (
        "1 name string",
        "2 version string",
        "3 state string",
        "4 reason string",
    ),
    "RepositoryModelLoadRequest": (
        "1 repository_name string",
        "2 model_name string",
        "3 parameters <ModelRepositoryParameter>",
    ),
    "RepositoryModelLoadResponse": (),
    "RepositoryModelUnloadRequest": (
        "1 repository_name string",
        "2 model_name string",
        "3 parameters <ModelRepositoryParameter>",
    ),
    "RepositoryModelUnloadResponse": (),
}

# Numbered from 0.
_DATA_TYPES = [
    "INVALID",
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "STRING",
    "BF16",
]


def _add_field(message: descriptor_pb2.DescriptorProto, full_name: str, line: str) -> None:
    number, name, kind = line.split()
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    if kind.startswith("<"):
        entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add_field(entry, f"{full_name}.{entry_name}", "1 key string")
        _add_field(entry, f"{full_name}.{entry_name}", f"2 value {kind[1:-1]}")
        kind = f"{full_name}.{entry_name}*"
    if kind.endswith("?"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if kind.endswith("*"):
        field.label = _FIELD.LABEL_REPEATED
    kind = kind.rstrip("*?")
    field.type = _SCALARS.get(kind, _FIELD.TYPE_MESSAGE)
    if field.type in (_FIELD.TYPE_MESSAGE, _FIELD.TYPE_ENUM):
        field.type_name = f".{_PACKAGE}.{kind}"


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="torchembed/inference.proto", package=_PACKAGE, syntax="proto3"
    )
    data_type = file.enum_type.add(name="DataType")
    for number, name in enumerate(_DATA_TYPES):
        data_type.value.add(name=f"TYPE_{name}", number=number)
    messages: dict[str, descriptor_pb2.DescriptorProto] = {}
    for full_name, lines in _MESSAGES.items():
        outer, _, name = full_name.rpartition(".")
        message = (messages[outer].nested_type if outer else file.message_type).add(name=name)
        messages[full_name] = message
        for line in lines:
            _add_field(message, full_name, line)
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())  # type: ignore[attr-defined]


def message_class(name: str) -> type[Any]:
    """The class of a message, by its name in the package."""
    descriptor = _pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")
    kind: type[Message] = message_factory.GetMessageClass(descriptor)
    return kind


ModelInferRequest = message_class("ModelInferRequest")
ModelInferResponse = message_class("ModelInferResponse")
