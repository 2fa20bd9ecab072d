"""Our side of `parity.py`: the library's own rounds in double precision, and what the authors' code needs for the same.

The library is float32 by the name `jnp.float32`. Where double precision is wanted from end to end, this name is given
to it before the library is imported (`double_precision`), so that every line of the library runs as it is. Convolutions
are matrix products of patches, because oneDNN knows no doubles. Images of FedLoGe's network are 16x16: a batch of two
on 8x8, whose last images are single pixels, has normalised values of +-1 that turn on the last digits.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

SIZES = (7, 12, 20, 13)
"""Examples of the clients: with batches of 8, last batches of 7, 4, 4 and 5."""

CLASSES = ((0, 1, 2), (2, 3, 4, 5), (0, 1, 2, 3, 4, 5, 6), (6, 7, 8))
"""Classes of which they hold examples, out of ten; nobody has the last."""

COHORTS = [[0, 1, 2, 3], [0, 2, 3], [1, 2]]
"""Who takes part in three rounds; the last cohort lacks at least three classes."""

BATCH, EPOCHS, CHOSEN, TESTS = 8, 2, 2, 20


class Row(NamedTuple):
    """A line of the table: which of our arrays are compared with which of theirs."""

    quantity: str
    ours: str  # beginning of their names
    theirs: str
    cause: str = ''  # of a deliberate departure; without one, both must agree


class Case(NamedTuple):
    """One method on one model."""

    method: str
    part: str  # the worker's, and the checkout's name
    given: dict[str, np.ndarray]  # data and first weights
    settings: dict[str, Any]  # rows, classes, counts, hyper-parameters, runs
    ours: dict[str, np.ndarray]  # results by names that begin with that of the run
    rows: list[Row]


class Off(NamedTuple):
    """Factors on two of our hyper-parameters, to see that the table tells."""

    lr: float = 1.0
    rho: float = 1.0


def double_precision() -> None:
    """Lets jax and the library compute in float64.

    Raises:
      RuntimeError: if the library has been imported already.
    """
    import jax
    import jax.numpy

    if 'fedjax_nc' in sys.modules:
        raise RuntimeError('the library has been imported in single precision: run parity.py as a script')
    jax.config.update('jax_enable_x64', True)
    jax.numpy.float32 = jax.numpy.float64


def cases(method: str, off: Off) -> list[Case]:
    """What is compared of a method, computed; `double_precision` comes first."""
    return {'fedetf': fedetf, 'fednh': fednh, 'fedloge': fedloge}[method](off)


class Setting:
    """Random images, the clients' shares of them, and rounds on them.

    Args:
      side: height and width of the images.
    """

    def __init__(self, side: int) -> None:
        from fedjax_nc import data

        rng = np.random.default_rng(side)
        y = np.concatenate([rng.choice(held, size) for held, size in zip(CLASSES, SIZES, strict=True)])
        shares = np.split(rng.permutation(len(y)), np.cumsum(SIZES)[:-1])
        labels = np.empty_like(y)
        labels[np.concatenate(shares)] = y
        self.data = data.federate(rng.normal(size=(len(y), side, side, 3)), labels, shares, 10)
        self.test = rng.normal(size=(TESTS, side, side, 3))
        self.rows = [share.tolist() for share in shares]

    def given(self, start: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tests = {'test_x': self.test, 'test_y': np.arange(TESTS) % 10}
        return {'x': np.asarray(self.data.x), 'y': np.asarray(self.data.y), **tests, **start}

    def settings(self, **more: Any) -> dict[str, Any]:
        counts = np.asarray(self.data.counts).tolist()
        return {'rows': self.rows, 'classes': 10, 'counts': counts, 'batch_size': BATCH, 'epochs': EPOCHS, **more}

    def play(self, run: Callable[..., Any], key: Any, state: Any, cohorts: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        """The state after one round a cohort, and the training loss of each. Cohorts are filled up with nobody."""
        import jax

        state, seen = jax.tree.map(jax.numpy.array, state), []
        for t, cohort in enumerate(cohorts):
            ids = np.array([*cohort, *[len(SIZES)] * (len(SIZES) - len(cohort))])
            state, report = run(jax.random.fold_in(key, t), state, self.data, ids)
            seen.append(float(report.loss))
        return state, np.array(seen)

    def orders(
        self, key: Any, cohorts: Sequence[Sequence[int]], epochs: int = EPOCHS, once_more: bool = False
    ) -> dict[str, list[Any]]:
        """The passes over the data that `play` makes with this key: client -> passes -> batches -> (rows, mirrored).

        With `once_more`, each round of a client ends with a pass in the order of its rows, as FedNH's class means do.
        """
        import jax

        out: dict[str, list[Any]] = {}
        for t, cohort in enumerate(cohorts):
            k_clients = jax.random.split(jax.random.fold_in(key, t), 3)[1]  # as in simulate.make_work
            for k in cohort:
                mine = jax.random.fold_in(k_clients, k)
                passes = [self.epoch(mine, k, e) for e in range(epochs)]
                if once_more:
                    rows, k_images = np.array(self.rows[k]), jax.random.fold_in(mine, epochs)
                    passes.append(self.batches(rows, k_images, k))
                out.setdefault(str(k), []).extend(passes)
        return out

    def epoch(self, key: Any, k: int, e: int, index: Any = None) -> list[Any]:
        """The batches of epoch e of `local.local_sgd` with this key; `index` where its rows have other numbers."""
        import jax

        from fedjax_nc import local

        shard = self.data.shard(k)
        k_order, k_batch = jax.random.split(jax.random.fold_in(key, e))
        rows = local._shuffled(k_order, shard if index is None else shard._replace(index=index), BATCH)
        rows = np.asarray(rows[: SIZES[k]])
        return self.batches(rows if index is None else np.array(self.rows[k])[rows], k_batch, k)

    def batches(self, rows: np.ndarray, key: Any, k: int) -> list[Any]:
        import jax

        out = []
        for s, at in enumerate(range(0, len(rows), BATCH)):
            k_augment = jax.random.split(jax.random.fold_in(key, s))[0]  # as in models.from_flax
            some = rows[at : at + BATCH].tolist()
            out.append([some, np.asarray(coins(k_augment, BATCH))[: len(some)].astype(int).tolist()])
        return out


def coins(key: Any, n: int) -> Any:
    import jax

    return jax.random.bernoulli(key, 0.5, (n,))


def mirrored(x: Any, key: Any) -> Any:
    """Our augmentation: each image of a training batch is mirrored or not."""
    import jax.numpy as jnp

    return x if key is None else jnp.where(coins(key, len(x))[:, None, None, None], x[:, :, ::-1], x)


def plain(orders: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The same passes without augmentation."""
    return {k: [[[rows, [0] * len(rows)] for rows, _ in batches] for batches in passes] for k, passes in orders.items()}


