"""Images with labels: scikit-learn's handwritten digits, or arrays from an `.npz` file."""

from __future__ import annotations

import hashlib
import pathlib
from typing import Annotated, Any

import numpy as np
import pydantic

from mpjax.registry._checks import Positive
from mpjax.registry._errors import DataError
from mpjax.registry._registry import register_data
from mpjax.zoo.data._text import Loaded, Share

# With more classes, no classifier's last layer would fit on a device.
Classes = Annotated[Positive, pydantic.Field(le=1 << 24)]
# Without `data.num_classes`, a label above this is an error unless there are as many images.
_FEW = 1024


@register_data("digits")
def load_digits() -> Loaded:
  """Loads 1797 images of 8 x 8 in 10 classes; a fixed fifth is held out."""
  import sklearn.datasets

  digits = sklearn.datasets.load_digits()
  images, labels = digits.images.astype(np.float32), digits.target.astype(np.int32)
  train, held_out = split_arrays(images, labels, 0.2)
  return images_to_rows(train, held_out, train[0], held_out[0], "scikit-learn handwritten digits")


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
  except FileNotFoundError:
    raise DataError(f"data.path={path!r}: no such file") from None
  except Exception as error:  # from the archive, its compression or NumPy's headers
    reason = " ".join(str(error).split()) or type(error).__name__
    if "pickle" in reason:  # NumPy's advice would run code in the file
      reason = "it is not an archive of arrays, or has Python objects, which are not read"
    raise DataError(f"data.path={path!r}: not a readable .npz file ({reason})") from error
  train = check_pair(arrays, "", path)
  if "eval_images" in arrays or "eval_labels" in arrays:
    held_out = check_pair(arrays, "eval_", path)
    if held_out[0].shape[1:] != train[0].shape[1:]:
      raise DataError(
        f"{path}: eval_images are {held_out[0].shape[1:]}, images {train[0].shape[1:]}: expected equal"
      )
    if held_out[0].dtype != train[0].dtype:
      # Most likely 0 to 255 in one and 0 to 1 in the other, with one mean and deviation for both.
      raise DataError(
        f"{path}: eval_images are {held_out[0].dtype}, images {train[0].dtype}: expected one dtype"
      )
  else:
    train, held_out = split_arrays(*train, valid_fraction)
  labelled = {name: arrays[name] for name in ("labels", "eval_labels") if name in arrays}
  for name, labels in labelled.items():
    require_classes(labels, name, path, num_classes, sum(map(len, labelled.values())))
  return images_to_rows(train, held_out, train[0], held_out[0], path, num_classes)


# Images by position, which may be read on demand, and labels.
LabelledImages = tuple[Any, np.ndarray]


class Images:
  """Rows of an image, standardised in float32, and a label."""

  def __init__(self, arrays: LabelledImages, shape: tuple[int, ...], mean: float, deviation: float):
    self._images, self._labels = arrays
    self._shape, self._mean, self._deviation = shape, mean, deviation

  def __len__(self) -> int:
    return len(self._images)

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    image = (self._images[index].astype(np.float32) - self._mean) / self._deviation
    label = self._labels[index].astype(np.int32)
    return {"images": image.astype(np.float32).reshape(self._shape), "labels": label}


def images_to_rows(
  train: LabelledImages,
  held_out: LabelledImages,
  seen: np.ndarray,
  seen_held_out: np.ndarray,
  title: str,
  num_classes: int | None = None,
) -> Loaded:
  """Makes rows of images that are read one by one.

  Args:
    train, held_out: images by position, and their labels.
    seen, seen_held_out: these images, or some of them. All images are standardised by the mean and deviation
      of `seen`. The fingerprint is from both.
    title: the dataset's name.
    num_classes: number of classes; `None`: the largest label plus one.

  Raises:
    DataError: if a split is empty.
  """
  labels = train[1]
  if not len(train[0]) or not len(held_out[0]):
    raise DataError(
      f"{title}: {len(train[0])} training and {len(held_out[0])} evaluation images: expected some"
    )
  mean, deviation = seen.mean(dtype=np.float64), max(seen.std(dtype=np.float64), 1e-6)
  digest = hashlib.blake2b(digest_size=8)
  for array in (seen, labels, seen_held_out, held_out[1]):
    digest.update(repr((array.shape, array.dtype.str)).encode())
    digest.update(np.ascontiguousarray(array).tobytes())
  shape = (*seen.shape[1:], 1)[:3]
  classes = num_classes or int(max(labels.max(), held_out[1].max())) + 1
  facts = {
    "image_shape": shape,
    "num_classes": classes,
    "fingerprint": digest.hexdigest(),
    "description": f"{title}: {len(train[0])} images of {'x'.join(map(str, shape))} to train on, "
    f"{len(held_out[0])} held out, {classes} classes",
  }
  return Images(train, shape, mean, deviation), Images(held_out, shape, mean, deviation), facts


