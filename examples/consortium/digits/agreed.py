"""What the sites agree on, which is this program: model, algorithm, rounds and keys."""

import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets

from fedjax_nc import flower, local, models
from fedjax_nc.algorithms import fedetf

SETTINGS = tomllib.loads((Path(__file__).parent / 'settings.toml').read_text())
SITES, CLASSES = 3, 10
PLAN = local.Plan(batch_size=16, epochs=2)
INIT, TRAIN, TUNE = jax.random.split(jax.random.key(0), 3)

network = models.from_flax(models.MLP((64, 64)))
train = fedetf.algorithm(network, local.sgd(0.02), scale=4.0, plan=PLAN)
tune = fedetf.adapt_features(network, local.sgd(0.02), plan=PLAN)

agreed = flower.Agreement(
    phases=(
        flower.Phase(train, TRAIN, rounds=SETTINGS['rounds']),
        flower.Phase(tune, TUNE, name='personal'),  # every site makes its own model, and sends nothing
    ),
    init_key=INIT,
    clients=SITES,
    example=jax.ShapeDtypeStruct((8, 8, 1), jnp.uint8),
    num_classes=CLASSES,
    half=SETTINGS['half'],
    secure=flower.Secure() if SETTINGS['secure'] else None,
)


def rows_of(site: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A site's digits, as its own data base would hold them: x [n, 8, 8, 1] uint8, y [n], and which are for tests.

    The data set names no writers, but is known not to be shuffled; each site has a stretch of it, and some digits
    never come to it.
    """
    digits = datasets.load_digits()
    x, y = np.rint(digits.images[..., None] * (255 / 16)).astype(np.uint8), digits.target
    begin, end = ((0, 800), (800, 1400), (1400, 1797))[site]
    lacking = ((8, 9), (0, 1, 2), (5,))[site]
    rows = np.arange(begin, end)
    rows = rows[~np.isin(y[begin:end], lacking)]
    return x[rows], y[rows], np.arange(len(rows)) % 4 == 3
