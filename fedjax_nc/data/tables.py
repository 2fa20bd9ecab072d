"""Tables in CSV and Parquet files: a column of labels, columns of numbers, and one that says whose row it is."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedjax_nc import checks
from fedjax_nc.data import decoded, store
from fedjax_nc.data.dataset import Dataset, DatasetUnavailableError, held_out

MOST_VALUES = 2**30
"""Of a table: what it takes in memory, 4 GB, says its file before it is read."""


def load_table(
    path: str | os.PathLike[str],
    *,
    label: str,
    client: str | None = None,
    features: Sequence[str] | None = None,
    test: str | float = 0.2,
    standardize: bool = False,
    classes: Sequence[str | int] | None = None,
    seed: int = 0,
) -> Dataset:
    """Loads a table: an example a row.

    Args:
        path: a `.csv` file, with the names of its columns in its first line, or a `.parquet` file.
        label: the column of labels, whole numbers or words; classes are numbered in their order, or as `classes` says.
        client: the column that says whose a row is, if any.
        features: columns of numbers; by default all others, among which there must be no index of a data frame.
        test: the share of each class that is held out for testing, between 0 and 1; or the column that says it of a
            row: 'train' or 'test', or whether it is for testing.
        standardize: whether features are shifted and scaled to mean 0 and deviation 1 over the training rows, before
            they are rounded to float32.
        classes: all labels that there may be, in the order of their numbers: where several tables must agree, of which
            some lack a class. By default those that occur.
        seed: draws what is held out.

    Returns:
        The data set, named after the file: x [n, features] float32 and y [n] int32 in the order of the file, and
        clients in the order of their ids, which are their names, for training and for testing, too.

    Raises:
        DatasetUnavailableError: if there is no such file.
        ValueError: if it is damaged or too large, a column is missing or holds something else, or anything is missing
            in a row.
        ImportError: without pyarrow.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f'`path` must be a path; got {checks.shown(path)}.')
    where = Path(path).expanduser()
    if not where.is_file():
        raise DatasetUnavailableError(f'{where} is not there: give a .csv or .parquet file')
    features = features if features is None or isinstance(features, str) else tuple(features)
    if isinstance(features, str) or features == ():
        raise ValueError(f'`features` must be names of columns, not {checks.shown(features)}.')
    other = roles(features or (), label, client, test if isinstance(test, str) else None)
    columns = _columns(where, other, features)
    try:
        return split(columns, other, where.stem, label, client, test, standardize, seed, classes)
    except ValueError as error:
        raise ValueError(f'{where}: {error}') from error


def split(
    columns: dict[str, NDArray[Any]],
    other: list[str],
    name: str,
    label: str,
    client: str | None,
    test: str | float,
    standardize: bool = False,
    seed: int = 0,
    classes: Sequence[str | int] | None = None,
) -> Dataset:
    """The data set of columns in memory; those of `other` are no features.

    Raises:
        ValueError: as `load_table`.
    """
    names = [column for column in columns if column not in other]
    if not names:
        raise ValueError('there is no column of features')
    checks.flags(standardize=standardize)
    kind = np.float64 if standardize else np.float32
    x = np.stack([numbers(column, columns[column], kind) for column in names], axis=1)
    values, y = numbered(label, columns[label])
    if classes is not None:
        values, y = renumbered(f'column {label!r}', values, y, classes)
    train, held = test_rows(test, columns, y, seed)
    if standardize:
        size = np.abs(x[train]).max(0)
        with np.errstate(over='ignore'):
            near = x - x[train[:1]]  # exact for numbers that differ in their last digits alone
        x = np.where(np.isfinite(near).all(0), near, x)
        largest = np.abs(x[train]).max(0)
        x = x / np.where(largest > 0, largest, 1)  # so that squares stay finite
        mean, deviation = x[train].mean(0), x[train].std(0)
        constant = deviation * largest <= 16 * np.finfo(np.float64).eps * size  # by rounding alone
        unit = np.where(constant, np.where(size > 0, size, 1) / np.where(largest > 0, largest, 1), deviation)
        x = ((x - mean) / unit).astype(np.float32)
    owners = None if client is None else numbered(client, columns[client])
    return divided(x, y, train, held, name, tuple(str(value) for value in values), owners)


