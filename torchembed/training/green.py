import ctypes

import torch


def streams(num_sms: int, priorities=(0, 0)):
    """Experiment: streams on num_sms multiprocessors, and on the others."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name, *args):
        code = getattr(cuda, name)(*args)
        if code:
            raise RuntimeError(f"{name}: {code}")

    torch.cuda.synchronize()
    device = torch.cuda.current_device()
    whole, part, rest = (ctypes.create_string_buffer(512) for _ in range(3))
    call("cuDeviceGetDevResource", device, whole, 1)
    groups = ctypes.c_uint(1)
    call("cuDevSmResourceSplitByCount", part, ctypes.byref(groups), whole, rest, 0, num_sms)
    made = []
    for resource, priority in zip((part, rest), priorities, strict=True):
        desc, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        call("cuDevResourceGenerateDesc", ctypes.byref(desc), resource, 1)
        call("cuGreenCtxCreate", ctypes.byref(context), desc, device, 1)
        call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, 1, priority)
        count = int.from_bytes(resource.raw[96:100], "little")
        print("green context of", count, "SMs", flush=True)
        made.append(torch.cuda.ExternalStream(stream.value, device=device))
    return made
