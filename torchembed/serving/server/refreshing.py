"""Refreshes of a model's cache in regular intervals."""

import logging
import threading
from types import TracebackType
from typing import Self

from torchembed.serving.configuration import CacheConfig
from torchembed.serving.models import ModelRepository

_log = logging.getLogger("torchembed.serving")


class Refresher:
    """Reads a share of the cached rows of a model again from the levels, over and over; a context
    manager that starts and ends its thread.

    Args:
        repository: that has the model.
        model: its name.
        config: of its cache: how much is refreshed, and how often.
    """

    def __init__(self, repository: ModelRepository, model: str, config: CacheConfig) -> None:
        self._repository, self._model, self._config = repository, model, config
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cache refresher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        seconds = self._config.refresh_delay_seconds + self._config.refresh_interval_seconds
        while not self._ending.wait(seconds):
            seconds = self._config.refresh_interval_seconds
            # Tables of one form have one lookup.
            lookups = {id(v): v for v in self._repository.lookups_of(self._model).values()}
            for lookup in lookups.values():
                try:
                    lookup.refresh(self._config.refresh_share)
                except (OSError, RuntimeError):
                    # A level is away; the next refresh reads again.
                    _log.exception("the cache of model %s could not be refreshed", self._model)
