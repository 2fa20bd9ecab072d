"""The figures of the papers, made tiny: what they draw is what they were given, and what they print."""

import re

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from test_spiral import fast_compilation as fast_compilation
from test_spiral import load

from fedjax_nc import data
from fedjax_nc.metrics import semantics

study = pytest.fixture(scope='module')(lambda: load('paper_figures'))


@pytest.fixture
def tiny(study, tmp_path, capsys, fast_compilation):
    """Makes one of the figures; what was printed, with its pictures seen to."""

    def make(figure, *names):
        paths = study.main([figure, '--tiny', '--out', str(tmp_path / 'new')])
        assert [path.name for path in paths] == [f'{name}{end}.png' for name in names for end in ('', '-dark')]
        assert all(path.read_bytes().startswith(b'\x89PNG') for path in paths)
        return capsys.readouterr().out

    return make


@pytest.mark.slow
def test_ccvr(tiny):
    out = tiny('ccvr', 'ccvr_tsne')
    before, after = map(float, re.search(r'accuracy before (\S+) %, after (\S+) %', out).groups())
    assert after > before + 10
    counts = [re.findall(r'\d (\d+)', line.split(': ')[1]) for line in out.splitlines() if 'of each class' in line]
    uneven, even = (np.array(row, int) for row in counts)
    assert uneven.sum() == even.sum() == 355
    assert uneven.std() > 2 * even.std()


@pytest.mark.slow
def test_fedloge(tiny):
    out = tiny('fedloge', 'fedloge_features', 'fedloge_pruning')
    lines = re.findall(r'(dense|sparse) ETF, (\w+) features first: (.*)', out)
    curves = {(kind, end): list(map(float, row.split())) for kind, end, row in lines}
    assert len(curves) == 4
    for kind in ('dense', 'sparse'):
        own = float(re.search(rf'{kind} ETF: accuracy (\S+) %', out).group(1))
        negligible, dominant = curves[kind, 'negligible'], curves[kind, 'dominant']
        assert negligible[0] == dominant[0] == own > 20
        assert negligible[-1] == dominant[-1]  # nothing is left
        assert np.mean(negligible) > np.mean(dominant) + 10
    zeros = [int(n) for n in re.findall(r'zeros in the lower half (\d+) %', out)]
    assert zeros[0] == 0 < zeros[1]


def test_frame(tiny):
    out = tiny('frame', 'fedloge_frame')
    drawn, moved = (float(gap) for gap in re.findall(r'cosine of an ETF (\S+)', out))
    assert moved < 0.1 < drawn


@pytest.mark.slow
def test_fednh(tiny):
    out = tiny('fednh', 'fednh_semantics')
    gaps = re.findall(r'(\w+): accuracy (\S+) %, semantic gap (\S+), of centred vectors (\S+)', out)
    assert [name for name, *_ in gaps] == ['FedAvg', 'FedNH']
    for _, accuracy, *both in gaps:
        assert float(accuracy) > 50
        assert all(-2 <= float(u) <= 2 for u in both)


def test_decisions_are_drawn_as_they_are(study):
    rng = np.random.default_rng(0)
    truth, before, after = rng.integers(0, 4, 40), np.zeros(40, int), rng.integers(0, 4, 40)
    rows, places = np.arange(5, 15), rng.normal(size=(10, 2))
    seen = study.Decisions(rng.normal(size=(40, 3)), truth, before, after)
    figure = study.draw_decisions(seen, rows, places, list('abcd'))
    for i, labels in enumerate((truth, before, after)):
        points, bars = figure.axes[i].collections[0], figure.axes[3 + i].patches
        np.testing.assert_allclose(points.get_offsets(), places)
        np.testing.assert_allclose(points.get_facecolor()[:, :3], [to_rgba(study.TEN[c])[:3] for c in labels[rows]])
        assert [bar.get_height() for bar in bars] == np.bincount(labels, minlength=4).tolist()
    assert f'{100 * np.mean(before == truth):.1f} % right' in figure.axes[1].get_title()
    assert '10 test images' in figure.get_supxlabel()


def test_boxes_stand_around_super_classes(study):
    w = np.eye(5)[[0, 1, 0, 2, 1]] + 0.1
    figure = study.draw_semantics({'FedAvg': (w, 10.0), 'FedNH': (w, 20.0)}, {'x': (0, 2), 'y': (1, 4)})
    axes = figure.axes[0]
    boxes = [(box.get_x(), box.get_y(), box.get_width()) for box in axes.patches if isinstance(box, Rectangle)]
    assert boxes == [(-0.5, -0.5, 2), (1.5, 1.5, 2)]
    shown = np.asarray(axes.images[0].get_array())
    np.testing.assert_allclose(shown[:2, :2], 1, atol=1e-5)  # classes 0 and 2
    np.testing.assert_allclose(shown[2:4, 2:4], 1, atol=1e-5)
    assert shown[4, :4].max() < 0.5  # class 3, which belongs to none
    assert [label.get_text() for label in axes.get_yticklabels()] == ['x', 'y', 'others']
    plain = semantics.semantic_gap(w, np.array([0, 1, 0, 2, 1])).centred
    assert f'gap {plain:.2f}' in axes.get_title()
    assert 'The 1 others' in figure.get_supxlabel()


def test_super_classes(study):
    ids = [i for members in study.WORDNET.values() for i in members.split()]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r'n\d{8}', i) for i in ids)
    assert min(len(members.split()) for members in study.WORDNET.values()) >= 3
    none = np.zeros(0, np.int32)
    source = data.Dataset(none, none, none, none, len(ids), 'photos', tuple(sorted(ids)))
    groups = study.groups_of(source)
    assert sorted(c for members in groups.values() for c in members) == list(range(len(ids)))
    assert [sorted(ids)[c] for c in groups['cats']] == study.WORDNET['cats'].split()
    hundred = study.groups_of(source._replace(name='cifar100'))
    assert hundred['aquatic mammals'] == (4, 30, 55, 72, 95)
    assert len(hundred) == 20
    with pytest.raises(ValueError, match='WordNet'):
        study.groups_of(source._replace(classes=('cat', 'dog')))


def test_refusals(study, tmp_path, capsys):
    for words in (['fednh'], ['frame', '--out', str(tmp_path / 'file' / 'x')], ['other']):
        (tmp_path / 'file').touch()
        with pytest.raises(SystemExit):
            study.main(words)
    err = capsys.readouterr().err
    assert 'fednh needs --data' in err
    assert 'cannot be made a directory' in err
