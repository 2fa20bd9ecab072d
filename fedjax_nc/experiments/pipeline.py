"""A run from its data to its summary: train, calibrate, make personal, evaluate, sum up."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_nc import checkpoints, data, evaluate, local, memory, models, plots, simulate, training
from fedjax_nc.base import Algorithm, Array, FederatedData, State
from fedjax_nc.data import images
from fedjax_nc.experiments import provenance, recipes, traffic
from fedjax_nc.experiments.setting import MODELS, PARTITIONS, PIXELS, Setting

ETF: dict[str, dict[str, Any]] = {
    'cnn': {'dim': 64, 'scale': 10.0}
}  # FedETF's frame and first temperature; C and 1 for the other models
FREE = ('rounds', 'eval_every')  # what may differ when a run is resumed


def run(
    setting: Setting,
    out: str | Path,
    *,
    data_dir: str | Path | None = None,
    resume: bool = False,
    chunk: int | None = None,
    mesh: Mesh | None = None,
    record: dict[str, Any] | None = None,
    on_round: training.OnRound | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Carries out a run, and returns its summary.

    Writes `config.json`, `metrics.jsonl`, `metrics.csv`, `summary.json`, `accuracy.png` and `checkpoints/` into `out`,
    which it holds as long as it lasts.

    Args:
      setting: what to run.
      out: where its files go.
      data_dir: where data sets lie or are put.
      resume: continue the run in `out`, or begin it.
      chunk: clients side by side.
      mesh: devices that share the clients, from `devices.mesh`.
      record: what `config.json` says beside the setting.
      on_round: as for `training.run`.
      progress: whether it is shown.

    Raises:
      ValueError: for a setting that cannot be, or an `out` that is in use, or holds a run that is not to be resumed or
        has other settings; and as `data.load_dataset` and `training.run`.
      DivergedError: if training or the personal models diverged.
    """
    out, clock = Path(out), Clock()
    with checkpoints.holding(out):
        settle(setting, out, resume)
        with clock.part('data'):
            scene = load(setting, data_dir)
        recipe = build(setting, scene[0])
        k_init, k_train, k_tune = jax.random.split(jax.random.key(setting.seed), 3)
        with clock.part('initialisation'):
            state = simulate.init(recipe.train, k_init, scene[1])
            first = jax.device_get(state.server)  # training takes the buffers of the state
        config = {**setting.plain(), **{k: v for k, v in (record or {}).items() if v is not None}}
        if not (out / 'config.json').exists():
            write(out / 'config.json', config)
        measure = Measures(setting, recipe, scene, k_train, k_tune, chunk)

        def evaluated(state: State) -> dict[str, Array]:
            with clock.part('evaluation'):
                return jax.block_until_ready(measure.general(state))

        done = training.run(
            recipe.train, k_train, state, scene[1], rounds=setting.rounds, cohort=setting.cohort, chunk=chunk,
            mesh=mesh, evaluate=evaluated, eval_every=setting.eval_every, eval_last=setting.eval_last,
            out=out, resume=resume, on_round=on_round, progress=progress, name=setting.algorithm,
        )  # fmt: skip
        trained = done.state if mesh is None else jax.tree.map(jnp.asarray, jax.device_get(done.state))
        with clock.part('personal'):
            personal, tuned = measure.personal(trained)
        clock.seconds |= {
            'compilation': done.compile_seconds or compiled_before(out),
            'rounds': sum(row['seconds'] for row in done.history),
        }
        summary = {
            'algorithm': setting.algorithm,
            'dataset': setting.dataset,
            'seed': setting.seed,
            'rounds': setting.rounds,
            **({'global_accuracy': done.history[-1]['accuracy']} if recipe.generic else {}),
            **{
                f'global_{name}_last{setting.last}': training.last_mean(done.history, name, setting.last)
                for name in ('accuracy', 'accuracy_trained', 'many', 'medium', 'few')
                if name in done.history[-1]
            },
            **personal,
            **measure.final(trained),
            'rounds_per_second': done.rounds_per_second,
            'compile_seconds': clock.seconds['compilation'],
            'seconds': {**clock.seconds, 'total': sum(clock.seconds.values())},
            'padded_work_share': float(np.mean([row['padded_work'] for row in done.history])),
            'broken_clients': int(sum(row['broken'] for row in done.history)),
            'parameters': parameters(trained),
            'bytes': sent(setting, traffic.of(recipe.train, first, trained, scene[1])),
            'jax': jax.__version__,
            **provenance.about(),
        }
        write(out / 'config.json', config)  # a resumed run may be longer than it was begun
        write(out / 'summary.json', summary)
        picture(setting, recipe, done, out)
        if not tuned:
            raise training.DivergedError('the personal models diverged: begin a new run with a lower lr')
        return summary


