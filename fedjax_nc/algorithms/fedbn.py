"""FedBN: every client keeps its own batch normalisation.

FedBN: Federated Learning on Non-IID Features via Local Batch Normalization.
Li, Jiang, Zhang, Kamp, Dou. ICLR 2021. https://arxiv.org/abs/2102.07623

FedAvg, except that scale, shift and running statistics of all BatchNorm layers, those of shortcuts included, are
client state: training and personal prediction use the client's own, the others are averaged.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.tree_util import keystr, tree_leaves, tree_leaves_with_path, tree_map_with_path

from fedjax_nc import tree
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Algorithm, Array, FederatedData, Info, Objective, Shard, Tree, Variables
from fedjax_nc.local import ClientOptimizer


class Norms(NamedTuple):
    """The BatchNorm layers of one model."""

    affine: dict[str, Array]  #: scales and shifts by their path in `params`
    stats: Tree  #: running statistics, those of `Variables`


class Client(NamedTuple):
    """What a client keeps."""

    own: Tree  #: what the client keeps under the base algorithm
    norms: Norms  #: its BatchNorm layers; the server's first ones before it has taken part


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    base: Callable[..., Algorithm] = fedavg.algorithm,
    **kwargs: Any,
) -> Algorithm:
    """Federated training of all but BatchNorm layers.

    Clients predict with their own layers in the server's model, as the paper's do; with `latest.keep(algorithm)` the
    rest is the client's latest local one too. The clients' layers are also sent and averaged, as in the released code
    of FedLoGe, for the generic model alone: none takes them back.

    Args:
      objective: model, head and loss. The model's BatchNorm layers are those called so, as flax does, and those whose
        parameters lie beside running statistics, as the adapters of `models` leave them.
      client_opt: from the round's number to a client's optimizer.
      base: the algorithm that trains it: FedAvg, or another factory whose messages are FedAvg's.
      **kwargs: as for `base`.

    Returns:
      An `Algorithm` with the server state of `base`, whose client state is a `Client` and whose clients send a
      `fedavg.Message`.

    Raises:
      ValueError: when a state is made, if the base remembers more than FedAvg, or the model has no BatchNorm layer; in
        the first round, if the base sends more than FedAvg.
    """
    inner = base(objective, client_opt, **kwargs)

    def init(key: Array, data: FederatedData) -> fedavg.Server:
        return fedavg.plain_server(inner.init(key, data))  # what a base remembers of changes would not be those sent

    def init_client(key: Array, server: fedavg.Server) -> Client:
        return Client(inner.init_client(key, server), norms(server.variables))

    def client(key: Array, server: fedavg.Server, client: Client, shard: Shard) -> tuple[Client, fedavg.Message, Info]:
        mine = _holding(server, client.norms)
        own, message, info = inner.client(key, mine, client.own, shard)
        message = fedavg.plain_message(message)
        v = fedavg.trained_model(mine, message)
        trained, received = (tree.split(u.params, tuple(message.delta))[0] for u in (v, server.variables))
        return Client(own, norms(v)), message._replace(delta=tree.sub(trained, received)), info

    def predict(server: fedavg.Server, client: Client | None, x: Array) -> Array:
        if client is None:
            return inner.predict(server, None, x)
        return inner.predict(_holding(server, client.norms), client.own, x)

    return inner._replace(init=init, init_client=init_client, client=client, predict=predict)


def norms(v: Variables) -> Norms:
    """The BatchNorm layers of a model: scales and shifts, and all running statistics.

    Raises:
      ValueError: if it has none.
    """
    normed = {_layer(path) for path, _ in tree_leaves_with_path({'body': v.stats})} - {'body'}
    affine = {
        keystr(path): leaf
        for path, leaf in tree_leaves_with_path(v.params)
        if _called_so(_layer(path)) or _layer(path) in normed
    }
    if not affine and not any(map(_called_so, normed)):
        raise ValueError("FedBN needs a model with BatchNorm layers, such as ResNet20(norm='batch')")
    return Norms(affine, v.stats)


def refused(kept: Tree, what: str) -> Tree:
    """Refuses FedBN's clients, for methods of which some part would not see BatchNorm layers of a client's own.

    Args:
      kept: what a client keeps under a base.
      what: that part, for the message.

    Returns:
      `kept`.

    Raises:
      ValueError: if there are such layers; it says `what` would not see them.
    """
    if any(isinstance(u, Client) for u in tree_leaves(kept, is_leaf=lambda u: isinstance(u, Client))):
        raise ValueError(f"{what} would not see the clients' own BatchNorm: take another base than fedbn.algorithm")
    return kept


def _called_so(layer: str) -> bool:
    """Whether a layer is called as flax calls a BatchNorm, whatever the modules around it are called."""
    return bool(re.fullmatch(r'(.*\.)?BatchNorm(_\d+)?', layer))


def _layer(path: Any) -> str:
    """The name of the layer to which a leaf belongs; in equinox and haiku statistics are a level below it."""
    name = keystr(path, simple=True, separator='.').rpartition('.')[0]
    return re.sub(r'(\.(batch|ema)_state_index|/~/(mean|var)_ema)$', '', name)


def _holding(server: fedavg.Server, own: Norms) -> fedavg.Server:
    """The server as a client with those layers sees it."""
    v = server.variables
    params = tree_map_with_path(lambda path, leaf: own.affine.get(keystr(path), leaf), v.params)
    return server._replace(variables=v._replace(params=params, stats=own.stats))
