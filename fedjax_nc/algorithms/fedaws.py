"""FedAwS: the server spreads the class vectors that clients without negatives would let collapse.

Federated Learning with Only Positive Labels.
Yu, Rawat, Menon, Kumar. ICML 2020. https://arxiv.org/abs/2004.10342

After averaging, the server takes a few gradient steps on the class vectors `w_c` of the head,

    min_w  sum_{c != c'} max(0, margin - d(w_c, w_c'))^2 / C^2,   d(u, v) = (1 - cos(u, v)) / 2.

The paper's clients hold one class and minimise the positive loss `losses.positive` on cosines; the comparisons of
later papers leave them the cross-entropy.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_nc import checks
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Aggregate, Algorithm, Array, FederatedData, Objective, Tree, Variables
from fedjax_nc.frames import normalize
from fedjax_nc.heads import product
from fedjax_nc.local import ClientOptimizer


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    margin: Array | float = 0.8,
    steps: int = 30,
    spread_opt: optax.GradientTransformation = optax.sgd(0.1, momentum=0.9),  # noqa: B008
    nearest: int | None = None,
    base: Callable[..., Algorithm] = fedavg.algorithm,
    **kwargs: Any,
) -> Algorithm:
    """Federated training after each round of which the server spreads the head's class vectors.

    A head that clients do not train, such as an ETF or FedBABU's, is left as it is; what remains is the base.

    Args:
      objective: model, head and loss. As the paper has it: `heads.cosine(learn_scale=False)` and `losses.positive`.
      client_opt: from the round's number to a client's optimizer.
      margin: distance up to which classes repel each other; the FedRS benchmark tries 0.8 and 0.5.
      steps: gradient steps of the server, 0 for none; the benchmark takes 30 or 50.
      spread_opt: their optimizer, which starts anew each round; the benchmark's rates are 0.1 and 0.01. The paper's sum
        without the division by C^2 is a C^2 times larger rate.
      nearest: how many classes repel each one, only its nearest, for large C; all by default.
      base: the algorithm that trains it: a factory that takes an objective and an optimizer, on FedAvg's server state.
      **kwargs: as for `base`.

    Returns:
      An `Algorithm` with the states and messages of `base`.

    Raises:
      ValueError: if `margin` or `steps` is negative, `nearest` below 1, or `spread_opt` no optax optimizer; on `init`,
        for a head that holds no class vectors.
    """
    checks.number('margin', margin)
    checks.whole('steps', steps, 0)
    if nearest is not None:
        checks.whole('nearest', nearest, advice='use steps=0 to spread nothing')
    checks.transformation('spread_opt', spread_opt)
    inner = base(objective, client_opt, **kwargs)

    def init(key: Array, data: FederatedData) -> fedavg.Server:
        server = inner.init(key, data)
        if not (_movable(server.variables) or jax.tree.leaves(server.variables.fixed)):
            raise ValueError("FedAwS spreads the class vectors params['head']['w']: use a head such as heads.linear()")
        return server

    def server(key: Array, server: fedavg.Server, aggregate: Aggregate) -> fedavg.Server:
        server = inner.server(key, server, aggregate)
        v = server.variables
        if not _movable(v) or 'head' not in fedavg.moved_parts(aggregate.value):
            return server
        w = v.params['head']['w']
        apart = jnp.where(aggregate.clients > 0, spread(w, margin, steps, spread_opt, nearest), w)
        head = {**v.params['head'], 'w': apart}
        return server._replace(variables=v._replace(params={**v.params, 'head': head}))

    return inner._replace(init=init, server=server)


def _movable(v: Variables) -> bool:
    """Whether the head's class vectors are parameters."""
    return isinstance(v.params['head'], dict) and 'w' in v.params['head']


def _repulsion(w: Array, margin: Array | float, nearest: int | None = None) -> Array:
    """What the server minimises, of class vectors `w [D, C]`: scalar, 0 where no two are closer than the margin."""
    classes = w.shape[1]
    unit = normalize(w.T)
    distance = 0.5 * (1.0 - product(unit, unit.T))
    distance = jnp.where(jnp.eye(classes, dtype=bool), jnp.inf, distance)
    closest = -jax.lax.top_k(-distance, min(nearest or classes - 1, classes - 1))[0]
    return jnp.sum(jnp.square(jnp.maximum(margin - closest, 0.0))) / classes**2


def spread(
    w: Array, margin: Array | float, steps: int, opt: optax.GradientTransformation, nearest: int | None = None
) -> Array:
    """Class vectors after gradient steps against their repulsion, the sum that the server minimises (see above).

    Args:
      w: class vectors [D, C] float32.
      margin: distance up to which classes repel each other; distances are in [0, 1].
      steps: their number.
      opt: an optax optimizer, which starts anew.
      nearest: how many classes repel each one, only its nearest; all by default.

    Returns:
      [D, C] float32, whose lengths may differ too. Where no two are closer than the margin it is `w`, unless `opt`
      decays weights.
    """

    def step(_: Array, carry: Tree) -> Tree:
        w, state = carry
        updates, state = opt.update(jax.grad(_repulsion)(w, margin, nearest), state, w)
        return optax.apply_updates(w, updates), state

    return jax.lax.fori_loop(0, steps, step, (w, opt.init(w)))[0]
