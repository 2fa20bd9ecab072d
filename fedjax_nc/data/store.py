"""The data directory: what is known of official data sets, one writer at a time, and the cache `<name>.npz`.

Files may be broken or made to do harm. What they may hold is known to the byte, so it is written down and not read from
them: nothing that a file says is imported or unpickled, and no more is unpacked than the format holds.
"""

import contextlib
import math
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import numpy as np
from numpy.typing import NDArray

from fedjax_nc.data.dataset import Dataset

Splits = dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]]
"""'train' and 'test': images [n, H, W, ch], and all their labels [n, kinds], the one that counts last."""


class Source(NamedTuple):
    """A data set that TFDS prepares, and the official files that it is made of."""

    name: str
    files: tuple[str, ...]  #: as they lie in the data directory
    base: str  #: URL of the folder that they come from
    read: Callable[[Any, Path], Splits]  #: of this and the data directory
    labels: dict[str, int]  #: the kinds of labels of an image, and how many classes each tells apart
    sizes: tuple[int, int]  #: training and test images
    prepared: str  #: TFDS's name, and its configuration
    version: str  #: of TFDS's layout
    shape: tuple[int, int, int] = (32, 32, 3)
    ids: str = ''  #: what TFDS calls an image by its split and place, which run in the order of the official files
    sideways: bool = False  #: whether rows and columns of TFDS's images are swapped

    @property
    def num_classes(self) -> int:
        return self.labels['label']

    def url(self, file: str) -> str:
        return f'{self.base}/{Path(file).name}'

    def put(self, folder: Path) -> str:
        """What a user is to do who has no network."""
        names = [Path(file).name for file in self.files]
        what = f'{", ".join(names[:-1])} and {names[-1]}' if names[1:] else names[0]
        return f'Put {what} from {self.base}/{"" if names[1:] else names[0]} into {(folder / self.files[0]).parent}'


def directory(data_dir: str | os.PathLike[str] | None) -> Path:
    """Where data sets lie: `data_dir`, or `fedjax_nc` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if data_dir is None:
        data_dir = Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache') / 'fedjax_nc'
    return Path(data_dir).expanduser()


def line(error: Exception) -> str:
    """What an error says, on one line: those of other libraries fill pages."""
    text = ' '.join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + '...'


class UnfitError(ValueError):
    """What is sound, and yet nothing that is read here."""


@contextlib.contextmanager
def refusing(path: Path, remedy: str) -> Iterator[None]:
    """Makes of whatever a damaged file raises one line with its name and a remedy."""
    try:
        yield
    except (MemoryError, PermissionError):
        raise  # nothing is said about the file
    except UnfitError as error:
        raise ValueError(
            f'{path} has {error}: save it with 8 bits, or all examples as arrays, which `load_npz` reads'
        ) from error
    except Exception as error:  # whatever a damaged file makes its readers raise
        raise ValueError(f'{path} is damaged ({line(error)}); {remedy}.') from error


@contextlib.contextmanager
def alone(name: str, folder: Path, wait: bool = True) -> Iterator[Path]:
    """An empty folder within `folder` for what is unfinished, while no other process has it.

    The lock ends with the process that holds it, however that ends; what it left is removed.

    Raises:
        filelock.Timeout: if another process has it and `wait` is False.
        OSError: if nothing can be written in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / f'{name}.lock')
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        if not wait:
            raise
        warnings.warn(f'waiting for another process that prepares {name} in {folder}', stacklevel=4)
        lock.acquire()
    unfinished = folder / f'.{name}.unfinished'
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        lock.release()


def checked(source: Source, arrays: list[NDArray[Any]]) -> Dataset:
    """The data set of four arrays.

    Raises:
        ValueError: if they are not what the source is known to hold.
    """
    for size, x, y in zip(source.sizes, arrays[::2], arrays[1::2], strict=True):
        if x.shape != (size, *source.shape) or x.dtype != np.uint8 or y.shape != (size,) or y.dtype != np.int32:
            shape = 'x'.join(map(str, source.shape))
            raise ValueError(f'expected {size} images of {shape} and as many labels, got {x.shape} and {y.shape}')
        if y.min() < 0 or y.max() >= source.num_classes:
            raise ValueError(f'labels from {y.min()} to {y.max()}, not below {source.num_classes}')
    x_train, y_train, x_test, y_test = arrays
    return Dataset(x_train, y_train, x_test, y_test, source.num_classes, source.name)


def read_cache(source: Source, cache: Path) -> Dataset:
    """What `write_cache` wrote.

    Raises:
        ValueError: if it is damaged, or holds anything else.
    """
    shapes = [shape for size in source.sizes for shape in ((size, *source.shape), (size,))]
    with refusing(cache, f'delete it and load {source.name} again'):
        if cache.stat().st_size > sum(math.prod(shape) * 4 for shape in shapes):
            raise ValueError(f'{cache.stat().st_size} bytes')
        with zipfile.ZipFile(cache) as file:
            if sorted(file.namelist()) != sorted(f'{field}.npy' for field in Dataset._fields[:4]):
                raise ValueError(f'it must hold {", ".join(Dataset._fields[:4])}, each once, and nothing else')
            kinds = zip(Dataset._fields[:4], shapes, (np.uint8, np.int32) * 2, strict=True)
            return checked(source, [_read_member(file, f'{field}.npy', shape, dtype) for field, shape, dtype in kinds])


def _read_member(file: zipfile.ZipFile, name: str, shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
    """An array of a known kind: all that announces another is refused before it can take memory."""
    info = file.getinfo(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others unpack without bound
        raise ValueError(f'{name} is compressed in another way than NumPy does')
    with file.open(info) as member:
        if (version := np.lib.format.read_magic(member)) != (1, 0):
            raise ValueError(f'{name} is of version {version}, not (1, 0)')
        got, _, kind = np.lib.format.read_array_header_1_0(member)
        if got != shape or kind != dtype:
            raise ValueError(f'{name} must be {np.dtype(dtype)} of shape {shape}, not {kind} of shape {got}')
        if info.file_size != member.tell() + math.prod(shape) * kind.itemsize:
            raise ValueError(f'{name} takes {info.file_size} bytes for {kind} of shape {shape}')
        member.seek(0)
        return np.lib.format.read_array(member, allow_pickle=False)


def write_cache(source: Source, dataset: Dataset, cache: Path) -> None:
    """Writes a data set where `read_cache` finds it, or warns that it cannot."""
    try:
        with alone(source.name, cache.parent, wait=False) as unfinished:
            whole = unfinished / cache.name
            np.savez(whole, **dict(zip(Dataset._fields[:4], dataset[:4], strict=True)))  # type: ignore[arg-type]
            os.replace(whole, cache)  # atomic, so that a reader never meets half a cache
    except filelock.Timeout:
        pass  # another process is about to leave the same
    except OSError as error:
        warnings.warn(f'{cache} cannot be written ({error}): the next load will be as slow as this one', stacklevel=3)
