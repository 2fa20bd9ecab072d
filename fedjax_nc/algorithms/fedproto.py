"""FedProto: clients exchange the mean features of their classes instead of models.

FedProto: Federated Prototype Learning across Heterogeneous Clients.
Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. AAAI 2022. https://arxiv.org/abs/2105.00243

Client k keeps its model and minimises, with the server's prototypes `P [C, D]` held constant,

    CE(W_k h, y) + lambda mean_i |h_i - P_{y_i}|^2 / D.

It sends the mean feature of each class it holds under its final model; P_c becomes the mean of those.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_nc import aggregators, checks, classwise
from fedjax_nc.aggregators import ClassRows
from fedjax_nc.algorithms import fedavg, finetune, solo
from fedjax_nc.base import Aggregate, Algorithm, Array, Batch, FederatedData, Info, Objective, Shard, Tree, Variables
from fedjax_nc.local import ClientOptimizer, Plan, featurize
from fedjax_nc.objective import masked_mean
from fedjax_nc.objective import predict as logits


class Prototypes(NamedTuple):
    """What the server remembers, in the field `extra` of its state."""

    rows: Array  #: [C, D] float32, P; 0 before any client has sent one
    valid: Array  #: [C] bool, whether any client has sent this one yet


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    lam: Array | float = 0.1,
    weigh: str = 'holders',
    plan: Plan = Plan(64, 5),  # noqa: B008
) -> Algorithm:
    """Local training towards common prototypes.

    Clients predict the nearest prototype that is valid, measured with their own body after the server's last update;
    see `head_predict` for their heads. A client's model is its latest; there is no generic one.

    Args:
      objective: model, head and loss.
      client_opt: published: `local.sgd(0.01, weight_decay=1e-5, decay=0.99, clip=10.0)` for CIFAR.
      lam: lambda, weight of the regulariser, which is a mean over examples and dimensions. Examples whose class has no
        prototype yet add nothing to it; the released code pulled them to noise.
      weigh: what a client's class mean counts: 'holders', the same for all who hold the class, as in the released code;
        'counts', its number of examples, as in the paper.
      plan: batch size and local epochs.

    Returns:
      An `Algorithm` whose server state is a `fedavg.Server` with `Prototypes` for `extra`, whose client state is the
      client's model, and whose clients send `ClassRows`. Its logits are `-|h - P_c|^2`, the least float for prototypes
      that are not valid.

    Raises:
      ValueError: for another `weigh`, a negative `lam`, or an objective, optimizer or plan that is none; in a
        prediction, if it is asked for the generic model.
    """
    checks.number('lam', lam)
    if weigh not in ('holders', 'counts'):
        raise ValueError(f"weigh must be 'holders' or 'counts', not {weigh!r}")

    def near(v: Variables, z: Array, batch: Batch, server: fedavg.Server, mine: Tree) -> Array:
        rows, valid = server.extra
        gap = jnp.mean(jnp.square(z.astype(jnp.float32) - rows[batch.y]), axis=-1)
        return lam * masked_mean(jnp.where(valid[batch.y], gap, 0.0), batch.mask)

    inner = solo.alone(finetune.algorithm(objective, client_opt, plan=plan, penalty=near))

    def init(key: Array, data: FederatedData) -> fedavg.Server:
        server = inner.init(key, data)
        z, _ = jax.eval_shape(lambda x: objective.features(server.variables, Batch(x)), data.x[:1])
        classes = data.num_classes
        return server._replace(
            extra=Prototypes(jnp.zeros((classes, z.shape[-1]), jnp.float32), jnp.zeros(classes, bool))
        )

    def client(key: Array, server: fedavg.Server, mine: Variables, shard: Shard) -> tuple[Variables, ClassRows, Info]:
        mine, _, info = inner.client(key, server, mine, shard)
        own = featurize(lambda batch: objective.features(mine, batch)[0], shard, plan.batch_size)
        mean, count = classwise.means(own.x, own.y, classwise.real_rows(own), len(own.counts))
        return mine, ClassRows(mean, count if weigh == 'counts' else jnp.sign(count)), info

    def server(key: Array, server: fedavg.Server, aggregate: Aggregate) -> fedavg.Server:
        (rows, valid), mean = server.extra, aggregate.value
        new = Prototypes(jnp.where(mean.weight[:, None] > 0, mean.rows, rows), valid | (mean.weight > 0))
        return inner.server(key, server, aggregate)._replace(extra=new)

    def predict(server: fedavg.Server, mine: Variables | None, x: Array) -> Array:
        if mine is None:
            return solo.refuse()
        rows, valid = server.extra
        z = objective.features(mine, Batch(x))[0].astype(jnp.float32)
        gap = jnp.sum(jnp.square(z[:, None] - rows), axis=-1)  # expanded squares would lose the digits that decide
        return jnp.where(valid, -gap, jnp.finfo(jnp.float32).min)

    return inner._replace(init=init, client=client, aggregate=aggregators.class_mean, server=server, predict=predict)


def head_predict(objective: Objective) -> Callable[[fedavg.Server, Variables | None, Array], Array]:
    """What the clients' own heads predict: evaluate `algorithm._replace(predict=head_predict(objective))`.

    Args:
      objective: that of training.

    Returns:
      `predict(server, client, x [B, ...])`, logits [B, C] float32 by the client's model.

    Raises:
      ValueError: for an objective that is none; in a prediction, if it is asked for the generic model.
    """
    checks.kind('objective', objective, Objective)

    def predict(server: fedavg.Server, mine: Variables | None, x: Array) -> Array:
        return solo.refuse() if mine is None else logits(objective, mine, x)

    return predict
