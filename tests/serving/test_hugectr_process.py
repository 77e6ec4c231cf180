"""A server that is started by a file of HugeCTR, with rows that HugeCTR saved."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.asked_servers import asked, expected, trained
from tests.support.server_processes import running_server
from torchembed.checkpoints import model_rows
from torchembed.serving.__main__ import main
from torchembed.serving.configuration import ServerConfig, read_hugectr_config
from torchembed.serving.models import deploy, read_description
from torchembed.serving.server import Server
from torchembed.stores import RocksDBStore, StoreInUseError

pytest.importorskip("tritonclient.http")
pytest.importorskip("rocksdict")


def write_hugectr_rows(model: torch.nn.Module, folder: Path, tables: list[str]) -> list[str]:
    """Save tables of a model as HugeCTR does; returns their folders."""
    weights = {name.split(".")[-2]: name for name, _ in model.named_parameters()}
    folders = []
    for number, table in enumerate(tables):
        place = folder / f"{number}_sparse.model"
        place.mkdir(parents=True)
        chunks = list(model_rows(model, weights[table], with_states=False))
        torch.cat([c.keys for c in chunks]).numpy().astype("<i8").tofile(place / "key")
        rows = torch.cat([c.rows for c in chunks]).detach().numpy().astype("<f4")
        rows.tofile(place / "emb_vector")
        folders.append(str(place))
    return folders


def ps_json(folder: Path, tables: list[str], files: list[str], **persistent: Any) -> Path:
    """A file in the form that HugeCTR documents."""
    values = {
        "supportlonglong": True,
        "models": [
            {
                "model": "m",
                "sparse_files": files,
                "num_of_worker_buffer_in_pool": 1,
                "embedding_table_names": tables,
                "embedding_vecsize_per_table": [8] * len(tables),
                "default_value_for_each_table": [0.0] * len(tables),
                "deployed_device_list": [0],
                "max_batch_size": 64,
                "hit_rate_threshold": 1.1,
                "gpucacheper": 0.1,
                "gpucache": False,
            }
        ],
        "volatile_db": {
            "type": "parallel_hash_map",
            "num_partitions": 2,
            "initial_cache_rate": 0.25,
            "cache_missed_embeddings": False,
            "max_batch_size": 7,
        },
        "persistent_db": {
            "type": "rocks_db",
            "path": str(folder / "rows"),
            "num_threads": 3,
            "max_batch_size": 10,
            **persistent,
        },
    }
    path = folder / "ps.json"
    path.write_text(json.dumps(values))
    return path


def metric(text: str, name: str, tier: str) -> float:
    (line,) = (
        line for line in text.splitlines() if line.startswith(name) and f'tier="{tier}"' in line
    )
    return float(line.split()[-1])


def test_rows_of_hugectr_are_served_as_its_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from urllib.request import urlopen

    import tritonclient.http

    models, case, other = tmp_path / "models", trained(1), trained(2)
    deploy(case.model, models, name="m", version=1, examples=case.examples(4))
    tables = read_description(models / "m" / "1").tables
    names = [table.name for table in tables]
    files = write_hugectr_rows(other.model, tmp_path / "hugectr", names)
    # The dense part of the one, and the rows of the other.
    with torch.no_grad():
        for (name, mine), theirs in zip(
            case.model.named_parameters(), other.model.parameters(), strict=True
        ):
            if name.split(".")[-2] in names:
                mine.copy_(theirs)
    examples = case.examples(50)
    request, wanted = case.request(examples), expected(case, examples)
    path = ps_json(tmp_path, names, files)
    with running_server(models, tmp_path / "log", "--ps-json", str(path)) as server:
        client = tritonclient.http.InferenceServerClient(server.http)
        found, _ = asked(client, tritonclient.http, request)
        np.testing.assert_allclose(found, wanted, atol=2e-6)
        client.close()
        text = urlopen(f"http://{server.http}/metrics").read().decode()
        # A quarter of the rows is in memory, and stays the only part.
        assert metric(text, "torchembed_level_hits_total", "memory") > 0
        assert metric(text, "torchembed_level_hits_total", "rocksdb") > 0
        assert metric(text, "torchembed_level_promoted_rows_total", "memory") == 0
        assert server.end() == 0

    # Files are not read again where RocksDB has the rows, and it may be read by several servers.
    for file in files:
        (Path(file) / "emb_vector").write_bytes(b"")
    with open_server(ps_json(tmp_path, names, files, read_only=True), models) as server:
        answer = server.repository.model("m").answer(request)
        np.testing.assert_allclose(answer.outputs["output"], wanted, atol=2e-6)
        memory, disk = next(iter(server.repository.lookups().values())).levels.statistics()
        # A quarter was copied to memory from there.
        assert memory.num_promoted_rows == sum(table.num_rows // 4 for table in tables)
        assert memory.num_hits > 0 and disk.num_hits > 0
        with pytest.raises(StoreInUseError, match="one store at a time may have"):
            RocksDBStore(tmp_path / "rows")

    def failed_start(names: list[str], folder: Path, **changes: Any) -> str:
        folder.mkdir()
        path = ps_json(folder, names, files)
        values = json.loads(path.read_text())
        values["models"][0] |= changes
        path.write_text(json.dumps(values))
        flags = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--ps-json", str(path)]
        assert main(["--models", str(models), *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "folders of HugeCTR (embedding_table_names) must be of tables of the model" in (
        failed_start(["x", *names[1:]], tmp_path / "1")
    )
    assert f"of table {names[0]} must be 8, as version 1 of model m has it, got 4" in failed_start(
        names, tmp_path / "2", embedding_vecsize_per_table=[4] * len(names)
    )
    assert f"rows of table {names[0]} cannot be read" in failed_start(
        names, tmp_path / "3", sparse_files=[str(tmp_path / "absent")] * len(names)
    )
    assert "must hold rows for" in failed_start(names, tmp_path / "4")


def open_server(path: Path, models: Path) -> Server:
    config: ServerConfig = read_hugectr_config(path, models).server
    server = Server(dataclasses.replace(config, http_address="127.0.0.1:0", grpc_address=None))
    server.start()
    return server
