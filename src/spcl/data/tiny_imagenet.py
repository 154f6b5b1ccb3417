"""Reader of Tiny-ImageNet-200 as published: JPEG files of 64×64, some grey, with labels by line of ``wnids.txt``."""

import numpy as np
import torch
from torch import Tensor

from spcl.data.archives import Archive
from spcl.data.image_data import ImageData
from spcl.data.pictures import decode_picture
from spcl.data.progress import track
from spcl.errors import DataError

__all__ = ["read_tiny_imagenet"]

SIDE = 64
ANNOTATIONS = "val/val_annotations.txt"


def read_tiny_imagenet(archive: Archive, name: str) -> ImageData:
    """Read the training and validation images; the published test images have no labels and are not used."""
    wnids = _lines(archive, "wnids.txt")
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    train_x, train_y = _decode(archive, _train_labels(archive, label_of))
    test_x, test_y = _decode(archive, _validation_labels(archive, label_of))
    return ImageData(name, train_x, train_y, test_x, test_y, _class_names(archive, wnids))


def _train_labels(archive: Archive, label_of: dict[str, int]) -> dict[str, int]:
    """Return the label of every file, from the folder names ``train/<wnid>/images``."""
    files = sorted(file for file in archive.names if file.startswith("train/") and file.endswith(".JPEG"))
    return {file: _label(archive, label_of, file.split("/")[1], file) for file in files}


def _validation_labels(archive: Archive, label_of: dict[str, int]) -> dict[str, int]:
    """Return the label of every file, from the first two columns of the annotations."""
    labels = {}
    for line in _lines(archive, ANNOTATIONS):
        file, _, rest = line.partition("\t")
        labels[f"val/images/{file}"] = _label(archive, label_of, rest.partition("\t")[0], f"{ANNOTATIONS}, {file}")
    present = {file for file in archive.names if file.startswith("val/images/")}
    if unlabelled := present - labels.keys():
        raise DataError(f"{archive.path}: {len(unlabelled)} images without a line in {ANNOTATIONS}: {min(unlabelled)}")
    return labels


def _label(archive: Archive, label_of: dict[str, int], wnid: str, where: str) -> int:
    if wnid not in label_of:
        raise DataError(f"{archive.path}, {where}: expected a class of wnids.txt, found {wnid!r}")
    return label_of[wnid]


def _decode(archive: Archive, labels: dict[str, int]) -> tuple[Tensor, Tensor]:
    if not labels:
        raise DataError(f"{archive.path}: expected JPEG files in train/<class>/images and val/images, found none")
    images = np.empty((len(labels), 3, SIDE, SIDE), np.uint8)
    for i, file in enumerate(track(labels, f"decoding {archive.path.name}", len(labels))):
        where = f"{archive.path}, {file}"
        image = decode_picture(archive.require(file), where, "RGB")
        if image.shape[1:] != (SIDE, SIDE):
            raise DataError(f"{where}: expected an image of 64×64, found {image.shape[2]}×{image.shape[1]}")
        images[i] = image
    return torch.from_numpy(images), torch.tensor(list(labels.values()))


def _class_names(archive: Archive, wnids: list[str]) -> tuple[str, ...]:
    """Return the first synonym in ``words.txt`` for each class, or its id where there is none."""
    lines = _lines(archive, "words.txt") if "words.txt" in archive.names else []
    words = {wnid: synonyms.split(",")[0] for wnid, _, synonyms in (line.partition("\t") for line in lines)}
    return tuple(words.get(wnid, wnid) for wnid in wnids)


def _lines(archive: Archive, name: str) -> list[str]:
    text = archive.require(name).decode(errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]
