"""The topics that messages of models and tables are sent to."""

import re
from typing import NamedTuple

MAX_NAME_CHARACTERS = 120
_MODEL = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME_CHARACTERS}}}")
_TABLE = re.compile(rf"[a-zA-Z0-9._-]{{1,{MAX_NAME_CHARACTERS}}}")

ROWS, DENSE, HUGECTR = "torchembed", "torchembed-dense", "hps_et"
"""The first words of topics: of our messages of rows and of dense parts, and of HugeCTR's."""
DEFAULT_FILTER = r"(torchembed|hps_et)\..+\..+|torchembed-dense\..+"
"""Matches the topics of all models and tables."""


class TopicContents(NamedTuple):
    """The contents of a topic, as its name says."""

    kind: str
    """``ROWS``, ``DENSE`` or ``HUGECTR``."""
    model: str
    table: str
    """Empty for the dense part."""


def topic_of(contents: TopicContents) -> str:
    """The name of a topic.

    Raises:
        ValueError: for a name of a model or a table that no topic can have.
    """
    check_model_name(contents.model)
    if contents.kind == DENSE:
        return f"{DENSE}.{contents.model}"
    if not _TABLE.fullmatch(contents.table):
        raise ValueError(
            f"table must have 1 to {MAX_NAME_CHARACTERS} letters, digits, '.', '_' and '-' to be "
            f"in the name of a topic, got {contents.table!r}; rename it"
        )
    return f"{contents.kind}.{contents.model}.{contents.table}"


def check_model_name(model: str) -> None:
    """Raise ``ValueError`` for a name that no topic can have, where a dot would end it."""
    if not _MODEL.fullmatch(model):
        raise ValueError(
            f"model must have 1 to {MAX_NAME_CHARACTERS} letters, digits, '_' and '-' to be in the "
            f"name of a topic, got {model!r}; rename it"
        )


def contents_of(topic: str) -> TopicContents | None:
    """The contents that the name of a topic says; None where it is no topic of updates."""
    kind, _, rest = topic.partition(".")
    model, _, table = rest.partition(".")
    if not _MODEL.fullmatch(model):
        return None
    if kind == DENSE:
        return None if table else TopicContents(kind, model, "")
    if kind not in (ROWS, HUGECTR) or not _TABLE.fullmatch(table):
        return None
    return TopicContents(kind, model, table)
