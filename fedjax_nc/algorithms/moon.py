"""MOON: model-contrastive federated learning.

Model-Contrastive Federated Learning.
Li, He, Song. CVPR 2021. https://arxiv.org/abs/2103.16257

With `z`, `z_g` and `z_p` the features of the same images under the model in training, the received one and the model
with which the client ended its previous round, clients minimise

    loss + mu l,   l = -log( e^{cos(z, z_g)/T} / (e^{cos(z, z_g)/T} + e^{cos(z, z_p)/T}) ),

averaged over the batch. The other two models are frozen and in evaluation mode. The server averages as in FedAvg.
"""

from typing import Any, NamedTuple

import jax

from fedjax_nc import checks, heads, tree
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Algorithm, Array, Batch, Info, Model, Objective, Shard, Tree, Variables
from fedjax_nc.frames import normalize
from fedjax_nc.local import ClientOptimizer
from fedjax_nc.objective import masked_mean


class Client(NamedTuple):
    """What a client keeps."""

    own: Tree  #: what the client keeps under FedAvg itself
    previous: Variables  #: the model at the end of its last local work, without `fixed`


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    mu: Array | float,
    temperature: Array | float = 0.5,
    **kwargs: Any,
) -> Algorithm:
    """FedAvg with the contrast of models as penalty.

    The contrast is of the features that the head sees. The paper's are projections: build the objective on
    `projected(model)`, or on `models.MoonCNN`, which ends in one. Rectified features, as of most bodies, have cosines
    above zero, and their contrast is weak. A client that has not taken part has the server's first model as its
    previous one. The cost is three forward passes and K models of memory.

    Args:
      objective: model, head and loss.
      client_opt: published: `local.sgd(0.01, weight_decay=1e-5)`.
      mu: weight of the contrast; published: 5 for CIFAR-10, 1 for CIFAR-100 and Tiny-ImageNet. 0 is FedAvg.
      temperature: the T that divides cosines.
      **kwargs: as for `fedavg.algorithm`, without `penalty`.

    Returns:
      An `Algorithm` with the server state and messages of `fedavg.algorithm`, whose client state is a `Client`.

    Raises:
      ValueError: for a negative `mu`, a temperature that is not positive, a `penalty`, or as `fedavg.algorithm` does.
    """
    fedavg.refuse_penalty('MOON', kwargs)
    checks.number('mu', mu)
    checks.number('temperature', temperature, open_low=True)

    def contrasting(previous: Variables) -> Algorithm:
        def penalty(v: Variables, z: Array, batch: Batch, server: fedavg.Server, client: Tree) -> Array:
            received = server.variables
            last = previous._replace(fixed=received.fixed)
            z_g, z_p = (reference(objective, w, batch) for w in (received, last))
            return mu * masked_mean(contrast(z, z_g, z_p, temperature), batch.mask)

        return fedavg.algorithm(objective, client_opt, penalty=penalty, **kwargs)

    plain = fedavg.algorithm(objective, client_opt, **kwargs)

    def init_client(key: Array, server: fedavg.Server) -> Client:
        return Client(plain.init_client(key, server), server.variables._replace(fixed=()))

    def client(key: Array, server: fedavg.Server, client: Client, shard: Shard) -> tuple[Client, fedavg.Message, Info]:
        own, message, info = contrasting(client.previous).client(key, server, client.own, shard)
        now = fedavg.trained_model(server, message)._replace(fixed=())
        return Client(own, tree.where(shard.size > 0, now, client.previous)), message, info

    return plain._replace(init_client=init_client, client=client)


def contrast(z: Array, z_g: Array, z_p: Array, temperature: Array | float) -> Array:
    """The contrast `l` of each example (Equation 3).

    Args:
      z: features [B, D] under the model in training.
      z_g: those under the received model.
      z_p: those under the client's previous model.
      temperature: the T that divides cosines.

    Returns:
      [B] float32, at least 0; log 2 where z_g = z_p.

    Raises:
      ValueError: unless the temperature is positive.
    """
    checks.number('temperature', temperature, open_low=True)
    near, far = ((normalize(z) * normalize(u)).sum(axis=-1) for u in (z_g, z_p))
    return jax.nn.softplus((far - near) / temperature)


def reference(task: Objective, v: Variables, batch: Batch) -> Array:
    """Features of a batch under a model that stands still beside one in training.

    Args:
      task: whose features they are.
      v: the model, in evaluation mode; no gradient reaches it.
      batch: that of the model in training. What its `preprocess` makes of the batch, as given to `models.from_flax`,
        all models see, augmented by the same draws.

    Returns:
      [B, D] float32.
    """
    return jax.lax.stop_gradient(task.features(v, batch._replace(key=None, beside=batch.key))[0])


def projected(model: Model, dim: int | None = 256, hidden: bool = True) -> Model:
    """The model with MOON's projection behind its features: `W_2 relu(W_1 h + b_1) + b_2`, `[B, D]` to `[B, dim]`.

    W_1 is square, and without `hidden` there is no such layer: `W_2 h + b_2`. So is W_2 with `dim=None`. Any head takes
    the projection for features.

    Raises:
      ValueError: for what is no model, or a `dim` below 1.
    """
    checks.kind('model', model, Model)
    if dim is not None:
        checks.whole('dim', dim)
    checks.flags(hidden=hidden)

    def init(key: Array, x: Array) -> tuple[Tree, Tree]:
        k_model, k_first, k_second = jax.random.split(key, 3)
        params, stats = model.init(k_model, x)
        width = jax.eval_shape(lambda x: model.features(params, stats, x, None, None), x)[0].shape[-1]
        first = {'first': heads.dense_init(k_first, width, width)} if hidden else {}
        return {'model': params, **first, 'second': heads.dense_init(k_second, width, dim or width)}, stats

    def features(params: Tree, stats: Tree, x: Array, mask: Array | None, key: Array | None) -> tuple[Array, Tree]:
        h, stats = model.features(params['model'], stats, x, mask, key)
        h = jax.nn.relu(heads.dense(params['first'], h)) if hidden else h
        return heads.dense(params['second'], h), stats

    return Model(init, features, model.augments)
