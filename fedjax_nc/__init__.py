"""Neural-collapse-inspired federated learning in pure functional JAX.

An algorithm is a record of pure functions written for one client; `simulate` owns the client axis; everything that
happens, training or personalisation, is a round.
"""

from fedjax_nc import aggregators as aggregators
from fedjax_nc import algorithms as algorithms
from fedjax_nc import base as base
from fedjax_nc import checks as checks
from fedjax_nc import classwise as classwise
from fedjax_nc import data as data
from fedjax_nc import devices as devices
from fedjax_nc import evaluate as evaluate
from fedjax_nc import experiments as experiments
from fedjax_nc import footprint as footprint
from fedjax_nc import frames as frames
from fedjax_nc import gaussians as gaussians
from fedjax_nc import heads as heads
from fedjax_nc import local as local
from fedjax_nc import losses as losses
from fedjax_nc import memory as memory
from fedjax_nc import metrics as metrics
from fedjax_nc import models as models
from fedjax_nc import objective as objective
from fedjax_nc import plots as plots
from fedjax_nc import population as population
from fedjax_nc import privacy as privacy
from fedjax_nc import saving as saving
from fedjax_nc import server_optimizers as server_optimizers
from fedjax_nc import simulate as simulate
from fedjax_nc import testing as testing
from fedjax_nc import training as training
from fedjax_nc import tree as tree
from fedjax_nc import tuning as tuning
from fedjax_nc import watch as watch

__version__ = '0.1.0'
