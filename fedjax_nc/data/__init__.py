"""Data for federated learning.

- partition: labels -> which examples lie on which client
- features: clients that see the same things differently
- federated: a pool and a partition -> `FederatedData`; local test splits
- dataset: what a data set is, and parts of one
- host: the same for pools that do not fit on the device
- sources: data sets by name
- folders, femnist: folders of images; LEAF's writers
- files, tables, hub: data sets from a user's own `.npz`, CSV and Parquet files, and of Hugging Face
- images: preprocessing and augmentation on the device
- synthetic: small made-up data sets
"""

from fedjax_nc.data import images
from fedjax_nc.data.dataset import Dataset, DatasetUnavailableError, keep, subset
from fedjax_nc.data.features import add_noise, rotate
from fedjax_nc.data.federated import class_weights, common_test, federate, matched_tests, split
from fedjax_nc.data.femnist import load_femnist
from fedjax_nc.data.files import load_npz
from fedjax_nc.data.folders import load_cinic10, load_folder, load_tiny_imagenet
from fedjax_nc.data.host import HostData, Part, cohorts, feed, part
from fedjax_nc.data.hub import load_hub
from fedjax_nc.data.partition import (
    by_domain,
    dirichlet,
    dirichlet_capped,
    dirichlet_draws,
    dirichlet_multiclass,
    dirichlet_sizes,
    iid,
    long_tail,
    natural,
    power_law,
    shards,
    uneven_classes,
)
from fedjax_nc.data.sources import load_dataset
from fedjax_nc.data.synthetic import clusters, spiral
from fedjax_nc.data.tables import load_table

__all__ = [
    'Dataset',
    'DatasetUnavailableError',
    'HostData',
    'Part',
    'add_noise',
    'by_domain',
    'class_weights',
    'clusters',
    'cohorts',
    'common_test',
    'dirichlet',
    'dirichlet_capped',
    'dirichlet_draws',
    'dirichlet_multiclass',
    'dirichlet_sizes',
    'federate',
    'feed',
    'iid',
    'images',
    'keep',
    'load_cinic10',
    'load_dataset',
    'load_femnist',
    'load_folder',
    'load_hub',
    'load_npz',
    'load_table',
    'load_tiny_imagenet',
    'long_tail',
    'matched_tests',
    'natural',
    'part',
    'power_law',
    'rotate',
    'shards',
    'spiral',
    'split',
    'subset',
    'uneven_classes',
]