def divided(
    x: NDArray[Any],
    y: NDArray[np.int32],
    train: NDArray[np.intp],
    test: NDArray[np.intp],
    name: str,
    classes: tuple[str, ...],
    owners: tuple[list[Any], NDArray[np.int32]] | None,
) -> Dataset:
    """A data set of the rows of one; `owners` are its clients as `numbered` gives them."""
    if absent := sorted(set(y[test].tolist()) - set(y[train].tolist())):
        raise ValueError(f'class {classes[absent[0]]} has test rows and no training rows')
    clients: dict[str, Any] = {}
    if owners is not None:
        ids, places = owners
        clients = {'clients_train': places[train], 'clients_test': places[test], 'clients': tuple(map(str, ids))}
    return decoded.sound(Dataset(x[train], y[train], x[test], y[test], len(classes), name, classes, **clients))


def roles(features: Sequence[str], label: str, *more: str | None) -> list[str]:
    """The names of the columns that are no features.

    Raises:
        ValueError: if one is no name, or that of a feature, too.
    """
    names = [label, *(name for name in more if name is not None)]
    if twice := [name for i, name in enumerate(features) if name in features[:i]]:
        raise ValueError(f'column {twice[0]!r} is a feature twice')
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f'a column is given by its name, not by {checks.shown(name)}')
        if name in features:
            raise ValueError(f'column {name!r} cannot be a feature and have another role: leave it out of `features`')
    return names


