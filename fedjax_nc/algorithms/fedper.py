"""FedPer: a common body below private heads.

Federated Learning with Personalization Layers.
Arivazhagan, Aggarwal, Singh, Choudhary. 2019. https://arxiv.org/abs/1912.00818

Client k trains the received body theta and its own head W_k together, `(theta_k, W_k) <- SGD((theta, W_k))`, and sends
`theta_k - theta`. W_k stays where it is from one participation to the next.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.tree_util import tree_leaves

from fedjax_nc import tree
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Algorithm, Array, FederatedData, Info, Objective, Shard, Tree, Variables
from fedjax_nc.local import ClientOptimizer, Plan


class Client(NamedTuple):
    """What a client keeps."""

    own: Tree  #: what the client keeps under the base algorithm
    head: Tree  #: W_k, like `params['head']`


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    plan: Plan = Plan(64, 5),  # noqa: B008
    base: Callable[..., Algorithm] = fedavg.algorithm,
    **kwargs: Any,
) -> Algorithm:
    """Federated training of the body alone; `params['head']` is each client's own.

    Clients predict with their head on the server's body. Personal models as in FedNH's tables have the client's latest
    local body instead: `latest.keep(algorithm)`. The generic model has the head that all began with.

    Args:
      objective: model, head and loss. What the head holds fixed, such as an ETF, is common to all.
      client_opt: published: `local.sgd(0.01, weight_decay=1e-5, decay=0.99, clip=10.0)` for CIFAR.
      plan: batch size and local epochs.
      base: the algorithm that trains it: FedAvg, or another factory whose messages are FedAvg's.
      **kwargs: as for `base`, but `parts`; clients count alike but for `aggregate` and `aggregate_stats`.

    Returns:
      An `Algorithm` with the server state of `base`, whose client state is a `Client` and whose clients send a
      `fedavg.Message` of the body.

    Raises:
      ValueError: when a state is made, if the head has no parameters, or the base remembers more than FedAvg; in the
        first round, if it sends more.
    """
    kwargs = {**fedavg.UNWEIGHTED, **kwargs, 'plan': plan}
    whole = base(objective, client_opt, **kwargs)
    shared = base(objective, client_opt, parts=('body',), **kwargs)

    def init(key: Array, data: FederatedData) -> fedavg.Server:
        return fedavg.plain_server(shared.init(key, data))

    def client(key: Array, server: fedavg.Server, client: Client, shard: Shard) -> tuple[Client, fedavg.Message, Info]:
        mine = holding(server, client.head)
        own, message, info = whole.client(key, mine, client.own, shard)
        sent, _ = tree.split(fedavg.plain_message(message).delta, ('body',))
        return Client(own, fedavg.trained_model(mine, message).params['head']), message._replace(delta=sent), info

    return private_heads(whole)._replace(init=init, client=client, server=shared.server)


def holding(server: fedavg.Server, head: Tree) -> fedavg.Server:
    """The server as a client with that `head` sees it: `server` with another `params['head']`."""
    v = server.variables
    return server._replace(variables=v._replace(params={**v.params, 'head': head}))


def local_model(server: fedavg.Server, message: Any, client: Tree) -> Variables:
    """The model with which a client ended its local work, as `fedavg.trained_model`, with the head that it keeps.

    Args:
      server: from which it began.
      message: what it sent.
      client: its state after that work, of any algorithm; a `Client` in it has a head of its own.
    """
    v = fedavg.trained_model(server, message)
    own = [u.head for u in tree_leaves(client, is_leaf=lambda u: isinstance(u, Client)) if isinstance(u, Client)]
    return v._replace(params={**v.params, 'head': own[0]}) if own else v


def private_heads(inner: Algorithm) -> Algorithm:
    """The first states and the predictions of clients that own their heads; their work is still to be replaced.

    Args:
      inner: an algorithm whose server state is a `fedavg.Server`.

    Returns:
      `inner` with `Client` as client state and personal predictions by it. Its `client` is `inner`'s, which does not
      take that state.

    Raises:
      ValueError: when clients are made, if the head has no parameters.
    """

    def init_client(key: Array, server: fedavg.Server) -> Client:
        head = server.variables.params['head']
        if not head:
            raise ValueError('this head has no parameters to be private: use fedavg.algorithm, or a head that learns')
        return Client(inner.init_client(key, server), head)

    def predict(server: fedavg.Server, client: Client | None, x: Array) -> Array:
        if client is None:
            return inner.predict(server, None, x)
        return inner.predict(holding(server, client.head), client.own, x)

    return inner._replace(init_client=init_client, predict=predict)
