"""Measures of features, class vectors and models; for reading, never part of training.

- collapse: how far features and classifier are from neural collapse
- similarity: how alike clients are: classifiers, class means, layers; distances of Gaussians
- degeneration: how features of a class behave in its dominant and its negligible dimensions
- semantics: whether prototypes of related classes are close

All are pure functions in float32 and work under `jit`. Classes without examples are left out.
"""

from fedjax_nc.metrics import collapse as collapse
from fedjax_nc.metrics import degeneration as degeneration
from fedjax_nc.metrics import semantics as semantics
from fedjax_nc.metrics import similarity as similarity
