"""The scripts of docs/several-nodes.md launch what they say."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from torch.distributed.run import get_args_parser

from recipes.train import Command, parse
from tests.support.source_tree import ROOT

SLURM = {"SLURM_JOB_NODELIST": "n[3-6]", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_ID": "77"}
COMMANDS_OF_SLURM = """
scontrol() { [ "$*" = 'show hostnames n[3-6]' ] && printf '%s\\n' n3 n4 n5 n6; }
srun() { printf '%s\\0' "$@" "${OMP_NUM_THREADS}" "${TORCH_DISABLE_SHARE_RDZV_TCP_STORE}"; }
export -f scontrol srun
"""


def block_of(language: str) -> str:
    page = (ROOT / "docs/several-nodes.md").read_text()
    (block,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    return block


def launched(torchrun: list[str], data: Path) -> tuple[Any, Command]:
    """The arguments as ``torchrun`` and as a recipe read them, of data that is there."""
    torchrun = [argument.replace("/shared/criteo", str(data)) for argument in torchrun]
    launch = get_args_parser().parse_args(torchrun)
    assert (launch.training_script, launch.module) == ("recipes.train", True)
    return launch, parse(launch.training_script_args)


def test_the_script_of_slurm_starts_one_torchrun_on_each_node(tmp_path: Path) -> None:
    script = tmp_path / "train.sbatch"
    script.write_text(block_of("bash"))
    shell = subprocess.run(
        ["bash", "-c", f'{COMMANDS_OF_SLURM}\nexec bash "$0"', str(script)],
        env=os.environ | SLURM,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shell.stderr == ""
    name, *arguments, num_threads, own_store, end = shell.stdout.split("\0")
    assert (name, num_threads, own_store, end) == ("torchrun", "8", "1", "")
    (tmp_path / "day_0").write_text("")
    launch, command = launched(arguments, tmp_path)
    assert (launch.nnodes, launch.nproc_per_node, launch.max_restarts) == ("4", "8", 3)
    assert (launch.rdzv_backend, launch.rdzv_id, launch.rdzv_endpoint) == ("c10d", "77", "n3:29500")
    assert command.config.output == Path("/shared/runs/77")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script.read_text(), re.MULTILINE))
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == (
        launch.nnodes,
        "1",
        launch.nproc_per_node,
    )


def test_the_job_of_kubernetes_has_a_pod_for_each_node(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all(block_of("yaml"))
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completionMode"], pod["subdomain"]) == ("Indexed", service["metadata"]["name"])
    (container,) = pod["containers"]
    assert container["command"] == ["torchrun"]
    (tmp_path / "day_0").write_text("")
    launch, command = launched(container["args"], tmp_path)
    assert spec["completions"] == spec["parallelism"] == int(launch.nnodes)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": int(launch.nproc_per_node)}
    assert launch.rdzv_endpoint == f"{name}-0.{pod['subdomain']}:29500"
    assert command.config.output == Path("/shared/runs", launch.rdzv_id)
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    grace = pod["terminationGracePeriodSeconds"]
    assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
