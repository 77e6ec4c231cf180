"""Host memory as tensors of the device that may access it."""

import torch
from torch import Tensor


def device_view(stored: Tensor, device: torch.device) -> Tensor:
    """``stored``, contiguous and in page-locked memory of the host, as a tensor of ``device``: the
    same memory, which kernels read and write where it is. ``stored`` itself on the CPU.

    Raises:
        RuntimeError: where the memory was locked for another GPU.
    """
    if device.type != "cuda" or not stored.numel():
        return stored.to(device)
    # As bytes, since the interface has no name for bfloat16.
    made = torch.as_tensor(_Bytes(stored), device=device)
    if made.data_ptr() != stored.data_ptr():
        raise RuntimeError(
            f"host memory of tables must be locked for {device}, which is to read it, and was for "
            "another GPU; call torch.cuda.set_device with the rank's GPU before sharding the model"
        )
    return made.view(stored.dtype).view(stored.shape)


class _Bytes:
    """The bytes of ``stored``, which lives as long as a tensor that was made of this."""

    def __init__(self, stored: Tensor) -> None:
        self._stored = stored
        self.__cuda_array_interface__ = {
            "shape": (stored.nbytes,),
            "typestr": "|u1",
            # An address of locked memory is the device's, too.
            "data": (stored.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
