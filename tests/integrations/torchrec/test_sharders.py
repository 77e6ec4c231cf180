"""Modules that become ours and that stay TorchRec's, the log of it, and refusals."""

import os
import re
from typing import Any

import pytest
import torch

from tests.support.torchrec_cases import log_lines

OURS = "torchembed.integrations.torchrec.sharded.collections"


def sharded(whose: str = "ours", placement: str = "table_wise", **arguments: Any) -> Any:
    """The sharded collection of a model."""
    from tests.support.torchrec_training import make_run

    optimizer = arguments.pop("optimizer", torch.optim.SGD)
    device = torch.device("cpu")
    run = make_run(whose, device, [placement], optimizer, {"lr": 0.1}, **arguments)
    run.steps(0, 1)
    return run.model.module.sparse


def what_falls_back() -> dict[str, tuple[str, list[str]]]:
    """On a rank: for each case, where the sharded module's class is from, and the log's lines."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
    from torchrec.modules.embedding_configs import PoolingType
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    decay = {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2}
    cases: dict[str, dict[str, Any]] = {
        "nothing": {},
        "cache": {"fused_params": {"cache_load_factor": 0.5, "enforce_hbm": True}},
        "clipping": {"fused_params": {"gradient_clipping": True, "max_gradient": 0.5}},
        "placement": {"placement": "grid_shard"},
        "decay": {"optimizer": RowWiseAdagrad, "fused_params": decay},
        "weighted mean": {"weighted": True, "pooling": PoolingType.MEAN},
        "sequences": {"is_sequence": True},
        "sequences, clipping": {"is_sequence": True, "fused_params": {"gradient_clipping": True}},
    }
    found = {}
    for name, case in cases.items():
        with log_lines() as lines:
            module = sharded(**case)
        found[name] = (type(module).__module__, list(lines))
    return found


def what_is_installed() -> dict[str, Any]:
    """On a rank."""
    import torchrec
    from torchrec.distributed import DistributedModelParallel
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    from torchembed.integrations import torchrec as ours

    def processed(sharders: Any) -> Any:
        """A module that is not ours, with a collection in it."""
        bags = torchrec.EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name="a", num_embeddings=8, embedding_dim=4, feature_names=["user"]
                )
            ],
            is_weighted=True,
            device=torch.device("meta"),
        )
        positions = PositionWeightedModuleCollection({"user": 4}, device=torch.device("cpu"))
        module = torch.nn.Sequential(FeatureProcessedEmbeddingBagCollection(bags, positions))
        wrapped: Any = DistributedModelParallel(
            module, device=torch.device("cpu"), sharders=sharders
        )
        return wrapped.module[0]._embedding_bag_collection

    found: dict[str, Any] = {}

    def note(name: str, make: Any) -> None:
        with log_lines() as lines:
            found[name] = type(make()).__module__, lines

    note("before", lambda: sharded("theirs"))
    note("default sharders", lambda: processed(ours.get_default_sharders()))
    ours.install()
    ours.install()
    note("installed", lambda: sharded("theirs"))
    note("installed, sequences", lambda: sharded("theirs", is_sequence=True))
    note("installed, processed", lambda: processed(None))
    note("installed, default sharders", lambda: processed(ours.get_default_sharders()))
    fallback: dict[str, Any] = {"fused_params": {"gradient_clipping": True}}
    note("installed, clipping", lambda: sharded("theirs", **fallback))
    note("installed, our clipping", lambda: sharded("ours", **fallback))
    ours.uninstall()
    note("uninstalled", lambda: sharded("theirs"))
    found["kinds"] = [type(sharder).__module__ for sharder in ours.get_default_sharders()]
    return found


def what_is_refused() -> dict[str, str]:
    """On a rank: errors' types and texts."""
    import torchrec

    from tests.support.torchrec_training import IDS
    from torchembed.integrations.torchrec.run import run
    from torchembed.integrations.torchrec.versions import check_version

    batches = torchrec.KeyedJaggedTensor(
        keys=list(IDS),
        values=torch.zeros(5, dtype=torch.int64),
        lengths=torch.ones(5, dtype=torch.int32),
        stride_per_key_per_rank=[[1], [2], [1], [1]],
        inverse_indices=(list(IDS), torch.zeros(4, 2, dtype=torch.int64)),
    )
    found = {}
    for name, call in {
        "variable batches": lambda: sharded()(batches),
        "no script": lambda: run([]),
        "no module": lambda: run(["-m"]),
        "another option": lambda: run(["--help"]),
        "an option alone": lambda: run(["--keep-pipeline"]),
        "old": lambda: check_version("1.5.0"),
        "new": lambda: check_version("1.10.0"),
        "right": lambda: [check_version(v) for v in ("1.6.1", "1.7.0", "1.8.0", "1.9.0")],
    }.items():
        try:
            call()
            found[name] = ""
        except (Exception, SystemExit) as error:  # noqa: BLE001
            found[name] = f"{type(error).__name__}: {error}"
    return found


