"""Requirements of the ``binary_cross_entropy_*`` operations on their arguments."""

from torch import Tensor

from torchembed.core import checks


def check_binary_cross_entropy_forward(logits: Tensor, labels: Tensor) -> None:
    checks.check_float("logits", logits)
    checks.check_float("labels", labels)
    if labels.shape != logits.shape:
        raise ValueError(
            f"labels must have the shape of logits, {tuple(logits.shape)}, got "
            f"{tuple(labels.shape)}; reshape one of them"
        )
    checks.check_same_device("logits", logits, labels=labels)
    checks.check_contiguous("logits", logits)
    checks.check_contiguous("labels", labels)


def check_binary_cross_entropy_backward(grad: Tensor, logits: Tensor, labels: Tensor) -> None:
    check_binary_cross_entropy_forward(logits, labels)
    checks.check_float("grad", grad)
    checks.check_numel("grad", grad, 1, "the gradient of one mean")
    checks.check_same_device("logits", logits, grad=grad)
