"""Folders, .zip and .tar files alike: which files there are, and what they hold. Nothing is ever unpacked to disk."""

import bz2
import functools
import gzip
import hashlib
import io
import lzma
import os
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedjax_nc import checks
from fedjax_nc.data.cifar import Bounded

MOST_FILES = 2**22
MOST_BYTES = 2**25  # of a file: no picture that one trains on is larger
_RATIO = 64  # at most, of what a .tar file unpacks to and itself, but for _SPARE bytes: images are packed already
_SPARE = 2**32
_HEADERS = 2**15  # bytes of a .tar file beside what a file of it holds


class Container(NamedTuple):
    """Files by name, in order: names have '/' between folders, and the folder that all share is left out."""

    path: Path
    files: dict[str, int]  #: sizes
    contents: Callable[[Iterable[str]], Iterator[tuple[str, bytes]]]  #: of some of them, in any order

    def text(self, name: str) -> str:
        """One file as text.

        Raises:
            ValueError: if it is missing or no text.
        """
        if name not in self.files:
            raise ValueError(f'{self.path} has no {name}')
        return next(content for _, content in self.contents([name])).decode()


def stamp(path: Path) -> str:
    """A digest of the names, sizes and times of all files, to tell whether anything has changed."""
    files = _walk(path) if path.is_dir() else {path.name: path.stat()}
    said = hashlib.blake2b(digest_size=16)
    for name, about in files.items():
        said.update(f'{name}\0{about.st_size}\0{about.st_mtime_ns}\0'.encode(errors='surrogateescape'))
    return said.hexdigest()


def digest(path: Path) -> str:
    """Of what a file holds, and of a folder the names and sizes of its files: a copy has the same."""
    return _digest(path.resolve(), stamp(path))


@functools.lru_cache(maxsize=8)  # by its stamp, so that large files are read once
def _digest(path: Path, stamp: str) -> str:
    if path.is_dir():
        said = ''.join(f'{name}\0{about.st_size}\0' for name, about in _walk(path).items())
        return hashlib.blake2b(said.encode(errors='surrogateescape')).hexdigest()[:16]
    with path.open('rb') as content:
        return hashlib.file_digest(content, 'blake2b').hexdigest()[:16]


def opened(path: Path) -> Container:
    """What is in a folder, a .zip file, or a .tar file however it is compressed.

    Raises:
        ValueError: if it is none of them, or holds what no data set does.
        OSError: if it cannot be read.
    """
    if path.is_dir():
        sizes = {name: about.st_size for name, about in _walk(path).items()}

        def read(name: str) -> bytes:
            with open(path / name, 'rb') as file:
                return file.read(MOST_BYTES + 1)

        return _container(path, sizes, lambda wanted: ((name, read(name)) for name in wanted))
    if zipfile.is_zipfile(path):
        return _zip(path)
    packed: dict[str, int] = {}
    for name, size, _ in _tar(path):
        if name in packed:  # as `tar -u` leaves it; which of them is meant is for its owner to say
            raise ValueError(f'it holds {name} twice: unpack it, and pack it anew')
        packed[name] = size
    return _container(path, packed, lambda wanted: _members(path, wanted))


