"""Lookups of served rows, and forwards from features to probabilities, on one GPU.

``python -m bench.serving.lookups`` takes under two minutes on a GPU. Each part compares what it
times with rows, or with PyTorch, that it knows to be right, in the same run; a part that fails
prints why, and the others go on.
"""

import contextlib
import dataclasses
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from torch import Tensor

import torchembed
from torchembed.core.types import Pooling
from torchembed.data.skewed_ids import skewed_ids
from torchembed.models import DLRM_DCNv2
from torchembed.serving.levels import (
    CacheKind,
    EmbeddingCache,
    LeveledLookup,
    RowLevels,
    ServedTable,
)
from torchembed.serving.models import ModelOptions, ModelRepository, deploy
from torchembed.stores import MemoryStore

_NUM_DENSE = 13
_WARM_CALLS = 20
_CHUNK_ROWS = 1 << 18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of the measurements."""

    device: str = "cuda"
    num_tables: int = 26
    rows_per_table: int = 20_000
    """Rows of each table of the lookups and of the model, all cached."""
    dim: int = 128
    num_keys: int = 2_000
    """Keys of one lookup, over all tables together."""
    num_calls: int = 1_000
    """Timed calls of the smallest lookups and forwards; of larger ones as many as take a second."""
    batch_sizes: tuple[int, ...] = (32, 1024, 65_536)
    captured_sizes: tuple[int, ...] = (32, 1024, 16_384)
    """Of the CUDA graphs of served forwards; none for no graphs."""
    matmul_precision: str = "highest"
    """Of float32 matrix products of all forwards, as ``torch.set_float32_matmul_precision`` has
    it."""
    dense_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """What served dense parts compute in; plain PyTorch is under ``torch.autocast`` then."""
    large_rows: int = 4_000_000
    """Rows of the table whose cache holds a tenth of them."""
    large_keys: int = 1 << 20
    """Keys of one lookup in that table."""
    exponent: float = 1.05
    seconds: float = 1.0
    """The most time of one measurement."""


def main(setting: Setting) -> None:
    """Measure, and print."""
    device = torch.device(setting.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    print(f"on {name}, torch {torch.__version__}")
    # Small lookups last: they are profiled in the end, after which a process launches more slowly.
    for part in (_forwards, _large_table, _small_lookups):
        try:
            part(setting, device)
        except Exception:  # noqa: BLE001 - the other parts are measured all the same
            print(f"{part.__name__} failed:")
            traceback.print_exc()


def _small_lookups(setting: Setting, device: torch.device) -> None:
    """Lookups that the cache answers, through ``LeveledLookup.look_up`` and as a graph."""
    tables = [ServedTable(name=f"t{n}", dim=setting.dim) for n in range(setting.num_tables)]
    num_rows = setting.rows_per_table
    cache = EmbeddingCache(tables, device, num_rows={t.name: num_rows * 2 for t in tables})
    keys = torch.arange(num_rows)
    for place in range(len(tables)):
        rows = _rows(keys, place, setting.dim, device)
        cache.insert(place, keys.to(device), tables[place].row_format.encode(rows))
    asked = torch.randint(num_rows, (setting.num_keys,)).to(device)
    of_tables = (torch.arange(setting.num_keys) * len(tables) // setting.num_keys).int().to(device)
    expected = _rows(asked, of_tables, setting.dim, device)
    what = f"{setting.num_keys} keys over {len(tables)} tables, dim {setting.dim}"
    with MemoryStore() as store:
        levels = RowLevels([store], tables)
        with LeveledLookup(cache, levels, hit_rate_threshold=2.0) as lookup:
            found = lookup.look_up(asked, of_tables)
            assert torch.equal(found.rows, expected), "rows of a lookup are wrong"
            assert not found.is_default.any(), "a lookup missed the cache"
            if device.type == "cuda":
                assert torch.cuda.current_stream().query(), "an answer came before its rows"
            _print_times(f"look_up, {what}", lambda: lookup.look_up(asked, of_tables), setting)
            on_host = asked.cpu(), of_tables.cpu()
            call = lambda: lookup.look_up(*on_host)  # noqa: E731
            _print_times(f"look_up, {what} in memory of the host", call, setting)
            call = _synchronized(lambda: cache.look_up(asked, of_tables), device)
            _print_times(f"of the cache alone, {what}", call, setting)
            if device.type == "cuda":
                _in_a_graph(lookup, asked, of_tables, expected, what, setting)
            launches = _launches(device, lambda: lookup.look_up(asked, of_tables))
            print(f"launches of LeveledLookup.look_up: {launches}")


def _in_a_graph(
    lookup: LeveledLookup,
    asked: Tensor,
    of_tables: Tensor,
    expected: Tensor,
    what: str,
    setting: Setting,
) -> None:
    """A lookup in the cache alone as a graph, which sees later updates."""
    cache, graph, answer = lookup.cache, torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        answer = cache.look_up(asked, of_tables)
    changed = expected[:1] + 1.0
    lookup.apply_rows("t0", asked[:1].cpu(), changed.cpu())
    graph.replay()
    same = (asked == asked[0]) & (of_tables == 0)
    wanted = torch.where(same[:, None], changed, expected)
    assert torch.equal(answer.rows, wanted), "a replay does not see an update"
    assert int(answer.num_missing) == 0, "a replay missed the cache"
    _print_times(f"in a graph, {what}", _synchronized(graph.replay, asked.device), setting)


def _forwards(setting: Setting, device: torch.device) -> None:
    """DLRM-DCNv2 from arrays to arrays, served and by plain PyTorch."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision(setting.matmul_precision)
    names = [f"f{n}" for n in range(setting.num_tables)]
    configs = [
        torchembed.EmbeddingBagConfig(
            name=f"t{n}",
            embedding_dim=setting.dim,
            num_embeddings=setting.rows_per_table,
            feature_names=(name,),
            pooling=Pooling.SUM,
        )
        for n, name in enumerate(names)
    ]
    tables = torchembed.EmbeddingBagCollection(configs)
    model = DLRM_DCNv2(
        tables, _NUM_DENSE, [512, 256, setting.dim], [1024, 1024, 512, 256, 1], 3, 512
    ).eval()

    def features(ids: Tensor) -> torchembed.SparseFeatures:
        hotness = (1,) * len(names)
        return torchembed.SparseFeatures(
            keys=tuple(names), values=ids.flatten(), batch_size=ids.shape[1], hotness=hotness
        )

    examples = torch.rand(8, _NUM_DENSE), features(torch.zeros(len(names), 8, dtype=torch.int64))
    dtype = getattr(torch, setting.dense_dtype)
    is_narrow = dtype != torch.float32
    # Four roundings of a probability of 1/2, or so many of float32 products.
    most_different = 2 * torch.finfo(dtype).eps if is_narrow else 1e-3
    with tempfile.TemporaryDirectory() as folder, MemoryStore() as store:
        deploy(
            model,
            folder,
            name="dlrm",
            version=1,
            examples=examples,
            output="sigmoid",
            dense_dtype=dtype if is_narrow else None,
        )

        def make(served: Mapping[ServedTable, int]) -> LeveledLookup:
            num_rows = {t.name: 2 * n for t, n in served.items()}
            cache = EmbeddingCache(list(served), device, num_rows=num_rows)
            levels = RowLevels([store], list(served))
            return LeveledLookup(cache, levels, hit_rate_threshold=2.0)

        options = ModelOptions(
            make_lookup=make, device=device, captured_sizes=setting.captured_sizes
        )
        plain = model.to(device)
        with ModelRepository(Path(folder), options) as repository:
            repository.start()
            served = repository.model("dlrm")
            (dense_name,) = [i.name for i in served.form.inputs if i.name not in names]
            for batch_size in setting.batch_sizes:
                dense = torch.rand(batch_size, _NUM_DENSE)
                ids = torch.randint(setting.rows_per_table, (len(names), batch_size))
                request = {dense_name: dense.numpy()}
                request |= {n: of[:, None].numpy() for n, of in zip(names, ids, strict=True)}

                def by_torch(dense: Tensor = dense, ids: Tensor = ids) -> np.ndarray:
                    with (
                        torch.inference_mode(),
                        torch.autocast(device.type, dtype, enabled=is_narrow),
                    ):
                        found = plain(dense.to(device), features(ids.to(device)))
                        return found.float().sigmoid().cpu().numpy()

                def by_server(request: Mapping[str, np.ndarray] = request) -> np.ndarray:
                    answer = served.answer(request)
                    assert answer.num_default_rows == 0, "an answer has default rows"
                    (found,) = [a for n, a in answer.outputs.items() if n != "default_rows"]
                    return found

                for _ in range(3):  # rows are cached after the first one
                    difference = np.abs(by_server().reshape(-1) - by_torch().reshape(-1)).max()
                    assert difference < most_different, f"probabilities differ by {difference}"
                for what, call in (("served", by_server), ("plain PyTorch", by_torch)):
                    seconds = _print_times(f"forward, batch {batch_size}, {what}", call, setting)
                    print(f"    {batch_size / seconds:,.0f} samples/s")


