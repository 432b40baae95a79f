"""Images with labels: scikit-learn's handwritten digits, or arrays from an `.npz` file."""

from __future__ import annotations

import hashlib
import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import pydantic

from mpjax._mistakes import DataError
from mpjax.registry import Positive, register_data
from mpjax.zoo.data._text import Loaded, Share

# With more classes, no classifier's last layer would fit on a device.
Classes = Annotated[Positive, pydantic.Field(le=1 << 24)]
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
  every = table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int32)
  return images_to_rows({title: every}, title, valid_fraction=0.2)


@register_data("npz")
def load_npz(*, path: str, num_classes: Classes | None = None, valid_fraction: Share = 0.05) -> Loaded:
  """Loads `images` [N, H, W] or [N, H, W, C] and `labels` [N].

  `eval_images` and `eval_labels` are held out; without them, the share `valid_fraction` is. Labels are below
  `num_classes`; by default the number of classes is the largest label plus one.
  """
  try:
    # Reading pickled objects could run code: they are refused.
    with pathlib.Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as file:
      arrays = {name: np.asarray(file[name]) for name in file.files}
  except Exception as error:  # from the file, the archive, its compression or NumPy's headers
    reason = " ".join(str(error).split()) or type(error).__name__
    if "pickle" in reason:  # NumPy's advice would run code in the file
      reason = "it is no archive of arrays, or has Python objects"
    raise DataError(f"data.path={path!r}: not a readable .npz file ({reason})") from error
  has_split = not arrays.keys().isdisjoint(("eval_images", "eval_labels"))
  splits = {}
  for prefix in ("", "eval_")[: 1 + has_split]:
    names = (f"{prefix}images", f"{prefix}labels")
    if lacking := [name for name in names if name not in arrays]:
      raise DataError(f"{path}: no array {lacking[0]!r}; it holds {', '.join(sorted(arrays)) or 'nothing'}")
    images, labels = (np.atleast_1d(arrays[name]) for name in names)
    with np.errstate(over="ignore"):  # what float32 cannot hold is found as infinite
      images = images.astype(np.float32) if images.dtype.kind == "f" else images
    splits[f"{path}: {' and '.join(names)}"] = images, labels
  return images_to_rows(splits, path, num_classes, valid_fraction)


class Images:
  """Rows of an image, standardised in float32, and a label.

  Args:
    images: an array, or a sequence that reads images on demand.
    labels: of all images, [N].
    at: the positions of those that are rows.
  """

  def __init__(self, images: Any, labels: np.ndarray, at: np.ndarray):
    self._images, self.labels, self._at = images, labels[at], at
    self.shape: tuple[int, ...] = ()
    self.mean, self.deviation = 0.0, 1.0

  def __len__(self) -> int:
    return len(self._at)

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    image = np.asarray(self._images[int(self._at[index])], np.float32)
    image = ((image - self.mean) / self.deviation).astype(np.float32)
    return {"images": image.reshape(self.shape), "labels": self.labels[index].astype(np.int32)}

  def sample(self) -> np.ndarray:
    """Returns the images as they are; at most 1024 that are read on demand."""
    if isinstance(self._images, np.ndarray):
      return self._images[self._at]
    some = self._at[np.unique(np.linspace(0, len(self) - 1, _SAMPLED).astype(int))]
    return np.stack([np.asarray(self._images[int(position)]) for position in some])


def images_to_rows(
  splits: Mapping[str, tuple[Any, np.ndarray]],
  title: str,
  num_classes: int | None = None,
  valid_fraction: float = 0.05,
) -> Loaded:
  """Makes rows of images to train on and held out, which are read one by one.

  `splits` are the images and labels to train on, and those held out, each by where they are from. A fixed
  permutation holds out the share `valid_fraction` of a single split. All are standardised by the mean and
  deviation of those to train on, or of 1024 of them if they are read on demand.

  Labels are below `num_classes`, which by default is the largest of them plus one. A single wrong label does
  not decide it: without `num_classes` they are below 1024 or the number of labels.

  Raises:
    DataError: if images and labels do not fit together.
  """
  most = num_classes or max(1024, sum(len(labels) for _, labels in splits.values()))
  for where, (images, labels) in splits.items():
    if labels.shape != (len(images),) or labels.dtype.kind not in "ui":
      found = f"labels are {labels.dtype}{list(labels.shape)}"
      raise DataError(f"{where}: {found}: expected an integer for each of {len(images)} images")
    if labels.size and (labels.min() < 0 or labels.max() >= most):
      found = f"labels are {labels.min()} to {labels.max()}"
      raise DataError(f"{where}: {found}: expected classes from 0 on, below {most} (data.num_classes)")
  pairs, positions = list(splits.values()), [np.arange(len(labels)) for _, labels in splits.values()]
  if len(pairs) == 1:
    order = np.random.default_rng(0).permutation(positions[0])
    held_out = max(1, round(len(order) * valid_fraction))
    pairs, positions = 2 * pairs, [np.sort(order[held_out:]), np.sort(order[:held_out])]
  parts = [Images(*pair, at) for pair, at in zip(pairs, positions, strict=True)]
  if not all(map(len, parts)):
    raise DataError(f"{title}: {len(parts[0])} images to train on, {len(parts[1])} held out: expected some")
  seen = [part.sample() for part in parts]
  kinds = [f"{images.dtype}{list(images.shape[1:])}" for images in seen]
  for images, kind in zip(seen, kinds, strict=True):
    has_numbers = images.size and images.dtype.kind in "uif" and np.isfinite(images).all()
    if images.ndim not in (3, 4) or not has_numbers:
      raise DataError(f"{title}: images are {kind}: expected finite numbers [height, width] or with channels")
  if kinds[0] != kinds[1]:
    # Most likely 0 to 255 in one and 0 to 1 in the other, with one mean and deviation for both.
    raise DataError(f"{title}: eval_images are {kinds[1]}, images {kinds[0]}: expected one shape and dtype")
  digest = hashlib.blake2b(digest_size=8)
  for array in (seen[0], parts[0].labels, seen[1], parts[1].labels):
    digest.update(repr((array.shape, array.dtype.str)).encode())
    digest.update(np.ascontiguousarray(array).tobytes())
  shape = (*seen[0].shape[1:], 1)[:3]
  classes = num_classes or int(max(part.labels.max() for part in parts)) + 1
  facts = {
    "image_shape": shape,
    "num_classes": classes,
    "fingerprint": digest.hexdigest(),
    "description": f"{title}: {len(parts[0])} images of {'x'.join(map(str, shape))} to train on, "
    f"{len(parts[1])} held out, {classes} classes",
  }
  mean, deviation = seen[0].mean(dtype=np.float64), max(seen[0].std(dtype=np.float64), 1e-6)
  for part in parts:
    part.shape, part.mean, part.deviation = shape, mean, deviation
  return parts[0], parts[1], facts
