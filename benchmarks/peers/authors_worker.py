"""The authors' side of `parity.py`, to be run by a Python that has PyTorch:

    python authors_worker.py METHOD CHECKOUT GIVEN.npz RESULTS.npz

Each method's part imports the released classes and functions from the checkout and calls them; none of their code is
repeated here.
"""

import contextlib
import importlib
import platform
import sys

import authors_shims
import numpy as np
import torch


def main(method: str, checkout: str, given: str, results: str) -> None:
    work = authors_shims.load(given)
    authors_shims.install(checkout, work)
    part = importlib.import_module(f'authors_{method}')
    with contextlib.redirect_stdout(sys.stderr):  # their code reports its progress
        out = part.run(work)
    authors_shims.Loader.plan({})
    np.savez(results, **out, versions=f'torch {torch.__version__}, Python {platform.python_version()}')


if __name__ == '__main__':
    main(*sys.argv[1:])