def split_arrays(
  images: np.ndarray, labels: np.ndarray, fraction: float
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
  """Returns (train, held out), split by a fixed permutation."""
  train, held_out = split_positions(len(images), fraction)
  return (images[train], labels[train]), (images[held_out], labels[held_out])


def split_positions(count: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
  """Returns the positions of training and held-out rows, as `split_arrays` uses them."""
  order = np.random.default_rng(0).permutation(count)
  held_out = max(1, round(count * fraction))
  return np.sort(order[held_out:]), np.sort(order[:held_out])


def check_pair(arrays: dict[str, np.ndarray], prefix: str, path: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns images and labels, checked to fit together."""
  for name in (f"{prefix}images", f"{prefix}labels"):
    if name not in arrays:
      raise DataError(f"{path}: no array {name!r}; it holds {', '.join(sorted(arrays)) or 'nothing'}")
  images, labels = arrays[f"{prefix}images"], arrays[f"{prefix}labels"]
  if images.ndim not in (3, 4) or images.dtype.kind not in "uif" or 0 in images.shape[1:]:
    raise DataError(
      f"{path}: {prefix}images is {images.dtype}{list(images.shape)}: expected numbers of shape [N, H, W] "
      "or [N, H, W, C], none of them empty"
    )
  check_labels(labels, f"{prefix}labels", path)
  if len(images) != len(labels):
    raise DataError(f"{path}: {len(images)} {prefix}images but {len(labels)} {prefix}labels")
  if images.dtype.kind == "f":
    with np.errstate(over="ignore"):  # what float32 cannot hold is reported as infinite
      images = images.astype(np.float32)
  if images.dtype.kind == "f" and not (finite := np.isfinite(images)).all():
    first = np.unravel_index(int(np.argmin(finite)), images.shape)
    count = int((~finite).sum())
    raise DataError(
      f"{path}: {prefix}images has {count} values that are NaN or infinite, first at {list(map(int, first))}"
    )
  return images, labels


def require_classes(labels: np.ndarray, name: str, path: str, num_classes: int | None, images: int) -> None:
  """Raises `DataError` for a label that is too large.

  Labels are below `num_classes`; without it, below 1024 or the number of `images` of all splits together, so
  that a single wrong label does not decide the number of classes.
  """
  bound = num_classes or max(_FEW, images)
  if (large := labels >= bound).any():
    at = int(np.argmax(large))
    what = f"below data.num_classes={num_classes}" if num_classes else f"below {bound}, or data.num_classes"
    raise DataError(f"{path}: {name}[{at}]={labels[at]}: expected a class {what}")


def check_labels(labels: np.ndarray, name: str, path: str) -> None:
  """Raises `DataError` for labels that are not integers of 0 or more."""
  if labels.ndim != 1 or labels.dtype.kind not in "ui":
    raise DataError(f"{path}: {name} is {labels.dtype}{list(labels.shape)}: expected integers [N]")
  if labels.dtype.kind == "i" and (labels < 0).any():
    raise DataError(f"{path}: {name} has negative values, first at {int(np.argmax(labels < 0))}")
  if (large := labels > np.iinfo(np.int32).max).any():
    at = int(np.argmax(large))
    raise DataError(f"{path}: {name}[{at}]={labels[at]}: expected classes that int32 can hold")
