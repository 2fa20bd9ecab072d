"""Figures show the numbers they were given, and leave matplotlib's global state alone."""

import io
import itertools
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip('matplotlib')

import matplotlib
from matplotlib.collections import Collection
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text

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


def test_names_that_begin_with_a_line_are_in_the_legend():
    figure = plots.accuracy_curves({'_ours': ([1, 2], [0.1, 0.2]), 'fedavg': ([1, 2], [0.1, 0.3])})
    assert [text.get_text().strip() for text in figure.axes[0].get_legend().get_texts()] == ['_ours', 'fedavg']


def test_curves_may_be_named_by_numbers():
    figure = plots.accuracy_curves({0.1: ([1, 2], [0.1, 0.2]), 1.0: ([1, 2], [0.1, 0.3])})
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ['0.1', '1.0']


def test_accuracy_in_percent_is_not_made_percent_again():
    curves = {'a': ([1, 2], [50.0, 90.0])}
    with pytest.raises(ValueError, match='in percent already: say percent=False'):
        plots.accuracy_curves(curves)
    assert plots.accuracy_curves(curves, percent=False).axes[0].get_lines()[0].get_ydata().max() == 90


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
    assert shown.shape == (9, 17, 4)
    for channel in range(3):
        np.testing.assert_allclose(shown[:4, 6:11, channel], grey[1] / 255)
    np.testing.assert_array_equal(shown[5:, :5], 1)  # cut off
    np.testing.assert_array_equal(shown[4, :, 3], 0)  # the gap between rows, through which the page shows
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ['one', 'two']
    assert png(plots.example_tiles({'rgb': rng.random((2, 6, 6, 3))}))
    wide, none, numbers = rng.random((2, 6, 6, 4)), grey[:0], grey.astype(int)
    for wrong in ({}, {'a': grey, 'b': grey[:, :3]}, *({'a': images} for images in (grey[0], wide, none, numbers))):
        with pytest.raises(ValueError, match=r'`rows`|uint8 or floating'):
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


def test_thirty_five_curves_look_different():
    """Any two of them in two of colour, dashes and marker; those of one colour also in how markers are filled."""
    figure = plots.accuracy_curves({str(i): (range(9), np.full(9, 0.1)) for i in range(35)})
    lines = figure.axes[0].lines
    looks = [(line.get_color(), str(line._dash_pattern), line.get_marker()) for line in lines]
    for a, b in itertools.combinations(looks, 2):
        assert sum(u != v for u, v in zip(a, b, strict=True)) >= 2
    for i, j in itertools.combinations(range(21), 2):
        if looks[i][0] == looks[j][0]:
            assert lines[i].get_fillstyle() != lines[j].get_fillstyle()
    assert len(figure.legends[0].get_texts()) == 35
    assert png(figure)


def test_markers_are_spread_over_the_axis():
    """Also where the last rounds are all evaluated; not all at the same rounds."""
    rounds = np.array([*range(0, 100, 10), *range(95, 101)])
    first, second = plots.accuracy_curves(dict.fromkeys('ab', (rounds, rounds / 100))).axes[0].lines
    marked = [rounds[line.get_markevery()] for line in (first, second)]
    assert all(len(places) == 8 and np.diff(places).max() <= 20 and places[0] <= 10 for places in marked)
    assert set(marked[0].tolist()) != set(marked[1].tolist())
    (lone,) = plots.accuracy_curves({'a': ([7], [0.5])}).axes[0].lines
    assert lone.get_markevery() == [0]


def test_legends_beside_leave_axes_their_width():
    names = ['a method of a rather long name', *'bcdefgh']
    for figure in (
        plots.accuracy_curves({n: ([1, 2], [0.1, 0.2]) for n in names}),
        plots.curve_panels({'one': {n: ([1, 2], [0.1, 0.2]) for n in names[:4]}}),
        plots.grouped_bars({'one': {n: [1.0, 2.0, 3.0] for n in names[:2]}}, ['many', 'medium', 'few']),
    ):
        figure.draw(figure.canvas.get_renderer())
        assert figure.axes[0].get_position().width * figure.get_figwidth() > 1.8
        assert figure.legends[0].get_window_extent().x1 <= figure.bbox.width