def everything_on_the_cpu() -> tuple[Any, Any, Any]:
    return what_falls_back(), what_is_installed(), what_is_refused()


@pytest.fixture(scope="module")
def ranks(cpu_answers: list[dict[str, Any]]) -> list[Any]:
    return [answer["sharders"] for answer in cpu_answers]


def test_what_we_have_not_is_torchrecs_as_a_whole_and_one_rank_says_why(ranks: list[Any]) -> None:
    bags, sequences = "torchrec.distributed.embeddingbag", "torchrec.distributed.embedding"
    clipping = "since table a: its fused_params have gradient_clipping = True"
    decay = "since table a: FBGEMM forgets weight_decay on the CPU"
    mean = "since table a has a mean of weighted vectors"
    head = "Collection (sparse) is sharded by TorchRec itself, "
    expected = {
        "nothing": (OURS, []),
        "cache": (OURS, []),
        "clipping": (bags, [f"EmbeddingBag{head}{clipping}"]),
        "placement": (bags, [f"EmbeddingBag{head}since table a is sharded grid_shard"]),
        "decay": (bags, [f"EmbeddingBag{head}{decay}"]),
        "weighted mean": (bags, [f"EmbeddingBag{head}{mean}"]),
        "sequences": (OURS, []),
        "sequences, clipping": (sequences, [f"Embedding{head}{clipping}"]),
    }
    assert ranks[0][0] == expected
    assert ranks[1][0] == {name: (kind, []) for name, (kind, _) in expected.items()}


def test_install_replaces_the_two_sharders_and_nothing_within_other_modules(
    ranks: list[Any],
) -> None:
    bags = "torchrec.distributed.embeddingbag"
    found = ranks[0][1]
    kinds = found.pop("kinds")
    assert kinds.count("torchembed.integrations.torchrec.sharded.sharders") == 2
    assert len(kinds) > 4
    lines = {name: lines for name, (_, lines) in found.items()}
    assert {name: kind for name, (kind, _) in found.items()} == {
        "before": bags,
        "default sharders": bags,
        "installed": OURS,
        "installed, sequences": OURS,
        "installed, processed": bags,
        "installed, default sharders": bags,
        "installed, clipping": bags,
        "installed, our clipping": bags,
        "uninstalled": bags,
    }
    only = "since torchembed shards EmbeddingBagCollection and EmbeddingCollection only"
    processed = f"FeatureProcessedEmbeddingBagCollection (0) is sharded by TorchRec itself, {only}"
    assert {name: len(each) for name, each in lines.items() if each} == {
        "default sharders": 1,
        "installed, processed": 1,
        "installed, default sharders": 1,
        "installed, clipping": 1,
        "installed, our clipping": 1,
    }
    assert lines["default sharders"] == lines["installed, processed"] == [processed]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("variable batches", "NotImplementedError: features must have one batch size for all keys"),
        *(
            (name, r"SystemExit: usage: .*run \[--keep-pipeline\] \(script\.py \| -m module\)")
            for name in ("no script", "no module", "another option", "an option alone")
        ),
        ("old", r"ImportError: .* needs TorchRec 1\.6 to 1\.9, got 1\.5\.0; install one of these"),
        ("new", r"ImportError: .* needs TorchRec 1\.6 to 1\.9, got 1\.10\.0; install one of these"),
        ("right", "$"),
    ],
)
def test_what_is_refused(ranks: list[Any], name: str, error: str) -> None:
    assert re.match(error, ranks[0][2][name]), ranks[0][2][name]