def _large_table(setting: Setting, device: torch.device) -> None:
    """A table in memory of the host, a tenth of it on the device, and FBGEMM's of the same
    rows."""
    num_rows, num_keys = setting.large_rows, setting.large_keys
    table = ServedTable(name="large", dim=setting.dim)
    batches = [
        skewed_ids(num_rows, num_keys, exponent=setting.exponent, first=n * num_keys).to(device)
        for n in range(8)
    ]
    what = f"{num_rows:,} rows of dim {setting.dim}, a tenth on the device, {num_keys:,} keys"
    cache = EmbeddingCache(
        [table], device, num_rows=num_rows, kind=CacheKind.UVM, num_device_rows=num_rows // 10
    )
    for keys in torch.arange(num_rows, device=device).split(_CHUNK_ROWS):
        rows = _rows(keys, 0, setting.dim, device)
        cache.insert(0, keys, table.row_format.encode(rows))
    of_tables = torch.zeros(num_keys, dtype=torch.int32, device=device)
    with MemoryStore() as store:
        levels = RowLevels([store], [table])
        with LeveledLookup(cache, levels, hit_rate_threshold=2.0) as lookup:
            for number in range(10 * 17):  # so that frequent rows are on the device
                lookup.look_up(batches[number % len(batches)], of_tables)
                lookup.wait_for_insertions()
            for keys in batches:
                found = lookup.look_up(keys, of_tables)
                assert torch.equal(found.rows, _rows(keys, 0, setting.dim, device)), "wrong rows"
                assert not found.is_default.any(), "a lookup missed"
            _print_rate(
                f"ours, {what}", lambda keys: lookup.look_up(keys, of_tables), batches, setting
            )
    del cache
    try:
        peer = _fbgemm(setting, device)
    except ImportError as error:
        print(f"FBGEMM is not installed: {error}")
        return
    for number in range(3 * len(batches)):
        peer(batches[number % len(batches)])
    for keys in batches:
        assert torch.equal(peer(keys), _rows(keys, 0, setting.dim, device)), "FBGEMM's rows differ"
    _print_rate(f"FBGEMM MANAGED_CACHING, {what}", peer, batches, setting)