def test_twenty_eight_bars_look_different():
    figure = plots.grouped_bars({'one': {str(i): [1.0] for i in range(28)}}, ['all'])
    looks = {(bar.get_facecolor(), bar.get_hatch()) for bar in figure.axes[0].patches}
    assert len(looks) == 28


def test_figures_say_what_bands_bars_and_boxes_are():
    three, two = np.ones((3, 4)), np.ones((2, 4))
    x = np.arange(4)
    curves = plots.accuracy_curves({'a': (x, three), 'b': (x, three[0])})
    assert curves.get_supxlabel() == 'Lines: means over 3 seeds; bands: one standard deviation to either side.'
    panels = plots.curve_panels({'one': {'a': (x, three)}, 'two': {'a': (x, two)}})
    assert 'over 2 to 3 seeds; bands: one' in panels.get_supxlabel()
    bars = plots.grouped_bars({'one': {'a': three}, 'two': {'a': three}}, list('abcd'))
    assert 'Bars: means over 3 seeds; lines: one standard' in bars.get_supxlabel()
    boxes = plots.boxes({'one': {'a': [1, 2]}})
    assert 'quartile, with the median' in ' '.join(boxes.get_supxlabel().split())
    for alone in (plots.accuracy_curves({'a': (x, x / 4)}), plots.grouped_bars({'one': {'a': [1]}}, ['a'])):
        assert alone.get_supxlabel() == ''
    renderer = boxes.canvas.get_renderer()
    boxes.draw(renderer)
    extent = (
        boxes.texts[-1].get_window_extent(renderer) if boxes.texts else boxes._supxlabel.get_window_extent(renderer)
    )
    assert 0 <= extent.x0 < extent.x1 <= boxes.bbox.width


def test_colour_bars_have_labels(clients):
    matrices = {'counts': np.eye(3), 'norms': np.ones((3, 3))}

    def labels(figure):
        return [axes.get_ylabel() for axes in figure.axes if axes.get_label() == '<colorbar>']

    assert labels(plots.heat_maps(matrices)) == ['counts', 'norms']
    assert labels(plots.heat_maps(matrices, limits=(0, 1))) == ['value']
    assert labels(plots.heat_maps(matrices, limits=(0, 1), label='cosine')) == ['cosine']
    assert labels(plots.heat_maps({'counts': np.eye(3)}, limits=(0, 1))) == ['counts']
    assert labels(plots.class_distribution(clients, 'bars')) == ['class']


def every(clients):
    """What makes a figure by each function."""
    rng = np.random.default_rng(0)
    x, seeds = np.arange(4), rng.random((3, 4))
    return {
        'bubble': lambda: plots.class_distribution(clients),
        'bars': lambda: plots.class_distribution(clients, 'bars'),
        'tiles': lambda: plots.example_tiles({'one': rng.random((3, 4, 4))}),
        'curves': lambda: plots.accuracy_curves({str(i): (x, seeds) for i in range(5)}, title='title'),
        'many curves': lambda: plots.accuracy_curves({str(i): (x, seeds) for i in range(9)}),
        'panels': lambda: plots.curve_panels({'one': {'a': (x, seeds)}}),
        'maps': lambda: plots.heat_maps({'a': seeds, 'b': seeds}),
        'grouped': lambda: plots.grouped_bars({'one': {str(i): seeds[:, :2] for i in range(8)}}, ['x', 'y']),
        'boxes': lambda: plots.boxes({'one': {'a': seeds[0], 'b': seeds[1]}}),
    }


