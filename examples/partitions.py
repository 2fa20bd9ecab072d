"""A picture of every partition and feature skew, on handwritten digits: those of docs/guides/partitions.md.

Each as NAME.png and, for dark pages, NAME-dark.png.

python examples/partitions.py --out examples/partitions
"""

import argparse
import io
from pathlib import Path

import numpy as np
from PIL import Image

from fedjax_nc import data, plots

CLIENTS, ALPHA = 20, 0.3


def counted(digits: data.Dataset) -> dict[str, tuple[data.Dataset, data.partition.Parts]]:
    """The partitions whose skew is seen in numbers of examples: name -> (data set, parts)."""
    y = digits.y_train
    tailed = data.keep(digits, data.long_tail(y, 20, seed=0))
    few = {'clients': CLIENTS, 'seed': 0}
    parts = {
        'iid': data.iid(y, **few),
        'dirichlet': data.dirichlet(y, alpha=ALPHA, **few),
        'dirichlet_capped': data.dirichlet_capped(y, alpha=ALPHA, **few),
        'dirichlet_multiclass': data.dirichlet_multiclass(y, alpha=ALPHA, **few),
        'dirichlet_draws': data.dirichlet_draws(y, alpha=ALPHA, **few),
        'shards': data.shards(y, classes_per_client=2, **few),
        'uneven_classes': data.uneven_classes(y, classes_per_client=(1, 6), **few),
        'dirichlet_sizes': data.dirichlet_sizes(y, alpha=1.0, **few),
        'power_law': data.power_law(y, exponent=1.0, **few),
    }
    found = {name: (digits, rows) for name, rows in parts.items()}
    return {**found, 'long_tail': (tailed, data.dirichlet_draws(tailed.y_train, alpha=ALPHA, min_size=2, **few))}


def seen(digits: data.Dataset) -> dict[str, dict[str, np.ndarray]]:
    """The feature skews: name -> client -> one of its images of each class."""
    x, y = digits.x_train, digits.y_train
    parts = data.iid(y, CLIENTS, seed=0)
    domains = np.random.default_rng(0).integers(0, 3, len(y))
    styles = np.where(
        domains[:, None, None, None] == 1, 255 - x, np.where(domains[:, None, None, None] == 2, x // 3, x)
    )
    views = {
        'rotate': (data.rotate(x, parts), parts, (0, 1, 2, 3)),
        'add_noise': (data.add_noise(x, parts, 0.1, seed=0), parts, (0, 6, 13, 19)),
        'by_domain': (styles, data.by_domain(domains, CLIENTS, seed=0), (0, 1, 2, 3)),
    }
    return {
        name: {f'client {k}': pool[[rows[k][y[rows[k]] == c][0] for c in range(10)]] for k in shown}
        for name, (pool, rows, shown) in views.items()
    }


def main(argv: list[str] | None = None) -> list[Path]:
    """Draws all pictures and returns their paths, light ones before dark ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=Path('examples/partitions'), help='folder of the pictures')
    out = parser.parse_args(argv).out
    digits = data.load_dataset('digits')
    figures = {
        name: plots.class_distribution(data.federate(d.x_train, d.y_train, parts, d.num_classes))
        for name, (d, parts) in counted(digits).items()
    }
    figures |= {name: plots.example_tiles(rows) for name, rows in seen(digits).items()}
    figures |= {f'{name}-dark': plots.dark(figure) for name, figure in figures.items()}
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=100)
        Image.open(drawn).convert('RGB').quantize(128).save(out / f'{name}.png', optimize=True)  # half as large
    return [out / f'{name}.png' for name in figures]


if __name__ == '__main__':
    for path in main():
        print(path)
