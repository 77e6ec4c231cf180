"""Receives updates of models from Kafka."""

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torchembed.streams.brokers import (
    BrokerErrors,
    check_answers,
    client_settings,
    kafka,
    made_client,
)
from torchembed.streams.message_error import MessageError
from torchembed.streams.received_messages import Received, ReceivedMessages, Update, WidthOf
from torchembed.streams.source_options import Lag, SourceOptions, SourceStatistics
from torchembed.streams.topics import contents_of
from torchembed.streams.updates import RowUpdate

_LOG = logging.getLogger("torchembed.streams")
_DISCOVERY_TIMEOUT_SECONDS = 1.0

_Place = tuple[str, int]
"""A topic and a partition of it."""


class UpdateSource:
    """Updates of models, in the order in which each partition of a topic has them.

    Instances of a group share the partitions: each message goes to one of them. Servers whose
    stores are their own therefore have a group each; those that share all of their stores may
    share one. A group that is new begins with the oldest messages that brokers still have. What was
    polled and not committed comes again after a restart, or to another instance.

    Topics are found by their names, new ones while it runs. Messages that cannot be read are
    dropped and counted by their fault. While brokers are away ``poll`` gives nothing, errors are
    counted, and it goes on by itself. It is a context manager that closes itself; one thread may
    use it at a time, and any may read ``statistics``.

    Args:
        brokers: ``host:port``, or several by commas.
        group: the name of the group.
        width_of: the width of the rows of a model's table, None for one that is not served, by
            which messages are refused; where it is None itself all are taken.
        is_served: says of a model whether its updates can be applied now, and where a version is
            given, whether those of this version can. Others are left with the brokers, uncommitted,
            until they can be; None for all models.

    Raises:
        ConnectionError: where no broker answers in time.
    """

    def __init__(
        self,
        brokers: str,
        group: str,
        options: SourceOptions | None = None,
        *,
        width_of: WidthOf | None = None,
        is_served: Callable[[str, int | None], bool] | None = None,
    ) -> None:
        if not group:
            raise ValueError("group must be a name, got ''; instances with equal names share")
        self.options = options or SourceOptions()
        self.statistics = SourceStatistics()
        self.num_assignments = 0
        """How often this instance was given partitions, which others may have read before."""
        self._brokers, self._group = brokers, group
        self._errors = BrokerErrors(brokers)
        self._received = ReceivedMessages(self.options, self.statistics, width_of)
        self._is_served = is_served
        self._topics: frozenset[str] = frozenset()
        self._given_back: set[str] = set()
        """Topics of which messages came and were left for later: no more of them are taken until
        they are read anew, from what was committed."""
        self._awaited: dict[str, int] = {}
        """Topics that are read again once a version is served, and this version."""
        self._next: dict[_Place, int] = {}
        """The offset behind what was polled of each partition that this instance has."""
        self._committed: dict[_Place, int] = {}
        self._last_published_at = time.time()
        self._told: set[object] = set()
        self._is_closed = False
        # Its own client: a consumer that is asked for all topics stops reading for half a second.
        self._topic_client = made_client(
            "Producer", client_settings(brokers, self.options, self._errors)
        )
        self._consumer = self._new_consumer()
        try:
            check_answers(self._topic_client, brokers, self.options)
            self._discover()
        except BaseException:
            self.close()
            raise

    def _new_consumer(self) -> Any:
        milliseconds = int(self.options.session_timeout_seconds * 1000)
        # Half a second by default, which brokers may take whatever comes meanwhile.
        settings: dict[str, Any] = {"fetch.wait.max.ms": 50}
        settings |= client_settings(self._brokers, self.options, self._errors) | {
            "group.id": self._group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": milliseconds,
            "heartbeat.interval.ms": max(milliseconds // 5, 20),
            "topic.metadata.refresh.interval.ms": 30_000,
            "partition.assignment.strategy": "cooperative-sticky",
            "on_commit": self._note_commit,
        }
        return made_client("Consumer", settings)

    @property
    def topics(self) -> frozenset[str]:
        """The topics that are read."""
        return self._topics

    @property
    def num_partitions(self) -> int:
        """Number of partitions that this instance has of its group's."""
        return len(self._consumer.assignment())

    def poll(self, timeout_seconds: float) -> list[Update]:
        """The updates that have come since, of at most ``max_messages`` messages; waits for the
        first one, and where brokers are away or new topics are looked for up to a second longer."""
        self._check_open()
        if time.monotonic() >= self._discover_at:
            self._discover()
        first = self._consumer.poll(timeout_seconds)
        self.statistics.num_broker_errors = self._errors.num_errors
        if first is None:
            return []
        updates = (self._update_of(message) for message in (first, *self._waiting_messages()))
        return [update for update in updates if update is not None]

    def commit(self) -> None:
        """Let what was polled so far not come again; it was applied. Does not wait: a commit that
        fails is counted, and made up for by the next."""
        self._check_open()
        due = {}
        for place, offset in self._next.items():
            needed = self._received.first_needed(*place)
            offset = offset if needed is None else min(offset, needed)
            if self._committed.get(place) != offset:
                due[place] = offset
        if not due:
            return
        # Noted before, since a failure takes it back.
        self._committed.update(due)
        offsets = [kafka().TopicPartition(*place, offset) for place, offset in due.items()]
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except kafka().KafkaException as error:
            self._note_commit(error.args[0], offsets)

    def give_back(self, update: Update) -> bool:
        """Leave an update for later, with all of its topic that is not committed, where its model
        or version is not served; True where that is so."""
        model, version = update.model, update.version
        if self._is_served is None or self._is_served(model, version):
            return False
        table = update.table if isinstance(update, RowUpdate) else ""
        for topic in self._topics:
            contents = contents_of(topic)
            if contents is not None and contents[1:] == (model, table):
                self._awaited[topic] = version
                self._give_back(topic)
                if (topic, version) not in self._told:
                    self._told.add((topic, version))
                    _LOG.warning(
                        "updates of %s wait with the brokers until version %d of the model, or a "
                        "later one, is loaded",
                        topic,
                        version,
                    )
        return True

    def lag(self) -> Lag:
        """The distance behind the publishers, as far as is known without asking brokers."""
        num_messages = 0
        for partition in self._consumer.assignment():
            low, high = self._consumer.get_watermark_offsets(partition, cached=True)
            after = self._next.get((partition.topic, partition.partition), max(low, 0))
            num_messages += max(high - after, 0)
        seconds = max(time.time() - self._last_published_at, 0.0) if num_messages else 0.0
        return Lag(num_messages, seconds)

    def close(self) -> None:
        """Leave the group; what was polled and not committed comes again. A second call does
        nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the source must be open, got a closed one; make another")

    def _discover(self) -> None:
        """Read further topics, where there are any."""
        self._discover_at = time.monotonic() + self.options.discovery_seconds
        try:
            names = self._topic_client.list_topics(timeout=_DISCOVERY_TIMEOUT_SECONDS).topics
        except kafka().KafkaException as error:
            self._errors.note(error.args[0].str())
            return
        # Those that are not read any more have nothing on the way. A topic that is wanted again
        # before it was taken from this instance would go on behind what was left.
        assigned = {partition.topic for partition in self._consumer.assignment()}
        self._given_back &= self._topics | assigned
        found = frozenset(filter(self._is_wanted, {*names, *self._topics}))
        self._awaited = {t: version for t, version in self._awaited.items() if t not in found}
        if not found and "topics" not in self._told:
            self._told.add("topics")
            _LOG.warning(
                "none of the %d topics of %s matches %s%s; looking on",
                len(names),
                self._brokers,
                " or ".join(self.options.topic_filters),
                "" if self.options.models is None else f" for models {self.options.models}",
            )
        if found != self._topics:
            _LOG.info("reading %d topics of %s: %s", len(found), self._brokers, sorted(found))
            self._topics = found
            self._subscribe()

    def _give_back(self, topic: str) -> None:
        self._given_back.add(topic)
        self._discover_at = time.monotonic()
        for place in [place for place in self._next if place[0] == topic]:
            del self._next[place]
            self._received.forget(*place)

    def _subscribe(self) -> None:
        if not self._topics:
            self._consumer.unsubscribe()
            return
        self._consumer.subscribe(
            sorted(self._topics),
            on_assign=self._note_assigned,
            on_revoke=self._forget,
            on_lost=self._forget,
        )

    def _is_wanted(self, topic: str) -> bool:
        contents = contents_of(topic)
        models = self.options.models
        return (
            contents is not None
            and (models is None or contents.model in models)
            and self.options.matches(topic)
            and topic not in self._given_back
            and (
                self._is_served is None or self._is_served(contents.model, self._awaited.get(topic))
            )
        )

    def _waiting_messages(self) -> list[Any]:
        """Messages that have come already, none where reading them fails: they come again."""
        try:
            return self._consumer.consume(self.options.max_messages - 1, 0)
        except kafka().KafkaException as error:
            self._errors.note(error.args[0].str())
            return []

    def _update_of(self, message: Any) -> Update | None:
        error = message.error()
        if error is not None:
            self._errors.note(error.str())
            if error.fatal():
                self._begin_anew()
            return None
        self._errors.note_answer()
        place = message.topic(), message.partition()
        if self._is_served is not None and not self._is_wanted(place[0]):
            self._give_back(place[0])
            self.statistics.num_given_back += 1
            return None
        kind, milliseconds = message.timestamp()
        is_known = kind != kafka().TIMESTAMP_NOT_AVAILABLE
        received = Received(
            *place,
            message.offset(),
            milliseconds / 1e3 if is_known else 0.0,
            message.value() or b"",
        )
        self._next[place] = received.offset + 1
        try:
            update = self._received.update_of(received)
        except MessageError as error:
            level = logging.DEBUG if (error.fault, place[0]) in self._told else logging.WARNING
            self._told.add((error.fault, place[0]))
            _LOG.log(level, "dropped message %d of %s [%d]: %s", received.offset, *place, error)
            return None
        if update is not None:
            self._last_published_at = update.origin.published_at
        return update

    def _begin_anew(self) -> None:
        """Take the place of a consumer that can do nothing more, as brokers have told it."""
        self._consumer.close()
        self._consumer = self._new_consumer()
        self._next.clear()
        self._committed.clear()
        self._subscribe()

    def _note_assigned(self, consumer: Any, partitions: list[Any]) -> None:
        """Note where a group that is not new begins, for :meth:`lag`."""
        self.num_assignments += 1
        try:
            known = consumer.committed(partitions, timeout=_DISCOVERY_TIMEOUT_SECONDS)
        except kafka().KafkaException as error:
            self._errors.note(error.args[0].str())
            return
        for partition in known:
            if partition.offset >= 0:
                place = partition.topic, partition.partition
                self._next[place] = self._committed[place] = partition.offset

    def _forget(self, consumer: Any, partitions: list[Any]) -> None:
        """Commit no more of partitions that another instance has now."""
        for partition in partitions:
            place = partition.topic, partition.partition
            self._next.pop(place, None)
            self._committed.pop(place, None)
            self._received.forget(*place)

    def _note_commit(self, error: Any, partitions: list[Any]) -> None:
        failed = [p for p in partitions if error is not None or p.error is not None]
        self.statistics.num_failed_commits += bool(failed)
        for partition in failed:
            self._committed.pop((partition.topic, partition.partition), None)
