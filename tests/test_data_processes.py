"""Several processes and one folder of data sets: one prepares, the others wait, and the killed leave no trace."""

import itertools
import multiprocessing
import shutil
import signal
import threading
import time
import warnings

import filelock
import numpy as np
import pytest
from test_sources import SIZES, assert_same, prepares, write_archive

from fedjax_nc.data import DatasetUnavailableError, cifar, load_dataset, prepared, sources, store

ROUNDS = 3
FOLDER = '.cifar10.unfinished'


def shrink(patch):
    for name in cifar.SOURCES:
        patch.setitem(sources.SOURCES, name, sources.SOURCES[name]._replace(sizes=SIZES))
    patch.setattr(prepared, 'reachable', lambda url: False)


@pytest.fixture
def archive(monkeypatch, tmp_path):
    shrink(monkeypatch)
    return write_archive(tmp_path, 'cifar10')


def load_often(folder, barrier, results):
    """In a process of its own: loads anew as often as the barrier opens."""
    import tensorflow_datasets as tfds

    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        tfds.core.GeneratorBasedBuilder  # noqa: B018  # what is loaded late, is loaded before the start
        prepare, made = prepared.prepare, []
        patch.setattr(prepared, 'prepare', lambda *arguments: made.append(1) or prepare(*arguments))
        for i in range(ROUNDS):
            barrier.wait(60)
            made.clear()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter('always')
                try:
                    arrays = load_dataset('cifar10', folder / str(i))[:4]
                except Exception as error:
                    arrays = repr(error)
            waits = sum('waiting for another process' in str(warning.message) for warning in caught)
            results.put((i, arrays, len(made), waits))


@prepares
def test_processes_that_start_together(archive, tmp_path):
    context = multiprocessing.get_context('spawn')
    for i in range(ROUNDS):
        (tmp_path / str(i)).mkdir()
        shutil.copy(tmp_path / 'cifar-10-binary.tar.gz', tmp_path / str(i))
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=load_often, args=(tmp_path, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    said = [results.get(timeout=60) for _ in range(2 * ROUNDS)]
    for process in processes:
        process.join(60)
    waits = 0
    for i in range(ROUNDS):
        (one, made, waited), (two, made_too, waited_too) = (what[1:] for what in said if what[0] == i)
        for arrays in (one, two):
            assert not isinstance(arrays, str), arrays
            assert_same(arrays, archive)
        assert made + made_too == 1
        waits += waited + waited_too
        assert sorted(path.name for path in (tmp_path / str(i)).iterdir()) == [
            'cifar-10-binary.tar.gz', 'cifar10', 'cifar10.lock', 'cifar10.npz',
        ]  # fmt: skip
    assert waits


def stall(folder, started, where):
    """In a process of its own: stops for ever in the midst of preparing."""
    from PIL import Image

    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)

        def stop(*_, **__):
            started.set()
            time.sleep(600)

        if where == 'images':
            save, calls = Image.Image.save, itertools.count()
            patch.setattr(Image.Image, 'save', lambda *a, **k: (stop if next(calls) > 20 else save)(*a, **k))
        else:
            patch.setattr(np, 'savez', lambda path, **_: path.write_bytes(b'half') and stop())
        load_dataset('cifar10', folder)


@pytest.mark.parametrize('where', [pytest.param('images', marks=prepares), 'cache'])
def test_what_a_killed_process_leaves(archive, tmp_path, where):
    context = multiprocessing.get_context('spawn')
    started = context.Event()
    process = context.Process(target=stall, args=(tmp_path, started, where))
    process.start()
    assert started.wait(60)
    with pytest.raises(filelock.Timeout):
        filelock.FileLock(tmp_path / 'cifar10.lock').acquire(blocking=False)
    process.kill()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert any((tmp_path / FOLDER).iterdir())
    assert_same(load_dataset('cifar10', tmp_path), archive)
    assert not list(tmp_path.glob('.*'))
    assert (tmp_path / 'cifar10.npz').exists()


def test_what_tfds_leaves_is_not_taken_for_finished(archive, tmp_path):
    left = tmp_path / 'cifar10' / 'incomplete.ABCDEF_3.0.2'
    left.mkdir(parents=True)
    for name in ('cifar10-train.array_record-00000-of-00001', 'dataset_info.json'):
        (left / name).write_bytes(b'')
    assert_same(load_dataset('cifar10', tmp_path), archive)


@prepares
def test_waiting_is_said(archive, tmp_path):
    held = threading.Event()

    def hold():
        with filelock.FileLock(tmp_path / 'cifar10.lock'):
            held.set()
            time.sleep(0.5)

    threading.Thread(target=hold).start()
    assert held.wait(10)
    with pytest.warns(UserWarning, match='waiting for another process that prepares cifar10') as caught:
        assert_same(load_dataset('cifar10', tmp_path), archive)
    assert caught[0].filename == __file__


def test_what_is_complete_needs_no_lock(archive, tmp_path, monkeypatch):
    load_dataset('cifar10', tmp_path)
    with filelock.FileLock(tmp_path / 'cifar10.lock'), warnings.catch_warnings():
        warnings.simplefilter('error')
        assert_same(load_dataset('cifar10', tmp_path), archive)
        (tmp_path / 'cifar10.npz').unlink()
        assert_same(load_dataset('cifar10', tmp_path), archive)
    assert not (tmp_path / 'cifar10.npz').exists()  # left to the process that has the lock


@pytest.fixture
def unwritable(monkeypatch):
    """As in a folder without the right to write, which an administrator has everywhere."""

    def refuse(path):
        raise PermissionError(13, 'Permission denied', str(path))

    monkeypatch.setattr(store.filelock, 'FileLock', refuse)


def test_a_complete_folder_may_be_read_only(archive, tmp_path, request):
    load_dataset('cifar10', tmp_path)
    request.getfixturevalue('unwritable')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert_same(load_dataset('cifar10', tmp_path), archive)
    (tmp_path / 'cifar10.npz').unlink()
    with pytest.warns(UserWarning, match=r'cannot be written.*Permission denied') as caught:
        assert_same(load_dataset('cifar10', tmp_path), archive)
    assert caught[0].filename == __file__


@prepares
def test_an_incomplete_folder_must_be_writable(archive, tmp_path, unwritable):
    with pytest.raises(
        DatasetUnavailableError, match=r'cifar10 is not ready in.*Permission denied.*another `data_dir`'
    ):
        load_dataset('cifar10', tmp_path)
    (tmp_path / 'file').touch()
    with pytest.raises(DatasetUnavailableError, match=r'Not a directory|File exists'):
        load_dataset('cifar10', tmp_path / 'file')
