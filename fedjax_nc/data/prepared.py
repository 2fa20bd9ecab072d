"""What tensorflow-datasets (TFDS) prepares, downloads and reads, without TensorFlow.

TFDS reads array_record copies without it, and the builder here does itself the steps that need it: taking official
files apart, encoding images and decoding them. Records of array_record are the one thing that is unpacked without a
limit: its reader knows none.
"""

import contextlib
import importlib.util
import io
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from fedjax_nc.data import store
from fedjax_nc.data.dataset import Dataset, DatasetUnavailableError

NEEDED = 'pip install tensorflow-datasets importlib_resources array_record pillow'


def possible() -> bool:
    """Whether what prepares data sets, and reads what is prepared, is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ('tensorflow_datasets', 'array_record', 'PIL'))


def find(source: store.Source, folder: Path) -> Path | None:
    """The folder of what TFDS has prepared, in the latest version that there is."""
    # what TFDS has not finished is called incomplete.*
    versions = {path.parent for path in (folder / source.prepared).glob('[0-9]*/*.array_record*')}
    return max(versions, default=None, key=lambda path: [int(n) for n in re.findall(r'\d+', path.name)])


def prepare(source: store.Source, folder: Path, unfinished: Path) -> Path:
    """Has TFDS write the official images beside their files as array_record, in the layout that it has for them."""
    prepared = folder / source.prepared / source.version
    if prepared.exists():
        raise ValueError(
            f'{prepared} holds no array_record files, the one format that is read without TensorFlow; '
            'move it away or choose another `data_dir`.'
        )
    if missing := [file for file in source.files if not (folder / file).exists()]:
        download(source, missing, folder, unfinished)
    splits = source.read(source, folder)

    import tensorflow_datasets as tfds
    from PIL import Image

    title, _, config = source.prepared.partition('/')
    version = tfds.core.Version(source.version)

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        name = title
        VERSION = version
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config, version=version)] if config else []

        def _info(self) -> Any:
            return tfds.core.DatasetInfo(builder=self, features=_features(source), disable_shuffling=True)

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {split: self._generate_examples(split) for split in splits}

        def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
            for i, (image, all_labels) in enumerate(zip(*splits[split], strict=True)):
                pixels = image.swapaxes(0, 1) if source.sideways else image
                png = io.BytesIO()  # an image already encoded is the one kind TFDS takes without TensorFlow
                Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(
                    png, 'png', compress_level=1
                )
                labels = {key: int(label) for key, label in zip(source.labels, all_labels, strict=True)}
                ids = {'id': source.ids.format(split, i)} if source.ids else {}
                yield i, {**ids, 'image': png.getvalue(), **labels}

    builder = Builder(data_dir=unfinished, file_format='array_record')
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    prepared.parent.mkdir(exist_ok=True, parents=True)
    os.replace(builder.data_path, prepared)
    return prepared


def read(source: store.Source, folder: Path) -> Dataset:
    """Reads the records alone: TFDS imports whatever modules the folder's own description of them names.

    Raises:
        ValueError: if they are damaged.
    """
    import tensorflow_datasets as tfds
    from array_record.python.array_record_data_source import ArrayRecordDataSource
    from PIL import Image

    features = _features(source)
    arrays: list[NDArray[Any]] = []
    height, width, channels = source.shape

    def example(record: bytes) -> tuple[bytes, NDArray[np.uint8], int]:
        fields = features.deserialize_example_np(record, decoders={'image': tfds.decode.SkipDecoding()})
        image = Image.open(io.BytesIO(fields['image']), formats=['PNG'])
        if image.size != (width, height) or image.mode != {1: 'L', 3: 'RGB'}[channels]:  # before it is unpacked
            raise ValueError(f'an image of size {image.size}, {image.mode}')
        pixels = np.asarray(image).reshape(source.shape)
        return fields.get('id', b''), pixels.swapaxes(0, 1) if source.sideways else pixels, fields['label']

    with store.refusing(folder, f'delete it and load {source.name} again'):
        for split, size in zip(('train', 'test'), source.sizes, strict=True):
            files = sorted(str(path) for path in folder.glob(f'*-{split}.array_record*'))
            if not files:
                raise ValueError(f'no {split} records')
            with ArrayRecordDataSource(files) as records:
                if len(records) != size:
                    raise ValueError(f'{size} {split} records expected, got {len(records)}')
                # TFDS shuffles when it prepares a set itself; names run in the order of the official files
                examples = sorted(map(example, records), key=lambda fields: fields[0])
            arrays.append(np.stack([image for _, image, _ in examples]))
            arrays.append(np.array([label for _, _, label in examples], np.int32))
        return store.checked(source, arrays)


def _features(source: store.Source) -> Any:
    import tensorflow_datasets as tfds

    labels = {key: tfds.features.ClassLabel(num_classes=n) for key, n in source.labels.items()}
    image = tfds.features.Image(shape=source.shape, encoding_format='png')
    ids = {'id': tfds.features.Text()} if source.ids else {}
    return tfds.features.FeaturesDict({**ids, 'image': image, **labels})


def download(source: store.Source, files: list[str], folder: Path, unfinished: Path) -> None:
    """Has TFDS download official files, whose checksums it knows.

    Raises:
        DatasetUnavailableError: if there is no network, or a file is not what it was.
    """
    remedy = f'{source.put(folder)}, then load again.'
    if not reachable(source.base):
        raise DatasetUnavailableError(
            f'{source.name} is not in {folder}, and {urlsplit(source.base).hostname} does not answer. {remedy}'
        )
    import tensorflow_datasets as tfds

    checksums = tfds.core.utils.tfds_path('datasets') / source.prepared / 'checksums.tsv'
    manager = tfds.download.DownloadManager(
        download_dir=unfinished / 'downloads', dataset_name=source.name,
        url_infos=tfds.core.download.checksums.load_url_infos(checksums) if checksums.exists() else None,
    )  # fmt: skip
    for file in files:
        try:
            path = manager.download(source.url(file))
        except Exception as error:
            raise DatasetUnavailableError(
                f'{source.name} could not be downloaded: {store.line(error)}. {remedy}'
            ) from error
        (folder / file).parent.mkdir(exist_ok=True)
        os.replace(path, folder / file)


def reachable(url: str, timeout: float = 3.0) -> bool:
    """Whether the host, or the proxy before it, accepts connections; TFDS itself tries for minutes."""
    scheme = urlsplit(url).scheme
    proxy = urllib.request.getproxies().get(scheme)
    target = urlsplit(proxy if proxy and '://' in proxy else f'{scheme}://{proxy}' if proxy else url)
    port = target.port or (80 if target.scheme == 'http' else 443)
    answers = []

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection((target.hostname, port), timeout):
            answers.append(True)

    # in a thread because looking the name up knows no time limit
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout)
    return bool(answers)
