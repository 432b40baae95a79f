"""Images with labels: scikit-learn's handwritten digits, or arrays from an `.npz` file."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import pydantic

from mpjax._mistakes import DataError
from mpjax.registry import Positive, register_data
from mpjax.zoo.data._text import Loaded, Share

# With more classes, no classifier's last layer would fit on a device.
_MOST = 1 << 24
Classes = Annotated[Positive, pydantic.Field(le=_MOST)]
# Images that are read before a run, of those that are read on demand.
_SAMPLED = 1024


@register_data("digits")
def load_digits() -> Loaded:
  """Loads 1797 images of 8 x 8 in 10 classes; a fixed fifth is held out."""
  package = importlib.util.find_spec("sklearn")
  if package is None or package.origin is None:
    raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
  # Its file, without the second that an import of its functions takes.
  file = pathlib.Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz"
  table = np.loadtxt(file, np.float32, delimiter=",")
  title = "scikit-learn handwritten digits"
  every = Images(table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int32), title)
  return images_to_rows([every], title, valid_fraction=0.2)


@register_data("npz")
def load_npz(
  *, path: str | None = None, num_classes: Classes | None = None, valid_fraction: Share = 0.05
) -> Loaded:
  """Loads `images` [N, H, W] or [N, H, W, C] and `labels` [N].

  `eval_images` and `eval_labels` are held out; without them, the share `valid_fraction` is. Labels are below
  `num_classes`; by default the number of classes is the largest label plus one.
  """
  if path is None:
    raise DataError(f"data.path={path!r}: expected the path of an .npz file")
  try:
    # Reading pickled objects could run code: they are refused.
    with pathlib.Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as file:
      arrays = {name: np.asarray(file[name]) for name in file.files}
  except Exception as error:  # from the file, the archive, its compression or NumPy's headers
    reason = " ".join(str(error).split()) or type(error).__name__
    raise DataError(f"data.path={path!r}: not a readable .npz file ({reason})") from error
  has_split = not arrays.keys().isdisjoint(("eval_images", "eval_labels"))
  splits = []
  for prefix in ("", "eval_")[: 1 + has_split]:
    for name in (f"{prefix}images", f"{prefix}labels"):
      if name not in arrays:
        raise DataError(f"{path}: no array {name!r}; it holds {', '.join(sorted(arrays)) or 'nothing'}")
    images = np.atleast_1d(arrays[f"{prefix}images"])
    if images.dtype.kind == "f":
      images = images.astype(np.float32)
    splits.append(Images(images, arrays[f"{prefix}labels"], path, f"{prefix}labels"))
  return images_to_rows(splits, path, num_classes, valid_fraction)


@dataclasses.dataclass(frozen=True)
class Images:
  """Rows of an image, standardised in float32, and a label.

  Attributes:
    images: an array, or a sequence that reads images on demand.
    labels: of all images, [N].
    title: where they come from.
    name: what the labels are called there.
    at: the positions of the images that are rows; those of all images by default.
    shape: the shape of an image in a row.
    mean: what is subtracted.
    deviation: what is divided by.
  """

  images: Any
  labels: np.ndarray
  title: str
  name: str = "labels"
  at: Any = None
  shape: tuple[int, ...] = ()
  mean: float = 0.0
  deviation: float = 1.0

  def __post_init__(self) -> None:
    if self.at is None:
      object.__setattr__(self, "at", np.arange(len(self.images)))

  def __len__(self) -> int:
    return len(self.at)

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    image = np.asarray(self.images[int(self.at[index])], np.float32)
    image = ((image - self.mean) / self.deviation).astype(np.float32)
    return {"images": image.reshape(self.shape), "labels": self.labels[self.at[index]].astype(np.int32)}

  def sample(self) -> np.ndarray:
    """Returns the images as they are; at most 1024 that are read on demand."""
    if isinstance(self.images, np.ndarray):
      return self.images[self.at]
    some = self.at[np.unique(np.linspace(0, len(self) - 1, _SAMPLED).astype(int))]
    return np.stack([np.asarray(self.images[int(position)]) for position in some])


def images_to_rows(
  splits: Sequence[Images], title: str, num_classes: int | None = None, valid_fraction: float = 0.05
) -> Loaded:
  """Makes rows of images to train on and held out, which are read one by one.

  A fixed permutation holds out the share `valid_fraction` of a single split. All are standardised by the
  mean and deviation of those to train on, or of 1024 of them if they are read on demand.

  Labels are below `num_classes`, which by default is the largest of them plus one.

  Raises:
    DataError: if images and labels do not fit together.
  """
  parts = list(splits)
  if len(splits) == 1:
    order = np.random.default_rng(0).permutation(splits[0].at)
    held_out = max(1, round(len(order) * valid_fraction))
    cut = (order[held_out:], order[:held_out])
    parts = [dataclasses.replace(splits[0], at=np.sort(at)) for at in cut]
  for split in splits:
    _check(split, num_classes or _MOST)
  seen, labels = [part.sample() for part in parts], [part.labels[part.at] for part in parts]
  kinds = [f"{images.dtype}{images.shape[1:]}" for images in seen]
  if kinds[0] != kinds[1]:
    # Most likely 0 to 255 in one and 0 to 1 in the other, with one mean and deviation for both.
    raise DataError(f"{title}: eval_images are {kinds[1]}, images {kinds[0]}: expected one shape and dtype")
  digest = hashlib.blake2b(digest_size=8)
  for array in (seen[0], labels[0], seen[1], labels[1]):
    digest.update(repr((array.shape, array.dtype.str)).encode())
    digest.update(np.ascontiguousarray(array).tobytes())
  shape = (*seen[0].shape[1:], 1)[:3]
  classes = num_classes or int(max(map(np.max, labels))) + 1
  facts = {
    "image_shape": shape,
    "num_classes": classes,
    "fingerprint": digest.hexdigest(),
    "description": f"{title}: {len(parts[0])} images of {'x'.join(map(str, shape))} to train on, "
    f"{len(parts[1])} held out, {classes} classes",
  }
  mean, deviation = seen[0].mean(dtype=np.float64), max(seen[0].std(dtype=np.float64), 1e-6)
  rows = [dataclasses.replace(part, shape=shape, mean=mean, deviation=deviation) for part in parts]
  return rows[0], rows[1], facts


def _check(split: Images, classes: int) -> None:
  """Raises `DataError` for unfit images or labels."""
  labels, images = split.labels, split.sample()
  if images.ndim not in (3, 4) or images.dtype.kind not in "uif":
    seen = f"images is {images.dtype}{list(images.shape)}"
    raise DataError(f"{split.title}: {seen}: expected numbers of shape [N, H, W] or [N, H, W, C]")
  if labels.shape != (len(split.images),) or labels.dtype.kind not in "ui":
    seen = f"{split.name} is {labels.dtype}{list(labels.shape)}"
    raise DataError(f"{split.title}: {seen}: expected an integer for each of {len(split.images)} images")
  if labels.min() < 0 or labels.max() >= classes:
    seen = f"{split.name} has {labels.min()} to {labels.max()}"
    raise DataError(f"{split.title}: {seen}: expected classes from 0 on, below {classes}")
  if not np.isfinite(images).all():
    raise DataError(f"{split.title}: images has values that are NaN or infinite")
