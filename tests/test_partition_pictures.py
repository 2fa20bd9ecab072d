"""The page of partitions and its pictures: all there, small, and made by the script of that name."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from PIL import Image

from fedjax_nc import data
from fedjax_nc.data import features, partition
from fedjax_nc.experiments.setting import PARTITIONS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / 'docs' / 'guides'
PAGE = (FOLDER / 'partitions.md').read_text()
EXTRA = {'long_tail', 'rotate', 'add_noise', 'by_domain'}


def public(module):
    named = vars(module).items()
    return {name for name, f in named if inspect.isfunction(f) and f.__module__ == module.__name__ and name[0] != '_'}


@pytest.fixture(scope='module')
def drawn(tmp_path_factory):
    spec = importlib.util.spec_from_file_location('partitions_script', ROOT / 'examples' / 'partitions.py')
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.main(['--out', str(tmp_path_factory.mktemp('pictures') / 'new')])


@pytest.mark.slow
def test_every_partition_has_a_picture_that_is_small(drawn):
    names = set(PARTITIONS) | EXTRA
    assert {path.stem for path in drawn} == names | {f'{name}-dark' for name in names}
    for path in drawn:
        assert path.stat().st_size < 60_000
        kept = ROOT / 'examples' / 'partitions' / path.name
        assert kept.stat().st_size < 60_000
        assert Image.open(kept).size == Image.open(path).size


def test_the_page_has_every_function_and_every_picture():
    rows = re.findall(r'^\| `(\w+)` \|', PAGE, re.M)
    assert len(rows) == len(set(rows))
    assert set(rows) == public(partition) - {'by_class'} | public(features)
    assert all(hasattr(data, name) for name in rows)
    pictures = re.findall(r'!\[[^]]*\]\((\.\./[^)]+)\)', PAGE)
    assert {Path(path).stem.removesuffix('-dark') for path in pictures} == set(rows) - {'natural'}
    for path in pictures:
        assert (FOLDER / path).is_file()
