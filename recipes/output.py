"""The folder that a run writes to, and the earlier run that it goes on from."""

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.launch import launch_id
from torchembed.core import ranks

RUNS = Path("runs")
CONFIG_FILE = "config.txt"
"""The config of a run, for people."""
_ARGUMENTS_FILE = "arguments.json"
_CHECKPOINTS = "step-*"


def prepare_output(
    output: Path | None, recipe: str, arguments: Sequence[str], *, is_resumed: bool = False
) -> Path:
    """Make the run's folder, try to write there, and note how the run was started.

    Processes that ``torchrun`` starts again get the folder of those before them: the one that the
    same launch (:func:`~recipes.launch.launch_id`) has noted with the same arguments. Every rank
    must call it.

    Args:
        output: the folder; ``runs/<recipe>-<time>`` where None.
        recipe: its name.
        arguments: all others of the command line.
        is_resumed: whether the folder is one that :func:`earlier_arguments` has read.

    Raises:
        FileExistsError: where the folder holds files of another launch, which a new run would
            overwrite.
        OSError: where it cannot be made or written to.
    """

    def prepare() -> Path | OSError:
        note = {"recipe": recipe, "arguments": list(arguments), "launch": launch_id()}
        folder = output or _folder_of(note) or RUNS / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
        return _try_prepare(folder, note, is_resumed=is_resumed)

    result = ranks.from_first_rank(prepare() if ranks.rank() == 0 else None)
    if isinstance(result, OSError):
        raise result
    assert result is not None  # the first rank made a folder or failed
    return result


@contextlib.contextmanager
def earlier_notes_kept(folder: Path | None) -> Iterator[None]:
    """Inside it a run goes on in ``folder``. Where that fails before a checkpoint is saved, the
    notes of how the run was started are put back: other arguments do not take the place of those
    that belong to its checkpoints. None for a run that begins."""
    if folder is None or ranks.rank() != 0:
        yield
        return
    notes = [folder / name for name in (_ARGUMENTS_FILE, CONFIG_FILE)]
    texts = {path: path.read_text() for path in notes if path.is_file()}
    saved = set(folder.rglob(_CHECKPOINTS))
    try:
        yield
    except Exception:
        if set(folder.rglob(_CHECKPOINTS)) == saved:
            for path, text in texts.items():
                _write(path, text)
        raise


def _write(path: Path, text: str) -> None:
    """Write a file that is whole whenever it is there."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def _folder_of(note: dict[str, Any]) -> Path | None:
    """The newest folder under ``runs`` in which processes of the same launch wrote ``note``."""
    folders = (path.parent for path in _notes_of(note["recipe"]))
    return next((folder for folder in folders if _is_started_again(folder, note)), None)


def _is_started_again(folder: Path, note: dict[str, Any]) -> bool:
    """True if ``torchrun`` has started the run of ``folder`` with ``note``, and does so again."""
    path = folder / _ARGUMENTS_FILE
    return note["launch"] is not None and path.is_file() and json.loads(path.read_text()) == note


def _try_prepare(folder: Path, note: dict[str, Any], *, is_resumed: bool) -> Path | OSError:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_known = is_resumed or _is_started_again(folder, note)
        if any(folder.iterdir()) and not is_known:
            return FileExistsError(
                f"output folder {folder} holds files already; name another with --output, or go "
                "on with its run with --resume"
            )
        _write(folder / _ARGUMENTS_FILE, json.dumps(note) + "\n")
    except OSError as error:
        return type(error)(
            f"output folder {folder} cannot be written ({error}); name another with --output"
        )
    return folder.resolve()


def _notes_of(recipe: str) -> list[Path]:
    """How the runs of ``recipe`` under ``runs`` were started, the newest first."""
    return sorted(RUNS.glob(f"{recipe}-*/{_ARGUMENTS_FILE}"), reverse=True)


def newest_run(recipe: str) -> Path:
    """The folder under ``runs`` of the run of ``recipe`` that was started last.

    Raises:
        FileNotFoundError: where there is none.
    """
    found = _notes_of(recipe)
    if not found:
        raise FileNotFoundError(
            f"{RUNS.resolve()} holds no run of {recipe} to go on with; name its folder after "
            "--resume"
        )
    return found[0].parent


def earlier_arguments(folder: Path, recipe: str, flag: str = "--resume") -> list[str]:
    """The arguments with which the run in ``folder``, which ``flag`` names, was started.

    Raises:
        FileNotFoundError: where no run was started there.
        ValueError: where it is a run of another recipe.
    """
    path = folder / _ARGUMENTS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{flag} names {folder}, and no run was started there")
    note = json.loads(path.read_text())
    if note["recipe"] != recipe:
        raise ValueError(
            f"{flag} names {folder}, a run of {note['recipe']}, and the recipe to go on with is "
            f"{recipe}; give {note['recipe']} as the recipe, or name another folder"
        )
    return note["arguments"]
