"""Deployed models in Triton: written into its repositories, and loaded in its processes."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchembed.serving.configuration import ModelConfig, ServerConfig, read_config
from torchembed.serving.interface import Answer, ModelForm
from torchembed.serving.models import (
    ModelRepository,
    models_in,
    read_description,
    version_folder,
    versions_in,
)
from torchembed.serving.server.lookups import model_options
from torchembed.serving.server.stores import loads_rows, open_stores
from torchembed.serving.triton.repository import TritonOptions, write_triton_model


class DeployedModel:
    """A version of a deployed model, with stores and a cache of its own
    (:class:`~torchembed.serving.interface.ServedModel`).

    Args:
        name: of the model.
        version: that answers.
        models_folder: that :func:`~torchembed.serving.models.deploy` wrote into.
        config: a file with the configuration of a server, of which the stores and the model's own
            part count; None for rows in memory.

    Raises:
        ValueError, OSError: where it cannot be loaded.
    """

    def __init__(
        self, name: str, version: str, *, models_folder: str, config: str | None = None
    ) -> None:
        server = ServerConfig(models_folder=Path(models_folder))
        if config is not None:
            server = read_config(config, models_folder=models_folder)
        chosen = next((m for m in server.models if m.name == name), ModelConfig(name=name))
        # Triton says which version there is, and gathers the requests itself.
        described = {"versions": (int(version),), "num_latest_versions": 1, "batching": None}
        chosen = ModelConfig(**{**vars(chosen), **described})
        with contextlib.ExitStack() as opening:
            stores = open_stores(server, opening)
            options = model_options(chosen, stores)
            repository = ModelRepository(
                models_folder,
                options,
                models={name: options},
                records=stores.records,
                is_loading=loads_rows(server),
            )
            opening.enter_context(repository)
            repository.start()
            self._model = repository.model(name)
            self._opened = opening.pop_all()

    @property
    def form(self) -> ModelForm:
        return self._model.form

    def answer(
        self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
    ) -> Answer:
        return self._model.answer(inputs, outputs)

    def close(self) -> None:
        """Let go of the model and its stores."""
        self._opened.close()


def write_triton_repository(
    models_folder: str | Path,
    output: str | Path,
    *,
    names: Sequence[str] | None = None,
    config: str | Path | None = None,
    options: TritonOptions | None = None,
) -> list[Path]:
    """Write the newest version of each deployed model into a Triton model repository, each model
    atomically. Triton's processes read rows and weights out of ``models_folder``.

    Args:
        models_folder: that :func:`~torchembed.serving.models.deploy` wrote into.
        output: the repository; made where there is none. Models of other names stay in it.
        names: of the models; None for all.
        config: a file with the configuration of a server, as :class:`DeployedModel` takes it.
        options: how Triton runs each of them.

    Returns:
        The models' folders in the repository.

    Raises:
        ValueError: for a name that no model has, and where Triton cannot serve a model.
    """
    models, arguments = Path(models_folder), dict[str, Any]()
    arguments["models_folder"] = str(models.resolve())
    if config is not None:
        read_config(config, models_folder=str(models))
        arguments["config"] = str(Path(config).resolve())
    known = models_in(models)
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise ValueError(f"names must be among {known}, the models of {models}, got {unknown}")
    loader = f"{DeployedModel.__module__}:{DeployedModel.__name__}"
    return [
        write_triton_model(Path(output), _newest_form(models, name), loader, arguments, options)
        for name in (known if names is None else names)
    ]


def _newest_form(models: Path, name: str) -> ModelForm:
    newest = versions_in(models, name)[-1]
    return read_description(version_folder(models, name, newest)).form()