def _fbgemm(setting: Setting, device: torch.device) -> Callable[[Tensor], Tensor]:
    """FBGEMM's table of the same rows with its cache, as TorchRec's UVM caching has it."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    location = EmbeddingLocation.MANAGED_CACHING
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(setting.large_rows, setting.dim, location, ComputeDevice.CUDA)],
        cache_load_factor=0.1,
        pooling_mode=PoolingMode.NONE,
        bounds_check_mode=BoundsCheckMode.NONE,
        device=device,
    )
    (weight,) = tables.split_embedding_weights()
    for keys in torch.arange(setting.large_rows).split(_CHUNK_ROWS):
        weight[int(keys[0]) : int(keys[-1]) + 1] = _rows(keys, 0, setting.dim, device)
    offsets = torch.arange(setting.large_keys + 1, device=device)

    def look_up(keys: Tensor) -> Tensor:
        with torch.no_grad():
            return tables(keys, offsets)

    return look_up


def _rows(keys: Tensor, tables: Tensor | int, dim: int, device: torch.device) -> Tensor:
    """The row of each key of a table, float32 ``[n, dim]``: whole numbers below 2**24."""
    keys = keys.to(device)
    first = (keys * 31 + torch.as_tensor(tables, device=device) * 7) % 65_521
    return first[:, None].float() + torch.arange(dim, device=device)


def _synchronized(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """``call``, which returns when the device has done it."""
    if device.type != "cuda":
        return call

    def wait() -> object:
        result = call()
        torch.cuda.synchronize(device)
        return result

    return wait


def _seconds(call: Callable[[], object], setting: Setting) -> list[float]:
    for _ in range(_WARM_CALLS):
        call()
    taken: list[float] = []
    end = time.perf_counter() + setting.seconds
    while len(taken) < setting.num_calls and (len(taken) < 10 or time.perf_counter() < end):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return sorted(taken)


def _print_times(what: str, call: Callable[[], object], setting: Setting) -> float:
    """Print percentiles of the time of ``call``, and return its mean in seconds."""
    taken = _seconds(call, setting)
    median, slow = taken[len(taken) // 2], taken[min(len(taken) * 99 // 100, len(taken) - 1)]
    print(f"{what}: p50 {median * 1e3:.3f} ms, p99 {slow * 1e3:.3f} ms ({len(taken)} calls)")
    return sum(taken) / len(taken)


def _print_rate(
    what: str, look_up: Callable[[Tensor], object], batches: Sequence[Tensor], setting: Setting
) -> None:
    """Print how many keys a second are looked up, one batch after another."""
    device = batches[0].device
    with _until_done(device):
        look_up(batches[0])
    begin, num_calls = time.perf_counter(), 0
    with _until_done(device):
        while time.perf_counter() - begin < 3 * setting.seconds:
            for keys in batches:
                look_up(keys)
            num_calls += len(batches)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    rate = num_calls * setting.large_keys / (time.perf_counter() - begin)
    print(f"{what}: {rate / 1e6:,.1f} M keys/s")


@contextlib.contextmanager
def _until_done(device: torch.device) -> Iterator[None]:
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _launches(device: torch.device, call: Callable[[], object]) -> str:
    """The names of the kernels that ``call`` launches."""
    if device.type != "cuda":
        return "none on a CPU"
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize(device)
    kernels = [
        event.key
        for event in profile.key_averages()
        if event.device_type.name == "CUDA"
        for _ in range(event.count)
    ]
    return f"{len(kernels)}: {', '.join(kernels)}"


if __name__ == "__main__":
    main(tyro.cli(Setting))
