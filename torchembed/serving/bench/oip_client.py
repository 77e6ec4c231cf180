"""Connections to a server of the Open Inference Protocol, by ``tritonclient``."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np


class OipClient:
    """One connection over HTTP, with tensors as bytes, or over gRPC; a context manager that closes
    it, all in one thread.

    Args:
        url: ``host:port``.
        protocol: ``"http"`` or ``"grpc"``.
        model: that is asked.

    Raises:
        ModuleNotFoundError: where ``tritonclient`` is not installed.
    """

    def __init__(self, url: str, protocol: str, model: str) -> None:
        try:
            if protocol == "grpc":
                import tritonclient.grpc as client
            else:
                import tritonclient.http as client
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "the load generator needs tritonclient: pip install 'torchembed[bench]'"
            ) from None
        self._client: Any = client
        self._connection: Any = client.InferenceServerClient(url)
        self._is_grpc, self._model = protocol == "grpc", model

    def inputs(self) -> Sequence[Mapping[str, Any]]:
        """Name, datatype and shape of each input of the model.

        Raises:
            LookupError: where the server does not describe the model; it says why.
        """
        from tritonclient.utils import InferenceServerException

        as_json = {"as_json": True} if self._is_grpc else {}
        try:
            return self._connection.get_model_metadata(self._model, **as_json)["inputs"]
        except InferenceServerException as error:
            raise LookupError(
                f"model {self._model!r} must be one that the server describes, and it says: {error}"
            ) from error

    def prepared(self, arrays: Mapping[str, np.ndarray]) -> list[Any]:
        """A request of ``arrays``, for :meth:`ask`."""
        from tritonclient.utils import np_to_triton_dtype

        tensors = []
        for name, array in arrays.items():
            datatype = np_to_triton_dtype(array.dtype)
            tensor = self._client.InferInput(name, list(array.shape), datatype)
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        return tensors

    def ask(self, request: list[Any]) -> None:
        """Ask a prepared request, and return when it is answered."""
        self._connection.infer(self._model, request)

    def version(self, request: list[Any]) -> str:
        """The version that answers a prepared request."""
        response = self._connection.infer(self._model, request).get_response()
        return response.model_version if self._is_grpc else response["model_version"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()
