"""Small things that tests share: a ragged population and models that fit on a line."""

import contextlib
import importlib
import os
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc import heads, local, losses
from fedjax_nc.base import FederatedData, Model
from fedjax_nc.models import adapter, layers
from fedjax_nc.objective import objective

CLASSES, DIM = 5, 12
KEY = jax.random.key(7)


def ragged(sizes, seed=0, padding=0):
    """Clients of the given sizes, sorted by a noisy label; `padding` more columns of junk in the index table."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    y = rng.integers(0, CLASSES, n)
    x = (rng.normal(size=(CLASSES, DIM))[y] * 1.5 + rng.normal(size=(n, DIM))).astype(np.float32)
    order = np.argsort(y + rng.normal(size=n) * 0.5, kind='stable')
    index = rng.integers(0, n, (len(sizes), max(sizes) + padding)).astype(np.int32)
    counts = np.zeros((len(sizes), CLASSES), np.int32)
    for k, part in enumerate(np.split(order, np.cumsum(sizes)[:-1])):
        index[k, : len(part)] = part
        counts[k] = np.bincount(y[part], minlength=CLASSES)
    return FederatedData(*map(jnp.asarray, (x, y.astype(np.int32), index, np.asarray(sizes, np.int32), counts)))


@contextlib.contextmanager
def own_module(tmp_path_factory, monkeypatch, name, text):
    """A module 'package.name' of a user's own, in a folder from which Python imports."""
    folder, (package, _, file) = tmp_path_factory.mktemp('own'), name.partition('.')
    (folder / package).mkdir()
    (folder / package / f'{file}.py').write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module(name)
    for known in [known for known in sys.modules if known.split('.')[0] == package]:
        del sys.modules[known]


def optimised(fn):
    """`jit` as for users, under whatever flags the suite runs: for results that are equal bit for bit only so."""
    options = {'xla_backend_optimization_level': 3}
    if 'fusion_emitters' in os.environ.get('XLA_FLAGS', ''):
        options['xla_cpu_use_fusion_emitters'] = True
    return jax.jit(fn, compiler_options=options)


def examples(data, k):
    """The real examples of client k, as float64 NumPy arrays."""
    rows = np.asarray(data.index[k, : int(data.size[k])])
    return np.asarray(data.x, np.float64)[rows], np.asarray(data.y)[rows]


tiny = Model(
    init=lambda key, x: (heads.dense_init(key, x.shape[-1], 16), ()),
    features=lambda params, stats, x, mask, key: (jax.nn.relu(heads.dense(params, x)), stats),
)
"""One hidden layer."""

scaling = Model(
    init=lambda key, x: ({'u': jax.random.uniform(key, (x.shape[-1],), jnp.float32, 0.5, 1.5)}, ()),
    features=lambda params, stats, x, mask, key: (x * params['u'], stats),
)
"""Features `x * u`: enough of a body for gradients that are written by hand."""


def dropout_features(params, stats, x, mask, key):
    """As `tiny`, with noise from the batch's key and a statistic that counts batches."""
    z = jax.nn.relu(heads.dense(params, x))
    if key is None:
        return z, stats
    return z + 0.1 * jax.random.normal(key, z.shape), {'batches': stats['batches'] + 1}


noisy = Model(lambda key, x: (tiny.init(key, x)[0], {'batches': jnp.float32(0)}), dropout_features)

task = objective(tiny, heads.linear(), losses.cross_entropy)
noisy_task = objective(noisy, heads.linear(), losses.cross_entropy)
opt = local.sgd(0.05)
PLAN = local.Plan(batch_size=16, epochs=2)


def same(a, b, atol=0.0):
    """Whether two trees agree, leaf by leaf."""
    jax.tree.map(lambda u, v: np.testing.assert_allclose(np.asarray(u), np.asarray(v), rtol=0, atol=atol), a, b)


class Normed(nn.Module):
    """One layer with BatchNorm."""

    @nn.compact
    def __call__(self, x, mask=None, train=False):
        return nn.relu(layers.BatchNorm(not train)(nn.Dense(8)(x), mask))


normed = adapter.from_flax(Normed())
