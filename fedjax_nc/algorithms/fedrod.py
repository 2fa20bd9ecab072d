"""FedROD: a generic head for all classes and a personal one for the rest, on one body.

On Bridging Generic and Personalized Federated Learning for Image Classification.
Chen, Chao. ICLR 2022. https://arxiv.org/abs/2107.00778

Body and generic head G minimise the balanced softmax `CE(G(h) + log pi_k, y)` with the client's class shares pi_k, and
are averaged. The personal head learns what is missing for the client's own classes, without shaping the others:

    CE(sg(G(h)) + P_k(sg(h)), y).

P_k is private, or made from pi_k by a network that all share. Generic logits are `G(h)`, personal ones `G(h) + P_k(h)`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_nc import checks, heads, losses, tree
from fedjax_nc.algorithms import fedavg, fedbn, finetune
from fedjax_nc.base import Algorithm, Array, Batch, FederatedData, Head, Info, Model, Shard, Tree, Variables
from fedjax_nc.local import ClientOptimizer, Plan, featurize, joined, sgd
from fedjax_nc.objective import masked_mean, objective, on_features


class Client(NamedTuple):
    """What a client keeps."""

    own: Tree  #: what the client keeps under the base algorithm
    head: Tree  #: P_k, as `Personal.init` makes it; () where a network makes it
    share: Array  #: [C] float32, pi_k; uniform before the first participation


class Personal(NamedTuple):
    """A form of the personal head."""

    init: Callable[[Array, Tree, int, int], Tree]  #: (key, generic head, D, C) -> params
    logits: Callable[[Tree, Array, Array], Array]  #: (params, pi_k [C], h [B, D]) -> [B, C] float32
    classes: Callable[[Tree], int]  #: params -> C
    private: bool  #: whether params stay with the client, or are averaged


def linear(start: str = 'generic', bias: bool = False) -> Personal:
    """A private `P_k h`.

    Args:
      start: 'generic', a copy of the first generic head, as in the released code; 'zeros', so that personal logits
        start at the generic ones, for any generic head.
      bias: whether it has one where the generic head does; FedNH's tables have none.

    Returns:
      A form whose parameters are `{'w' [D, C]}`, with a bias also `'b' [C]`.

    Raises:
      ValueError: for another start; when used, if the generic head has no class vectors to copy.
    """
    if start not in ('generic', 'zeros'):
        raise ValueError(f"start must be 'generic' or 'zeros', not {start!r}")
    checks.flags(bias=bias)

    def init(key: Array, generic: Tree, dim: int, classes: int) -> Tree:
        own = {'b': generic['b']} if bias and 'b' in generic else {}
        if start == 'zeros':
            return {'w': jnp.zeros((dim, classes)), **tree.zeros(own)}
        if 'w' not in generic:
            raise ValueError("this generic head has no learned class vectors to copy: use linear(start='zeros')")
        return {'w': generic['w'], **own}

    return Personal(init, lambda params, share, h: heads.dense(params, h), lambda params: params['w'].shape[1], True)


def hyper() -> Personal:
    """A network shared by all, `pi_k -> dense(C, D) -> ReLU -> dense(D, D C) -> P_k [D, C]`.

    Returns:
      A form whose parameters are the two layers, 'in' and 'out', each with 'w' and 'b'.
    """

    def init(key: Array, generic: Tree, dim: int, classes: int) -> Tree:
        first, second = jax.random.split(key)
        return {'in': heads.dense_init(first, classes, dim), 'out': heads.dense_init(second, dim, dim * classes)}

    def logits(params: Tree, share: Array, h: Array) -> Array:
        made = heads.dense(params['out'], jax.nn.relu(heads.dense(params['in'], share)))
        return heads.product(h, made.reshape(h.shape[-1], len(share)))

    return Personal(init, logits, lambda params: params['in']['w'].shape[0], False)


def algorithm(
    model: Model,
    client_opt: ClientOptimizer,
    *,
    personal: Personal = linear(),  # noqa: B008
    personal_opt: ClientOptimizer = sgd(0.01, momentum=0.0, weight_decay=0.0, decay=0.99),  # noqa: B008
    separate: bool = True,
    personal_epochs: int | None = None,
    head: Head = heads.linear(bias=False),  # noqa: B008
    absent: str = 'mask',
    plan: Plan = Plan(64, 5),  # noqa: B008
    base: Callable[..., Algorithm] = fedavg.algorithm,
    **kwargs: Any,
) -> Algorithm:
    """The federated training of FedROD. `params['personal']` is the network, or what private heads start from.

    Clients predict with the server's body and generic head and their personal head; with `latest.keep(algorithm)`,
    FedNH's personal models, with those that their latest local work ended with, the network included.

    Args:
      model: feature extractor.
      client_opt: of body and generic head; published: `local.sgd(0.01, weight_decay=1e-5, decay=0.99, clip=10.0)`.
      personal: form of the personal head, `linear()` or `hyper()`; published: `hyper()` for CIFAR.
      personal_opt: of the personal head.
      separate: whether the personal head is trained after the others, as in FedNH's tables, on the final features,
        which are made once, in evaluation mode and without augmentation (that code augments); or beside them, each
        batch on the features before the step, and the reported loss is the sum.
      personal_epochs: epochs of that separate phase; by default those of the plan.
      head: the generic head.
      absent: what a class that a client lacks counts as in the balanced loss; see `losses.balanced_softmax`.
      plan: batch size and local epochs.
      base: the algorithm that trains it: FedAvg, or another factory whose messages are FedAvg's.
      **kwargs: as for `base`, but `parts`; clients count alike but for `aggregate` and `aggregate_stats`.

    Returns:
      An `Algorithm` with the server state of `base`, whose client state is a `Client` and whose clients send a
      `fedavg.Message`.

    Raises:
      ValueError: for another `absent`, a form, optimizer or epochs of the personal head that are none; on `init`, if
        the personal head cannot start as it should, or the base is FedBN, or remembers more than FedAvg beside a
        private head that is not trained separately; in the first round, if it sends more.
    """
    if absent not in ('floor', 'mask'):
        raise ValueError(f"absent must be 'floor' or 'mask', not {absent!r}")
    checks.kind('personal', personal, Personal)
    checks.flags(separate=separate)
    checks.optimizer('personal_opt', personal_opt)
    if personal_epochs is not None:
        checks.whole('personal_epochs', personal_epochs)
    generic = objective(model, head, functools.partial(losses.balanced_softmax, absent=absent))

    def first(key: Array, data: FederatedData) -> Variables:
        v, k_personal = generic.init(key, data), jax.random.fold_in(key, 2)  # 0 and 1 are what `generic` has used
        z, _ = jax.eval_shape(lambda x: generic.features(v, Batch(x)), data.x[:1])
        start = personal.init(k_personal, v.params['head'], z.shape[-1], data.num_classes)
        return v._replace(params={**v.params, 'personal': start})

    def beside(v: Variables, z: Array, batch: Batch) -> Array:
        """The personal head's loss, which moves nothing else."""
        z, given = jax.lax.stop_gradient((z, generic.logits(v, z)))
        logits = given + personal.logits(v.params['personal'], _shares(batch.counts), z)
        return masked_mean(losses.cross_entropy(logits, batch.y), batch.mask)

    def both(v: Variables, z: Array, batch: Batch) -> Array:
        return generic.loss(v, z, batch) + beside(v, z, batch)

    def opt(round: Array) -> optax.GradientTransformation:
        by_name = {'shared': client_opt(round), 'personal': personal_opt(round)}
        return optax.partition(by_name, lambda params: {k: 'personal' if k == 'personal' else 'shared' for k in params})

    task = generic._replace(init=first) if separate else generic._replace(init=first, loss=both)
    kwargs = {**fedavg.UNWEIGHTED, **kwargs, 'plan': plan}
    some, every = (
        base(task, client_opt if separate else opt, parts=parts, **kwargs) for parts in (('body', 'head'), None)
    )
    local, shared = (some if separate else every), (some if personal.private else every)
    personal_plan = plan if personal_epochs is None else plan._replace(epochs=personal_epochs)

    def init(key: Array, data: FederatedData) -> fedavg.Server:
        server = shared.init(key, data)
        # Then the base that trains clients is not the server's: it has the personal head, or has it not.
        return fedavg.plain_server(server) if personal.private != separate else server

    def holding(server: fedavg.Server, private: Tree) -> fedavg.Server:
        if not personal.private:
            return server
        v = server.variables
        return server._replace(variables=v._replace(params={**v.params, 'personal': private}))

    def fit(key: Array, server: fedavg.Server, v: Variables, shard: Shard) -> tuple[Variables, Info]:
        def put(part: Tree) -> Variables:
            return v._replace(params={**v.params, 'personal': part})

        own = featurize(lambda batch: task.features(v, batch)[0], shard, plan.batch_size)
        tuned, opt = on_features(task)._replace(loss=beside), personal_opt(server.round)
        return finetune.fit(key, tuned, v, v.params['personal'], put, opt, own, personal_plan)

    def init_client(key: Array, server: fedavg.Server) -> Client:
        first = server.variables.params['personal']
        share = _shares(jnp.zeros(personal.classes(first), jnp.int32))
        kept = fedbn.refused(local.init_client(key, server), 'predictions of FedROD')
        return Client(kept, first if personal.private else (), share)

    def client(key: Array, server: fedavg.Server, client: Client, shard: Shard) -> tuple[Client, fedavg.Message, Info]:
        mine = holding(server, client.head)
        own, message, info = local.client(key, mine, client.own, shard)
        message = fedavg.plain_message(message)
        v = fedavg.trained_model(mine, message)
        if separate:
            v, second = fit(jax.random.fold_in(key, plan.epochs), server, v, shard)  # training folds in smaller numbers
            info = joined(info, second)
        end, sent = v.params['personal'], {name: message.delta[name] for name in ('body', 'head')}
        if not personal.private:
            sent['personal'] = tree.sub(end, server.variables.params['personal'])
        kept = Client(own, end if personal.private else (), _shares(shard.counts))
        return kept, message._replace(delta=sent), info

    def predict(server: fedavg.Server, client: Client | None, x: Array) -> Array:
        v = server.variables if client is None else holding(server, client.head).variables
        z, _ = task.features(v, Batch(x))
        logits = task.logits(v, z)
        return logits if client is None else logits + personal.logits(v.params['personal'], client.share, z)

    return shared._replace(init=init, init_client=init_client, client=client, predict=predict)


def _shares(counts: Array) -> Array:
    """Class shares `pi_k [C]` of a client with those counts, floored so that their logs are finite."""
    n = jnp.maximum(counts.astype(jnp.float32), 1e-12)
    return n / jnp.sum(n)