def prefixed(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f'{prefix}/{name}': array for name, array in arrays.items()}


def weights(state: Any) -> dict[str, np.ndarray]:
    from side_by_side import named

    return named(state.server.variables)


def shown(algorithm: Any, state: Any, setting: Setting, seen: Any) -> dict[str, np.ndarray]:
    """The results of a run: weights, training losses and logits of the test images."""
    return {**weights(state), 'loss': seen, 'logits': np.asarray(algorithm.predict(state.server, None, setting.test))}


RUNS = {'client': [[CHOSEN]], 'rounds': COHORTS}
"""The cohorts of what is compared: one round of one client, whose model becomes the server's, and three rounds."""

WHEN = {'client': "after a client's update", 'rounds': 'after 3 rounds'}


def each(parts: dict[str, str]) -> list[Row]:
    """Rows that must agree: part -> where it is, for both runs."""
    return [
        Row(f'{part} {when}', f'{run}/{where}', f'{run}/{where}')
        for run, when in WHEN.items()
        for part, where in parts.items()
    ]


def fedetf(off: Off) -> list[Case]:
    import jax

    from fedjax_nc import frames, local, models, simulate
    from fedjax_nc.algorithms import fedetf

    opt = local.sgd(0.04 * off.lr)
    plan, turn, cycles, k_own = local.Plan(BATCH, EPOCHS), local.Plan(BATCH, 3), 20, 1
    k_init, k_stage, *k_runs = jax.random.split(jax.random.key(1), 2 + len(RUNS))
    out = []
    for name, body, head in (
        ('CNN', models.CNN(conv=models.conv_patches), {'dim': 64, 'scale': 10.0}),
        ('ResNet20', models.ResNet20(norm='batch', conv=models.conv_patches), {}),
    ):
        setting, model, small = Setting(32), models.from_flax(body), name == 'CNN'
        algorithm = fedetf.algorithm(model, opt, plan=plan, persist_momentum=True, **head)
        run = simulate.compiled(simulate.make_round(algorithm))
        first = simulate.init(algorithm, k_init, setting.data)
        ours, runs = dict[str, np.ndarray](), dict[str, Any]()
        for (which, cohorts), key in zip(RUNS.items(), k_runs, strict=True):
            state, seen = setting.play(run, key, first, cohorts)
            ours |= prefixed(which, shown(algorithm, state, setting, seen))
            ours[f'{which}/cosines'] = ours[f'{which}/logits'] / ours[f'{which}/params/head/scale']
            runs[which] = {'cohorts': cohorts, 'orders': plain(setting.orders(key, cohorts))}

        # Both stages of personalisation from there, on one client.
        stage = fedetf.personalize(model, opt, plan=plan, released=True, turn=turn, cycles=cycles)
        tuned = simulate.join(stage, k_stage, state.server, len(SIZES))
        tuned, _ = simulate.compiled(simulate.make_round(stage))(k_stage, tuned, setting.data, np.array([k_own]))
        mine = state.server._replace(variables=jax.tree.map(lambda u: u[k_own], tuned.clients))
        ours |= prefixed('own', weights(simulate.State(mine, ())))
        passes = personal_passes(setting, k_stage, k_own, turn.epochs, cycles)
        runs['rounds'] |= {'personal': k_own, 'personal_orders': plain({str(k_own): passes})}

        rows = each({'body': 'params/body', 'projection': 'params/head/proj', 'temperature': 'params/head/scale'})
        rows += [] if small else each({'BatchNorm statistics': 'stats'})
        rows += [
            Row('cosines of test images to the frame', 'rounds/cosines', 'rounds/logits'),
            Row(
                'logits of test images', 'rounds/logits', 'rounds/logits', 'their evaluation leaves the temperature out'
            ),
            Row('training loss, by examples', 'rounds/loss', 'rounds/loss'),
            Row(
                'training loss as reported', 'rounds/loss', 'rounds/told', 'theirs is the mean of batches, then clients'
            ),
        ]
        personal = {'body': 'params/body', 'projection': 'params/head/proj', 'frame': 'fixed/v'}
        if small:
            rows += [Row(f'personal {part}', f'own/{where}', f'anew/{where}') for part, where in personal.items()]
            cause = 'theirs go on with the momentum of training; `personalize` starts it anew'
            rows += [Row('personal models after training', 'own/params', 'carried/params', cause)]
            forgetful = fedetf.algorithm(model, opt, plan=plan, **head)
            run = simulate.compiled(simulate.make_round(forgetful))
            state, _ = setting.play(run, k_runs[-1], simulate.init(forgetful, k_init, setting.data), COHORTS)
            ours |= prefixed('forgetful', weights(state))
            cause = 'their momentum outlives rounds; ours by default not (`persist_momentum=True` above)'
            rows += [Row('body after 3 rounds, by default', 'forgetful/params/body', 'rounds/params/body', cause)]
            v = np.asarray(frames.simplex_etf(k_init, 64, 10))
            ours['frame/gram'] = v.T @ v
            rows += [Row('inner products of the first frame', 'frame/gram', 'frame/gram')]
        else:
            cause = 'their frozen body still normalises by batches and moves its statistics; ours is in evaluation mode'
            rows += [Row('personal body', 'own/params/body', 'anew/params/body')]
            parts = {'BatchNorm statistics': 'stats', 'projection': 'params/head/proj', 'frame': 'fixed/v'}
            rows += [Row(f'personal {part}', f'own/{where}', f'anew/{where}', cause) for part, where in parts.items()]
        settings = setting.settings(model=name, lr=0.04, momentum=0.9, weight_decay=5e-4, runs=runs)
        out.append(Case(f'FedETF, {name}', 'fedetf', setting.given(weights(first)), settings, ours, rows))
    return out