class Clock:
    """Where the time of a run goes. What is measured again adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds what passes in it to a part."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun


def parameters(state: State) -> dict[str, int]:
    """Numbers that are trained, by the parts of the model and in all; those of the server's model."""
    parts = {name: sum(u.size for u in jax.tree.leaves(part)) for name, part in state.server.variables.params.items()}
    return {**parts, 'total': sum(parts.values())}


def sent(setting: Setting, each: traffic.Traffic) -> dict[str, int]:
    """Bytes of a client in a round, of a round, and of the run, in which every client is sent once what never moves."""
    members, rounds = setting.cohort, setting.rounds
    return {
        'client_down': each.down,
        'client_up': each.up,
        'client_once': each.once,
        'round_down': members * each.down,
        'round_up': members * each.up,
        'down': rounds * members * each.down + setting.clients * each.once,
        'up': rounds * members * each.up,
    }


def picture(setting: Setting, recipe: recipes.Recipe, done: training.Run, out: Path) -> None:
    """Draws the accuracy over rounds."""
    shown = 'accuracy' if recipe.generic else 'accuracy_personal'
    seen = [(row['round'], row[shown]) for row in done.history if shown in row]
    rounds, values = (np.array(column) for column in zip(*seen, strict=True))
    title = f'{setting.dataset}, {setting.clients} clients, {setting.partition}'
    if setting.partition.startswith('dirichlet'):
        title = f'{setting.dataset}, {setting.clients} clients, Dirichlet({setting.alpha:g})'
    plots.accuracy_curves({setting.algorithm: (rounds, values)}, title=title).savefig(out / 'accuracy.png', dpi=150)


Scene = tuple[data.Dataset, FederatedData, FederatedData]
"""The data set, the clients' training data and their local tests."""


def load(setting: Setting, data_dir: str | Path | None = None) -> Scene:
    """The data of a run.

    Raises:
      ValueError: for a partition that cannot be, and as `data.load_dataset`.
    """
    if setting.dataset.endswith('.npz'):
        dataset = data.load_npz(Path(data_dir or '.') / setting.dataset)
    else:
        dataset = data.load_dataset(setting.dataset, data_dir)
    if setting.max_examples:
        dataset = data.subset(dataset, setting.max_examples, setting.seed)
    if setting.imbalance > 1:
        kept = data.long_tail(dataset.y_train, setting.imbalance, seed=setting.seed)
        dataset = dataset._replace(x_train=dataset.x_train[kept], y_train=dataset.y_train[kept])
    parts = PARTITIONS[setting.partition](dataset.y_train, setting)
    clients = data.federate(dataset.x_train, dataset.y_train, parts, dataset.num_classes)
    x, y = dataset.x_test, dataset.y_test
    if setting.tests == 'matched':
        return dataset, clients, data.matched_tests(clients.counts, x, y, total=len(y), seed=setting.seed)
    if setting.tests == 'common':
        return dataset, clients, data.common_test(x, y, setting.clients, dataset.num_classes)
    return dataset, *data.split(clients, setting.test_share, seed=setting.seed)


