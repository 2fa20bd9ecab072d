"""The spiral experiment, made tiny: what it prints, what it draws, and what it computes on the way."""

import importlib.util
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('matplotlib')

ROOT = Path(__file__).parent.parent


def load(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / 'examples' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


spiral = pytest.fixture(scope='module')(lambda: load('spiral'))


@pytest.fixture
def fast_compilation():
    """Code that runs for a moment is not worth optimising."""
    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', False)


@pytest.mark.slow
def test_prints_tables_and_draws(spiral, tmp_path, monkeypatch, capsys, fast_compilation):
    monkeypatch.setattr(spiral, 'HEADS', {name: spiral.HEADS[name] for name in ('free', 'uniform')})
    settings = ('--quick', '--seeds', '1', '--epochs', '8', '--rounds', '2', '--out')
    monkeypatch.setattr(sys, 'argv', ['spiral.py', *settings, str(tmp_path)])
    spiral.main()
    out = capsys.readouterr().out
    for kind in ('balanced', 'imbalanced'):
        for name in ('free', 'uniform'):
            accuracies, vectors = re.findall(rf'^{kind}, {name} +([\d .±]+)$', out, re.MULTILINE)
            mean, sd, lowest, loss, *by_class = map(float, accuracies.replace('±', '').split())
            assert (mean, sd) == (pytest.approx(lowest, abs=0.06), 0)
            assert np.mean(by_class) == pytest.approx(mean, abs=0.06)
            assert loss > 0
            lengths, angles = np.array(list(map(float, vectors.split()))).reshape(2, 6)
            if name == 'uniform':
                np.testing.assert_array_equal(lengths, 1)
                np.testing.assert_array_equal(angles, 60)
            else:
                assert np.ptp(lengths) > 0.1
                assert angles.min() < 60
    for name in ('free', 'uniform'):
        cosine, sd, accuracy, _ = map(
            float, re.search(rf'^{name} head +(\S+) ± (\S+) +(\S+) ± (\S+)$', out, re.M).groups()
        )
        assert -1 <= cosine <= 1
        assert sd == 0
        assert 0 <= accuracy <= 100
    for name in ('spiral.png', 'spiral_federated.png'):
        assert (tmp_path / name).read_bytes().startswith(b'\x89PNG')


def test_the_body_is_that_of_the_paper(spiral):
    v = spiral.task_of('free').init(jax.random.key(0), spiral.holders([(np.ones((6, 2), np.float32), np.arange(6))]))
    sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(part)) for name, part in v.params.items()}
    assert sizes == {'body': 230, 'head': 12}
    bias = jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else jnp.zeros_like(leaf), v.params['body'])
    assert spiral.features(v._replace(params={**v.params, 'body': bias}), np.ones((3, 2))).min() < 0  # no last ReLU


def test_one_client_for_each_set(spiral):
    data = spiral.holders([(np.full((n, 2), k, np.float32), np.arange(n) % 2) for k, n in enumerate((5, 3))])
    assert data.size.tolist() == [5, 3]
    for k in range(2):
        assert (data.x[data.index[k, : data.size[k]]] == k).all()


def test_nearest_angles(spiral):
    turns = np.deg2rad([[0, 90, 100, 250], [0, 20, 40, 60]])
    vectors = np.stack([np.cos(turns), np.sin(turns)], axis=-1) * [[[3.0]], [[0.5]]]
    np.testing.assert_allclose(spiral.nearest_angles(vectors), [[90, 10, 10, 110], [20, 20, 20, 20]], atol=0.05)


@pytest.mark.slow
def test_the_pattern_of_the_paper(spiral):
    """Heads differ only where classes are unbalanced; there a free head shortens and crowds the vectors of the tail."""
    free, uniform = (spiral.central(name, spiral.SIZES, 5, 201) for name in ('free', 'uniform'))
    (balanced, imbalanced), (balanced_uniform, imbalanced_uniform) = (
        np.asarray(case.accuracy).mean(axis=(0, 2)) for case in (free, uniform)
    )
    assert min(balanced, balanced_uniform) > 0.95
    assert imbalanced_uniform > imbalanced + 0.15
    vectors = spiral.class_vectors(free.variables)[:, 1]
    lengths, angles = np.linalg.norm(vectors, axis=-1), spiral.nearest_angles(vectors)
    assert np.median(lengths[:, 4:]) < 0.6 * np.median(lengths[:, :2])
    assert np.median(angles[:, 3:]) < 40
