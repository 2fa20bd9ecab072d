"""The types that everything in the library is made of.

Letters used in shapes: `P` examples in the pool, `K` clients, `N` rows of the longest client, `C` classes, `D`
features, `B` examples in a batch, `M` clients in a cohort, `m` clients in a chunk of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
"""`jax.Array`."""

Tree = Any
"""A pytree of arrays."""


class Shard(NamedTuple):
    """The data of one client: rows of a pool that all clients share, whose length P means nothing to a client."""

    x: Array  #: [P, ...] the pool
    y: Array  #: [P] int32 in [0, C)
    #: [N] int32 rows of the pool; the first `size` are real
    index: Array  # type: ignore[assignment]
    size: Array  #: [] int32
    counts: Array  #: [C] int32, how many examples of each class the client holds


class FederatedData(NamedTuple):
    """All clients' data: one pool of examples and a table of row numbers.

    Padding the table to the longest client costs one int32 an entry, never an example.
    """

    x: Array  #: [P, ...] images stay uint8
    y: Array  #: [P] int32 in [0, C)
    #: [K, N] int32 rows of the pool; the first `size[k]` are real
    index: Array  # type: ignore[assignment]
    size: Array  #: [K] int32, examples of each client
    counts: Array  #: [K, C] int32 label histograms

    @property
    def num_clients(self) -> int:
        """The number of clients, K."""
        return self.index.shape[0]

    @property
    def num_classes(self) -> int:
        """The number of classes, C."""
        return self.counts.shape[1]

    def shard(self, client: Array | int) -> Shard:
        """The data of `client`, an integer in [0, K] that may be traced; the pool is not copied.

        `client == num_clients` is nobody: a shard of size 0, whose `counts` are 0.
        """
        client = jnp.asarray(client, jnp.int32)
        real = client < self.num_clients
        row = jnp.minimum(client, self.num_clients - 1)
        size = jnp.where(real, self.size[row], 0)
        counts = jnp.where(real, self.counts[row], 0)
        return Shard(self.x, self.y, self.index[row], size, counts)


class Batch(NamedTuple):
    """Everything that a loss may look at; predictions have `x` alone."""

    x: Array  #: [B, ...] examples as the pool holds them; [B, D] features under `objective.on_features`
    #: [B] int32
    y: Array = None  # type: ignore[assignment]
    #: [B] bool, False for padding, copies of a real row; None: no padding
    mask: Array = None  # type: ignore[assignment]
    #: [C] int32, label histogram of the client's training data
    counts: Array = None  # type: ignore[assignment]
    key: Array | None = None  #: None means evaluation: no augmentation, no dropout, running statistics
    #: where `key` is None, the key with which a model in training sees these examples, of whose augmentation alone a
    #: model beside it that stands still takes part
    beside: Array | None = None


class Variables(NamedTuple):
    """Three kinds of numbers with three rules."""

    params: dict[str, Tree]  #: {'body': ..., 'head': ...}: gradients reach them, servers average their changes
    stats: Tree = ()  #: BatchNorm running statistics: no gradient, averaged as values
    fixed: Tree = ()  #: frames and prototypes: no optimizer ever sees them


class Still(NamedTuple):
    """In the place of a model's key: evaluation, of examples as training with `key` sees them."""

    key: Array


class Model(NamedTuple):
    """A feature extractor.

    Features are float32. Without a key the model evaluates and returns `stats` as they were; `mask [B]` is False for
    rows that are padding.
    """

    init: Callable[[Array, Array], tuple[Tree, Tree]]  #: (key, x [B, ...]) -> (params, stats)
    features: Callable[..., tuple[Array, Tree]]  #: (params, stats, x, mask | None, key | None) -> (z [B, D], stats)
    #: whether what it sees depends on the key, so that `features` takes a `Still` for one, too
    augments: bool = False


