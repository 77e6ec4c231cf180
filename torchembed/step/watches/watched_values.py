"""Values of a model and its optimizers that Python may change, and that a CUDA graph holds as they
were when it was captured."""

import collections
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from types import FunctionType
from typing import NamedTuple

import torch
from torch import nn

from torchembed.modules.table_module import TableModule, TableWeight
from torchembed.step.stages import Reason
from torchembed.step.watches.read_values import (
    CONTAINERS,
    MAX_ITEMS,
    ReadValues,
    Values,
    called_for_loss,
    values_read,
)
from torchembed.step.watches.replaced_methods import forward_of
from torchembed.step.watches.watched_contents import WatchedContents

_OWN = ("torchembed.", "torchrec.", "fbgemm_gpu.")
"""Packages whose modules are left out: what they change, steps follow."""
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has."""
_OF_OPTIMIZERS = ("step", "zero_grad")
"""Methods that may be assigned to optimizers."""
_forward = operator.attrgetter("forward")
_CPU = torch.device("cpu")
_MAX_CHANGES = 3
_WINDOW = 30
"""A value that changes so often in so many steps is not worth a capture each time."""


Reads = Mapping[nn.Module, set[str] | None]
"""Names of attributes of modules; None for all of one."""


class NotCapturable(Exception):  # noqa: N818 - no error of the caller
    """Raised in place of a capture where replays would not do what the step does."""

    def __init__(self, why: Reason) -> None:
        super().__init__(str(why))
        self.why = why


class _Attributes(NamedTuple):
    """Some attributes of a module, or other values by their names."""

    where: str
    values: Values
    names: Sequence[str]
    containers: Sequence[str]
    """Names of lists, dicts and sets whose items are looked at, too."""


class WatchedValues:
    """Hyperparameters but ``lr``, parameters of optimizers, attributes and buffers of modules, and
    what else the code of a forward and of the loss function reads.

    :meth:`look` notes which were replaced, by identity, since the call before. A number or a string
    is the same where it is equal, and a NumPy array, and a tensor of the host that steps on a GPU
    read, where it was not changed in place. Attributes and buffers that no step depends on, by
    :meth:`note_reads`, are left out. Of modules of torch only floats, as a dropout's ``p``, are
    looked at, in addition to their parameters and buffers, and torchembed's own are left out.

    Args:
        model: the modules are those that it has when a change is noticed.
        captured: optimizers whose steps graphs repeat.
        others: optimizers that step after each replay.
        loss_fn: of the pipeline; None where the model gives its loss.
        device: of the steps.

    Attributes:
        version: counts the looks that found a change.
        held: the version that captures hold; None while there is none. Whoever captures or releases
            sets it.
        num_refreshes: counts the looks that found anything replaced, added or removed, changes or
            not.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Iterable[torch.optim.Optimizer],
        others: Iterable[torch.optim.Optimizer],
        loss_fn: object = None,
        device: torch.device = _CPU,
    ) -> None:
        self._model, self._loss_fn, self._device = model, loss_fn, device
        of_optimizers = [(o, _hyperparameters_of(o)) for o in captured]
        of_optimizers += [(o, []) for o in others]
        self._optimizers = [(o, names, _getter(names)) for o, names in of_optimizers]
        self.version = self._num_looks = self.num_refreshes = 0
        self.held: int | None = None
        self._last_change = ""
        """The name of a value that changed last."""
        self._reads: weakref.WeakKeyDictionary[nn.Module, set[str] | None]
        self._reads = weakref.WeakKeyDictionary()
        """The attributes of users' modules that steps depend on; None for all of a module, as of
        those that are not there."""
        self._reads_all = self._has_new_reads = False
        self._applied: Reads = {}
        """The reads by which values were chosen."""
        self._forwards: dict[type, object] = {}
        """``forward`` of each class of the modules, as it was first."""
        self._changes: dict[str, collections.deque[int]] = {}
        """For each value that changed, the calls of :meth:`look` that noticed it last."""
        self._begin()

    def _begin(self) -> None:
        self._optimizers = [
            (o, names, _getter(_in_all_groups(o, names))) for o, names, _ in self._optimizers
        ]
        modules = dict(watched_modules(self._model, self._loss_fn))
        reads = self._applied
        self._held = list(_held_by(modules, reads))
        self._dicts = [values for _, values in self._held]
        # As written: what is put in their place is not captured.
        for kind in dict.fromkeys(map(type, modules.values())):
            self._forwards.setdefault(kind, forward_of(kind))
        read = values_read(modules, self._forwards, self._loss_fn)
        self._attributes = [*_attributes_of(modules, reads), *_as_attributes(read)]
        # Also of modules whose values are not looked at, which may be given methods.
        # Holders of tables' weights, which are many, are called for a parametrization alone.
        self._growing = [
            vars(module) for module in self._model.modules() if not isinstance(module, TableWeight)
        ]
        kinds = dict.fromkeys(type(module) for module in self._model.modules())
        self._kinds = [kind for kind in kinds if isinstance(forward_of(kind), FunctionType)]
        self._gets = [(_getter(names), values) for _, values, names, _ in self._attributes]
        self._containers = [
            (values, name) for _, values, _, names in self._attributes for name in names
        ]
        self._before = self._now()
        named = dict(self._named())
        self._contents = WatchedContents(named, self._device)
        self._known = {**named, **dict(self._contents.named())}

    @property
    def outdated(self) -> Reason | None:
        """The change since values were captured; None without one, or without a capture."""
        if self.held is None or self.held == self.version:
            return None
        return Reason("it has changed since steps were captured", self._last_change)

    @property
    def unsteady(self) -> Reason | None:
        """The first value that changes so often that no graph should hold it, or may change without
        notice; None without one."""
        for name, looks in self._changes.items():
            if len(looks) == _MAX_CHANGES and self._num_looks - looks[0] < _WINDOW:
                return Reason("it changes from step to step, which no graph follows", name)
        return self._contents.unwatchable

    def users_modules(self) -> dict[str, nn.Module]:
        """The modules that are neither torch's nor torchembed's, by their names in warnings."""
        modules = watched_modules(self._model, self._loss_fn)
        return {where: module for where, module in modules if not _is_of_torch(module)}

    def note_reads(self, read: Reads | None) -> None:
        """Leave out attributes of users' modules that no step depends on.

        Args:
            read: the names of attributes that a further step depends on; None in place of names for
                all of a module, None alone for all of all modules.
        """
        self._has_new_reads = True
        if read is None:
            self._reads_all = True
        for module, names in (read or {}).items():
            known = self._reads.get(module, set())
            self._reads[module] = None if names is None or known is None else known | names

    def look(self) -> None:
        """Note what has changed since the last call."""
        self._note_changes()
        if self._has_new_reads:
            self._has_new_reads = False
            self._applied = {} if self._reads_all else weakref.WeakKeyDictionary(self._reads)
            self._begin()
            for name in self._changes.keys() - self._known.keys():
                del self._changes[name]

    def _note_changes(self) -> None:
        self._num_looks += 1
        try:
            before, now = self._before, self._now()
        except KeyError:  # of an attribute that is gone
            before, now = self._before, list[object]()
        is_same = len(now) == len(before) and all(map(operator.is_, now, before))
        if is_same and not self._contents.have_changed:
            return
        known = self._known
        self.num_refreshes += 1
        # Also where values are equal, so that further calls find the very objects.
        self._begin()
        names = known.keys() | self._known.keys()
        changed = sorted(n for n in names if not _is_same(known.get(n), self._known.get(n)))
        for name in changed:
            looks = self._changes.setdefault(name, collections.deque(maxlen=_MAX_CHANGES))
            looks.append(self._num_looks)
        if changed:
            # What was replaced says more than what came or went with it.
            replaced = (name for name in changed if name in known and name in self._known)
            self.version, self._last_change = self.version + 1, next(replaced, changed[0])

    def _now(self) -> list[object]:
        # Each step asks: what is long is done in C.
        found = list(chain.from_iterable(map(dict.values, self._dicts)))
        found += map(len, self._growing)
        found += map(_forward, self._kinds)
        for get, values in self._gets:
            found += get(values)
        for optimizer, _, get in self._optimizers:
            found += map(vars(optimizer).get, _OF_OPTIMIZERS)
            for group in optimizer.param_groups:
                found += group["params"]
                found += get(group)
        for values, name in self._containers:
            found += _items_of(values.get(name))
        return found

    def _named(self) -> Iterator[tuple[str, object]]:
        """The values by their names."""
        yield from self._hyperparameters()
        for where, values in self._held:
            yield from ((f"{name} of {where}", value) for name, value in values.items())
        for where, values, names, containers in self._attributes:
            yield from ((f"{name} of {where}", values.get(name)) for name in names)
            for name in containers:
                yield f"contents of {name} of {where}", _items_of(values.get(name))

    def _hyperparameters(self) -> Iterator[tuple[str, object]]:
        for number, (optimizer, names, _) in enumerate(self._optimizers):
            of_optimizer = f"optimizer {number}, {type(optimizer).__name__}"
            yield f"param_groups of {of_optimizer}", len(optimizer.param_groups)
            for index, group in enumerate(optimizer.param_groups):
                where = f"parameter group {index} of {of_optimizer}"
                yield f"params of {where}", tuple(map(id, group["params"]))
                yield from ((f"{name} of {where}", group.get(name)) for name in names)


