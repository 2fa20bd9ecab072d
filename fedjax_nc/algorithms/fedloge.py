"""FedLoGe: one backbone, a balanced generic model and personal ones for long-tailed data.

FedLoGe: Joint Local and Generic Federated Learning under Long-tailed Data.
Xiao, Chen, Liu, Feng, Wu, Liu, Zhou, Yang, Liu. ICLR 2024. https://arxiv.org/abs/2401.08977

Client k trains its features `h` through a frozen sparse ETF `W`, and beside it two heads that do not shape them, the
global `psi` and the private `phi_k`:

    CE(h W, y) + CE(sg(h) psi, y) + CE(sg(h) phi_k, y).

Backbone and `psi` are averaged, `phi_k` stays. The lengths of class vectors tell how much was known of a class: the
generic model takes them from `psi` (Equation 6), and `phi_k` lends its own to the personal one (Equation 7).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from fedjax_nc import aggregators, checks, frames, heads, losses, tree
from fedjax_nc.algorithms import fedavg, fedbn, finetune
from fedjax_nc.base import Algorithm, Array, Batch, FederatedData, Head, Info, Model, Shard, State, Tree, Variables
from fedjax_nc.local import ClientOptimizer, Plan, checked, featurize, joined
from fedjax_nc.objective import masked_mean, objective, on_features


class Client(NamedTuple):
    """What a client keeps in training."""

    own: Tree  #: what the client keeps under the base algorithm
    head: Tree  #: phi_k, `{'w' [D, C]}`, and 'b' [C] with `aux_bias`
    seen: Array  #: [] bool, whether it was ever trained


class Personal(NamedTuple):
    """A client of `realign`."""

    head: Tree  #: phi_k, as in `Client`
    seen: Array  #: [] bool, whether federated training ever trained it
    realigned: Tree  #: phi'_k, alike
    allowed: Array  #: [C] bool, classes of its training data


def algorithm(
    model: Model,
    client_opt: ClientOptimizer,
    *,
    frame: heads.Frame = frames.sparse_etf,
    aux_bias: bool = False,
    frozen_bias: bool = False,
    plan: Plan = Plan(8, 5),  # noqa: B008
    base: Callable[..., Algorithm] = fedavg.algorithm,
    **kwargs: Any,
) -> Algorithm:
    """The federated training of FedLoGe, to be followed by `realign`.

    The generic model is the frozen head's; clients predict with their private heads. `params['aux']` is psi. The loss
    that is reported is the sum of all three.

    Args:
      model: feature extractor with at least C-1 features.
      client_opt: published: `local.sgd(0.03, momentum=0.5, weight_decay=0.0)`. Decay would distort the lengths of class
        vectors, and clipping tie the backbone to the auxiliary heads.
      frame: the frozen head, `(key, D, C) -> [D, C]`, such as `functools.partial(frames.sparse_etf, norm=1.6)`. The
        dense ETF of the paper's ablation is `frames.simplex_etf`.
      aux_bias: whether psi and phi_k have a bias, as in the released code.
      frozen_bias: whether W has a random bias, as frozen as it is, as in the released code; the paper has none.
      plan: batch size and local epochs.
      base: the algorithm that trains it: FedAvg, or another factory whose messages are FedAvg's.
      **kwargs: as for `base`.

    Returns:
      An `Algorithm` with the server state of `base`, whose client state is a `Client` and whose clients send a
      `fedavg.Message`.

    Raises:
      ValueError: for `parts`; when clients are made, if the base remembers more than FedAvg or is FedBN; in the first
        round, if it sends more.
    """
    if 'parts' in kwargs:
        raise ValueError('FedLoGe trains the body and both heads: it takes no `parts`')
    checks.flags(aux_bias=aux_bias, frozen_bias=frozen_bias)
    head = heads.etf(project=False, unit_features=False, learn_scale=False, frame=frame)
    frozen = objective(model, _biased(head) if frozen_bias else head, losses.cross_entropy)

    def first(key: Array, data: FederatedData) -> Variables:
        v = frozen.init(key, data)
        width, classes = v.fixed['v'].shape
        k_aux = jax.random.fold_in(key, 2)  # the task has taken what folding in 0 and 1 gives
        return v._replace(params={**v.params, 'aux': heads.dense_init(k_aux, width, classes, aux_bias)})

    def loss(v: Variables, z: Array, batch: Batch) -> Array:
        detached = jax.lax.stop_gradient(z)
        beside = (heads.dense(v.params[name], detached) for name in ('aux', 'private'))
        terms = (masked_mean(losses.cross_entropy(logits, batch.y), batch.mask) for logits in beside)
        return frozen.loss(v, z, batch) + sum(terms)

    task = frozen._replace(init=first, loss=loss)
    inner = base(task, client_opt, plan=plan, **kwargs)

    def holding(server: fedavg.Server, private: Tree) -> fedavg.Server:
        v = server.variables
        return server._replace(variables=v._replace(params={**v.params, 'private': private}))

    def init_client(key: Array, server: fedavg.Server) -> Client:
        width, classes = server.variables.params['aux']['w'].shape
        head = heads.dense_init(key, width, classes, aux_bias)
        own = inner.init_client(key, holding(fedavg.plain_server(server), head))
        return Client(fedbn.refused(own, 'predictions of FedLoGe'), head, jnp.array(False))

    def client(key: Array, server: fedavg.Server, client: Client, shard: Shard) -> tuple[Client, fedavg.Message, Info]:
        mine = holding(server, client.head)
        own, message, info = inner.client(key, mine, client.own, shard)
        message = fedavg.plain_message(message)
        head = fedavg.trained_model(mine, message).params['private']
        _, sent = tree.split(message.delta, ('private',))
        return Client(own, head, client.seen | (shard.size > 0)), message._replace(delta=sent), info

    def predict(server: fedavg.Server, client: Client | None, x: Array) -> Array:
        if client is None:
            return inner.predict(server, None, x)
        return heads.dense(client.head, task.features(server.variables, Batch(x))[0])

    return inner._replace(init_client=init_client, client=client, predict=predict)


def _biased(head: Head) -> Head:
    """The head with a bias in `fixed`, uniform in `+-1 / sqrt(D)`, that nothing ever moves."""

    def init(key: Array, dim: int, classes: int) -> tuple[Tree, Tree]:
        params, fixed = head.init(key, dim, classes)
        k_bias = jax.random.fold_in(key, 2)  # the head has taken what folding in 0 and 1 gives
        return params, {**fixed, 'b': jax.random.uniform(k_bias, (classes,), jnp.float32, -(dim**-0.5), dim**-0.5)}

    return Head(init, lambda params, fixed, z: head.logits(params, fixed, z) + fixed['b'])


def global_realign(aux: Tree, scale: Array | float = 1.0, keep_bias: bool = False) -> Tree:
    """The head of the generic model (Equation 6): `psi'_c = scale psi_c / |psi_c|`.

    The paper has neither bias nor scale. The released code keeps the bias of psi, whose weight is then set by
    `scale=1.7`; without a bias the scale changes no prediction.

    Args:
      aux: psi, `{'w' [D, C]}`, and 'b' [C] if it has a bias.
      scale: length of every class vector.
      keep_bias: whether the bias of psi stays.

    Returns:
      `{'w' [D, C]}`, and 'b' [C] if it is kept.
    """
    checks.flags(keep_bias=keep_bias)
    w = scale * frames.normalize(aux['w'].T).T
    return {**aux, 'w': w} if keep_bias else {'w': w}


def local_realign(aux: Tree, private: Tree) -> Tree:
    """The head of a personal model (Equation 7): `phi'_c = |phi_c| psi_c` with psi as it was trained, and its bias.

    Args:
      aux: psi, `{'w' [D, C]}`, and 'b' [C] if it has a bias.
      private: phi_k, alike; of it only the lengths of class vectors enter.

    Returns:
      `{'w' [D, C]}`, and the 'b' of psi if it has one.
    """
    return {**aux, 'w': aux['w'] * jnp.sqrt(jnp.sum(jnp.square(private['w']), axis=0))}


def realign(
    model: Model,
    client_opt: ClientOptimizer,
    *,
    mode: str = 'paper',
    unseen: str = 'train',
    plan: Plan = Plan(8, 5),  # noqa: B008
    finetune_epochs: int = 0,
    scale: Array | float = 1.0,
    keep_bias: bool = False,
) -> Algorithm:
    """The last stage of FedLoGe: every client makes its personal head. One round of it is all.

    It begins with `stage_state(trained)`. The backbone is frozen in evaluation mode. The server keeps psi as it is and
    predicts with `global_realign(psi, scale, keep_bias)`. Clients that federated training never met have
    `seen == False`, before and after.

    Args:
      model: feature extractor.
      client_opt: optimizer of the federated training.
      mode: 'paper' predicts with phi'_k; 'released' adds phi_k and leaves out classes of which the client has no
        training example (the released code: no test example).
      unseen: what a client does whose phi_k was never trained, and so has meaningless lengths: 'train' trains it first,
        for `plan.epochs`; 'generic' takes psi in place of phi'_k and nothing in place of phi_k. So does, with either, a
        client without data.
      plan: batch size, and epochs of 'train'.
      finetune_epochs: epochs for which phi'_k is then trained on the client's own data; published: up to 15, 0 for the
        tables.
      scale: of `global_realign`; 1.7 in the released code.
      keep_bias: of `global_realign`; True in the released code.

    Returns:
      An `Algorithm` on the server state of training, whose client state is a `Personal` and whose clients send nothing.

    Raises:
      ValueError: for an unknown option, a negative number of epochs, a `scale` that is not positive, or a model,
        optimizer or plan that is none; in `simulate.init` and `simulate.join`, as only `stage_state` makes its state.
    """
    if mode not in ('paper', 'released'):
        raise ValueError(f"mode must be 'paper' or 'released', not {mode!r}")
    if unseen not in ('train', 'generic'):
        raise ValueError(f"unseen must be 'train' or 'generic', not {unseen!r}")
    checks.whole('finetune_epochs', finetune_epochs, least=0)
    checks.number('scale', scale, open_low=True)
    checks.flags(keep_bias=keep_bias)
    checks.optimizer('client_opt', client_opt)
    checked('plan', plan)
    task = objective(model, heads.linear(), losses.cross_entropy)

    def fit(key: Array, head: Tree, opt: Any, own: Shard, epochs: int) -> tuple[Tree, Info]:
        def put(head: Tree) -> Variables:
            return Variables({'head': head})

        local = plan._replace(epochs=epochs)
        v, info = finetune.fit(key, on_features(task), put(head), head, put, opt, own, local)
        return v.params['head'], info

    def client(key: Array, server: fedavg.Server, client: Personal, shard: Shard) -> tuple[Personal, tuple, Info]:
        v, psi, opt = server.variables, server.variables.params['aux'], client_opt(server.round)
        k_head, k_tune = jax.random.split(key)
        late = ~client.seen & (unseen == 'train')
        busy = shard._replace(size=jnp.where(late, shard.size, 0))
        own = featurize(lambda batch: task.features(v, batch)[0], shard if finetune_epochs else busy, plan.batch_size)
        head, info = fit(k_head, client.head, opt, own._replace(size=busy.size), plan.epochs)
        known = client.seen | (busy.size > 0)
        realigned = tree.where(known, local_realign(psi, head), psi)
        if finetune_epochs:
            realigned, tuned = fit(k_tune, realigned, opt, own, finetune_epochs)
            info = joined(info, tuned)
        head = tree.where(known, head, tree.zeros(head))
        return Personal(head, client.seen, realigned, shard.counts > 0), (), info

    def predict(server: fedavg.Server, client: Personal | None, x: Array) -> Array:
        z, _ = task.features(server.variables, Batch(x))
        if client is None:
            return heads.dense(global_realign(server.variables.params['aux'], scale, keep_bias), z)
        logits = heads.dense(client.realigned, z)
        if mode == 'paper':
            return logits
        allowed = client.allowed | ~jnp.any(client.allowed)
        return jnp.where(allowed, logits + heads.dense(client.head, z), jnp.finfo(jnp.float32).min)

    def refuse(*_: Any) -> NoReturn:
        raise ValueError('realign needs the private heads of training: begin it with fedloge.stage_state(trained)')

    return Algorithm(refuse, refuse, client, aggregators.nothing, lambda key, server, aggregate: server, predict)


def stage_state(trained: State) -> State:
    """The state with which `realign` takes over from training: `realign(...)` can be run on it, not joined.

    Returns:
      The server of `trained`, and a `Personal` of every client, whose phi'_k is still phi_k. Arrays are copies.

    Raises:
      ValueError: if the state is not one of `fedloge.algorithm`.
    """
    if not isinstance(trained.clients, Client):
        raise ValueError(f'expected a state of fedloge.algorithm, not one with clients {type(trained.clients)}')
    head = trained.clients.head
    population, _, classes = head['w'].shape
    clients = Personal(head, trained.clients.seen, head, jnp.zeros((population, classes), bool))
    # Owned buffers, as in simulate.join: a donated stage must not take the trained state with it.
    return jax.tree.map(jnp.array, State(trained.server, clients))
