"""Figures show the numbers they were given, and leave matplotlib's global state alone."""

import io
import itertools
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip('matplotlib')

from fedjax_nc import plots
from fedjax_nc.data import federate


@pytest.fixture
def clients():
    y = np.repeat([0, 1, 2], [9, 4, 1])
    return federate(np.zeros((14, 1)), y, [range(9), [9, 10, 11], [12, 13]])


def png(figure):
    out = io.BytesIO()
    figure.savefig(out, format='png')
    return out.getvalue()


def test_bubble_areas_are_proportional(clients):
    figure = plots.class_distribution(clients, class_names=['cat', 'dog', 'eel'])
    (discs,) = figure.axes[0].collections
    np.testing.assert_array_equal(discs.get_offsets(), [[0, 0], [1, 1], [2, 1], [2, 2]])
    np.testing.assert_allclose(discs.get_sizes() / discs.get_sizes()[2], [9, 3, 1, 1])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ['cat', 'dog', 'eel']
    assert png(figure).startswith(b'\x89PNG')


def test_bars_stack_to_the_sizes(clients):
    figure = plots.class_distribution(clients, 'bars')
    blocks = [path.vertices for path in figure.axes[0].collections[0].get_paths()]
    got = sorted((round(x.mean()), y.min(), y.max()) for x, y in (block[:4].T for block in blocks))
    assert got == [(0, 0, 9), (1, 0, 3), (2, 0, 1), (2, 1, 2)]
    assert png(figure)


def test_many_classes_and_clients():
    y = np.arange(4000) % 200
    data = federate(np.zeros((4000, 1)), y, np.array_split(np.arange(4000), 150))
    for kind in ('bubble', 'bars'):
        assert png(plots.class_distribution(data, kind))


def test_tiles_show_the_images():
    rng = np.random.default_rng(0)
    grey = rng.integers(0, 256, (3, 4, 5)).astype(np.uint8)
    figure = plots.example_tiles({'one': grey, 'two': (grey[:2, ..., None] / 255).astype(np.float32) + 2})
    (image,) = figure.axes[0].get_images()
    shown = np.asarray(image.get_array())
    assert shown.shape == (9, 17)
    np.testing.assert_allclose(shown[:4, 6:11], grey[1] / 255)
    np.testing.assert_array_equal(shown[5:, :5], 1)  # cut off
    np.testing.assert_array_equal(shown[4], 1)  # the gap between rows
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ['one', 'two']
    assert png(plots.example_tiles({'rgb': rng.random((2, 6, 6, 3))}))
    for wrong in ({}, {'a': grey, 'b': grey[:, :3]}, {'a': grey[0]}, {'a': rng.random((2, 6, 6, 4))}):
        with pytest.raises(ValueError, match='`rows`'):
            plots.example_tiles(wrong)


def test_accuracy_curves():
    rounds, seeds = np.arange(5), np.array([[0.1, 0.2, 0.3, 0.4, 0.5], [0.3, 0.4, 0.5, 0.6, 0.7]])
    figure = plots.accuracy_curves({'FedAvg': (rounds, seeds[0]), 'FedETF': (rounds, seeds)}, title='digits')
    axes = figure.axes[0]
    assert [line.get_label() for line in axes.lines] == ['FedAvg', 'FedETF']
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [10, 20, 30, 40, 50])
    np.testing.assert_allclose(axes.lines[1].get_ydata(), [20, 30, 40, 50, 60])
    (band,) = axes.collections  # only where there are seeds
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.min() == pytest.approx(10)
    assert heights.max() == pytest.approx(70)
    assert axes.get_title() == 'digits'
    assert png(figure)


def test_curve_panels():
    figure = plots.curve_panels({'NC1': {'a': ([1, 2], [0.3, 0.1]), 'b': ([1, 2], [3, 2])}, 'NC2': {'a': ([1], [5])}})
    first, second = figure.axes
    assert [first.get_title(), second.get_title()] == ['NC1', 'NC2']
    np.testing.assert_allclose(first.lines[0].get_ydata(), [0.3, 0.1])  # not in percent
    np.testing.assert_allclose(second.lines[0].get_ydata(), [5])
    assert first.get_legend()
    assert not second.get_legend()
    assert png(figure)


@pytest.mark.parametrize('limits', [None, (0, 10)])
def test_heat_maps_show_their_matrices(limits):
    matrices = {'counts': np.arange(12).reshape(4, 3), 'norms': np.ones((4, 3)) / 2}
    figure = plots.heat_maps(matrices, ylabel='who', limits=limits)
    maps = [axes for axes in figure.axes if axes.images]
    for axes, (title, values) in zip(maps, matrices.items(), strict=True):
        assert axes.get_title() == title
        np.testing.assert_array_equal(axes.images[0].get_array(), values)
        if limits:
            assert axes.images[0].get_clim() == limits
    assert maps[0].get_ylabel() == 'who'
    assert [label.get_text() for label in maps[0].get_yticklabels()] == ['0', '1', '2', '3']
    assert len(figure.axes) - len(maps) == (1 if limits else 2)  # colour bars
    assert png(figure)


