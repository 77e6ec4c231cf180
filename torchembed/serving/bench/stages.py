"""Times of a server's stages, out of its metrics before and after a load."""

import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

_DURATIONS = {
    "nv_inference_queue_duration_us": "queue",
    "nv_inference_compute_input_duration_us": "input",
    "nv_inference_compute_infer_duration_us": "model",
    "nv_inference_compute_output_duration_us": "output",
}
_STAGES = "torchembed_lookup_stage_seconds_total"
_HITS, _MISSES = "torchembed_cache_hits_total", "torchembed_cache_misses_total"


def read_totals(url: str) -> dict[str, float]:
    """The seconds of each stage that the metrics of a server tell, over all models, and ids that
    were cached (``hits``) and not (``misses``).

    Args:
        url: of the page of metrics.

    Raises:
        OSError: where there is none.
    """
    with urllib.request.urlopen(url, timeout=30) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in _DURATIONS:
                name, value = _DURATIONS[sample.name], sample.value * 1e-6
            elif sample.name == _STAGES:
                name, value = f"lookup {sample.labels['stage']}", sample.value
            elif sample.name in (_HITS, _MISSES):
                name, value = sample.name.split("_")[2], sample.value
            else:
                continue
            found[name] = found.get(name, 0.0) + value
    return found


def milliseconds_each(
    before: Mapping[str, float], after: Mapping[str, float], num_requests: int
) -> dict[str, float]:
    """The milliseconds of a request in each stage, on average; the stages of lookups are parts of
    ``model``."""
    return {
        name: 1000 * (total - before.get(name, 0.0)) / max(1, num_requests)
        for name, total in after.items()
        if name not in ("hits", "misses")
    }


def hit_rate(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """The part of the ids that were cached; None where no id was looked up."""
    hits, misses = (after.get(n, 0.0) - before.get(n, 0.0) for n in ("hits", "misses"))
    return hits / (hits + misses) if hits + misses else None
