"""Binds processes to the processors of a GPU's NUMA node."""

import os
from pathlib import Path

import torch


def processors_near(device: torch.device, root: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Numbers of the processors of the NUMA node that ``device``, a GPU, is attached to; empty
    where the system does not say."""
    gpu = torch.cuda.get_device_properties(device)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        return parsed_processors((root / address / "local_cpulist").read_text())
    except OSError:
        return set()


def parsed_processors(text: str) -> set[int]:
    """The numbers of a Linux list of processors, such as ``0-3,8``."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def stay_near(device: torch.device) -> None:
    """Bind this process, and threads that it starts from now on, to the processors near ``device``.

    Memory that they touch first, pinned memory too, is then near the GPU. Nothing changes for a CPU
    device, on systems that do not say where a GPU is, and where the process may use none of these
    processors.
    """
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    allowed = processors_near(device) & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)
