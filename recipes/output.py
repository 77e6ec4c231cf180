"""Where a run writes."""

import time
from pathlib import Path

from torchembed.training import ranks


def prepare_output(output: Path | None, recipe: str) -> Path:
    """Make the run's folder, and try to write there; every rank must call it.

    Args:
        output: the folder; ``runs/<recipe>-<time>`` where None.

    Raises:
        FileExistsError: where the folder holds files already, which the run would overwrite.
        OSError: where it cannot be made or written to.
    """
    result = ranks.from_first_rank(_try_prepare(output, recipe) if ranks.rank() == 0 else None)
    if isinstance(result, OSError):
        raise result
    return result


def _try_prepare(output: Path | None, recipe: str) -> Path | OSError:
    folder = output or Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            return FileExistsError(
                f"output folder {folder} holds files already; name another with --output"
            )
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return type(error)(
            f"output folder {folder} cannot be written ({error}); name another with --output"
        )
    return folder.resolve()