def _hyperparameters_of(optimizer: torch.optim.Optimizer) -> list[str]:
    # Schedulers put further entries into groups, which no step reads.
    return [name for name in getattr(optimizer, "defaults", {}) if name != "lr"]


def _in_all_groups(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that every parameter group has: groups of a state that was saved by
    another release, or in another form, may lack some."""
    return [name for name in names if all(name in group for group in optimizer.param_groups)]


def _getter(names: Sequence[str]) -> Callable[[Values], tuple[object, ...]]:
    """Function from a mapping to its values of ``names``."""
    # With one name alone it would give no tuple.
    return operator.itemgetter(*names, *names[:1]) if names else lambda _: ()


def watched_modules(model: nn.Module, loss_fn: object = None) -> Iterator[tuple[str, nn.Module]]:
    """The modules of ``model`` and of a loss function but torchembed's own, each after its name in
    warnings."""
    seen = set[nn.Module]()
    called = called_for_loss(loss_fn)
    for what, root in (("model", model), ("loss function", called)):
        for path, module in root.named_modules(seen) if isinstance(root, nn.Module) else ():
            # Compiled ones hold no values of Python.
            is_own = type(module).__module__.startswith(_OWN) or isinstance(module, TableModule)
            if not (is_own or isinstance(module, torch.jit.ScriptModule)):
                of_loss = f" of the {what}" if root is called else ""
                name = f"module {path}{of_loss}" if path else f"{what} {type(module).__name__}"
                yield name, module


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _held_by(
    modules: Mapping[str, nn.Module], reads: Reads
) -> Iterator[tuple[str, dict[str, object]]]:
    """Parameters and children of modules, and buffers of those of which all attributes count."""
    for where, module in modules.items():
        is_of_torch = _is_of_torch(module)
        buffers = [] if _read_of(module, reads) is not None else [module._buffers]
        for values in (*buffers, module._parameters, module._modules):
            # An empty one may be filled later, but torch's own modules add nothing.
            if values or not is_of_torch:
                yield where, values  # type: ignore[misc]


def _read_of(module: nn.Module, reads: Reads) -> set[str] | None:
    """The attributes of ``module`` that steps depend on; None for all."""
    return None if _is_of_torch(module) else reads.get(module)


def _attributes_of(modules: Mapping[str, nn.Module], reads: Reads) -> Iterator[_Attributes]:
    for where, module in modules.items():
        attributes, is_users = vars(module), not _is_of_torch(module)
        names = [name for name in attributes if name not in OF_EVERY_MODULE]
        if not is_users:
            names = [name for name in names if isinstance(attributes[name], float)]
        read = _read_of(module, reads)
        if read is not None:
            names = [name for name in names if name in read]
            of_buffers = [name for name in module._buffers if name in read]
            if of_buffers:
                yield _Attributes(where, module._buffers, of_buffers, [])
        if names or is_users:
            yield _Attributes(where, attributes, names, _containers_in(attributes, names))


def _as_attributes(read: Iterable[ReadValues]) -> Iterator[_Attributes]:
    for where, values, names in read:
        if names:
            yield _Attributes(where, values, names, _containers_in(values, names))


def _containers_in(values: Values, names: Sequence[str]) -> list[str]:
    return [name for name in names if isinstance(values[name], CONTAINERS)]


def _items_of(container: object) -> list[object]:
    if not isinstance(container, CONTAINERS):
        return []
    items = container.values() if isinstance(container, dict) else container
    return [len(container), *islice(items, MAX_ITEMS)]


def _is_same(one: object, other: object) -> bool:
    if one is other:
        return True
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    plain = (int, float, complex, str, bytes, type(None))
    return isinstance(one, plain) and isinstance(other, plain) and one == other
