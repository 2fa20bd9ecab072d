"""Evaluation: count once which class was taken for which; every reported accuracy is a weighting of the counts.

A table of counts is `[C, C]`: row = true class, column = predicted class; what a model with NaN says counts as wrong.
What a table does not hold, such as the loss, is the `mean` of a measure. The functions that run a model compile
themselves, once for each algorithm and shape.
"""

from fedjax_nc.evaluate.accuracies import (
    Over,
    OverClients,
    accuracy,
    by_group,
    class_accuracy,
    class_f1,
    group_accuracy,
    groups,
    macro_f1,
    over,
    over_clients,
    weighted_accuracy,
    weighted_f1,
)
from fedjax_nc.evaluate.tables import among, confusion, features, generic, mean, per_client

__all__ = [
    'Over',
    'OverClients',
    'accuracy',
    'among',
    'by_group',
    'class_accuracy',
    'class_f1',
    'confusion',
    'features',
    'generic',
    'group_accuracy',
    'groups',
    'macro_f1',
    'mean',
    'over',
    'over_clients',
    'per_client',
    'weighted_accuracy',
    'weighted_f1',
]
