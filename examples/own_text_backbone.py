"""A network and data of your own, on text: notes with a topic and an urgency, and a bag of words as the backbone.

    python examples/own_text_backbone.py

The file is a plug-in, too, so that the command can use both by name:

    spcl run --plugin examples/own_text_backbone.py --benchmark notes --set backbone=bag-of-words --out runs/notes

A batch is a dict of tensors, here words and a mask; so is what memory keeps.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from spcl.data import SourceData, from_sources
from spcl.models import InputSpec
from spcl.plugins import backbone, data_set
from spcl.runs import execute, resolve_settings

LENGTH, TOPICS, WORDS_OF_A_TOPIC = 12, 4, 15


@data_set("notes")
def notes(samples: int = 1500, seed: int = 0) -> SourceData:
    """Made-up notes: the words tell the topic, and how often word 1 occurs tells the urgency."""
    generator = torch.Generator().manual_seed(seed)
    topic = torch.randint(TOPICS, (samples,), generator=generator)
    words = torch.randint(WORDS_OF_A_TOPIC, (samples, LENGTH), generator=generator)
    words += 2 + WORDS_OF_A_TOPIC * topic[:, None]
    words[torch.rand(samples, LENGTH, generator=generator) < 0.3] = 1
    mask = torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (samples, 1), generator=generator)
    notes = {"input_ids": words * mask, "attention_mask": mask.long()}
    urgency = ((words == 1) & mask).sum(dim=1) / mask.sum(dim=1)
    return from_sources({"topic": (notes, topic), "urgency": (notes, urgency)}, name="notes")


@backbone("bag-of-words")
class BagOfWords(nn.Module):
    """The mean of word vectors, and a layer."""

    def __init__(self, inputs: InputSpec, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(inputs.vocabulary or 1000, width)
        self.layer = nn.Linear(width, width)
        self.feature_dim = width

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        mask = x["attention_mask"].unsqueeze(-1)
        return torch.tanh(self.layer((self.words(x["input_ids"]) * mask).sum(dim=1) / mask.sum(dim=1)))


if __name__ == "__main__":
    settings = resolve_settings({"plugins": [__file__], "benchmark": "notes", "backbone": "bag-of-words", "epochs": 4})
    with tempfile.TemporaryDirectory() as folder:
        for name, task in execute(settings, Path(folder) / "run").tasks.items():
            print(f"{name}: {task.final:.1f} % {task.metric}")
