"""Folders of images and archives of them; Tiny-ImageNet and CINIC-10 in their official layouts, but for their sizes."""

import concurrent.futures
import io
import json
import os
import shutil
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedjax_nc import data
from fedjax_nc.data import DatasetUnavailableError, containers, decoded, folders, load_dataset, load_folder, store

RNG = np.random.default_rng(0)


def picture(path, size=(8, 6), mode='RGB', **options):
    """Writes a random image; returns its pixels [H, W, ch]."""
    shape = (size[1], size[0]) + ((3,) if mode == 'RGB' else ())
    pixels = RNG.integers(0, 256, shape, np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return pixels


def images(folder, splits=('train', 'test'), classes=('cat', 'dog', 'owl'), count=4):
    """Folders of classes; returns the pixels by split, in the order of the names."""
    return {
        split: np.stack([picture(folder / split / c / f'{i}.png') for c in classes for i in range(count)])
        for split in splits
    }


@pytest.fixture
def kept(tmp_path):
    return tmp_path / 'cache'


@pytest.fixture
def photos(tmp_path):
    return tmp_path / 'photos', images(tmp_path / 'photos')


def packed(folder, kind):
    """The same as an archive, with the folder in it or not."""
    path = folder.with_name(f'photos.{kind}')
    if kind == 'zip':
        with zipfile.ZipFile(path, 'w') as file:
            file.writestr('__MACOSX/photos/._x', b'')
            for found in sorted(folder.rglob('*'), reverse=True):
                file.write(found, Path('photos') / found.relative_to(folder))
    else:
        with tarfile.open(path, f'w:{kind[4:]}') as file:
            file.add(folder, '.')
    shutil.rmtree(folder)
    return path


@pytest.mark.parametrize('kind', ['folder', 'zip', 'tar', 'tar.gz', 'tar.xz', 'tar.bz2'])
def test_images_then_cache(photos, kept, monkeypatch, kind):
    folder, pixels = photos
    (folder / 'train' / 'cat' / 'boxes.txt').write_text('not an image')
    (folder / 'train' / '.hidden').mkdir()
    path = folder if kind == 'folder' else packed(folder, kind)
    once = load_folder(path, cache=kept)
    np.testing.assert_array_equal(once.x_train, pixels['train'])
    np.testing.assert_array_equal(once.x_test, pixels['test'])
    assert once.y_train.tolist() == once.y_test.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert (once.classes, once.num_classes, once.name) == (('cat', 'dog', 'owl'), 3, 'photos')
    assert (once.x_train.dtype, once.y_train.dtype, once.clients_train) == (np.uint8, np.int32, None)
    assert not list(kept.glob('.*'))
    monkeypatch.setattr(folders.pictures, 'picture', lambda *_: pytest.fail('decoded anew'))
    again = load_folder(path, cache=kept)
    for one, other in zip(once[:4], again[:4], strict=True):
        np.testing.assert_array_equal(one, other)
    assert again[4:] == once[4:]


def test_what_is_large_stays_in_its_file(photos, kept, monkeypatch):
    folder, pixels = photos
    monkeypatch.setattr(decoded, 'LARGE', 1)
    for _ in range(2):
        dataset = load_folder(folder, cache=kept)
        assert isinstance(dataset.x_train, np.memmap)
        np.testing.assert_array_equal(dataset.x_train, pixels['train'])
    assert not dataset.x_train.flags.writeable
    parts = data.iid(dataset.y_train, 2, seed=0)
    assert data.federate(dataset.x_train, dataset.y_train, parts).x.shape == (12, 6, 8, 3)
    assert data.subset(dataset, 3, seed=0).x_train.shape == (3, 6, 8, 3)


@pytest.mark.parametrize('kind', ['folder', 'zip'])
def test_changes_are_seen(photos, kept, kind):
    folder, _ = photos
    copy = folder.with_name('copy')
    shutil.copytree(folder, copy)
    path = folder if kind == 'folder' else packed(folder, kind)
    before = load_folder(path, cache=kept)
    new = picture(copy / 'test' / 'owl' / '3.png')
    if kind == 'folder':
        shutil.copy(copy / 'test' / 'owl' / '3.png', folder / 'test' / 'owl' / '3.png')
    else:
        copy.rename(folder)
        packed(folder, kind)
    after = load_folder(path, cache=kept)
    assert not np.array_equal(after.x_test[-1], before.x_test[-1])
    np.testing.assert_array_equal(after.x_test[-1], new)
    assert len(list(kept.glob('*.decoded'))) == 1


def test_a_share_held_out(tmp_path, kept):
    pixels = images(tmp_path / 'all', ('.',), count=10)['.']
    dataset = load_folder(tmp_path / 'all', test=0.3, cache=kept)
    assert np.bincount(dataset.y_test).tolist() == [3, 3, 3]
    assert sorted(map(bytes, [*dataset.x_train, *dataset.x_test])) == sorted(map(bytes, pixels))
    other = load_folder(tmp_path / 'all', test=0.3, seed=1, cache=kept)
    assert not np.array_equal(other.x_test, dataset.x_test)


ORDERS = ('split/client/class', 'client/split/class', 'class/client/split', 'client/class', 'class/client')


@pytest.mark.parametrize('order', ORDERS)
@pytest.mark.parametrize('zipped', [False, True])
def test_folders_may_be_named_after_clients(order, zipped, tmp_path, kept):
    folder, test = tmp_path / 'photos', 'test' if 'split' in order else 0.25
    wanted = {}
    for split, client, c in [
        (s, k, c) for s in ('train', 'test') for k in ('south', 'north', 'west') for c in ('owl', 'cat')
    ]:
        if (client, c) != ('west', 'cat'):  # who lacks a class
            place = folder.joinpath(
                *({'split': split, 'client': client, 'class': c}[level] for level in order.split('/'))
            )
            for i in range(4):
                pixels = picture(place / f'{split}{i}.png').tobytes()
                wanted[pixels] = (split, client, c)
    if 'split' in order:
        unused = {'split': 'unused', 'client': 'west', 'class': 'owl'}
        picture(folder.joinpath(*(unused[level] for level in order.split('/')), '0.png'))
    path = packed(folder, 'zip') if zipped else folder
    for _ in range(2):  # decoded, then kept
        found = load_folder(path, test=test, folders=order, cache=kept)
        assert found.classes == ('cat', 'owl')
        assert found.clients == ('north', 'south', 'west')
        seen = [
            (split, found.clients[k], found.classes[c], x.tobytes())
            for split in ('train', 'test')
            for x, k, c in zip(*(getattr(found, f'{part}_{split}') for part in ('x', 'clients', 'y')), strict=True)
        ]
        assert sorted(pixels for *_, pixels in seen) == sorted(wanted)
        assert all(wanted[pixels][1:] == (client, c) for _, client, c, pixels in seen)
        if 'split' in order:
            assert all(wanted[pixels][0] == split for split, *_, pixels in seen)
        else:
            assert [sum(split == 'test' for split, *_ in seen), len(seen)] == [10, 40]
    rows = data.natural(found.clients_train)
    assert sum(map(len, rows)) == len(found.y_train)


def test_clients_that_would_be_taken_for_classes_are_told(tmp_path, kept):
    for site in ('north', 'south'):
        images(tmp_path / 'photos' / site, splits=('.',))
    with pytest.warns(UserWarning, match='north, south are taken for the classes.*cat, dog, owl.*client/class'):
        assert load_folder(tmp_path / 'photos', test=0.5, cache=kept).classes == ('north', 'south')
    load_folder(tmp_path / 'photos', test=0.5, cache=kept / 'other', folders='class')
    for kind in ('cat', 'dog'):  # as in Tiny ImageNet
        images(tmp_path / 'tiny' / kind, splits=('.',), classes=('images',))
    load_folder(tmp_path / 'tiny', test=0.5, cache=kept)


def test_a_client_without_any_image_of_the_splits_is_not_passed_over(tmp_path, kept):
    folder = tmp_path / 'sites'
    for split, client in (('train', 'north'), ('test', 'north'), ('train', 'south'), ('unused', 'south')):
        for c in 'ab':
            picture(folder / client / split / c / '0.png')
    found = load_folder(folder, folders='client/split/class', cache=kept)
    assert found.clients_train.tolist() == [0, 0, 1, 1]
    assert found.clients_test.tolist() == [0, 0]  # one without test images is one, too
    picture(folder / 'south' / 'train' / '0.png')
    with pytest.raises(ValueError, match=r"'south/train/0\.png' beside folders of classes"):
        load_folder(folder, folders='client/split/class', cache=kept)
    (folder / 'south' / 'train' / '0.png').unlink()
    for place in ('west/Train/a/0.png', 'west/0.png'):
        picture(folder / place)
        with pytest.raises(ValueError, match="has images in 'west', and none of them in its train/ or test/"):
            load_folder(folder, folders='client/split/class', cache=kept)
        shutil.rmtree(folder / 'west')
    with zipfile.ZipFile(tmp_path / 'odd.zip', 'w') as file:
        for name in ('train//a/0.png', 'train/x/b/0.png', 'test/x/a/0.png', 'test/x/b/0.png'):
            file.writestr(name, (folder / 'north' / 'train' / 'a' / '0.png').read_bytes())
    with pytest.raises(ValueError, match=r"'train//a/0\.png', in a folder without a name"):
        load_folder(tmp_path / 'odd.zip', folders='split/client/class', cache=kept)


def test_classes_that_several_folders_agree_on(tmp_path, kept):
    """A site without a class numbers the others as all do."""
    images(tmp_path / 'here', classes=('owl', 'dog'))
    images(tmp_path / 'there', ('.',), classes=('dog',), count=6)
    shutil.rmtree(tmp_path / 'here' / 'test' / 'dog')  # nor must it be tested on all of its own
    known = ['owl', 'cat', 'dog']
    here = load_folder(tmp_path / 'here', classes=known, cache=kept)
    there = load_folder(tmp_path / 'there', test=0.5, classes=np.array(known), cache=kept)
    assert here.classes == there.classes == tuple(known)
    assert [sorted({*y.tolist()}) for y in (here.y_train, here.y_test, there.y_train)] == [[0, 2], [0], [2]]
    again = load_folder(tmp_path / 'there', test=0.5, classes=known[::-1], cache=kept)
    assert {*again.y_train.tolist()} == {0}  # and what is kept is of these
    for how, said in (
        ({'classes': ['owl', 'cat']}, "here has the label 'dog', which is none"),
        ({'classes': 'owl'}, 'at least two different labels'),
        ({'classes': ['owl'] * 3}, 'at least two different labels'),
        ({'classes': 5}, 'at least two different labels'),
        ({}, "'dog' in only one of train/ and test/"),
    ):
        with pytest.raises(ValueError, match=said):
            load_folder(tmp_path / 'here', cache=kept, **how)
    picture(tmp_path / 'here' / 'test' / 'cat' / '0.png')
    with pytest.raises(ValueError, match="'cat' in only one of"):
        load_folder(tmp_path / 'here', classes=known, cache=kept)


UPRIGHT = {  # by the number with which EXIF says how a camera was held
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x.swapaxes(0, 1)[:, ::-1],
    7: lambda x: x.swapaxes(0, 1)[::-1, ::-1],
    8: lambda x: x.swapaxes(0, 1)[::-1],
}


@pytest.mark.filterwarnings('error')
def test_images_stand_as_viewers_show_them(tmp_path, kept):
    said = {i: Image.Exif() for i in (*UPRIGHT, 9)}
    for i, about in said.items():
        about[0x112] = i
    content = {i: about.tobytes() for i, about in said.items()} | {
        'cut': said[6].tobytes()[:14],
        'odd': b'Exif\0\0' * 9,
    }
    # Held as 6 says, and in a unit of inches that no short number is.
    content['beside'] = b'Exif\0\0MM\0*' + struct.pack(
        '>IHHHIIHHIII', 8, 2, 0x112, 3, 1, 6 << 16, 0x128, 4, 1, 99999, 0
    )
    pixels = {
        name: picture(tmp_path / 'a' / split / c / f'{name}.png', (6, 6), exif=about)
        for name, about in content.items()
        for split in ('train', 'test')
        for c in 'ab'
    }
    found = load_folder(tmp_path / 'a', cache=kept)
    for (name, lying), x in zip(
        sorted(pixels.items(), key=lambda item: f'{item[0]}.png'), found.x_test[-12:], strict=True
    ):
        np.testing.assert_array_equal(x, UPRIGHT.get(6 if name == 'beside' else name, UPRIGHT[1])(lying), str(name))


def test_another_name_for_the_test_folder(tmp_path, kept):
    images(tmp_path / 'a', ('train', 'val'))
    assert len(load_folder(tmp_path / 'a', test='val', cache=kept).y_test) == 12


def test_sizes_modes_and_formats(tmp_path, kept):
    folder = tmp_path / 'a'
    for split in ('train', 'test'):
        picture(folder / split / 'x' / 'deep' / 'grey.PNG', (20, 10), 'L')
        picture(folder / split / 'x' / 'wide.jpg', (40, 10))
        picture(folder / split / 'y' / 'high.bmp', (10, 40))
        Image.new('P', (16, 16)).save(folder / split / 'y' / 'palette.gif')
        Image.new('RGBA', (16, 16)).save(folder / split / 'y' / 'transparent.webp')
    with pytest.raises(ValueError, match=r'wide\.jpg is 10x40 and .*grey\.PNG is 10x20: give a `size`'):
        load_folder(folder, cache=kept)
    assert load_folder(folder, size=8, cache=kept).x_train.shape == (5, 8, 8, 3)
    assert load_folder(folder, size=(4, 8), channels=1, cache=kept).x_test.shape == (5, 4, 8, 1)


@pytest.mark.parametrize(
    ('arguments', 'said'),
    [
        ({'path': None}, '`path` must be a path'),
        ({'size': 0}, '`size` must be'),
        ({'size': (3, 4, 5)}, '`size` must be one side'),
        ({'size': 2**20}, '`size` must be at most'),
        ({'size': 'big'}, '`size` must be'),
        ({'channels': 4}, '`channels` must be 3 or 1'),
        ({'test': 0}, '`test` must lie in'),
        ({'test': 1.0}, '`test` must lie in'),
        ({'test': 'train'}, "another folder than 'train'"),
        ({'test': 'held/test'}, 'the name of another folder'),
        ({'test': ''}, 'the name of another folder'),
        (
            {'test': 'none'},
            r"no images in none/, but in test, train; name the folder for testing, such as test='val', or",
        ),
        ({'test': 0.2}, r'has the folders test, train, which are parts of a data set and no classes: give the'),
        ({'test': 0.01}, '`test` 0.01 holds out nothing'),
        ({'seed': -1}, '`seed` must be'),
        ({'folders': 'split'}, "`folders` must be 'class', with 'split' and 'client' .* not 'split'"),
        ({'folders': 'split/class/class'}, '`folders` must be'),
        ({'folders': 'split/site/class'}, '`folders` must be'),
        ({'folders': ('split', 'class')}, '`folders` must be'),
        ({'folders': 'client/class'}, "names no 'split': `test` must then be the share"),
        ({'folders': 'split/class', 'test': 0.5}, "names a 'split': `test` must then be a folder"),
        ({'folders': 'class/split'}, 'no images in train/ or test/, but in cat, dog, owl; .*`folders` says what else'),
        ({'folders': 'client/class', 'test': 0.5}, 'has the folders test, train, .* and no clients'),
        ({'folders': 'split/client/class'}, r"'test/cat/0\.png' beside folders of classes"),
    ],
)
def test_bad_arguments(photos, kept, arguments, said):
    with pytest.raises(ValueError, match=said) as info:
        load_folder(**{'path': photos[0], 'cache': kept, **arguments})
    assert '\n' not in str(info.value)


def bomb(path, side):
    """A PNG of one colour: a few kilobytes that are gigabytes of pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new('1', (side, side)).save(path)


def deep(path):
    """A PNG with 16 bits a colour."""

    def chunk(kind, content):
        return struct.pack('>I', len(content)) + kind + content + struct.pack('>I', zlib.crc32(kind + content))

    rows = b''.join(b'\0' + struct.pack('>24H', *range(0, 24000, 1000)) for _ in range(6))
    header = struct.pack('>IIBBBBB', 8, 6, 16, 2, 0, 0, 0)
    content = chunk(b'IHDR', header) + chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b'')
    path.write_bytes(b'\x89PNG\r\n\x1a\n' + content)


@pytest.mark.parametrize(
    ('spoil', 'said'),
    [
        (lambda f: (f / 'train' / 'cat' / '0.png').write_bytes(b'no image'), r'train/cat/0\.png is damaged \(cannot'),
        (lambda f: (f / 'train' / 'cat' / '0.png').write_bytes(b''), r'0\.png is damaged'),
        (lambda f: os.truncate(f / 'test' / 'owl' / '1.png', 99), 'damaged'),
        (lambda f: bomb(f / 'train' / 'cat' / '0.png', 6000), '6000 x 6000 pixels'),
        (lambda f: bomb(f / 'train' / 'cat' / '0.png', 15000), '225000000 pixels'),
        (lambda f: Image.new('I;16', (8, 6)).save(f / 'train' / 'cat' / '0.png'), 'has more than 8 bits a pixel'),
        (lambda f: deep(f / 'train' / 'cat' / '0.png'), 'more than 8 bits a colour'),
        (lambda f: (f / 'train' / 'cat' / '0.png').write_bytes(bytes(2**25 + 1)), 'more than 33554432'),
        (lambda f: picture(f / 'train' / 'cat' / '0.png', (8, 7)), r'is 6x8 and .*0\.png is 7x8: give a `size`'),
        (lambda f: picture(f / 'train' / 'loose.png'), "'train/loose.png' beside folders of classes"),
        (lambda f: picture(f / 'test' / 'cow' / '0.png'), "'cow' in only one of train/ and test/"),
        (lambda f: shutil.rmtree(f / 'test' / 'cat'), "'cat' in only one of"),
        (lambda f: shutil.rmtree(f / 'test'), 'no images in test/'),
        (lambda f: [shutil.rmtree(f / s / c) for s in ('train', 'test') for c in ('cat', 'dog')], 'two classes or'),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings('error')
def test_damaged_folders(photos, kept, spoil, said):
    folder, _ = photos
    spoil(folder)
    tracemalloc.start()
    with pytest.raises(ValueError, match=said) as info:
        load_folder(folder, cache=kept)
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()
    assert str(folder) in str(info.value)
    assert '\n' not in str(info.value)
    assert len(str(info.value)) < 500
    assert not list(kept.glob('*.decoded')) + list(kept.glob('.*'))


def test_links_in_circles_end(photos, kept):
    folder, pixels = photos
    os.symlink('..', folder / 'train' / 'cat' / 'round')
    os.symlink('nowhere', folder / 'train' / 'cat' / 'lost.png')
    os.mkfifo(folder / 'train' / 'cat' / 'pipe.png')
    shutil.move(folder / 'test' / 'owl', folder.with_name('owl'))
    os.symlink(folder.with_name('owl'), folder / 'test' / 'owl')
    np.testing.assert_array_equal(load_folder(folder, cache=kept).x_test, pixels['test'])


def test_images_may_lie_at_any_depth(photos, kept):
    folder, pixels = photos
    deep = folder / 'train' / 'cat' / '/'.join('1234567')
    deep.mkdir(parents=True)
    shutil.copy(next((folder / 'train' / 'cat').glob('*.png')), deep / 'zz.png')
    assert len(load_folder(folder, cache=kept).x_train) == len(pixels['train']) + 1


def tarred(path, members):
    with tarfile.open(path, 'w:gz', compresslevel=1) as tar:
        for name, content, fields in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize(
    ('members', 'said'),
    [
        ([('../x.png', b'', {})], 'leads out of it'),
        ([('/x.png', b'', {})], 'leads out of it'),
        ([('train/a/x.png', b'', {'type': tarfile.SYMTYPE, 'linkname': '/etc/passwd'})], 'neither a file nor a folder'),
        ([('train/a/x.png', b'', {'type': tarfile.CHRTYPE})], 'neither a file nor a folder'),
        ([('train/' + 'x' * 2**21, b'', {})], 'unpacks to more'),
        ([(f'{i}', b'', {}) for i in range(200)], 'holds more than 99 files'),
        ([('train/a/x.png', bytes(2**25 + 1), {}), ('train/b/x.png', b'', {}), ('test/a/x.png', b'', {}),
          ('test/b/x.png', b'', {})], 'has 33554433 bytes'),
        ([(f'notes{i}', bytes(2**24), {}) for i in range(3)], 'unpacks to more than 64 times its size'),
        ([('train/a/x.png', b'', {})] * 2, 'holds train/a/x.png twice: unpack it'),
        ([], 'no images in train/ or test/'),
    ],
)  # fmt: skip
def test_hostile_tars(tmp_path, kept, monkeypatch, members, said):
    monkeypatch.setattr(containers, '_SPARE', 2**25 + 9)
    monkeypatch.setattr(containers, 'MOST_FILES', 99)
    tarred(tmp_path / 'a.tar.gz', members)
    with pytest.raises(ValueError, match=said) as info:
        load_folder(tmp_path / 'a.tar.gz', cache=kept)
    assert 'a.tar.gz' in str(info.value)
    assert set(tmp_path.iterdir()) == {tmp_path / 'a.tar.gz', kept}


@pytest.mark.parametrize('kind', ['climbing', 'many', 'bomb', 'lzma', 'half', 'rubbish', 'empty', 'lying'])
def test_hostile_zips(tmp_path, kept, monkeypatch, kind):
    monkeypatch.setattr(containers, 'MOST_FILES', 99)
    path = tmp_path / 'a.zip'
    how = zipfile.ZIP_LZMA if kind == 'lzma' else zipfile.ZIP_DEFLATED
    names = [f'{s}/{c}/0.png' for s in ('train', 'test') for c in 'ab']
    with zipfile.ZipFile(path, 'w', how) as file:
        for name in ['../' + names[0]] if kind == 'climbing' else names:
            file.writestr(name, bytes(2**26) if kind in ('bomb', 'lying') else b'')
        for i in range(200 if kind == 'many' else 0):
            file.writestr(str(i), b'')
    whole = path.read_bytes()
    if kind == 'lying':  # about sizes, in the list of files at the end
        whole = whole.replace(struct_size(2**26), struct_size(10))
    path.write_bytes({'half': whole[: len(whole) // 2], 'rubbish': b'PK\x03\x04rubbish', 'empty': b''}.get(kind, whole))
    tracemalloc.start()
    with pytest.raises(ValueError, match=r'a\.zip') as info:
        load_folder(path, cache=kept)
    assert tracemalloc.get_traced_memory()[1] < 2**27
    tracemalloc.stop()
    assert '\n' not in str(info.value)


def struct_size(size):
    return size.to_bytes(4, 'little')


@pytest.mark.parametrize('kind', ['cut', 'labels', 'no array', 'objects', 'json', 'lost', 'names'])
def test_damaged_caches(photos, kept, kind):
    folder, _ = photos
    load_folder(folder, cache=kept)
    place = next(kept.glob('*.decoded'))
    x, y, about = place / 'x_train.npy', place / 'y_train.npy', place / 'about.json'
    if kind == 'cut':
        x.write_bytes(x.read_bytes()[:-1])
    elif kind == 'labels':
        np.save(y, np.load(y) + 1)
    elif kind == 'objects':
        np.save(y, np.array([{}] * 12, object), allow_pickle=True)
    elif kind == 'lost':
        y.unlink()
    elif kind == 'names':
        about.write_text(json.dumps({**json.loads(about.read_text()), 'classes': ['a']}))
    else:
        (x if kind == 'no array' else about).write_bytes(b'[')
    with pytest.raises(ValueError, match=r'\.decoded is damaged \(.*\); delete it and load again'):
        load_folder(folder, cache=kept)
    shutil.rmtree(place)
    load_folder(folder, cache=kept)


def test_where_nothing_can_be_written_nothing_is_kept(photos, kept, monkeypatch):
    folder, pixels = photos
    kept.write_text('a file')
    with pytest.warns(UserWarning, match='cannot be written'):
        dataset = load_folder(folder, cache=kept)
    np.testing.assert_array_equal(dataset.x_train, pixels['train'])
    monkeypatch.setattr(decoded.shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(0, 0, 0))
    with pytest.warns(UserWarning, match='do not fit on the disk'):
        load_folder(folder, cache=kept.with_name('other'))


def test_what_cannot_be_read_is_not_blamed_on_the_cache(photos, kept, monkeypatch, recwarn):
    folder, _ = photos
    tried = []

    def refused(*args):
        tried.append(args)
        raise PermissionError(13, 'Permission denied')

    monkeypatch.setattr(folders.pictures, 'decode', refused)
    with pytest.raises(PermissionError, match='Permission denied'):
        load_folder(folder, cache=kept)
    assert len(tried) == 1
    assert not recwarn.list


def test_numbers_of_numpy_are_taken(tmp_path, kept):
    images(tmp_path / 'all', ('.',), count=8)
    plain = load_folder(tmp_path / 'all', test=0.25, seed=3, cache=kept)
    same = load_folder(tmp_path / 'all', test=np.float32(0.25), seed=np.int64(3), cache=kept)
    np.testing.assert_array_equal(plain.x_test, same.x_test)
    assert len(list(kept.glob('*.decoded'))) == 1


@pytest.mark.filterwarnings('ignore:waiting for another process')
def test_of_several_at_once_one_decodes(photos, kept, monkeypatch):
    folder, pixels = photos
    decode, calls = folders.pictures.decode, []
    monkeypatch.setattr(folders.pictures, 'decode', lambda *rest: calls.append(1) or decode(*rest))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: load_folder(folder, cache=kept), range(4)):
            np.testing.assert_array_equal(found.x_train, pixels['train'])
    assert len(calls) == 1


def test_what_a_killed_process_left_is_removed(photos, kept):
    folder, pixels = photos
    load_folder(folder, cache=kept)
    place = next(kept.glob('*.decoded'))
    left = kept / f'.{place.name.removesuffix(".decoded")}.unfinished'
    place.rename(left)
    (left / 'about.json').unlink()
    np.testing.assert_array_equal(load_folder(folder, cache=kept).x_train, pixels['train'])
    assert not left.exists()


def test_by_default_it_is_kept_where_data_sets_are(photos, tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'home'))
    load_folder(photos[0])
    assert list((tmp_path / 'home' / 'fedjax_nc').glob('photos-*.decoded'))
    assert store.directory(None) == tmp_path / 'home' / 'fedjax_nc'


# Tiny-ImageNet and CINIC-10


WNIDS = ('n02124075', 'n01443537', 'n07920052')


def write_tiny(folder):
    """The official layout: boxes beside the training images, labels of the validation images in a table."""
    root = folder / 'tiny-imagenet-200'
    pixels = {'train': [], 'val': []}
    for wnid in sorted(WNIDS):
        for i in range(5):
            place = root / 'train' / wnid / 'images' / f'{wnid}_{i}.JPEG'
            picture(place, (64, 64), 'L' if i == 3 else 'RGB', quality=95)
            pixels['train'].append(np.asarray(Image.open(place).convert('RGB')))
        (root / 'train' / wnid / f'{wnid}_boxes.txt').write_text(f'{wnid}_0.JPEG\t0\t0\t63\t63\n')
    rows = []
    for i in range(6):
        place = root / 'val' / 'images' / f'val_{i}.JPEG'
        picture(place, (64, 64))
        pixels['val'].append(np.asarray(Image.open(place)))
        rows.append(f'val_{i}.JPEG\t{WNIDS[i % 3]}\t0\t32\t44\t62\n')
        picture(root / 'test' / 'images' / f'test_{i}.JPEG', (64, 64))
    (root / 'val' / 'val_annotations.txt').write_text(''.join(rows))
    (root / 'wnids.txt').write_text('\n'.join(WNIDS) + '\n')
    (root / 'words.txt').write_text('n01443537\tgoldfish, Carassius auratus\n')
    return root, {split: np.stack(found) for split, found in pixels.items()}


@pytest.fixture
def sizes(monkeypatch):
    monkeypatch.setattr(folders, 'OFFICIAL', {'tiny_imagenet': (3, 15, 6), 'cinic10': (10, 20, 20)})


@pytest.mark.parametrize('zipped', [False, True])
def test_tiny_imagenet(tmp_path, sizes, zipped):
    root, pixels = write_tiny(tmp_path)
    if zipped:
        with zipfile.ZipFile(tmp_path / 'tiny-imagenet-200.zip', 'w') as file:
            for path in sorted(root.rglob('*')):
                file.write(path, path.relative_to(tmp_path))
        shutil.rmtree(root)
    dataset = load_dataset('tiny_imagenet', tmp_path)
    np.testing.assert_array_equal(dataset.x_train, pixels['train'])
    np.testing.assert_array_equal(dataset.x_test, pixels['val'])
    assert dataset.y_train.tolist() == [c for c in range(3) for _ in range(5)]
    assert dataset.y_test.tolist() == [1, 0, 2, 1, 0, 2]
    assert (dataset.classes, dataset.name, dataset.num_classes) == (tuple(sorted(WNIDS)), 'tiny_imagenet', 3)
    path = tmp_path / 'tiny-imagenet-200.zip' if zipped else root
    np.testing.assert_array_equal(data.load_tiny_imagenet(path, cache=tmp_path).x_train, dataset.x_train)
    assert len(list(tmp_path.glob('*.decoded'))) == 1


@pytest.mark.parametrize(
    ('spoil', 'said'),
    [
        (lambda r: (r / 'wnids.txt').unlink(), 'has no wnids.txt'),
        (lambda r: (r / 'wnids.txt').write_text('n1\n'), 'not those of wnids.txt'),
        (lambda r: (r / 'val' / 'val_annotations.txt').unlink(), 'has no val/val_annotations.txt'),
        (lambda r: (r / 'val' / 'val_annotations.txt').write_text('val_0.JPEG\tn02124075\n'), 'val_1.JPEG without'),
        (lambda r: (r / 'val' / 'images' / 'val_5.JPEG').unlink(), 'does not hold all of tiny_imagenet'),
        (lambda r: (r / 'train' / WNIDS[0] / 'images' / f'{WNIDS[0]}_0.JPEG').unlink(), 'does not hold all'),
    ],
)  # fmt: skip
def test_damaged_tiny_imagenet(tmp_path, sizes, spoil, said):
    root, _ = write_tiny(tmp_path)
    spoil(root)
    with pytest.raises(ValueError, match=said) as info:
        load_dataset('tiny_imagenet', tmp_path)
    assert str(root) in str(info.value)


CIFAR10 = ('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck')


@pytest.mark.parametrize('packed', [False, True])
def test_cinic10(tmp_path, sizes, packed):
    root = tmp_path / 'CINIC-10'
    pixels = {}
    for split in ('train', 'valid', 'test'):
        names = [f'{c}/{name}' for c in CIFAR10 for name in ('cifar10-train-10.png', 'n02123394_7.png')]
        pixels[split] = np.stack([picture(root / split / name, (32, 32)) for name in names])
    (root / 'README.md').write_text('CINIC-10')
    (root / 'synsets-to-cifar-10-classes.txt').write_text('')
    if packed:
        with tarfile.open(tmp_path / 'CINIC-10.tar.gz', 'w:gz') as tar:
            for name in sorted(os.listdir(root), reverse=True):
                tar.add(root / name, f'./{name}')
        shutil.rmtree(root)
    dataset = load_dataset('cinic10', tmp_path)
    np.testing.assert_array_equal(dataset.x_train, pixels['train'])
    np.testing.assert_array_equal(dataset.x_test, pixels['test'])
    assert (dataset.classes, dataset.num_classes, dataset.name) == (CIFAR10, 10, 'cinic10')


@pytest.mark.parametrize(
    ('name', 'said'),
    [
        ('tiny_imagenet', r'put tiny-imagenet-200 or tiny-imagenet-200\.zip from http://cs231n\.stanford\.edu/tiny-'),
        ('cinic10', r'put CINIC-10 or CINIC-10\.tar\.gz from https://datashare\.ed\.ac\.uk/.*CINIC-10\.tar\.gz there$'),
        ('femnist', r'put data/femnist/data of https://github\.com/TalwalkarLab/leaf, .* as femnist there'),
    ],
)
def test_what_is_not_there_says_where_it_is_to_be_had(tmp_path, name, said):
    with pytest.raises(DatasetUnavailableError, match=said) as info:
        load_dataset(name, tmp_path)
    assert str(tmp_path) in str(info.value)
    with pytest.raises(DatasetUnavailableError, match='is not there'):
        load_folder(tmp_path / 'none')


def test_real_photographs():
    """A hundred classes of ImageNet, 32x32, where they have been unpacked."""
    folder = Path(__file__).parent.parent / 'local' / 'imagenet100-32'
    if not folder.is_dir():
        pytest.skip('local/imagenet100-32 is not there')
    dataset = load_folder(folder, cache=folder.parent)
    assert dataset.x_train.shape == (50_000, 32, 32, 3)
    assert np.bincount(dataset.y_train).tolist() == [500] * 100
    assert np.bincount(dataset.y_test).tolist() == [50] * 100
    names = (folder / 'classes.txt').read_text().splitlines()
    assert dataset.classes == tuple(sorted(name.partition('\t')[0] for name in names))