def build(setting: Setting, dataset: data.Dataset) -> recipes.Recipe:
    """The method of a run.

    Raises:
      ValueError: for a head, loss, server optimizer or option that the method does not have.
    """
    norm = {'norm': setting.norm} if setting.model.startswith(('resnet', 'mobilenet')) else {}
    module = MODELS[setting.model](dtype=jnp.dtype(setting.precision), **norm)
    augment = None
    if setting.crop or setting.flip or setting.pixels != 'half':
        look = PIXELS[setting.pixels]
        augment = images.pipeline(*look, crop=setting.crop, flip=setting.flip, crop_mode=setting.crop_mode)
    server_opt, plain = None, setting.server_optimizer == 'average'
    if not (plain and setting.server_lr == 1 and not setting.server_momentum):
        make = recipes.SERVER_OPTIMIZERS['sgd' if plain else setting.server_optimizer]
        server_opt = make(setting.server_lr, setting.server_momentum)
    held = None
    if setting.algorithm == 'ratioloss':
        held = recipes.auxiliary(dataset.x_train, dataset.y_train, dataset.num_classes)
    options = dict(setting.options)
    compares = setting.algorithm in ('moon', 'fedmmd') or options.get('base') == 'moon'
    if augment is not None and compares:
        options, augment = {**options, 'preprocess': augment}, None  # all models that are compared see the same pixels
    return recipes.RECIPES[setting.algorithm](
        models.from_flax(module, augment),
        local.sgd(setting.lr, setting.momentum, setting.weight_decay, setting.lr_decay, setting.clip or None),
        local.Plan(setting.batch_size, setting.local_epochs),
        head=setting.head, loss=setting.loss, server_opt=server_opt,
        personal_opt=local.sgd(setting.lr, 0.0, 0.0, setting.lr_decay), rounds=setting.rounds, auxiliary=held,
        weigh=setting.weigh, personal=setting.personal, options=options, **ETF.get(setting.model, {}),
    )  # fmt: skip


class Measures:
    """What is measured of a run: while it trains, and when it is done."""

    def __init__(
        self, setting: Setting, recipe: recipes.Recipe, scene: Scene, k_train: Array, k_tune: Array, chunk: int | None
    ) -> None:
        self.setting, self.recipe, self.k_train, self.k_tune, self.chunk = setting, recipe, k_train, k_tune, chunk
        self.dataset, self.train, self.test = scene
        self.x_test, self.y_test = jnp.asarray(self.dataset.x_test), jnp.asarray(self.dataset.y_test)
        self.groups = evaluate.groups(jnp.sum(self.train.counts, axis=0))
        self.calibrate = None if recipe.calibrate is None else self.stage(recipe.calibrate)

    def stage(self, algorithm: Algorithm) -> Callable[..., tuple[State, simulate.Report]]:
        """One compiled round of all clients."""
        return simulate.compiled(simulate.make_round(algorithm, chunk=self.chunk))

    def delivered(self, state: State) -> tuple[Algorithm, State]:
        """What has the generic model, if training ended here."""
        if self.calibrate is None or self.recipe.calibrate is None:
            return self.recipe.final, state
        begun = simulate.join(self.recipe.calibrate, self.k_tune, state.server, self.setting.clients)
        return self.recipe.calibrate, self.calibrate(self.k_tune, begun, self.train)[0]

    def kept(self, state: State) -> Array:
        """Counts [K, C, C] of what clients keep, of those that have taken part: the others have what all began with."""
        setting = self.setting
        took = simulate.participants(self.k_train, state.server.round, setting.clients, setting.cohort)
        tables = evaluate.per_client(self.recipe.train, state, self.test)
        return jnp.where(took[:, None, None], tables, 0)

    def table(self, algorithm: Algorithm, state: State) -> Array:
        """Counts of the generic model on the test set."""
        return evaluate.generic(algorithm, state, self.x_test, self.y_test, self.dataset.num_classes)

    def general(self, state: State) -> dict[str, Array]:
        """The metrics of a round."""
        if not self.recipe.generic:
            return {'accuracy_personal': evaluate.over_clients(self.kept(state)).mean}
        table = self.table(*self.delivered(state))
        seen = {'accuracy': evaluate.accuracy(table)}
        if self.setting.imbalance > 1:
            seen |= dict(zip(('many', 'medium', 'few'), evaluate.group_accuracy(table, self.groups), strict=True))
        if self.recipe.refines:
            seen['accuracy_trained'] = evaluate.accuracy(self.table(self.recipe.train, state))
        v = state.server.variables
        if 'memory' in v.fixed:
            strength = memory.strength(v.fixed['memory'], v.fixed['head']['v'])
            seen |= {'memory_norm': strength.norm, 'memory_margin': strength.margin}
        return seen | ({'temperature': v.params['head']['scale']} if 'scale' in v.params['head'] else {})

    def personal(self, state: State) -> tuple[dict[str, Any], bool]:
        """What the summary says of personal models, and whether they are finite; None stands for what is not."""
        recipe = self.recipe
        algorithm, model = self.delivered(state)

        def personalized(stage: Algorithm) -> tuple[State, simulate.Report]:
            return self.stage(stage)(self.k_tune, recipe.enter(stage, self.k_tune, model, self.train), self.train)

        tuned = True  # training that makes personal models has not diverged
        if recipe.personalize is None:
            tables = self.kept(state)
        else:
            own, report = personalized(recipe.personalize)
            tuned = all(bool(jnp.all(jnp.isfinite(u))) for u in jax.tree.leaves((own.clients, report.info.loss)))
            tables = evaluate.per_client(recipe.personalize, own, self.test)
        told = self.told('personal_accuracy', tables)
        for name, variant in recipe.variants.items():
            found = evaluate.per_client(variant, personalized(variant)[0], self.test)
            told[f'personal_accuracy_{name}'] = float(evaluate.over_clients(found).mean)
        if recipe.variants:  # what clients keep is a model of their own before the stage, too
            told['personal_accuracy_trained'] = float(evaluate.over_clients(self.kept(state)).mean)
        tested = np.asarray(tables).sum((1, 2))
        told['clients'] = {
            'examples': np.asarray(self.train.size).tolist(),
            'tested': tested.tolist(),
            'personal_accuracy': each(evaluate.accuracy(tables), tested),
        }
        if not tuned:
            told = dict.fromkeys(told)
        if recipe.generic:
            before = evaluate.per_client(algorithm, model, self.test, personal=False)
            summed = evaluate.over_clients(before)
            told |= {
                'personal_accuracy_before': float(summed.mean),
                'personal_accuracy_before_std': float(summed.std),
            }
        return told, tuned

    def final(self, state: State) -> dict[str, Any]:
        """What else the summary says of the generic model."""
        if not self.recipe.generic:
            return {}
        algorithm, model = self.delivered(state)
        found: dict[str, Any] = {
            'class_accuracy': np.asarray(evaluate.class_accuracy(self.table(algorithm, model))).tolist(),
            'class_examples': np.asarray(self.train.counts).sum(0).tolist(),
        }
        if self.recipe.oracle is not None:
            algorithm, refit = self.recipe.oracle
            bound = refit(self.k_tune, state, self.train)
            found['global_accuracy_oracle'] = float(evaluate.accuracy(self.table(algorithm, bound)))
        return found

    def told(self, name: str, tables: Array) -> dict[str, Any]:
        """Accuracies over clients; on a common test set also by the classes that clients have, as FedNH's PM are."""
        summed = evaluate.over_clients(tables)
        found = {'': summed.mean, '_std': summed.std, '_pooled': summed.pooled, '_low': summed.low}
        if self.setting.tests == 'common':
            tested = jnp.sum(tables, (1, 2)) > 0
            for kind in ('present', 'labels'):
                values = evaluate.weighted_accuracy(tables, data.class_weights(self.train, kind))
                over = evaluate.over(values, tested)
                found |= {f'_{kind}': over.mean, f'_{kind}_std': over.std}
        return {f'{name}{end}': float(value) for end, value in found.items()}