def test_grouped_bars():
    """A bar for each name and group, beside each other; a line where there are seeds."""
    seeds = np.array([[10.0, 20, 30], [14, 24, 36]])
    panels = {'one': {'a': [50, 40, 30], 'b': seeds}, 'two': {'a': [1, 2, 3], 'b': [4, 5, 6]}}
    figure = plots.grouped_bars(panels, ['many', 'medium', 'few'])
    assert [axes.get_title() for axes in figure.axes] == ['one', 'two']
    first, second = figure.axes
    assert len(first.patches) == len(second.patches) == 2 * 3
    heights = {
        bars.get_label(): [bar.get_height() for bar in bars] for bars in first.containers if bars.get_label() in 'ab'
    }
    np.testing.assert_allclose(heights['a'], [50, 40, 30])
    np.testing.assert_allclose(heights['b'], [12, 22, 33])
    (lines,) = first.collections
    np.testing.assert_allclose([line[:, 1] for line in lines.get_segments()], [[10, 14], [20, 24], [30, 36]])
    assert not second.collections
    edges = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in first.patches)
    assert all(right <= left for (_, right), (left, _) in itertools.pairwise(edges))
    assert [label.get_text() for label in first.get_xticklabels()] == ['many', 'medium', 'few']
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ['a', 'b']
    assert png(figure)


def test_a_name_looks_the_same_in_every_panel():
    """Also where one of the others has no values, and the first panel lacks one."""
    for figure in (
        plots.grouped_bars({'one': {'a': [1, 2], 'b': [3, 4]}, 'two': {'b': [3, 4], 'c': [5, 6]}}, ['x', 'y']),
        plots.curve_panels({'one': {'a': ([1], [2]), 'b': ([1], [3])}, 'two': {'b': ([1], [3]), 'c': ([1], [3])}}),
    ):
        looks = []
        for axes in figure.axes:
            handles, labels = axes.get_legend_handles_labels()
            shown = [h.patches[0].get_facecolor() if hasattr(h, 'patches') else h.get_color() for h in handles]
            looks.append(dict(zip(labels, shown, strict=True)))
        assert looks[0]['b'] == looks[1]['b']
        assert len({looks[0]['a'], looks[0]['b'], looks[1]['c']}) == 3
        legend = figure.legends[0] if figure.legends else figure.axes[0].get_legend()
        assert [text.get_text() for text in legend.get_texts()] == ['a', 'b', 'c']


def test_boxes():
    spread = {'wide': np.arange(101.0), 'gaps': [np.nan, 1, 2, 3, np.nan], 'alike': [5.0, 5.0]}
    figure = plots.boxes({'one': spread, 'two': {'alone': [7.0]}}, ylabel='percent')
    first, second = figure.axes
    assert first.get_ylabel() == 'percent'
    assert [label.get_text() for label in first.get_xticklabels()] == ['wide', 'gaps', 'alike']
    assert len(first.collections) == 2  # no violin around a single value
    lines = {(round(np.mean(u.get_xdata())), tuple(u.get_ydata())) for u in first.lines}
    for i, middle in enumerate((50, 2, 5)):
        assert (i, (middle, middle)) in lines
    boxes = [u.get_ydata() for u in first.lines if len(u.get_ydata()) == 5]
    np.testing.assert_allclose([(min(y), max(y)) for y in boxes], [(25, 75), (1.5, 2.5), (5, 5)])
    assert len([u for u in second.lines if len(u.get_ydata()) == 5]) == 1
    assert png(figure)


def test_twelve_curves_look_different():
    figure = plots.accuracy_curves({str(i): ([1, 2], [0.1, 0.2]) for i in range(12)})
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == 12
    assert png(figure)


def test_refusals(clients):
    for call in (
        lambda: plots.class_distribution(clients, 'pie'),
        lambda: plots.class_distribution(clients, class_names=['a']),
        lambda: plots.accuracy_curves({}),
        lambda: plots.accuracy_curves({'a': ([1, 2], [0.1])}),
        lambda: plots.curve_panels({}),
        lambda: plots.curve_panels({'NC1': {}}),
        lambda: plots.heat_maps({}),
        lambda: plots.heat_maps({'a': np.ones(3)}),
        lambda: plots.grouped_bars({}, ['x']),
        lambda: plots.grouped_bars({'one': {'a': [1, 2]}}, ['x']),
        lambda: plots.grouped_bars({'one': {'a': np.ones((2, 2, 2))}}, ['x', 'y']),
        lambda: plots.boxes({}),
        lambda: plots.boxes({'one': {'a': []}}),
        lambda: plots.boxes({'one': {'a': [np.nan]}}),
    ):
        with pytest.raises(ValueError, match=r'needs|needed|empty|must|no values'):
            call()


def test_matplotlib_comes_late_and_pyplot_never():
    program = """
import sys
import numpy as np
from fedjax_nc import plots
assert 'matplotlib' not in sys.modules
plots.accuracy_curves({'a': ([1], [0.5])})
assert 'matplotlib.pyplot' not in sys.modules
sys.modules['matplotlib.figure'] = None
try:
    plots.accuracy_curves({'a': ([1], [0.5])})
except ImportError as error:
    assert 'fedjax_nc[examples]' in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, '-c', program], check=True)