def _container(path: Path, sizes: dict[str, int], read: Callable[[Any], Iterator[tuple[str, bytes]]]) -> Container:
    """Leaves out hidden files, and the folder that all others are in."""
    if len(sizes) > MOST_FILES:
        raise ValueError(f'it holds more than {MOST_FILES} files')
    shown = {name: name.removeprefix('./') for name in sizes}
    shown = {
        name: said for name, said in shown.items() if not any(p[:1] == '.' or p == '__MACOSX' for p in said.split('/'))
    }
    tops = {said.partition('/')[0] for said in shown.values()}
    if not path.is_dir() and len(tops) == 1 and all('/' in said for said in shown.values()):
        shown = {name: said.partition('/')[2] for name, said in shown.items()}
    inside = {said: name for name, said in sorted(shown.items(), key=lambda item: item[1])}

    def contents(wanted: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        names = {inside[name]: name for name in wanted}
        for name in names:
            if sizes[name] > MOST_BYTES:
                raise ValueError(f'{names[name]} has {sizes[name]} bytes, more than {MOST_BYTES}')
        return ((names[name], content) for name, content in read(names))

    return Container(path, {said: sizes[name] for said, name in inside.items()}, contents)


def _walk(path: Path) -> dict[str, os.stat_result]:
    """The files below a folder, by their names from there."""
    found = {}
    top = str(path)
    above = {top: {_place(top)}}  # of each folder, which it lies in: links may lead in circles
    for folder, inner, names in os.walk(top, followlinks=True):
        below = folder[len(top) :].strip(os.sep).replace(os.sep, '/')
        around = above.pop(folder)
        inner[:] = sorted(name for name in inner if not name.startswith('.'))
        places = {name: _place(f'{folder}/{name}') for name in inner}
        inner[:] = [name for name in inner if places[name] not in around]
        above |= {os.path.join(folder, name): around | {places[name]} for name in inner}
        for name in sorted(names):
            try:
                about = os.stat(f'{folder}/{name}')
            except FileNotFoundError:  # a link that leads nowhere
                continue
            if stat.S_ISREG(about.st_mode):  # what else there is may never end
                found[f'{below}/{name}' if below else name] = about
        if len(found) > MOST_FILES:
            raise ValueError(f'{path} holds more than {MOST_FILES} files')
    return found


def _place(folder: str) -> tuple[int, int]:
    """What tells a folder from others, by whatever name."""
    about = os.stat(folder)
    return about.st_dev, about.st_ino


def _zip(path: Path) -> Container:
    with open(path, 'rb') as file:
        check_list(file)
    with zipfile.ZipFile(path) as zipped:
        infos = {info.filename: info for info in zipped.infolist() if not info.is_dir()}
    for name in infos:
        _check_name(name)

    def read(wanted: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        with zipfile.ZipFile(path) as file:
            for name in wanted:
                if infos[name].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(f'{name} is compressed in a way that unpacks without bound')
                with file.open(infos[name]) as member:
                    yield name, member.read(MOST_BYTES + 1)

    return _container(path, {name: info.file_size for name, info in infos.items()}, read)


def check_list(file: IO[bytes]) -> None:
    """Refuses a .zip file whose list of files would take much memory, before it is read."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 2**17))
    tail = file.read()
    at = tail.rfind(b'PK\x05\x06')
    count, size = struct.unpack('<HL', tail[at + 10 : at + 16]) if 0 <= at <= len(tail) - 22 else (0, 0)
    far = tail.rfind(b'PK\x06\x06', 0, at)  # of long lists, the numbers are elsewhere
    if 0 <= far <= len(tail) - 56:
        count, size = max((count, size), struct.unpack('<QQ', tail[far + 32 : far + 48]))
    if count > MOST_FILES or size > MOST_FILES * 128:
        raise ValueError(f'it lists more than {MOST_FILES} files')


def _tar(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """The files of a .tar file, and how to read each before the next."""
    with open(path, 'rb') as file:
        head = file.read(6)
    openers: dict[bytes, Callable[[Path], Any]] = {b'\x1f\x8b': gzip.open, b'BZ': bz2.open, b'\xfd7': lzma.open}
    left = _RATIO * path.stat().st_size + _SPARE
    with openers.get(head[:2], io.FileIO)(path) as file:
        stream: Any = Bounded(file, _HEADERS)
        with tarfile.open(fileobj=stream, mode='r|') as tar:
            for count, member in enumerate(tar):
                _check_name(member.name)
                if count > MOST_FILES:
                    raise ValueError(f'it holds more than {MOST_FILES} files')
                if not (member.isdir() or member.isfile()) or member.issparse():
                    raise ValueError(f'{checks.shown(member.name)} is neither a file nor a folder')
                if (left := left - member.size) < 0:
                    raise ValueError(f'it unpacks to more than {_RATIO} times its size')
                stream.left = member.size + _HEADERS
                if member.isfile():
                    opened = tar.extractfile(member)
                    yield member.name, member.size, lambda opened=opened: opened.read(MOST_BYTES + 1)  # type: ignore
                tar.members = []  # type: ignore[attr-defined]  # the list of them would grow


def _members(path: Path, wanted: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    names = set(wanted)
    for name, _, read in _tar(path):
        if name in names:
            yield name, read()


def _check_name(name: str) -> None:
    if name.startswith('/') or '..' in name.split('/') or '\\' in name:
        raise ValueError(f'{checks.shown(name)} leads out of it')
