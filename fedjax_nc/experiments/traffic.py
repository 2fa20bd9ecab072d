"""How many bytes a run sends, by what its clients read of the server's state and what they send back."""

from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_nc import privacy
from fedjax_nc.base import Algorithm, FederatedData, State, Tree


class Traffic(NamedTuple):
    """Bytes of one client in one round, without compression; 0 up where nothing is sent.

    Messages count whole: what is all zeros in some rounds, as class means before a memory is collected, too.
    """

    down: int  #: what moves and is read by a client's work
    up: int
    once: int  #: what a client reads and training never moves, such as a frozen frame: sent once


def of(algorithm: Algorithm, before: Tree, state: State, data: FederatedData) -> Traffic:
    """The traffic of training from the server state `before` to `state`. Compiles and computes nothing on the clients.

    Args:
      algorithm: what was trained.
      before: the server state that training began with.
      state: the state at the end, to tell what has moved.
      data: the clients' training data.
    """
    server, structure = jax.tree.flatten(state.server)
    own = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape[1:], u.dtype), state.clients)
    shard = jax.eval_shape(lambda data: data.shard(0), data)

    def work(*leaves: Any) -> Any:
        return algorithm.client(jax.random.key(0), jax.tree.unflatten(structure, leaves[:-1]), *leaves[-1])

    trace, made = jax.make_jaxpr(work, return_shape=True)(*server, (own, shard))
    down = once = 0
    for i, (first, last) in enumerate(zip(jax.tree.leaves(before), server, strict=True)):
        if privacy.depends_on(trace.jaxpr, i):
            moved = not np.array_equal(first, last)
            down, once = down + moved * last.nbytes, once + (not moved) * last.nbytes
    return Traffic(down, sum(u.size * u.dtype.itemsize for u in jax.tree.leaves(made[1])), once)
