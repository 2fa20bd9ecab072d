"""The types that everything in the library is made of.

Letters used in shapes: `P` examples in the pool, `K` clients, `N` rows of the longest client, `C` classes, `D`
features, `B` examples in a batch, `M` clients in a cohort, `m` clients in a chunk of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
Tree = Any
"""A pytree of arrays."""


class Shard(NamedTuple):
    """The data of one client: rows of a pool that all clients share."""

    x: Array  #: [P, ...] the pool
    y: Array  #: [P] int32
    index: Array  # type: ignore[assignment]  #: [N] int32 rows of the pool; the first `size` are real
    size: Array  #: [] int32
    counts: Array  #: [C] int32, how many examples of each class the client holds


class FederatedData(NamedTuple):
    """All clients' data: one pool of examples and a table of row numbers.

    Padding the table to the longest client costs one int32 an entry, never an example.
    """

    x: Array  #: [P, ...] images stay uint8
    y: Array  #: [P] int32 in [0, C)
    index: Array  # type: ignore[assignment]  #: [K, N] int32 rows of the pool; the first `size[k]` are real
    size: Array  #: [K] int32
    counts: Array  #: [K, C] int32 label histograms

    @property
    def num_clients(self) -> int:
        return self.index.shape[0]

    @property
    def num_classes(self) -> int:
        return self.counts.shape[1]

    def shard(self, client: Array | int) -> Shard:
        """The data of one client. `client == num_clients` is nobody: a shard of size 0."""
        real = client < self.num_clients
        row = jnp.minimum(client, self.num_clients - 1)
        size = jnp.where(real, self.size[row], 0)
        counts = jnp.where(real, self.counts[row], 0)
        return Shard(self.x, self.y, self.index[row], size, counts)


class Batch(NamedTuple):
    """Everything that a loss may look at; predictions have `x` alone."""

    x: Array  #: [B, ...]
    y: Array = None  # type: ignore[assignment]  #: [B] int32
    mask: Array = None  # type: ignore[assignment]  #: [B] bool, False for padding, copies of a real row; None: no padding
    counts: Array = None  # type: ignore[assignment]  #: [C] label histogram of the client's training data
    key: Array | None = None  #: None means evaluation: no augmentation, no dropout, running statistics


class Variables(NamedTuple):
    """Three kinds of numbers with three rules."""

    params: dict[str, Tree]  #: {'body': ..., 'head': ...}: gradients reach them, servers average their changes
    stats: Tree = ()  #: BatchNorm running statistics: no gradient, averaged as values
    fixed: Tree = ()  #: frames and prototypes: no optimizer ever sees them


class Model(NamedTuple):
    """A feature extractor."""

    init: Callable[[Array, Array], tuple[Tree, Tree]]  #: (key, x [B, ...]) -> (params, stats)
    features: Callable[..., tuple[Array, Tree]]  #: (params, stats, x, mask | None, key | None) -> (z [B, D], stats)


class Head(NamedTuple):
    """A classifier on features."""

    init: Callable[[Array, int, int], tuple[Tree, Tree]]  #: (key, dim, classes) -> (params, fixed)
    logits: Callable[[Tree, Tree, Array], Array]  #: (params, fixed, z [B, D]) -> [B, C] float32


Loss = Callable[[Array, Array, Array], Array]
"""(logits [B, C], labels [B], counts [C]) -> [B], one value an example."""


class Objective(NamedTuple):
    """Model, head and loss together: the only thing that an algorithm sees of the task."""

    init: Callable[[Array, FederatedData], Variables]
    features: Callable[[Variables, Batch], tuple[Array, Tree]]  #: -> (z [B, D], stats)
    logits: Callable[[Variables, Array], Array]  #: (variables, z) -> [B, C]
    loss: Callable[[Variables, Array, Batch], Array]  #: (variables, z, batch) -> [], mean over real examples


class Aggregator(NamedTuple):
    """What the server does to the messages of a cohort, in two steps so that messages need not be kept.

    `partial` reduces the messages of one chunk of clients; partials are added over chunks and devices; `finish` turns
    the sum into the aggregate. A client of weight 0 must leave no trace.
    """

    partial: Callable[[Tree, Array, Array, int], Tree]  #: (messages [m, ...], weights [m], slots [m], M) -> tree
    finish: Callable[[Tree], Tree]


class Aggregate(NamedTuple):
    """What the server receives from a round."""

    value: Tree  #: what the algorithm's aggregator made of the messages
    weight: Array  #: [] float32, examples held by the cohort
    clients: Array  #: [] float32, clients of the cohort that hold any
    cohort: int | None = None  #: how many were drawn, whoever holds nothing included; None where nobody says


class Info(NamedTuple):
    """What a person may look at after one client's local work; the next round does not need it."""

    loss: Array  #: [] float32, mean over the examples visited
    steps: Array  #: [] int32, optimizer steps taken
    examples: Array  #: [] int32, examples visited
    slots: Array  #: [] int32, batch rows computed for them, padding included


class Algorithm(NamedTuple):
    """A federated algorithm. All but `aggregate` is written without a client axis."""

    init: Callable[[Array, FederatedData], Tree]  #: (key, data) -> server
    init_client: Callable[[Array, Tree], Tree]  #: (key, server) -> one client's first state, () if it keeps none
    client: Callable[[Array, Tree, Tree, Shard], tuple[Tree, Tree, Info]]
    # (key, server, client, shard) -> (client, message, info): the whole local work of one client
    aggregate: Aggregator
    server: Callable[[Array, Tree, Aggregate], Tree]  #: (key, server, aggregate) -> server
    predict: Callable[[Tree, Tree | None, Array], Array]  #: (server, client | None, x [B, ...]) -> logits [B, C]
    # None asks for the generic model


class State(NamedTuple):
    """What the next round needs."""

    server: Tree
    clients: Tree  #: leading axis K