def each(values: Array, tested: np.ndarray) -> list[float | None]:
    """Numbers of clients, with None for those who are not tested."""
    return [float(value) if n else None for value, n in zip(np.asarray(values), tested, strict=True)]


def settle(setting: Setting, out: Path, resume: bool) -> None:
    """Raises ValueError if `out` holds a run that is not to be resumed, or one with other settings."""
    path = out / 'config.json'
    if not path.exists():
        return
    if not resume:
        raise ValueError(f'{out} already holds a run: resume it, or choose another directory')
    before, defaults = known(path), Setting().plain()
    bound = ('rounds',) if setting.algorithm == 'fedetf_gmv' else ()  # its memory is planned from their number
    said = [
        f'{name} was {before.get(name, defaults[name])} and is now {value}'
        for name, value in setting.plain().items()
        if (name not in FREE or name in bound) and before.get(name, defaults[name]) != value
    ]
    if said:
        raise ValueError(f'the run in {out} has other settings: {", ".join(said)}')


def known(path: Path) -> dict[str, Any]:
    """What a JSON file holds.

    Raises:
      ValueError: if it is damaged.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f'{path} is damaged: choose another directory')
    return content


def compiled_before(out: Path) -> float:
    """What compiling took when the run in `out` was trained, if its summary still tells."""
    with contextlib.suppress(OSError, ValueError, KeyError):  # a damaged summary is made anew
        return float(known(out / 'summary.json')['compile_seconds'])
    return 0.0


def write(path: Path, content: dict[str, Any]) -> None:
    """JSON, written beside its place and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoints.replace(path, json.dumps(content, indent=2) + '\n')
