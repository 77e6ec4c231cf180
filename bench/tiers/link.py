"""The speed of the link between host and device, by plain copies."""

import statistics
import time
from typing import NamedTuple

import torch


class LinkRates(NamedTuple):
    """Bytes a second that a large copy moves."""

    to_device: float
    to_host: float


def measured_rates(device: torch.device, num_bytes: int = 2**28, num_copies: int = 7) -> LinkRates:
    """Measure copies between pinned memory of the host and ``device``; on a CPU, within its
    memory."""
    on_gpu = device.type == "cuda"
    host = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        seconds = []
        for _ in range(num_copies):
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return num_bytes / statistics.median(seconds)

    return LinkRates(to_device=rate(there, host), to_host=rate(host, there))
