"""A model of Hugging Face Transformers as the shared backbone: tiny, with random weights, without any download.

    python examples/hugging_face.py

From the command line any model is a backbone by name; here one on the notes of another example:

    spcl run --plugin examples/own_text_backbone.py --benchmark notes --set backbone=transformers:bert \
        --set backbone.hidden_size=32 --set backbone.num_attention_heads=4 --out runs/bert

With `--set backbone.pretrained=true` the name is one on the hub, or a folder with a model.
"""

from functools import partial

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import spcl
from spcl.models import FeatureExtractor

WORDS, LENGTH = 40, 8


def sentences(count: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(2, WORDS, (count, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (count, 1), generator=generator)
    return {"input_ids": words * mask, "attention_mask": mask.long()}


def is_long(x: dict[str, Tensor]) -> Tensor:
    return (x["attention_mask"].sum(dim=1) > 5).long()


def rarity(x: dict[str, Tensor]) -> Tensor:
    return x["input_ids"].sum(dim=1, keepdim=True) / x["attention_mask"].sum(dim=1, keepdim=True) / WORDS


torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
config = BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes)
backbone = FeatureExtractor(BertModel(config, add_pooling_layer=False))
adamw = partial(torch.optim.AdamW, lr=5e-3)
learner = spcl.Learner(backbone, spcl.SORO(), optimizer=adamw, memory=spcl.Reservoir(200), clip_norm=1.0)
learner.add_task("length", classes=("short", "long"))
learner.add_task("rarity", head=nn.Linear(32, 1), loss=nn.functional.mse_loss)
for step in range(150):
    x = sentences(32, step)
    learner.step({"length": (x, is_long(x)), "rarity": (x, rarity(x))})
x = sentences(500, seed=1000)
print(f"length: {learner.evaluate([(x, is_long(x))], task='length'):.1%} accuracy")
print(f"rarity: {learner.evaluate([(x, rarity(x))], task='rarity'):.4f} mean squared error")
print(f"of variance {rarity(x).var():.4f}")
