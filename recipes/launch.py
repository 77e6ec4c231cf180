"""The launch by ``torchrun`` that a process belongs to."""

import os

import torch.distributed as dist

_NO_ID = "none"
"""The run ID of a ``torchrun`` that was given none."""
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def launch_id() -> str | None:
    """The run ID of ``torchrun``'s rendezvous, which stays the same when it starts its processes
    again: ``--rdzv-id``, or the random one of ``--standalone``. None without either."""
    if not dist.is_torchelastic_launched():
        return None
    run_id = os.environ["TORCHELASTIC_RUN_ID"]
    return None if run_id == _NO_ID else run_id


def num_launched_ranks() -> int:
    """Ranks that ``torchrun`` started, of all nodes; 1 where it did not start this process."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def check_restarts() -> None:
    """Raise ``RuntimeError`` where ``torchrun`` is to start processes again and could not.

    They must know their launch, whose output they go on with. And they must not share the store of
    ``torchrun`` itself, which keeps the addresses of the dead processes under the names of the new
    ones (https://github.com/pytorch/pytorch/issues/135712).
    """
    max_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if not dist.is_torchelastic_launched() or max_restarts == 0:
        return
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == str(True):
        raise RuntimeError(
            f"--max-restarts must come with a store for each start, got {max_restarts} and one "
            f"store for all; set {_OWN_STORE} for torchrun, and give it --standalone or "
            "--rdzv-backend c10d"
        )
    if launch_id() is None:
        raise RuntimeError(
            f"--max-restarts must come with a name of the launch, got {max_restarts} and none; "
            "give torchrun --standalone, or the same --rdzv-id on every node"
        )