def contrast(a, b):
    """Of two colours, after WCAG 2."""

    def luminance(color):
        linear = [u / 12.92 if u <= 0.04045 else ((u + 0.055) / 1.055) ** 2.4 for u in to_rgb(color)]
        return np.dot([0.2126, 0.7152, 0.0722], linear) + 0.05

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return high / low


def colors(figure):
    """The colours of all artists that have any of their own, by kind."""
    axes = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    grid = {id(tick.gridline) for axis in axes for tick in axis.get_major_ticks()}
    text = [a.get_color() for a in figure.findobj(Text) if a.get_text()]
    line = [a.get_color() for a in figure.findobj(Line2D) if id(a) not in grid and a.get_visible()]
    marks = [a.get_markeredgecolor() for a in figure.findobj(Line2D) if a.get_marker() not in ('None', None, '')]
    fills = [
        color for a in figure.findobj(Collection) if a.get_array() is None for color in a.get_facecolor() if color[3]
    ]
    ground = [a.patch.get_facecolor() for a in (figure, *figure.axes)]
    return {'text': text, 'lines': line + marks, 'fills': fills, 'ground': ground}


@pytest.mark.parametrize('name', sorted(every(federate(np.zeros((2, 1)), [0, 1], [[0], [1]]))))
def test_light_and_dark(clients, name):
    figure = every(clients)[name]()
    light = colors(figure)
    night = plots.dark(figure)
    shown = colors(night)
    assert str(colors(figure)) == str(light)  # the one given is as it was
    for ground, kinds in (('#ffffff', light), ('#14181e', shown)):
        assert {to_rgba(color) for color in kinds['ground']} == {to_rgba(ground)}
        assert all(contrast(color, ground) >= 4.5 for color in kinds['text'])
    assert all(contrast(color, '#14181e') >= 4.4 for color in shown['lines'] + shown['fills'])
    assert all(contrast(color, '#ffffff') >= 2 for color in light['lines'] + light['fills'])
    for a, b in zip(light['fills'], shown['fills'], strict=True):
        assert a[3] == b[3]  # as transparent as they were
    for a, b in zip(figure.findobj(AxesImage), night.findobj(AxesImage), strict=True):
        np.testing.assert_array_equal(a.get_array(), b.get_array())
        assert a.get_cmap() == b.get_cmap()
    assert [a.get_text() for a in night.findobj(Text)] == [a.get_text() for a in figure.findobj(Text)]
    assert png(night)
    image = np.asarray(night.canvas.buffer_rgba())
    assert (image[0, 0] == np.round(255 * np.array(to_rgba('#14181e')))).all()


def test_dark_knows_what_colours_mean(clients):
    """Hues stay, black lines become white ones, a legend's frame stays hidden, bars' hatches turn with the page."""
    figure = plots.accuracy_curves({str(i): ([1, 2], [0.1, 0.2]) for i in range(6)})
    lines, night = figure.axes[0].lines, plots.dark(figure).axes[0]
    for a, b in zip(lines[:6], night.lines[:6], strict=True):
        u, v = (np.array(matplotlib.colors.rgb_to_hsv(to_rgb(line.get_color())))[0] for line in (a, b))
        assert abs(u - v) < 0.01
    assert night.get_legend().get_frame().get_edgecolor()[3] == 0
    many = plots.dark(plots.accuracy_curves({str(i): ([1, 2], [0.1, 0.2]) for i in range(7)}))
    assert min(to_rgb(many.axes[0].lines[6].get_color())) > 0.9
    bars = plots.dark(plots.grouped_bars({'one': {str(i): [1] for i in range(8)}}, ['x']))
    hatched = [bar for bar in bars.axes[0].findobj(Rectangle) if bar.get_hatch()]
    assert hatched
    assert all(to_rgba(bar.get_edgecolor()) == to_rgba('#14181e') for bar in hatched)


