"""FedETF: federated learning with a synthetic and fixed simplex-ETF classifier.

No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and Fixed Classifier.
Li, Shang, He, Lin, Wu. ICCV 2023. https://arxiv.org/abs/2303.10058

Features `h = f(x)` are projected and normalised, `mu = normalize(h W + b)`, and compared with the columns of a frozen
simplex ETF `V`: logits `beta V^T mu` with a learnable temperature beta. Clients minimise the balanced loss
`-log softmax(beta V^T mu + gamma log n_k)_y`; extractor, projection and temperature are averaged as in FedAvg. After
training each client makes the model its own: it adapts the extractor, then its classifier and projection in turns.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_nc import checks, heads, losses
from fedjax_nc.algorithms import fedavg, finetune
from fedjax_nc.base import Algorithm, Array, Info, Model, Shard, Tree, Variables
from fedjax_nc.local import ClientOptimizer, Plan, checked, featurize, joined, sgd
from fedjax_nc.objective import objective, on_features


def algorithm(
    model: Model,
    client_opt: ClientOptimizer,
    *,
    dim: int | None = None,
    scale: float = 1.0,
    gamma: Array | float = 1.0,
    absent: str = 'floor',
    base: Callable[..., Algorithm] = fedavg.algorithm,
    **kwargs: Any,
) -> Algorithm:
    """The federated training of FedETF.

    Args:
      model: feature extractor.
      client_opt: from the round's number to a client's optimizer; published: `local.sgd(0.04)` for CIFAR-10.
      dim: dimension d >= C-1 of the ETF; C by default.
      scale: first value of the temperature; published: 1 for ResNets, 10 for the small CNN.
      gamma: exponent of the class counts in the loss; 0 turns the balancing off.
      absent: what a class that a client lacks counts as; see `losses.balanced_softmax`. The paper writes 'mask', its
        released code does 'floor'.
      base: the algorithm that trains it: FedAvg, or another factory that takes an objective and an optimizer.
      **kwargs: as for `base`.

    Returns:
      An `Algorithm` with the states and messages of `base`. In `variables`, `params['head']` has `proj` (`w [D, d]`,
      `b [d]`) and the temperature `scale []`, and `fixed['v']` is the ETF [d, C]. `predict` is the generic model's.

    Raises:
      ValueError: for another `absent`, a negative `gamma`, or a `scale` that is not positive; on `init`, if `dim` is
        below C-1.

    Example:
      >>> import jax
      >>> from fedjax_nc import local, models, simulate, testing
      >>> from fedjax_nc.algorithms import fedetf
      >>> clients = testing.clients()  # of 5 classes
      >>> algorithm = fedetf.algorithm(models.from_flax(models.MLP((16,))), local.sgd(0.1), dim=8)
      >>> server = simulate.init(algorithm, jax.random.key(0), clients).server
      >>> sorted(server.variables.params['head']), server.variables.fixed['v'].shape
      (['proj', 'scale'], (8, 5))
      >>> algorithm.predict(server, None, clients.x[:3]).shape
      (3, 5)
    """
    if absent not in ('floor', 'mask'):
        raise ValueError(f"absent must be 'floor' or 'mask', not {absent!r}")
    checks.number('gamma', gamma)
    balanced = functools.partial(losses.balanced_softmax, gamma=gamma, absent=absent)
    return base(objective(model, heads.etf(dim, scale=scale), balanced), client_opt, **kwargs)


def adapt_features(
    model: Model,
    client_opt: ClientOptimizer,
    *,
    plan: Plan = Plan(),  # noqa: B008
    released: bool = False,
) -> Algorithm:
    """The first stage of personalisation: extractor and temperature are tuned on the client's own data.

    Args:
      model: feature extractor.
      client_opt: optimizer of the federated training; its momentum starts anew.
      plan: batch size and epochs.
      released: as the authors' released code does it: the projection is tuned too, with the balanced loss.

    Returns:
      A stage as of `finetune.stage`. The client state is the client's model, nothing is sent.

    Raises:
      ValueError: for a model, optimizer or plan that is none; when joined, for a head that was not trained by FedETF.
    """
    checks.optimizer('client_opt', client_opt)
    checked('plan', plan)
    checks.flags(released=released)
    task = objective(model, heads.etf(), losses.balanced_softmax if released else losses.cross_entropy)

    def tune(key: Array, server: fedavg.Server, mine: Variables, shard: Shard) -> tuple[Variables, Info]:
        head = mine.params['head']

        def put(part: Tree) -> Variables:
            return mine._replace(params={'body': part['body'], 'head': {**head, **part['head']}})

        trained = {'body': mine.params['body'], 'head': head if released else {'scale': head['scale']}}
        return finetune.fit(key, task, mine, trained, put, client_opt(server.round), shard, plan)

    return _of_fedetf(finetune.stage(task, tune))


def alternate(
    model: Model,
    *,
    cycles: int = 20,
    turn: Plan = Plan(),  # noqa: B008
    frame_opt: ClientOptimizer = sgd(0.1, momentum=0.0, weight_decay=0.0),  # noqa: B008
    proj_opt: ClientOptimizer = sgd(0.05),  # noqa: B008
    tune_scale: bool = True,
) -> Algorithm:
    """The second stage of personalisation: the client's classifier and its projection are tuned in turns.

    The extractor is frozen in evaluation mode, so that features are computed once. The frame becomes the client's own
    and is not normalised again. Both turns minimise the plain cross-entropy.

    Args:
      model: feature extractor.
      cycles: how often both are tuned.
      turn: batch size and epochs of one turn.
      frame_opt: optimizer of the classifier. Its state starts anew each turn.
      proj_opt: optimizer of the projection.
      tune_scale: whether the temperature moves with either, as in the paper; the released code holds it.

    Returns:
      A stage as of `finetune.stage`. The client state is the client's model, with its frame in `fixed['v']`, and
      nothing is sent. The loss that is reported is that of the last turn.

    Raises:
      ValueError: if there is no cycle, or for a model, plan or optimizer that is none; when joined, for a head that was
        not trained by FedETF.
    """
    checks.whole('cycles', cycles, advice='use adapt_features alone for the first stage')
    checked('turn', turn)
    checks.flags(tune_scale=tune_scale)
    checks.optimizer('frame_opt', frame_opt)
    checks.optimizer('proj_opt', proj_opt)
    task = objective(model, heads.etf(), losses.cross_entropy)

    def tune(key: Array, server: fedavg.Server, mine: Variables, shard: Shard) -> tuple[Variables, Info]:
        cached = featurize(lambda batch: task.features(mine, batch)[0], shard, turn.batch_size)

        def fit(key: Array, v: Variables, part: Tree, opt: ClientOptimizer) -> tuple[Variables, Info]:
            def put(part: Tree) -> Variables:
                params = {**v.params, 'head': {**v.params['head'], **part['head']}}
                return v._replace(params=params, fixed={**v.fixed, **part['fixed']})

            return finetune.fit(key, on_features(task), v, part, put, opt(server.round), cached, turn)

        def cycle(v: Variables, key: Array) -> tuple[Variables, Info]:
            k_frame, k_proj = jax.random.split(key)
            scale = {'scale': v.params['head']['scale']} if tune_scale else {}
            v, first = fit(k_frame, v, {'fixed': v.fixed, 'head': scale}, frame_opt)
            head = v.params['head']
            scale = {'scale': head['scale']} if tune_scale else {}
            v, second = fit(k_proj, v, {'fixed': {}, 'head': {**scale, 'proj': head['proj']}}, proj_opt)
            return v, joined(first, second)

        tuned, infos = jax.lax.scan(cycle, mine, jax.random.split(key, cycles))
        return tuned, jax.tree.map(lambda u: jnp.sum(u, axis=0), infos)._replace(loss=infos.loss[-1])

    return _of_fedetf(finetune.stage(task, tune))


def personalize(
    model: Model,
    client_opt: ClientOptimizer,
    *,
    plan: Plan = Plan(),  # noqa: B008
    released: bool = False,
    **kwargs: Any,
) -> Algorithm:
    """Both stages of personalisation in one round: `adapt_features`, then `alternate(**kwargs)`.

    Args:
      model: feature extractor.
      client_opt: optimizer of the first stage.
      plan: batch size and epochs of the first stage.
      released: as for `adapt_features`. The second stage then holds the temperature, unless `tune_scale=True` is given.
      **kwargs: as for `alternate`.

    Returns:
      A stage as of `finetune.stage`. The client state is the client's model, nothing is sent.

    Raises:
      ValueError: as both stages do.
    """
    first = adapt_features(model, client_opt, plan=plan, released=released)
    second = alternate(model, **{'tune_scale': not released, **kwargs})

    def client(key: Array, server: fedavg.Server, mine: Variables, shard: Shard) -> tuple[Variables, tuple, Info]:
        k_first, k_second = jax.random.split(key)
        mine, _, a = first.client(k_first, server, mine, shard)
        mine, _, b = second.client(k_second, server, mine, shard)
        return mine, (), joined(a, b)

    return second._replace(client=client)


def _of_fedetf(stage: Algorithm) -> Algorithm:
    """A stage that begins with a model of FedETF only."""

    def init_client(key: Array, server: fedavg.Server) -> Variables:
        if not {'proj', 'scale'} <= set(server.variables.params['head']):
            raise ValueError('this stage tunes a projection and a temperature: train with fedetf.algorithm first')
        return stage.init_client(key, server)

    return stage._replace(init_client=init_client)
