"""The log that MLPerf's compliance checker reads.

The keys and their order are those of the rules for ``dlrm_dcnv2``
(https://github.com/mlcommons/logging, ``compliance_checker/training_5.1.0``).
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchembed.core.ranks import rank

LOG_FILE = "mlperf.log"
_BENCHMARK = "dlrm_dcnv2"


class MlperfLog:
    """Writes ``:::MLLOG`` lines to ``mlperf.log`` in ``folder``, on rank 0 alone.

    It begins with ``cache_clear``, false since nothing here clears the system's caches, and
    ``init_start``.
    """

    def __init__(self, folder: Path) -> None:
        self._file = (folder / LOG_FILE).open("w") if rank() == 0 else None
        self._event("cache_clear", False)
        self._event("init_start", kind="INTERVAL_START")

    def describe(
        self, *, division: str, org: str, platform: str, values: Mapping[str, Any]
    ) -> None:
        """Who ran what, where, and ``values`` of the run by the rules' keys."""
        self._event("submission_benchmark", _BENCHMARK)
        self._event("submission_org", org)
        self._event("submission_division", division)
        self._event("submission_status", "onprem")
        self._event("submission_platform", platform)
        for key, value in values.items():
            self._event(key, value)

    def start_run(self, epoch: float) -> None:
        """All is set up; from here on the data may be read and the time counts."""
        self._event("init_stop", kind="INTERVAL_END")
        self._event("run_start", kind="INTERVAL_START")
        self._event("epoch_start", kind="INTERVAL_START", epoch_num=epoch)

    def start_evaluation(self, epoch: float) -> None:
        """After ``epoch`` passes over the training rows."""
        self._event("eval_start", kind="INTERVAL_START", epoch_num=epoch)

    def stop_evaluation(self, epoch: float, auc: float) -> None:
        """With the result of what was started last."""
        self._event("eval_accuracy", auc, epoch_num=epoch)
        self._event("eval_stop", kind="INTERVAL_END", epoch_num=epoch)

    def stop_run(self, epoch: float, *, is_success: bool) -> None:
        """The last line."""
        self._event("epoch_stop", kind="INTERVAL_END", epoch_num=epoch)
        status = "success" if is_success else "aborted"
        self._event("run_stop", kind="INTERVAL_END", status=status)
        if self._file is not None:
            self._file.close()

    def _event(
        self, key: str, value: Any = None, kind: str = "POINT_IN_TIME", **metadata: Any
    ) -> None:
        if self._file is None:
            return
        line = {
            "namespace": "",
            "time_ms": int(time.time() * 1000),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": metadata,
        }
        self._file.write(f":::MLLOG {json.dumps(line)}\n")
        self._file.flush()
