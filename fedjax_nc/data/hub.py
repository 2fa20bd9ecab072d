"""Data sets of Hugging Face's `datasets`, in memory or in a directory."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_nc import checks
from fedjax_nc.data import pictures, store, tables
from fedjax_nc.data.dataset import Dataset, DatasetUnavailableError


def load_hub(
    source: Any,
    *,
    label: str,
    features: str | Sequence[str],
    client: str | None = None,
    test: str | float = 'test',
    size: int | Sequence[int] | None = None,
    channels: int = 3,
    classes: Sequence[str | int] | None = None,
    seed: int = 0,
) -> Dataset:
    """Loads a data set of Hugging Face's `datasets`. Nothing is downloaded.

    Args:
        source: a `datasets.Dataset` or `DatasetDict`, or a directory: what `save_to_disk` wrote, or a copy of a
            repository with Parquet files `SPLIT-*.parquet` or `SPLIT/NUMBER.parquet`.
        label: the column of labels: classes as `datasets` knows them, whole numbers from 0, or words.
        features: the column of images or of arrays of one shape; or a list of columns of numbers.
        client: the column of natural client ids, if any, such as a writer's.
        test: the split for testing beside 'train'; or the share of each class of 'train', the only split that is then
            read, between 0 and 1.
        size: side, or height and width, to which images are scaled. Without it they must be alike.
        channels: of images, 3 for colours, 1 for grey.
        classes: all labels that there may be, in the order of their numbers: where several sets must agree, of which
            some lack a class. By default those that `datasets` knows, or that occur.
        seed: draws what is held out.

    Returns:
        The data set, named after the directory, or 'hub'. Images are uint8 [n, H, W, channels], arrays [n, ...]
        float32 or of integers as they are, columns of numbers float32 [n, features]; clients in the order of their
        ids.

    Raises:
        DatasetUnavailableError: if there is no such directory.
        ValueError: if an argument is not of its kind, a split or a column is missing or holds something else, images
            are not alike, or one, or the directory, is damaged.
        ImportError: without `datasets`.
    """
    if isinstance(test, str) and test == 'train':
        raise ValueError("`test` must be another split than 'train', or the share of it that is for testing.")
    if channels not in (1, 3):
        raise ValueError(f'`channels` must be 3 or 1, not {checks.shown(channels)}.')
    try:
        import datasets
    except ImportError as error:
        raise ImportError('data sets of the hub are read with datasets: pip install "fedjax_nc[hub]"') from error
    name = 'hub'
    if isinstance(source, str | os.PathLike):
        name = Path(source).expanduser().resolve().name
        source = _opened(Path(source).expanduser())
    if isinstance(source, datasets.Dataset):
        source = {'train': source}
    elif not isinstance(source, datasets.DatasetDict):
        raise ValueError(f'`source` must be a Dataset, a DatasetDict or a directory, not {checks.shown(source)}.')
    splits = ['train', test] if isinstance(test, str) else ['train']
    if missing := [split for split in splits if split not in source]:
        raise ValueError(
            f'{name} has no split {missing[0]!r}, only {", ".join(source)}; name another as `test`, or give a share'
        )
    one = datasets.concatenate_datasets([source[split] for split in splits]).with_format(None)
    several = [features] if isinstance(features, str) else list(features)
    if not several:
        raise ValueError('`features` must be a column of images or arrays, or names of columns of numbers.')
    wanted = [*several, *tables.roles(several, label, client)]
    if absent := [column for column in wanted if column not in one.column_names]:
        raise ValueError(f'{name} has no column {absent[0]!r}; there are {", ".join(one.column_names)}')
    if not len(one):
        raise ValueError(f'{name} has no rows')
    x = (
        _pixels(datasets, one, features, size, channels)
        if isinstance(features, str)
        else np.stack([tables.numbers(column, np.asarray(one[column][:])) for column in several], axis=1)
    )
    kind = one.features[label]
    if isinstance(kind, datasets.ClassLabel):
        values, y = kind.names, np.asarray(one[label][:])
        if y.dtype.kind not in 'iu' or y.min() < 0 or y.max() >= len(values):
            raise ValueError(f'{name} has labels in {label!r} that are none of its {len(values)} classes')
    else:
        values, y = tables.numbered(label, _column(one, label))
    if classes is not None:
        values, y = tables.renumbered(f'column {label!r}', values, y, classes)
    owners = tables.numbered(client, _column(one, client)) if client else None
    first = len(source['train'])
    train, held = (
        (np.arange(first), np.arange(first, len(one)))
        if isinstance(test, str)
        else tables.test_rows(test, {}, y.astype(np.int32), seed)
    )
    return tables.divided(x, y.astype(np.int32), train, held, name, tuple(map(str, values)), owners)


def _opened(path: Path) -> Any:
    import datasets

    if not path.is_dir():
        raise DatasetUnavailableError(f'{path} is not there: give a directory that `save_to_disk` wrote, or a copy')
    with store.refusing(path, 'write it again'):
        if saved(path):
            return datasets.load_from_disk(str(path))
    shards: dict[str, list[Path]] = {}
    for file in sorted(path.rglob('*.parquet'), key=_place):
        split = file.stem.partition('-')[0]
        shards.setdefault(file.parent.name if split.isdigit() else split, []).append(file)
    for split, files in shards.items():
        if len(folders := sorted({file.parent.relative_to(path).as_posix() for file in files})) > 1:
            raise ValueError(
                f'{path} has {split!r} in {" and ".join(folders[:2])}: give the folder of one configuration'
            )
    with store.refusing(path, 'write it again'):
        if not shards:
            raise ValueError('neither what `save_to_disk` writes nor Parquet files')
        # not by `load_dataset`, which downloads what a description in the directory names
        import pyarrow.parquet

        tables = {split: [pyarrow.parquet.read_table(file) for file in files] for split, files in shards.items()}
        return datasets.DatasetDict(
            {split: datasets.Dataset(pyarrow.concat_tables(parts)) for split, parts in tables.items()}
        )


def _place(file: Path) -> tuple[Path, int, str]:
    """Where a shard comes: by its number, if that is its name."""
    return file.parent, int(file.stem) if file.stem.isdecimal() else -1, file.name


def saved(path: Path) -> bool:
    """Whether a directory is one that `save_to_disk` wrote."""
    return any((path / name).is_file() for name in ('dataset_dict.json', 'state.json'))


def _column(one: Any, name: str) -> NDArray[Any]:
    values = one[name][:]
    return np.array(values, object) if any(isinstance(value, str) for value in values) else np.asarray(values)


def _content(cell: dict[str, Any]) -> bytes:
    if cell['bytes'] is not None:
        return cell['bytes']
    if not Path(cell['path']).is_file():  # but a device, whose bytes never end, or an address
        raise ValueError(f'{checks.shown(cell["path"])} is no file here')
    with open(cell['path'], 'rb') as file:
        return file.read(pictures.MOST_BYTES + 1)


def _type(feature: Any, otherwise: np.dtype[Any]) -> np.dtype[Any]:
    """The type of the numbers in a column of arrays or lists, if they are integers as well."""
    while not hasattr(feature, 'dtype') or hasattr(feature, 'feature'):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, 'feature', None)
        if inner is None:
            return otherwise
        feature = inner
    found = np.dtype(feature.dtype)
    return found if found.kind in 'iub' and otherwise.kind in 'iub' else otherwise


def _pixels(datasets: Any, one: Any, column: str, size: int | Sequence[int] | None, channels: int) -> NDArray[Any]:
    """Images, or arrays of one shape."""
    if not isinstance(one.features[column], datasets.Image):
        try:
            x = np.asarray(one[column][:])
        except ValueError as error:
            raise ValueError(f'column {column!r} must hold arrays of one shape: {store.line(error)}') from error
        if x.ndim < 2 or x.dtype.kind not in 'biuf':
            raise ValueError(f'column {column!r} must hold images or arrays of numbers, not {x.dtype} {x.shape[1:]}')
        if x.dtype.kind == 'f':
            with np.errstate(over='ignore'):
                low = x.astype(np.float32)
            if (np.isinf(low) & np.isfinite(x)).any():
                raise ValueError(f'column {column!r} has numbers beyond those of float32')
            return low
        return x.astype(_type(one.features[column], x.dtype))  # Python's integers are none of its bytes
    sides = pictures.sides(size)
    images = []
    for row, cell in enumerate(one.cast_column(column, datasets.Image(decode=False))[column]):
        with store.refusing(Path(f'row {row} of {column}'), 'remove it'):
            images.append(pictures.picture(_content(cell), sides, channels))
        if images[-1].shape != images[0].shape:
            raise ValueError(
                f'row {row} of {column!r} is {images[-1].shape} and row 0 is {images[0].shape}: give a `size`'
            )
    return np.stack(images)