def personal_passes(setting: Setting, key: Any, k: int, epochs: int, cycles: int) -> list[Any]:
    """The passes of `fedetf.personalize` in a round of this key."""
    import jax
    import jax.numpy as jnp

    key = jax.random.fold_in(jax.random.split(key, 3)[1], k)
    k_first, k_second = jax.random.split(key)
    passes = [setting.epoch(k_first, k, e) for e in range(EPOCHS)]
    anew = jnp.arange(setting.data.index.shape[1])  # the second stage works on features, which are numbered anew
    for k_cycle in jax.random.split(k_second, cycles):
        for k_turn in jax.random.split(k_cycle):
            passes += [setting.epoch(k_turn, k, e, anew) for e in range(epochs)]
    return passes


def fednh(off: Off) -> list[Case]:
    import functools

    import jax

    from fedjax_nc import frames, local, models, simulate
    from fedjax_nc.algorithms import fednh

    setting, rho, scale, big = Setting(32), 0.9, 1.0, 20.0  # only with the last do gradients reach the limit of 10
    model = models.from_flax(models.Conv2Cifar(conv=models.conv_patches), mirrored)
    opt = local.sgd(0.01 * off.lr, weight_decay=1e-5, decay=0.99, clip=10.0)
    k_init, *k_runs = jax.random.split(jax.random.key(2), 1 + len(RUNS))
    orthogonal = functools.partial(frames.uniform, method='orthogonal')

    def make(**options: Any) -> Any:
        options = {'init': orthogonal, 'augment': True, **options}
        return fednh.algorithm(model, opt, rho=rho * off.rho, plan=local.Plan(BATCH, EPOCHS), **options)

    def rounds(which: str, algorithm: Any, cohorts: list[list[int]], key: Any, scale: float = scale) -> None:
        """Plays a run of ours and, unless it is one of a departure, asks for the same of theirs."""
        state, seen = setting.play(compiled(algorithm), key, begin(scale), cohorts)
        ours.update(prefixed(which, shown(algorithm, state, setting, seen)))
        if which != 'still':
            orders = setting.orders(key, cohorts, once_more=True)
            runs[which] = {'cohorts': cohorts, 'orders': orders, 'scale': scale, 'adaptive': which == 'adaptive'}

    def begin(scale: float) -> Any:
        state = simulate.init(released, k_init, setting.data)
        v = state.server.variables
        v = v._replace(params={**v.params, 'head': {'scale': jax.numpy.asarray(scale)}})
        return state._replace(server=state.server._replace(variables=v))

    @functools.cache
    def compiled(algorithm: Any) -> Any:
        return simulate.compiled(simulate.make_round(algorithm))

    ours, runs = dict[str, np.ndarray](), dict[str, Any]()
    released = make()
    for (which, cohorts), key in zip(RUNS.items(), k_runs, strict=True):
        rounds(which, released, cohorts, key)
    rounds('adaptive', make(confident=True, weigh='agreement'), COHORTS, k_runs[-1])
    rounds('clipped', released, RUNS['client'], k_runs[0], big)
    rounds('still', make(augment=False), COHORTS, k_runs[-1])
    for name, frame in (('orthogonal', orthogonal), ('uniform', frames.uniform)):
        v = np.asarray(frame(k_init, 192, 10))
        ours[name] = v.T @ v
    rows = each({'body': 'params/body', 'scale': 'params/head/scale', 'prototypes': 'fixed/w'})
    rows += [
        Row('prototypes, adaptive weights', 'adaptive/fixed/w', 'adaptive/fixed/w'),
        Row('logits of test images', 'rounds/logits', 'rounds/logits'),
        Row('training loss, by examples', 'rounds/loss', 'rounds/loss'),
        Row('training loss as reported', 'rounds/loss', 'rounds/told', "theirs is the last local epoch's"),
        Row('inner products of the first prototypes', 'orthogonal', 'frame/gram'),
        Row(
            'the same, by default', 'uniform', 'frame/gram',
            "the paper's prototypes are as far apart as they can be; `method='orthogonal'` above",
        ),
        Row(
            'prototypes after 3 rounds, by default', 'still/fixed/w', 'rounds/fixed/w',
            'class means of plain images, as in the paper; `augment=True` above',
        ),
        Row(
            "body after a client's update, gradients clipped", 'clipped/params/body', 'clipped/params/body',
            'PyTorch divides by the norm plus 1e-6',
        ),
    ]  # fmt: skip
    start = weights(begin(scale))
    settings = setting.settings(lr=0.01, decay=0.99, momentum=0.9, weight_decay=1e-5, rho=rho, runs=runs)
    return [Case('FedNH', 'fednh', setting.given(start), settings, ours, rows)]