class Head(NamedTuple):
    """A classifier on features."""

    init: Callable[[Array, int, int], tuple[Tree, Tree]]  #: (key, D, C) -> (params, fixed)
    logits: Callable[[Tree, Tree, Array], Array]  #: (params, fixed, z [B, D]) -> [B, C] float32


Loss = Callable[[Array, Array, Array], Array]
"""(logits [B, C], labels [B] int, counts [C]) -> [B] float32, one value an example."""


class Objective(NamedTuple):
    """Model, head and loss together: the only thing that an algorithm sees of the task."""

    init: Callable[[Array, FederatedData], Variables]  #: (key, data) -> first variables
    features: Callable[[Variables, Batch], tuple[Array, Tree]]  #: (variables, batch) -> (z [B, D] float32, new stats)
    logits: Callable[[Variables, Array], Array]  #: (variables, z) -> [B, C] float32
    #: (variables, z, batch) -> [] float32, mean over real examples, seen through z: `batch.x` may be features
    loss: Callable[[Variables, Array, Batch], Array]


class Aggregator(NamedTuple):
    """What the server does to the messages of a cohort, in two steps so that messages need not be kept.

    `partial` reduces the messages of one chunk of clients; partials are added over chunks and devices; `finish` turns
    the sum into the aggregate. Weights are float32, the clients' numbers of examples; slots are int32, their places in
    the cohort. A client of weight 0 must leave no trace.
    """

    partial: Callable[[Tree, Array, Array, int], Tree]  #: (messages [m, ...], weights [m], slots [m], M) -> tree
    finish: Callable[[Tree], Tree]  #: (sum of partials) -> aggregate


class Aggregate(NamedTuple):
    """What the server receives from a round."""

    value: Tree  #: what the algorithm's aggregator made of the messages
    weight: Array  #: [] float32, examples held by the cohort
    clients: Array  #: [] float32, clients of the cohort that hold any examples
    cohort: int | None = None  #: how many were drawn, whoever holds nothing included; None where nobody says


class Info(NamedTuple):
    """What a person may look at after one client's local work; the next round does not need it."""

    #: [] float32, mean training loss over the examples visited, penalties included unless the method says otherwise
    loss: Array
    steps: Array  #: [] int32, optimizer steps taken
    examples: Array  #: [] int32, examples visited
    slots: Array  #: [] int32, batch rows computed for them, padding included
    #: [n] int32, `slots` by loops over batches, in each of which clients side by side wait for each other, without what
    #: `lane_slots` counts; () for one loop, or none that is not counted
    loops: Any = ()
    #: [] int32, batch rows computed in its lane, those included in which it waited for others; () where nobody counts
    lane_slots: Any = ()

    @property
    def waits(self) -> Any:
        """The loops of which `lane_slots` holds nothing, [n] int32, or [] for a single one; () if it holds all."""
        alone = isinstance(self.loops, tuple) and isinstance(self.lane_slots, tuple)
        return self.slots if alone else self.loops


class Algorithm(NamedTuple):
    """A federated algorithm. All but `aggregate` is written without a client axis."""

    init: Callable[[Array, FederatedData], Tree]  #: (key, data) -> server
    init_client: Callable[[Array, Tree], Tree]  #: (key, server) -> one client's first state, () if it keeps none
    #: (key, server, client, shard) -> (client, message, info): the whole local work of one client
    client: Callable[[Array, Tree, Tree, Shard], tuple[Tree, Tree, Info]]
    aggregate: Aggregator  #: how the messages of a cohort become one
    server: Callable[[Array, Tree, Aggregate], Tree]  #: (key, server, aggregate) -> server
    #: (server, client | None, x [B, ...]) -> logits [B, C] float32; None asks for the generic model
    predict: Callable[[Tree, Tree | None, Array], Array]
    secret: bool = False  #: whether clients must not know what `server` draws, as the noise of differential privacy


class State(NamedTuple):
    """What the next round needs."""

    server: Tree  #: what the algorithm's `init` makes of it
    clients: Tree  #: the states of all clients, leading axis K; () where they keep none
