"""The pictures of docs/ideas.md: what the page says holds, and they are drawn."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from fedjax_nc import frames

pytest.importorskip('matplotlib')
pytest.importorskip('sklearn')

ROOT = Path(__file__).parent.parent
SMALL = {'few': 6, 'many': 6, 'epochs': 4, 'partitions': 2, 'passes': 3, 'rounds': 2}


@pytest.fixture(scope='module')
def ideas():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / 'examples'))
        yield importlib.import_module('ideas')


@pytest.fixture(scope='module')
def small(ideas):
    return ideas.measured.Setting(**SMALL)


@pytest.fixture
def made_up(ideas):
    """Numbers of the right shapes, which cost nothing."""
    rng = np.random.default_rng(0)
    y, z = np.arange(30) % 3, rng.normal(size=(30, 2))
    head = {'w': rng.normal(size=(2, 5)), 'b': rng.normal(size=5)}
    pairs = [(0, 1), (0, 2), (1, 2)]
    return {
        'collapse': ideas.measured.Collapse(
            y,
            {t: (z, rng.normal(size=(3, 2))) for t in (1, 2)},
            {n: rng.uniform(size=2) for n in ('NC1', 'NC2', 'NC3')},
        ),
        'fedetf': ideas.measured.Simplex(
            {n: rng.uniform(-1, 1, 45) for n in ('FedAvg', 'FedETF')}, {'FedAvg': 0.9, 'FedETF': 0.95}
        ),
        'gmv': ideas.measured.Remembered(z, y, rng.normal(size=(3, 2)), rng.normal(size=(3, 2)), 0.5),
        'fedloge': ideas.measured.Lengths(np.arange(10, 0, -1), rng.uniform(1, 2, 10), *rng.uniform(size=(2, 10))),
        'ccvr': ideas.measured.Calibrated(z, np.arange(30) % 5, head, head, (0.5, 0.75)),
        'fednh': ideas.measured.Meaning(pairs, *rng.uniform(size=(3, 3))),
    }


@pytest.mark.slow
def test_class_vectors_turn_away_from_each_other_where_clients_differ(ideas, small):
    found = ideas.measured.drift(small)
    assert found.even.shape == found.uneven.shape == (6, 3, 2)
    assert not found.held.all()
    even, uneven = found.cosines['even'], found.cosines['uneven']
    assert (even > 0.9).all()
    assert (uneven < even - 0.05).all()
    ideas.drawn.draw_drift(found)
    assert f'{uneven[0]:.2f} as drawn' in ideas.measured.told(found)[1]


@pytest.mark.slow
def test_layers_agree_less_the_later_they_are_and_where_clients_differ(ideas, small):
    found = ideas.measured.agreement(small)
    (_, even), (_, uneven) = found.layers.items()
    assert (uneven < even - 0.05).all()
    assert (np.diff(uneven) < 0).all()
    cosines = [matrix[np.triu_indices(6, 1)].mean() for matrix in found.cosines.values()]
    assert cosines[1] < cosines[0] - 0.05
    ideas.drawn.draw_agreement(found)


def test_what_is_drawn_as_a_simplex_is_one(ideas):
    for d in (2, 3):
        frame = ideas.drawn.turned(np.asarray(frames.simplex_etf(ideas.measured.KEY, d, d + 1)).T)
        np.testing.assert_allclose(frame @ frame.T, ((d + 1) * np.eye(d + 1) - 1) / d, atol=1e-5)
        np.testing.assert_allclose(frame[0], np.eye(d)[-1], atol=1e-5)
        spots = ideas.drawn.seen_from_above(frame)
        assert spots.shape == (d + 1, 2)
        assert np.linalg.norm(spots, axis=1).max() < 1.001
    ideas.drawn.draw_frames()


def test_borders_lie_where_two_classes_are_level(ideas, made_up):
    head = made_up['ccvr'].before
    points = np.concatenate(ideas.drawn.borders(head, 10.0))
    points = points[np.isfinite(points[:, 0])]
    assert len(points) > 100
    first, second = np.sort(points @ head['w'] + head['b'], axis=1)[:, [-1, -2]].T
    np.testing.assert_allclose(first, second, atol=1e-5)


@pytest.mark.parametrize('name', ['collapse', 'fedetf', 'gmv', 'fedloge', 'ccvr', 'fednh'])
def test_pictures_are_drawn_and_told(ideas, made_up, name):
    figure = ideas.PICTURES[name][1](made_up[name])
    assert all(axes.get_title() for axes in figure.axes[1:])
    assert ideas.measured.told(made_up[name])


@pytest.mark.slow
def test_the_program_writes_light_and_dark_pictures(ideas, made_up, tmp_path, monkeypatch, capsys):
    made = {'fednh': (lambda setting: made_up['fednh'], ideas.drawn.draw_meaning)}
    monkeypatch.setattr(ideas, 'PICTURES', made)
    for out, only, wanted in (
        ('new', [], ('clients', 'frames', 'fednh')),
        ('one', ['--only', 'fednh'], ('fednh',)),
    ):
        monkeypatch.setattr(sys, 'argv', ['ideas.py', '--quick', *only, '--out', str(tmp_path / out)])
        ideas.main()
        assert capsys.readouterr().out.startswith('fednh: first cosines')
        names = {f'{name}{night}.png' for name in wanted for night in ('', '-dark')}
        assert {path.name for path in (tmp_path / out).iterdir()} == names
        for path in (tmp_path / out).iterdir():
            assert path.read_bytes().startswith(b'\x89PNG')


def test_the_pages_show_every_picture_in_both_colours(ideas):
    shown = set()
    for page in ('ideas.md', 'getting-started.md'):
        text = (ROOT / 'docs' / page).read_text()
        found = re.findall(r'```\{image\} pictures/(\S+)\n:alt: .+\n:class: only-(light|dark)\n', text)
        assert all(name.endswith('-dark.png') == (ground == 'dark') for name, ground in found)
        shown |= {name for name, _ in found}
    assert shown == {f'{name}{night}.png' for name in ('clients', 'frames', *ideas.PICTURES) for night in ('', '-dark')}
    for name in shown:
        assert (ROOT / 'docs' / 'pictures' / name).stat().st_size < 200_000