def test_rows(
    test: str | float, columns: dict[str, NDArray[Any]], y: NDArray[np.int32], seed: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Which rows train, and which test."""
    if not isinstance(test, str):
        return held_out(y, test, seed)
    said = columns[test]
    if said.dtype.kind in 'OU' and set(said) <= {'train', 'test'}:
        said = said == 'test'
    if said.dtype != np.bool_ or said.all() or not said.any():
        raise ValueError(f"column {test!r} must say 'train' or 'test', or whether a row is for testing, and both occur")
    return np.flatnonzero(~said), np.flatnonzero(said)


def _columns(path: Path, other: list[str], features: Sequence[str] | None) -> dict[str, NDArray[Any]]:
    """The columns that are needed; numbers, booleans, or words as objects."""
    try:
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError('tables are read with pyarrow: pip install "fedjax_nc[tables]"') from error
    wanted = None if features is None else list(dict.fromkeys([*features, *other]))
    kind, indices = path.suffix.lower(), list[Any]()
    if kind not in ('.csv', '.parquet'):
        raise ValueError(f'{path} is neither a .csv nor a .parquet file')
    with store.refusing(path, 'write it again'):
        if kind == '.parquet':
            with pyarrow.parquet.ParquetFile(path) as file:
                names, rows = file.schema_arrow.names, file.metadata.num_rows
                indices = (file.schema_arrow.pandas_metadata or {}).get('index_columns', [])
        else:
            if path.stat().st_size > MOST_VALUES * 16:
                raise ValueError(f'{path.stat().st_size} bytes')
            with pyarrow.csv.open_csv(path) as reader:
                names, rows = reader.schema.names, 0
        if rows * len(wanted or names) > MOST_VALUES:
            raise ValueError(f'{rows} rows of {len(wanted or names)} columns are more than {MOST_VALUES} values')
    if len(set(names)) < len(names):
        raise ValueError(f'{path} has two columns of one name: rename them')
    if missing := [name for name in wanted or other if name not in names]:
        raise ValueError(f'{path} has no column {checks.shown(missing[0])}; there are {checks.shown(names)}')
    if features is None:  # it may tell the order of the rows, and with it their classes
        for name in names:
            if name not in other and (name in indices or re.fullmatch(r'|__index_level_\d+__|Unnamed: \d+', name)):
                raise ValueError(
                    f'{path} has a column {name!r}, the index of a data frame, which would be a feature: write it with '
                    'index=False, or name `features`'
                )
    with store.refusing(path, 'write it again'):
        if kind == '.parquet':
            with pyarrow.parquet.ParquetFile(path) as file:
                table = file.read(columns=wanted)
        else:
            options = pyarrow.csv.ConvertOptions(include_columns=wanted)
            table = pyarrow.csv.read_csv(path, convert_options=options)
            whole = [name for name in other if pyarrow.types.is_integer(table[name].type)]
            words = pyarrow.csv.ConvertOptions(
                include_columns=whole, column_types=dict.fromkeys(whole, pyarrow.string())
            )
            written = pyarrow.csv.read_csv(path, convert_options=words) if whole else {}
    if kind == '.csv':
        for name in whole:  # of which pyarrow makes one number
            spelled = {word.strip() for word in written[name].unique().to_pylist() if word}
            if len(spelled) > len(table[name].unique().drop_null()):
                raise ValueError(
                    f'{path} writes one number of {name!r} in several ways, such as 1 and 01: write each in one'
                )
    columns = {}
    for name in wanted or names:
        column = table[name].combine_chunks()
        if column.null_count:
            raise ValueError(f'{path} has {column.null_count} rows without {name!r}: fill or drop them')
        columns[name] = column.to_numpy(zero_copy_only=False)
    if not table.num_rows:
        raise ValueError(f'{path} has no rows')
    return columns


def _no_number(column: NDArray[Any]) -> int:
    """The first row of a column that holds no number, counted from 0."""
    for row, entry in enumerate(column.tolist()):
        try:
            float(entry)
        except (TypeError, ValueError):
            return row
    return 0


def numbers(name: str, column: NDArray[Any], kind: DTypeLike = np.float32) -> NDArray[Any]:
    """A column of features."""
    if column.dtype.kind not in 'biuf' or column.ndim != 1:
        row = _no_number(column)
        if row:
            raise ValueError(
                f'column {name!r} holds {checks.shown(column[row])} in row {row + 1}, which is no number: mend or drop '
                'such rows, or leave the column out of `features`'
            )
        raise ValueError(f'column {name!r} holds no numbers: name the columns that do as `features`')
    with np.errstate(over='ignore'):  # what overflows is found below
        numbers = column.astype(kind)
    if not np.isfinite(numbers).all():
        raise ValueError(f'column {name!r} holds NaN or infinity: fill or drop these rows')
    largest = np.abs(numbers).max(initial=0)
    if column.dtype.kind in 'iu':
        close, least = largest >= 2**24, 1.0
    else:  # which lose digits everywhere: it matters where most of them fall together
        close, least = np.ptp(numbers) < 2**12 * np.spacing(largest), 0.5
    if close and (apart := len(np.unique(numbers))) < least * (exact := len(np.unique(column))):
        advice = ', as `standardize=True` does,' if kind == np.float32 else ''
        raise ValueError(
            f'column {name!r} holds {exact} numbers, of which {numbers.dtype} tells {apart} apart: take off what they '
            f'have in common{advice} or leave the column out of `features`'
        )
    return numbers


def numbered(name: str, column: NDArray[Any]) -> tuple[list[Any], NDArray[np.int32]]:
    """The values of a column in order, and the place of each row's among them."""
    words = column.dtype.kind == 'U' or (column.dtype.kind == 'O' and all(isinstance(value, str) for value in column))
    if column.ndim == 1 and column.dtype.kind in 'UO' and (lacking := sum(u is None or u == '' for u in column)):
        raise ValueError(f'column {name!r} has {lacking} rows without a value: fill or drop them')
    if column.ndim != 1 or not (words or column.dtype.kind in 'biu'):
        raise ValueError(f'column {name!r} must hold whole numbers or words, not {column.dtype}')
    values, places = np.unique(column, return_inverse=True)
    if len(values) > checks.MOST_CLASSES:
        raise ValueError(f'column {name!r} has {len(values)} different values, more than {checks.MOST_CLASSES}')
    return values.tolist(), places.reshape(-1).astype(np.int32)


def renumbered(
    what: str, values: Sequence[Any], places: NDArray[np.integer], classes: Sequence[str | int]
) -> tuple[list[Any], NDArray[np.int32]]:
    """The same as `numbered` gives, by the order of `classes`, which may have more than those that occur.

    Raises:
        ValueError: for `classes` that are no different labels, and where `what`, as messages call it, has others.
    """
    if np.ndim(classes) != 1 or len(set(classes)) < max(len(classes), 2):
        raise ValueError(f'`classes` must be at least two different labels, not {checks.shown(classes)}')
    known = {value: i for i, value in enumerate(classes)}
    if odd := [value for value in values if value not in known]:
        raise ValueError(f'{what} has the label {checks.shown(odd[0])}, which is none of `classes`')
    return list(classes), np.array([known[value] for value in values], np.int32)[places]
