"""Torch's random numbers, put back to where they were."""

from collections.abc import Callable

import torch


def saved_random_numbers(device: torch.device) -> Callable[[], None]:
    """A function that puts torch's generators, the CPU's and that of ``device``, back to where they
    are now.

    Whoever sets the state of a GPU's generator makes cuDNN begin its dropout anew, from a number
    for which the host waits and which no capture can draw. So the state is set through another
    generator that shares it, of which cuDNN knows nothing.
    """
    of_cpu = torch.random.get_rng_state()
    if device.type != "cuda":
        return lambda: torch.random.set_rng_state(of_cpu)
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index].graphsafe_get_state()
    of_gpu = generator.get_state()

    def restore() -> None:
        torch.random.set_rng_state(of_cpu)
        generator.set_state(of_gpu)

    return restore
