import gc
import itertools
import os

import jaxlib

# Programs here run a few times on little data: most of their time would go into optimising them, and into cutting them
# up for many threads. To have them as users do, set XLA_FLAGS to nothing. This comes before anything uses jax. An
# unknown flag ends the process, and other jaxlibs may not know all of them.
os.environ.setdefault(
    'XLA_FLAGS',
    '--xla_backend_optimization_level=0'
    + (
        ' --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1'
        ' --xla_cpu_enable_concurrency_optimized_scheduler=false'
        if jaxlib.__version__.startswith('0.10.')
        else ''
    ),
)

import jax
import pytest
import toys

from fedjax_nc.base import FederatedData

# Tracing makes many objects that stay: to look for garbage among them again and again takes 3 % of the time.
gc.set_threshold(20_000, 50, 100)
FILES = itertools.count(1)


@pytest.fixture(autouse=True, scope='module')
def room():
    """Forgets what was compiled every eight files: all of it would take a process 6 GB."""
    yield
    if next(FILES) % 8 == 0:
        jax.clear_caches()


@pytest.fixture(scope='session')
def data() -> FederatedData:
    """Eight clients of very unequal size on Gaussian clusters of five classes; most lack some class."""
    return toys.ragged([100, 7, 60, 33, 200, 1, 50, 149])
