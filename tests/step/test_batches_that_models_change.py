"""Models may put parts into their batch and take parts out, as in a plain loop."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.support.tape import taped_captures
from torchembed.training import StepForm, TrainPipeline

NUM_STEPS, NUM_SAMPLES, NUM_ROWS = 8, 6, 20


class Scores(nn.Module):
    """Takes the labels out of a batch and puts its scores in."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torchembed.Embedding(NUM_ROWS, 4, seed=0)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        batch["scores"] = self.items(batch["ids"]).sum(1)
        return F.mse_loss(batch["scores"], labels)


def made_batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "ids": torch.randint(NUM_ROWS, (NUM_SAMPLES,), generator=generator),
            "labels": torch.rand(NUM_SAMPLES, generator=generator),
        }
        for _ in range(NUM_STEPS)
    ]


def test_the_result_has_the_batch_as_the_model_left_it() -> None:
    by_hand, model = Scores(), Scores()
    optimizer = torchembed.optim.SGD(by_hand.parameters(), lr=0.1)
    expected = []
    for batch in made_batches():
        optimizer.zero_grad()
        by_hand(batch).backward()
        optimizer.step()
        expected.append(batch["scores"].tolist())
    batches = made_batches()
    optimizer = torchembed.optim.SGD(model.parameters(), lr=0.1)
    found, kinds = [], []
    with taped_captures(), TrainPipeline(model, None, optimizer, capture=True) as pipeline:
        iterator = iter(batches)
        for _ in batches:
            result = pipeline.progress(iterator)
            assert result.batch.keys() == {"ids", "scores"}
            assert not result.batch["scores"].requires_grad
            found.append(result.batch["scores"].tolist())
            kinds.append(result.kind)
    assert kinds[-1].form is StepForm.GRAPH
    assert found == expected
    # The reader's own, which may be read once more.
    assert all(batch.keys() == {"ids", "labels"} for batch in batches)
