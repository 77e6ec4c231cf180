"""Arguments that make recipes small."""

import json
from pathlib import Path
from typing import Any

from recipes.train import main

SMALL_DLRM = [
    *("--embedding-dim", "4", "--dense-arch", "8", "4", "--over-arch", "8", "1"),
    *("--num-cross-layers", "2", "--low-rank", "2", "--max-table-rows", "50"),
]
SMALL_CTR = [
    *("--embedding-dim", "4", "--layer-sizes", "8", "--batch-size", "64"),
    *("--max-epochs", "2", "--seeds", "1", "2"),
]


def lines_of_dlrm(output: Path, *flags: object) -> list[dict[str, Any]]:
    """The metrics of a small run of ``dlrm_dcnv2``, less its times."""
    arguments = [
        "dlrm_dcnv2", "--output", output, *SMALL_DLRM, "--max-table-rows", 400,
        "--click-log.num-train", 400, "--click-log.num-held-out", 100, "--batch-size", 32,
        "--evaluate-every", 6, "--read-loss-every", 4, "--learning-rate", 0.05, *flags,
    ]  # fmt: skip
    main([str(argument) for argument in arguments])
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    measured = ("time", "samples_per_second")
    return [{k: v for k, v in line.items() if k not in measured} for line in lines]
