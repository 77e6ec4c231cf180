"""Totals of lookups, levels and updates, by the names that Prometheus reads."""

from collections.abc import Iterator

from torchembed.serving.configuration import VolatileConfig
from torchembed.serving.levels import LeveledLookup, LookupStatistics
from torchembed.serving.models import ModelRepository
from torchembed.serving.protocols import ExecutionTotals, HistogramTotal, MetricKind, MetricTotal
from torchembed.serving.updates import UpdateApplier
from torchembed.stores import RedisStore, VolatileMemoryStore

_COUNTER, _GAUGE = MetricKind.COUNTER, MetricKind.GAUGE


def batch_totals(repository: ModelRepository) -> list[ExecutionTotals]:
    """Totals of the batches of all models that have any, by version."""
    return [ExecutionTotals(*totals) for totals in repository.batches()]


def lookup_totals(repository: ModelRepository) -> Iterator[MetricTotal]:
    """Totals of all lookups of a repository, by table, level and stage."""
    by_lookup: dict[int, LeveledLookup] = {id(u): u for u in repository.lookups().values()}
    for number, lookup in enumerate(by_lookup.values()):
        found = lookup.statistics()
        yield from _of_lookup(found, str(number))
        yield from _of_tables(found)
        yield from _of_levels(found, str(number))


def _of_lookup(found: LookupStatistics, number: str) -> Iterator[MetricTotal]:
    labels = {"lookup": number}
    for name, help_text, value in (
        ("lookups", "Lookups of whole requests or batches", found.num_lookups),
        ("lookup_keys", "Ids that were looked up", found.num_requested_ids),
        ("lookup_missed_keys", "Ids that were not cached", found.num_missed_ids),
        ("lookup_default_keys", "Ids that were answered by default rows", found.num_default_ids),
        ("refreshed_rows", "Cached rows that were read again", found.num_refreshed_rows),
        ("dropped_insertions", "Lookups not inserted behind", found.num_dropped_insertions),
        ("failed_insertions", "Lookups whose insertion failed", found.num_failed_insertions),
    ):
        yield MetricTotal(f"torchembed_{name}_total", _COUNTER, help_text, labels, value)
    for stage, seconds in found.seconds.items():
        yield MetricTotal(
            "torchembed_lookup_stage_seconds_total",
            _COUNTER,
            "Time of lookups in each stage",
            {**labels, "stage": stage},
            seconds,
        )


def _of_tables(found: LookupStatistics) -> Iterator[MetricTotal]:
    for table, counts in found.tables.items():
        labels = {"table": table}
        for name, kind, help_text, value in (
            ("cache_hits_total", _COUNTER, "Ids that were cached", counts.num_hits),
            ("cache_misses_total", _COUNTER, "Ids that were not cached", counts.num_misses),
            ("cache_evicted_rows_total", _COUNTER, "Rows that left", counts.num_evictions),
            ("cache_rows", _GAUGE, "Rows that are cached", counts.num_rows),
            ("cache_capacity_rows", _GAUGE, "Rows that there is room for", counts.capacity),
        ):
            yield MetricTotal(f"torchembed_{name}", kind, help_text, labels, value)


def _of_levels(found: LookupStatistics, number: str) -> Iterator[MetricTotal]:
    for level in found.levels:
        labels = {"lookup": number, "tier": level.name}
        for name, kind, help_text, value in (
            ("level_hits_total", _COUNTER, "Rows that a level answered", level.num_hits),
            ("level_promoted_rows_total", _COUNTER, "Rows put higher", level.num_promoted_rows),
            ("level_faults_total", _COUNTER, "Calls of a level that failed", level.num_faults),
            ("level_away", _GAUGE, "1 while a level is left out", level.is_away),
        ):
            yield MetricTotal(f"torchembed_{name}", kind, help_text, labels, value)


def eviction_totals(
    config: VolatileConfig, store: VolatileMemoryStore | RedisStore
) -> Iterator[MetricTotal]:
    """The total of rows that left the volatile level since partitions had too many."""
    yield MetricTotal(
        "torchembed_evicted_rows_total",
        _COUNTER,
        "Rows that this server evicted from partitions with too many",
        {"policy": config.overflow_policy.value, "tier": config.kind.value},
        store.num_evicted_rows,
    )


def update_totals(applier: UpdateApplier) -> Iterator[MetricTotal | HistogramTotal]:
    """Totals of the updates that came and were applied."""
    found, came = applier.statistics(), applier.source.statistics
    for name, help_text, value in (
        ("updates", "Applied updates of rows", found.num_updates),
        ("updated_rows", "Applied rows", found.num_rows),
        ("deleted_rows", "Applied deletions", found.num_deletions),
        ("dense_parts", "Applied dense parts", found.num_dense_parts),
        ("update_retries", "Updates that failed for now", found.num_retries),
        ("update_messages", "Messages that came", came.num_messages),
        (
            "update_messages_left",
            "Messages of models or versions not loaded yet",
            came.num_given_back,
        ),
        ("broker_errors", "Errors of brokers", came.num_broker_errors),
    ):
        yield MetricTotal(f"torchembed_{name}_total", _COUNTER, help_text, {}, value)
    dropped = {reason.value: count for reason, count in found.num_dropped.items()}
    dropped |= {fault.value: count for fault, count in dict(came.num_dropped).items()}
    for reason, count in dropped.items():
        yield MetricTotal(
            "torchembed_update_rejected_total",
            _COUNTER,
            "Updates and messages that were dropped",
            {"reason": reason},
            count,
        )
    yield MetricTotal(
        "torchembed_update_applier_running",
        _GAUGE,
        "0 where no update is applied any more, which the log explains",
        {},
        found.is_running,
    )
    yield MetricTotal(
        "torchembed_update_lag_seconds",
        _GAUGE,
        "How far updates are behind their publishers",
        {},
        found.lag.seconds,
    )
    yield MetricTotal(
        "torchembed_update_lag_messages", _GAUGE, "Messages to come", {}, found.lag.num_messages
    )
    for model, freshness in found.freshness.items():
        yield HistogramTotal(
            "torchembed_update_age_seconds",
            "From when an update was published until lookups saw it",
            {"model": model},
            freshness.upper_bounds,
            freshness.counts,
            freshness.sum_seconds,
        )
