"""Keeping every client's latest local model, under any algorithm.

Methods that train no personal models are judged by the local models themselves, as in FedNH's PM columns (Dai et al.,
AAAI 2023), and analyses compare them before they are averaged, as in CCVR (Luo et al., NeurIPS 2021).
"""

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_nc import checks, tree
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Algorithm, Array, Info, Shard, Tree, Variables


class Latest(NamedTuple):
    """What a client keeps."""

    own: Tree  #: what the client keeps under the algorithm itself
    variables: Variables  #: the model at the end of its last local work
    round: Array  #: [] int32, the round of that work, from 0; -1 before the first


def keep(algorithm: Algorithm) -> Algorithm:
    """The same algorithm, whose clients also keep the model with which their last local work ended.

    Nothing else changes, nor does any random number. The cost is K models of memory. Clients predict with their own
    model; those of `round == -1` have only the first model of the server, and are to be left out of averages.

    Args:
      algorithm: one whose server state and messages are FedAvg's, or hold FedAvg's.

    Returns:
      The algorithm, whose client state is a `Latest`.

    Raises:
      ValueError: for what is no algorithm; in the first round, for one whose clients send no model.
    """
    checks.kind('algorithm', algorithm, Algorithm)

    def init_client(key: Array, server: fedavg.Server) -> Latest:
        return Latest(algorithm.init_client(key, server), server.variables, jnp.int32(-1))

    def client(key: Array, server: fedavg.Server, client: Latest, shard: Shard) -> tuple[Latest, Tree, Info]:
        own, message, info = algorithm.client(key, server, client.own, shard)
        now = Latest(own, fedavg.trained_model(server, message), server.round)
        return tree.where(shard.size > 0, now, client), message, info

    def predict(server: fedavg.Server, client: Latest | None, x: Array) -> Array:
        if client is None:
            return algorithm.predict(server, None, x)
        server = server._replace(variables=client.variables)
        return algorithm.predict(server, client.own, x)

    return algorithm._replace(init_client=init_client, client=client, predict=predict)