def fedloge(off: Off) -> list[Case]:
    import functools

    import jax

    from fedjax_nc import frames, local, models, simulate
    from fedjax_nc.algorithms import fedloge

    setting, blocks = Setting(16), (1, 1, 1, 1)
    body = models.ResNet(widths=(64, 128, 256, 512), blocks=blocks, norm='batch', conv=models.conv_patches)
    model, opt = models.from_flax(body), local.sgd(0.03 * off.lr, momentum=0.5, weight_decay=0.0)
    frame = functools.partial(frames.sparse_etf, steps=100)
    k_init, k_stage, *k_runs = jax.random.split(jax.random.key(3), 2 + len(RUNS))

    def make(**options: Any) -> Any:
        return fedloge.algorithm(model, opt, frame=frame, plan=local.Plan(BATCH, EPOCHS), **options)

    released = make(aux_bias=True, frozen_bias=True)
    run = simulate.compiled(simulate.make_round(released))
    first = simulate.init(released, k_init, setting.data)
    ours, runs = dict[str, np.ndarray](), dict[str, Any]()
    for (which, cohorts), key in zip(RUNS.items(), k_runs, strict=True):
        state, seen = setting.play(run, key, first, cohorts)
        ours |= prefixed(which, {**shown(released, state, setting, seen), **private(state)})
        runs[which] = {'cohorts': cohorts, 'orders': plain(setting.orders(key, cohorts))}

    for which, options in (('realigned', {'mode': 'released', 'scale': 1.7, 'keep_bias': True}), ('paper', {})):
        stage = fedloge.realign(model, opt, plan=local.Plan(BATCH, EPOCHS), **options)
        ready = fedloge.stage_state(state)
        ready, _ = simulate.compiled(simulate.make_round(stage))(k_stage, ready, setting.data)
        aux, held = ready.server.variables.params['aux'], np.asarray(setting.data.counts)[:, None] > 0
        generic = fedloge.global_realign(aux, options.get('scale', 1.0), options.get('keep_bias', False))
        ours |= prefixed(f'{which}/generic', {name: np.asarray(u) for name, u in generic.items()})
        ours[f'{which}/generic/logits'] = np.asarray(stage.predict(ready.server, None, setting.test))
        heads = ready.clients.realigned
        ours |= prefixed(f'{which}/personal', {name: np.asarray(u) for name, u in heads.items()})
        each_client = [jax.tree.map(lambda u, k=k: u[k], ready.clients) for k in range(len(SIZES))]
        logits = [np.asarray(stage.predict(ready.server, mine, setting.test)) for mine in each_client]
        ours[f'{which}/personal/logits'] = np.where(held, np.stack(logits), 0.0)

    bare = make()
    run = simulate.compiled(simulate.make_round(bare))
    state, _ = setting.play(run, k_runs[0], unbiased(first), RUNS['client'])
    ours |= prefixed('bare', weights(state))

    parts = {'backbone': 'params/body', 'BatchNorm statistics': 'stats', 'auxiliary head': 'params/aux'}
    rows = each({**parts, 'private heads': 'private'})
    rows += [
        Row('logits of the frozen head', 'rounds/logits', 'frozen/logits'),
        Row('training loss, by examples', 'rounds/loss', 'rounds/loss'),
        Row('training loss as reported', 'client/loss', 'client/told', 'theirs is the mean of batches'),
        Row('realigned generic head (GA-FR)', 'realigned/generic', 'generic'),
        Row('realigned personal heads (LA-FR), their logits', 'realigned/personal', 'personal'),
        Row(
            "backbone after a client's update, by default", 'bare/params/body', 'client/params/body',
            'no bias in the frozen head, as in the paper; `frozen_bias=True` above',
        ),
        Row(
            'logits of the generic head, by default', 'paper/generic/logits', 'generic/logits',
            'Equation 6 has neither the factor 1.7 nor a bias; `scale=1.7, keep_bias=True` above',
        ),
        Row(
            'logits of personal models, by default', 'paper/personal/logits', 'personal/logits',
            "theirs add the private head's; `mode='released'` above",
        ),
    ]  # fmt: skip
    given = {**setting.given(weights(first)), **private(first)}
    settings = setting.settings(lr=0.03, momentum=0.5, blocks=blocks, runs=runs)
    return [Case('FedLoGe', 'fedloge', given, settings, ours, rows)]


def private(state: Any) -> dict[str, np.ndarray]:
    return {f'private/{name}': np.asarray(u) for name, u in state.clients.head.items()}


def unbiased(state: Any) -> Any:
    """FedLoGe's first state without its biases."""
    v, clients = state.server.variables, state.clients
    aux, fixed = ({name: u for name, u in part.items() if name != 'b'} for part in (v.params['aux'], v.fixed))
    v = v._replace(params={**v.params, 'aux': aux}, fixed=fixed)
    clients = clients._replace(head={'w': clients.head['w']})
    return state._replace(server=state.server._replace(variables=v), clients=clients)
