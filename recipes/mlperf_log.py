"""The log that MLPerf's compliance checker reads, written by MLPerf's own package.

The keys and their order are those of the rules for ``dlrm_dcnv2``
(https://github.com/mlcommons/logging, ``compliance_checker/training_5.1.0``).
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchembed.core.ranks import rank

LOG_FILE = "mlperf.log"
_BENCHMARK = "dlrm_dcnv2"


class MlperfLog:
    """Writes ``:::MLLOG`` lines to ``mlperf.log`` in ``folder``, on rank 0 alone.

    It begins with ``cache_clear``, false since nothing here clears the system's caches, and
    ``init_start``. Each line names the place in the recipe that it comes from.

    Raises:
        ImportError: where the package mlperf-logging is not installed; on every rank.
    """

    def __init__(self, folder: Path) -> None:
        # On every rank, so that none goes on alone.
        try:
            from mlperf_logging.mllog.mllog import MLLogger  # type: ignore[import-not-found]
        except ImportError as error:
            raise ImportError(
                "mlperf_log needs the package mlperf-logging, and it cannot be imported "
                f"({error}); pip install mlperf-logging, or leave it out"
            ) from error
        path = folder / LOG_FILE
        self._handler = logging.FileHandler(path, "w") if rank() == 0 else logging.NullHandler()
        # Outside logging's tree: each log has its own file, and nothing else may write to it.
        logger = logging.Logger(__name__, logging.INFO)  # noqa: LOG001
        logger.addHandler(self._handler)
        self._log = MLLogger(logger, default_stack_offset=2)
        self._log.event("cache_clear", False)
        self._log.start("init_start")

    def describe(
        self, *, division: str, org: str, platform: str, values: Mapping[str, Any]
    ) -> None:
        """Log the submission, and ``values`` of the run by the rules' keys."""
        submission = {
            "submission_benchmark": _BENCHMARK,
            "submission_org": org,
            "submission_division": division,
            "submission_status": "onprem",
            "submission_platform": platform,
        }
        for key, value in (submission | dict(values)).items():
            self._log.event(key, value)

    def start_run(self, epoch: float) -> None:
        """Log that all is set up; from here on the data may be read and the time counts."""
        self._log.end("init_stop")
        self._log.start("run_start")
        self._log.start("epoch_start", metadata={"epoch_num": epoch})

    def start_evaluation(self, epoch: float) -> None:
        """Log that an evaluation begins, after ``epoch`` passes over the training rows."""
        self._log.start("eval_start", metadata={"epoch_num": epoch})

    def stop_evaluation(self, epoch: float, auc: float) -> None:
        """Log the result of the evaluation that began last."""
        self._log.event("eval_accuracy", auc, metadata={"epoch_num": epoch})
        self._log.end("eval_stop", metadata={"epoch_num": epoch})

    def stop_run(self, epoch: float, *, is_success: bool) -> None:
        """Log the end of the run, and close the file."""
        self._log.end("epoch_stop", metadata={"epoch_num": epoch})
        status = "success" if is_success else "aborted"
        self._log.end("run_stop", metadata={"status": status})
        self._handler.close()
