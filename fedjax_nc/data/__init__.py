"""Data for federated learning.

partition: labels -> which examples lie on which client
federated: a pool and a partition -> `FederatedData`; local test splits
host: the same for pools that do not fit on the device
sources: data sets by name
files: data sets from a user's own files
images: preprocessing and augmentation on the device
synthetic: small made-up data sets
"""

from fedjax_nc.data import images
from fedjax_nc.data.federated import class_weights, common_test, federate, matched_tests, split
from fedjax_nc.data.files import load_npz
from fedjax_nc.data.host import HostData, Part, cohorts, feed, part
from fedjax_nc.data.partition import (
    dirichlet,
    dirichlet_capped,
    dirichlet_draws,
    dirichlet_multiclass,
    iid,
    long_tail,
    natural,
    shards,
)
from fedjax_nc.data.sources import Dataset, DatasetUnavailableError, load_dataset, subset
from fedjax_nc.data.synthetic import clusters, spiral

__all__ = [
    'Dataset',
    'DatasetUnavailableError',
    'HostData',
    'Part',
    'class_weights',
    'clusters',
    'cohorts',
    'common_test',
    'dirichlet',
    'dirichlet_capped',
    'dirichlet_draws',
    'dirichlet_multiclass',
    'federate',
    'feed',
    'iid',
    'images',
    'load_dataset',
    'load_npz',
    'long_tail',
    'matched_tests',
    'natural',
    'part',
    'shards',
    'spiral',
    'split',
    'subset',
]