def test_figures_do_not_depend_on_settings(clients):
    plain = {name: colors(draw()) for name, draw in every(clients).items()}
    with matplotlib.rc_context():
        matplotlib.rcParams.update({
            'figure.facecolor': 'black', 'axes.facecolor': 'black', 'text.color': 'white', 'axes.labelcolor': 'white',
            'xtick.color': 'white', 'ytick.color': 'white', 'legend.facecolor': 'black',
        })  # fmt: skip
        settings = dict(matplotlib.rcParams)
        for name, draw in every(clients).items():
            figure = draw()
            assert str(colors(figure)) == str(plain[name])
            plots.dark(figure)
        assert dict(matplotlib.rcParams) == settings


def test_dark_refuses_what_cannot_be_copied():
    figure = plots.accuracy_curves({'a': ([1, 2], [0.1, 0.2])})
    figure.axes[0].xaxis.set_major_formatter(lambda value, place: '')
    with pytest.raises(ValueError, match='cannot be copied'):
        plots.dark(figure)


def test_save_writes_both(tmp_path):
    figure = plots.accuracy_curves({'a': ([1, 2], [0.1, 0.2])})
    both = plots.save(figure, str(tmp_path / 'a.b.png'), dpi=50)
    assert both == (tmp_path / 'a.b.png', tmp_path / 'a.b-dark.png')
    light, night = (matplotlib.image.imread(path) for path in both)
    assert light.shape == night.shape == (200, 320, 4)
    np.testing.assert_allclose(light[0, 0], 1)
    np.testing.assert_allclose(night[0, 0], to_rgba('#14181e'), atol=1e-6)


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
plots.dark(plots.accuracy_curves({'a': ([1], [0.5])}))
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


def test_points_have_the_look_of_their_class():
    rng = np.random.default_rng(0)
    places, labels = rng.normal(size=(40, 2)), np.arange(40) % 4
    figure = plots.points(
        {'a': (places, labels), 'b': (places[:6], labels[:6])}, class_names=['w', 'x', 'y', 'z', 'none']
    )
    first, second = figure.axes
    for c, drawn in enumerate(first.collections):
        np.testing.assert_array_equal(drawn.get_offsets(), places[labels == c])
        other = second.collections[c]
        np.testing.assert_array_equal(drawn.get_facecolor(), other.get_facecolor())
        assert len(other.get_offsets()) == np.sum(labels[:6] == c)
    assert len({tuple(drawn.get_facecolor()[0]) for drawn in first.collections}) == 4
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ['w', 'x', 'y', 'z']  # nobody is of the fifth
    assert png(plots.dark(figure)).startswith(b'\x89PNG')


def test_points_of_many_classes_have_a_bar():
    places, labels = np.random.default_rng(0).normal(size=(90, 2)), np.arange(90) % 30
    figure = plots.points({'a': (places, labels.astype(np.uint8))})  # which have no -1
    (drawn,) = figure.axes[0].collections
    np.testing.assert_array_equal(drawn.get_array(), labels)
    assert figure.axes[1].get_ylabel() == 'class'


@pytest.mark.parametrize(
    ('places', 'labels', 'names', 'said'),
    [
        (np.zeros((3, 3)), [0, 1, 2], None, r'needs places \[n, 2\] and labels \[n\]; shapes: \(3, 3\)'),
        (np.zeros((3, 2)), [0, 1], None, r'shapes: \(3, 2\) and \(2,\)'),
        (np.zeros((3, 2)), [0, 1, -1], None, 'whole numbers from 0'),
        (np.zeros((3, 2)), [0.0, 1.0, 2.0], None, 'whole numbers from 0'),
        (np.zeros((3, 2)), [0, 1, 2], ['a', 'b'], 'a label is 2, and there are 2 class names'),
    ],
)
def test_points_that_are_none(places, labels, names, said):
    with pytest.raises(ValueError, match=said):
        plots.points({'a': (places, labels)}, class_names=names)


def test_points_need_a_panel():
    with pytest.raises(ValueError, match='`panels` is empty'):
        plots.points({})
