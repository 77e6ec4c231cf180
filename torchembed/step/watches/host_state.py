"""State of the host that a forward changes and no graph does: random generators, and attributes of
modules."""

import collections
import contextlib
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from torchembed.core.random_numbers import saved_random_numbers
from torchembed.step.stages import Reason
from torchembed.step.trained_modules import TrainedModules
from torchembed.step.watches.dropout_states import DropoutStates
from torchembed.step.watches.read_values import CONTAINERS, ReadValues, values_read
from torchembed.step.watches.replaced_methods import forward_of
from torchembed.step.watches.watched_contents import small_arrays_in
from torchembed.step.watches.watched_values import OF_EVERY_MODULE, watched_modules

_NUM_OBSERVED = 2
"""The last steps before a capture that count: the first one may initialize what is drawn once."""

_READERS = ("torchembed: batches", "batch-feeder")
"""The beginnings of names of threads that read batches."""


class _Generator(NamedTuple):
    name: str
    get: Callable[[], Any]
    """Gets the state, which may be compared with ``==``."""
    set: Callable[[Any], object]


class HostState:
    """The random generators of the host, those among them that modules hold or code of forward and
    of the loss function reads, and the attributes of modules.

    Args:
        model: whose modules are looked at.
        device: of the steps. On a CPU torch's generator is the device's, whose numbers replays draw
            as the step does.
        loss_fn: of the pipeline, whose modules are looked at as well.
    """

    def __init__(self, model: nn.Module, device: torch.device, loss_fn: object = None) -> None:
        self._model, self._device, self._loss_fn = model, device, loss_fn
        self._dropout_states = DropoutStates(TrainedModules.of(model, loss_fn))
        self._drawn = collections.deque[str](maxlen=_NUM_OBSERVED)
        """For each of the last steps, the first generator that it drew from; empty for none."""

    @property
    def drawn(self) -> Reason | None:
        """The generator of the host that the last steps drew from; None without one."""
        what = "forward draws from it, which no graph repeats; draw on the device"
        return next((Reason(what, name) for name in self._drawn if name), None)

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """A context for a step, which notes the generators and dropout states that it draws from.

        No generator is noted while a thread of torchembed reads batches, which may draw as well.
        """
        with self._dropout_states.observed():
            if _reads_in_a_thread():
                yield
                return
            generators = self._generators()
            before = [generator.get() for generator in generators]
            yield
        states = zip(generators, before, strict=True)
        self._drawn.append(next((g.name for g, state in states if g.get() != state), ""))

    def saved(self) -> Callable[[], None]:
        """A function that puts everything back to where it is now, and with it random numbers of
        the device, dropout states of :meth:`observed` steps and what buffers hold."""
        generators = self._generators()
        states = [(generator, generator.get()) for generator in generators]
        attributes = [
            _saved_attributes(module) for _, module in watched_modules(self._model, self._loss_fn)
        ]
        restore_random_numbers = saved_random_numbers(self._device)
        restore_dropout_states = self._dropout_states.saved()
        trained = TrainedModules.of(self._model, self._loss_fn)
        buffers = [(buffer, buffer.clone()) for buffer in trained.buffers()]

        @torch.no_grad()
        def restore() -> None:
            for generator, state in states:
                generator.set(state)
            for restore_attributes in attributes:
                restore_attributes()
            restore_random_numbers()
            restore_dropout_states()
            for buffer, before in buffers:
                buffer.copy_(before)

        return restore

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context at whose end everything is put back, as :meth:`saved` does."""
        restore = self.saved()
        try:
            yield
        finally:
            restore()

    def _generators(self) -> list[_Generator]:
        found = [
            _Generator("Python's random", random.getstate, random.setstate),
            _of_numpy("NumPy's generator", np.random.mtrand._rand),
        ]
        if self._device.type != "cpu":
            found.append(_of_torch("torch's generator of the CPU", torch.default_generator))
        modules = dict(watched_modules(self._model, self._loss_fn))
        forwards = {type(module): forward_of(type(module)) for module in modules.values()}
        places = [ReadValues(w, vars(module), [*vars(module)]) for w, module in modules.items()]
        places += values_read(modules, forwards, self._loss_fn)
        seen = set[int]()
        for where, values, names in places:
            for name in names:
                value = values.get(name)
                generator = None if id(value) in seen else _generator(f"{name} of {where}", value)
                if generator is not None:
                    seen.add(id(value))
                    found.append(generator)
        return found


def _generator(name: str, value: object) -> _Generator | None:
    """The generator that ``value`` is; None where it is none of the host's."""
    if isinstance(value, random.Random):
        return _Generator(name, value.getstate, value.setstate)
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        return _of_numpy(name, value)
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return _of_torch(name, value)
    return None


def _of_numpy(name: str, generator: np.random.Generator | np.random.RandomState) -> _Generator:
    def get() -> bytes:
        if isinstance(generator, np.random.Generator):
            return pickle.dumps(generator.bit_generator.state)
        return pickle.dumps(generator.get_state(legacy=False))

    def put(state: bytes) -> None:
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = pickle.loads(state)
        else:
            generator.set_state(pickle.loads(state))

    return _Generator(name, get, put)


def _of_torch(name: str, generator: torch.Generator) -> _Generator:
    def put(state: bytes) -> None:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return _Generator(name, lambda: generator.get_state().numpy().tobytes(), put)


def _reads_in_a_thread() -> bool:
    return any(thread.name.startswith(_READERS) for thread in threading.enumerate())


def _saved_attributes(module: nn.Module) -> Callable[[], None]:
    """A function that puts back attributes and buffers of ``module``, items of its lists, dicts and
    sets, and elements of its small NumPy arrays."""
    attributes, buffers = dict(vars(module)), dict(module._buffers)
    contents = [
        (value, value.copy())
        for name, value in attributes.items()
        if name not in OF_EVERY_MODULE and isinstance(value, CONTAINERS)
    ]
    arrays = [(a, a.copy()) for value in attributes.values() for a in small_arrays_in(value)]

    def restore() -> None:
        for array, elements in arrays:
            array[...] = elements
        now = vars(module)
        for name in now.keys() - attributes.keys():
            del now[name]
        now.update(attributes)
        module._buffers.clear()
        module._buffers.update(buffers)
        for container, before in contents:
            container.clear()
            if isinstance(container, (dict, set)):
                container.update(before)
            else:
                container.extend(before)

    return restore
