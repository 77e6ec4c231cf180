"""A tape of the dispatcher's calls: what a CUDA graph does, on a CPU.

A graph repeats kernels on the memory of its capture, and no Python. On a CPU the pipeline's
captured steps call the step again, which hides what a graph gets wrong: hooks, counters, attributes
that are set, numbers of the host. Within :func:`taped_captures` they replay a tape instead.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from torchembed.core import ranks
from torchembed.core.trees import tensors_in
from torchembed.modules.lookup import bad_ids
from torchembed.ops.jagged import function as jagged_function
from torchembed.sharding.transport.collectives import GatheredSize
from torchembed.step.batches.bucketized_buffers import BucketizedBuffers
from torchembed.step.engines import static_step
from torchembed.step.engines.captured_call import CapturedCall
from torchembed.step.engines.static_step import StaticStep
from torchembed.tables import recording_moves

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.cuda import _POOL_HANDLE

_NO_CONTEXT = contextlib.nullcontext()
_WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_WAITING = {"aten::_coalesce", "aten::is_nonzero", "aten::masked_scatter_backward"}
"""Operations without these tags that make the host wait for a GPU as well."""
_MASKABLE = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index"}
"""Operations that count the True elements of a mask among their indices, and only then wait."""
_HOST_COPIES = ("cpu", "numpy", "tolist", "__array__")
"""Methods of tensors that copy from a GPU, and that the dispatcher does not see on a CPU."""
_HOST_MEMORY = ("from_numpy", "as_tensor", "frombuffer")
"""Functions whose results are pageable memory, which no capture copies to a GPU."""


class Tape(TorchDispatchMode):
    """Records the operations that run within it, below autograd; :meth:`replay` runs them again.

    A replay does what a CUDA graph of the same code would: it runs the operations on the memory of
    the recording and nothing else. Results are written to the recorded results. Views are not
    computed again. Random numbers come from torch's generator as in the recording.

    Recording runs the operations, which a capture does not: leaving the context puts back all
    memory that was there before, and torch's generator.

    Tensors that ``torch.tensor`` makes, and what is computed from them alone, are the host's: that
    is not recorded. As on a GPU, those without dimensions are numbers to other operations.

    Raises:
        RuntimeError: within the context, for what a capture does not permit: an operation that
            makes the host wait for the device, as ``item`` and ``nonzero``, the use of a tensor of
            the host that has dimensions, and generators other than torch's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._made: dict[int, torch.UntypedStorage] = {}
        """Memory allocated by the recorded operations, by the address of its record."""
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Other memory that the operations were given, and a copy from before the first of them."""
        self._of_host: dict[int, torch.UntypedStorage] = {}
        """Memory of tensors of the host."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.callback(torch.set_rng_state, torch.get_rng_state())
        for name in _HOST_COPIES:
            self._stack.enter_context(mock.patch.object(Tensor, name, self._of_host_alone(name)))
        for name in (*_HOST_MEMORY, "get_rng_state"):
            refused = functools.partial(_refuse, f"torch.{name}")
            self._stack.enter_context(mock.patch.object(torch, name, refused))
        # Of tensors on a GPU the host reads no offsets, not even to check them.
        unread = mock.patch.object(bad_ids, "is_readable", return_value=False)
        self._stack.enter_context(unread)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        # The first copy of memory that several storages share is the one from before all of it.
        for storage, before in reversed(self._before.values()):
            storage.copy_(before, non_blocking=False)
        self._before.clear()
        self._stack.close()

    def __torch_dispatch__(
        self,
        func: "OpOverload",
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors_in((args, kwargs))
        if any(map(_is_wrapper, given)):
            return NotImplemented  # it runs operations on the tensors within, which are recorded
        if any(tensor.is_meta for tensor in given):
            return func(*args, **kwargs)
        schema = func._schema
        are_of_host = list(map(self._is_of_host, given)) if self._of_host else [False] * len(given)
        if (given and all(are_of_host)) or schema.name == "aten::lift_fresh":
            outcome = func(*args, **kwargs)
            for storage in itertools.chain.from_iterable(map(_storages_of, _tensors_in(outcome))):
                self._of_host[_identity(storage)] = storage
            return outcome
        _check_permitted(func, args, kwargs)
        if any(is_it and t.dim() > 0 for t, is_it in zip(given, are_of_host, strict=True)):
            _refuse(f"{schema.name} of a tensor of the host")
        storages = {_identity(one): one for tensor in given for one in _storages_of(tensor)}
        self._note_before(storages)
        # The schemas of collectives do not say what they write to.
        may_write = schema.is_mutable or func.namespace == "c10d"
        # Before the call, which may change what a tensor is a view of.
        aliases = _aliases((args, kwargs)) if may_write else None
        outcome = _completed(func, func(*args, **kwargs))
        new = []
        for number, result in enumerate(_tensors_in(outcome)):
            of_result = {_identity(one): one for one in _storages_of(result)}
            if storages.keys().isdisjoint(of_result):
                new.append((number, result))
                self._made |= of_result
        if new or may_write:
            arguments, by_name = aliases or _aliases((args, kwargs))
            written = [(number, _alias(result)) for number, result in new]
            self._calls.append(_Call(func, arguments, by_name, written, torch.is_grad_enabled()))
        return outcome

    def _is_of_host(self, tensor: Tensor) -> bool:
        return any(_identity(storage) in self._of_host for storage in _storages_of(tensor))

    def _of_host_alone(self, name: str) -> Callable[..., object]:
        """The method of tensors called ``name``, refused to others than those of the host."""
        method = getattr(Tensor, name)

        @functools.wraps(method)
        def checked(tensor: Tensor, *args: object, **kwargs: object) -> object:
            if not self._is_of_host(tensor):
                _refuse(f"Tensor.{name}")
            return method(tensor, *args, **kwargs)

        return checked

    def _note_before(self, storages: Mapping[int, torch.UntypedStorage]) -> None:
        for identity, storage in storages.items():
            # Also what an operation only reads, by its schema, which may be wrong.
            if identity not in self._made and identity not in self._before:
                self._before[identity] = storage, storage.clone()

    def replay(self) -> None:
        """Run the recorded operations, in order."""
        for call in self._calls:
            # Recorded tensors need no gradients, but what some operations return depends on it.
            with torch.set_grad_enabled(call.is_grad_enabled):
                outcome = _completed(call.func, call.func(*call.args, **call.kwargs))
            if call.results:
                found = _tensors_in(outcome)
                for number, result in call.results:
                    _write(found[number], result)

    def clear(self) -> None:
        """Forget the operations and their memory."""
        self._calls.clear()
        self._made.clear()
        self._of_host.clear()


class _Call(NamedTuple):
    """An operation that a replay runs."""

    func: "OpOverload"
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[tuple[int, Tensor]]
    """Results in new memory, each with its number among the tensors of the outcome."""
    is_grad_enabled: bool


class TapedCall(CapturedCall):
    """A captured call on a CPU that replays a tape.

    Steps whose ``sizes`` differ from one to the next, which only a CPU has, are called again.
    """

    def __init__(
        self,
        call: Callable[[], None],
        sizes: Sequence[GatheredSize] | None,
        stream: "torch.cuda.Stream | None",
        pool: "_POOL_HANDLE | None",
    ) -> None:
        super().__init__(call, sizes, stream, pool)
        self._tape: Tape | None = None
        if sizes is not None:
            self._tape = Tape()
            with recording_moves() as self._moves, self._tape:
                self._run()

    @property
    def calls_again(self) -> bool:
        return self._tape is None

    def replay(self) -> None:
        if self._tape is None:
            super().replay()
        else:
            with self._moved_lines():
                self._tape.replay()

    def release(self) -> None:
        super().release()
        if self._tape is not None:
            self._tape.clear()


def _has_fixed_shapes(step: StaticStep) -> bool:
    """True on one rank also for padded steps, which on a CPU have what several ranks exchange in
    the sizes of each batch."""
    return step._program.group is None or step.bucketized is None


def _bucketize_in_place(buffers: BucketizedBuffers, buffer: int) -> None:
    """Bucketize a buffer's batch in the memory that the one before it has, as a graph does."""
    before = buffers.batches[buffer]
    _bucketize(buffers, buffer)
    now = buffers.batches[buffer]
    if before is None or now is None:
        return
    found, memory = (tensors_in((b.lookups, b.checks, b.needed)) for b in (now, before))
    for tensor, old in zip(found, memory, strict=True):
        if tensor is not old:
            _write(tensor, old)
    buffers.batches[buffer] = before


_bucketize = BucketizedBuffers._bucketize


@contextlib.contextmanager
def taped_captures() -> Iterator[None]:
    """A context in which pipelines on a CPU with ``capture=True`` replay tapes of their steps.

    Padded steps of several ranks are called again, as they are outside of it.
    """
    is_alone = ranks.world_size() == 1
    bucketize = _bucketize_in_place if is_alone else _bucketize
    with (
        # A check of contents, which the CPU alone does.
        mock.patch.object(jagged_function, "_check_room"),
        mock.patch.object(BucketizedBuffers, "_bucketize", bucketize),
        mock.patch.object(static_step, "CapturedCall", TapedCall),
        mock.patch.object(StaticStep, "_has_fixed_shapes", property(_has_fixed_shapes)),
    ):
        yield


def _completed(func: "OpOverload", outcome: Any) -> Any:
    """``outcome`` of ``func``, once it is complete: in a graph what follows a collective waits for
    it, and on a CPU Python does, which no replay runs."""
    if func.namespace == "c10d":
        for leaf in tree_leaves(outcome):
            if isinstance(leaf, torch.ScriptObject):
                dist.Work.unbox(leaf).wait()
    return outcome


def _check_permitted(func: "OpOverload", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for an operation that a capture on a GPU does not permit."""
    name = func._schema.name
    if name in _MASKABLE:
        masks = [t for t in _tensors_in(args[1]) if t.dtype in (torch.bool, torch.uint8)]
        # A mask of as many elements as rows are written to with one number is no index.
        is_fill = name.startswith("aten::index_put") and args[2].numel() == 1
        waits = bool(masks) and not is_fill
    else:
        waits = name in _WAITING or not _WAITING_TAGS.isdisjoint(func.tags)
    if waits:
        _refuse(name)
    generator = kwargs.get("generator")
    if generator is not None and generator is not torch.default_generator:
        _refuse(f"{name} with a generator")


def _refuse(name: str, *args: object, **kwargs: object) -> NoReturn:
    del args, kwargs
    raise RuntimeError(f"{name}: operation not permitted when stream is capturing")


def _is_wrapper(tensor: Tensor) -> bool:
    return type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor)


def _tensors_in(tree: object) -> list[Tensor]:
    """Those of arguments or results of an operation, which are of few kinds: a tape is often made,
    and torch's own trees take most of its time."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, (tuple, list)):
        return [tensor for part in tree for tensor in _tensors_in(part)]
    return []


def _storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
        return list(itertools.chain.from_iterable(map(_storages_of, parts)))
    if tensor.layout is not torch.strided or tensor._is_zerotensor():
        return []
    return [tensor.untyped_storage()]


def _identity(storage: torch.UntypedStorage) -> int:
    return storage._cdata


def _alias(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own, which stays there where ``tensor`` is given other
    memory, and has a version counter of its own: a graph counts no versions, and knows no inference
    mode."""
    if tensor.layout is not torch.strided or tensor._is_zerotensor():
        return tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        return tensor.detach()
    mode = torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NO_CONTEXT
    with mode:
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def _aliases(tree: Any) -> Any:
    """The arguments of an operation, with an alias for each tensor."""
    if isinstance(tree, Tensor):
        return _alias(tree)
    if isinstance(tree, dict):
        return {name: _aliases(part) for name, part in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(map(_aliases, tree))
    return tree


def _write(found: Tensor, recorded: Tensor) -> None:
    """Write the result of a replayed operation where that of the recording is."""
    if found.shape != recorded.shape:
        raise RuntimeError(
            f"a replayed operation gave shape {tuple(found.shape)}, where the recorded one gave "
            f"{tuple(recorded.shape)}: its shape depends on what tensors hold, which no graph can"
        )
    if recorded.layout is torch.sparse_coo:
        _write(found._indices(), recorded._indices())
        _write(found._values(), recorded._values())
    else:
        recorded.copy_(found)
