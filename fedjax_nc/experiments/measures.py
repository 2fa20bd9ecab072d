"""What is measured of a run: while it trains, and when it is done."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc import aggregators, checks, data, evaluate, memory, simulate, tree
from fedjax_nc.base import Algorithm, Array, FederatedData, Info, State
from fedjax_nc.data.host import AT_ONCE
from fedjax_nc.experiments import probes, recipes
from fedjax_nc.experiments.scene import Scene, drawn, same_model
from fedjax_nc.experiments.setting import NATURAL, Setting

DEEP, LONG = 48, 5e9
"""Arrays of a server state, and parameters times examples, from which on a stage is compiled as rounds are: `once`
would take longer to compile, or to run by more than it saves."""


@functools.lru_cache(maxsize=8)
def stage(algorithm: Algorithm, chunk: int | None, once: bool) -> Callable[..., tuple[State, simulate.Report]]:
    """One round of all clients, compiled once for all runs of the same algorithm."""
    return simulate.compiled(simulate.make_round(algorithm, chunk=chunk), once=once)


def short(state: State, train: FederatedData) -> bool:
    """Whether a stage that runs once a run spends its time in the compiler."""
    arrays = jax.tree.leaves(state.server)
    return len(arrays) < DEEP and sum(u.size for u in arrays) * int(np.asarray(train.size).sum(dtype=np.int64)) < LONG


def of_all(
    algorithm: Algorithm, key: Array, state: State, train: FederatedData, chunk: int | None, once: bool = False
) -> Any:
    """The round of a stage, `(state, infos)`: of some clients after the other where the examples stay on the host.

    All of them travel at once for a stage whose clients send something, which is to be added up. `once` is for one that
    does not follow every evaluation.
    """
    round = stage(algorithm, chunk, once and short(state, train))
    if not isinstance(train, data.HostData) or algorithm.aggregate is not aggregators.nothing:
        state, report = round(key, state, train)
        return state, [report.info]
    infos = []
    for ids in data.cohorts(train):
        state, report = round(key, state, data.part(train, ids))
        infos.append(report.info)
    return state, infos


class Measures:
    """What is measured of one run.

    Attributes:
      k_init: key of the first model.
      k_train: key of the rounds.
      k_tune: key of the stages after them.
    """

    def __init__(self, setting: Setting, recipe: recipes.Recipe, scene: Scene, chunk: int | None = None) -> None:
        self.setting, self.recipe, self.chunk = setting, recipe, chunk
        self.k_init, self.k_train, self.k_tune = jax.random.split(checks.seeded(setting.seed), 3)
        self.dataset, self.train, self.test = scene
        here: Any = jnp.asarray if self.dataset.x_test.nbytes <= AT_ONCE else np.asarray
        self.x_test, self.y_test = here(self.dataset.x_test), here(self.dataset.y_test)

    @functools.cached_property
    def groups(self) -> Array:
        """Of classes, many, medium or few."""
        return evaluate.groups(jnp.sum(self.train.counts, axis=0))

    def begun(self) -> State:
        """The state before the first round."""
        train = self.train
        if isinstance(train, data.HostData):
            if self.setting.algorithm not in recipes.RECIPES:  # a method of one's own may look at all examples
                return simulate.init(self.recipe.train, self.k_init, train)
            # The library's look at tables and at what an example is, which can be sent.
            train = FederatedData(train.x[:1], train.y[:1], train.index, train.size, train.counts)
        state = simulate.compiled_init(self.recipe.train)(self.k_init, train)
        same_model(self.recipe, self.setting.label, state, train)
        mine = self.setting.algorithm not in recipes.RECIPES or set(self.setting.probes) - set(probes.PROBES)
        if self.setting.probes and mine and self.recipe.generic:
            delivered = self.delivered(state)
            self.probed(delivered, self.table(*delivered))  # what is wrong with one's own shows before it costs a round
        return state

    def delivered(self, state: State) -> tuple[Algorithm, State]:
        """What has the generic model, if training ended here."""
        calibrate = self.recipe.calibrate
        if calibrate is None:
            return self.recipe.general, state
        begun = simulate.join(calibrate, self.k_tune, state.server, self.setting.clients)
        return calibrate, of_all(calibrate, self.k_tune, begun, self.train, self.chunk)[0]

    def took_part(self, state: State) -> Array:
        """Which clients were in a cohort: [K] bool."""
        setting = self.setting
        return simulate.participants(self.k_train, state.server.round, setting.clients, setting.cohort)

    def owners(self, state: State) -> list[int]:
        """The clients with a personal model: all, where a stage makes them, else those that have taken part."""
        if self.recipe.personalize is not None:
            return list(range(self.setting.clients))
        return np.flatnonzero(self.took_part(state)).tolist()

    def kept(self, state: State, algorithm: Algorithm | None = None) -> Array:
        """Counts [K, C, C] of what clients keep, of those that have taken part: the others have what all began with."""
        tables = evaluate.per_client(algorithm or self.recipe.train, state, self.test)
        return jnp.where(self.took_part(state)[:, None, None], tables, 0)

    def table(self, algorithm: Algorithm, state: State) -> Array:
        """Counts of the generic model on the test set."""
        return evaluate.generic(algorithm, state, self.x_test, self.y_test, self.dataset.num_classes)

    def general(self, state: State) -> dict[str, Array]:
        """The metrics of a round."""
        if not self.recipe.generic:
            return {'accuracy_personal': evaluate.over_clients(self.kept(state)).mean}
        delivered = self.delivered(state)
        table = self.table(*delivered)
        seen = {'accuracy': evaluate.accuracy(table)}
        if self.setting.imbalance > 1:
            seen |= dict(zip(('many', 'medium', 'few'), evaluate.group_accuracy(table, self.groups), strict=True))
        if self.recipe.refines:
            seen['accuracy_trained'] = evaluate.accuracy(self.table(self.recipe.train, state))
        for name, view in self.recipe.views.items():
            seen[f'accuracy_{name}'] = evaluate.accuracy(self.table(view, state))
        if (v := self.recipe.variables(state.server)) is None:  # of a method of one's own
            return seen | self.probed(delivered, table)
        if 'memory' in v.fixed:
            vectors = {**v.fixed['head'], **v.params['head']}  # a frozen frame is 'v' in a scale, learned ones are 'w'
            w = vectors['w'] if 'w' in vectors else vectors['scale'] * vectors['v']
            strength = memory.strength(v.fixed['memory'], w)
            seen |= {'memory_norm': strength.norm, 'memory_margin': strength.margin}
        head = v.params.get('head')
        if isinstance(head, Mapping) and 'scale' in head and jnp.ndim(head['scale']) == 0:
            seen['temperature'] = head['scale']
        return seen | self.probed(delivered, table)

    def probed(self, delivered: tuple[Algorithm, State], table: Array) -> dict[str, Array]:
        """What the setting's probes measure of the generic model, whose counts on the test set are known."""
        if not self.setting.probes:
            return {}
        recipe, variables = self.recipe, self.recipe.variables(delivered[1].server)
        seen = probes.Seen(*delivered, recipe.task, variables, self.x_test, self.y_test, self.train, self.test, table)
        return {name: jnp.float32(value) for name, value in probes.take(self.setting.probes, seen)}

    def personal(
        self, state: State, delivered: tuple[Algorithm, State]
    ) -> tuple[dict[str, Any], bool, tuple[Algorithm, State]]:
        """What the summary says of personal models, whether they are finite, and what has them.

        None stands for what is not finite.
        """
        recipe, (algorithm, model) = self.recipe, delivered

        def personalized(algorithm: Algorithm) -> tuple[State, list[Info]]:
            begun = recipe.enter(algorithm, self.k_tune, model, self.train)
            return of_all(algorithm, self.k_tune, begun, self.train, self.chunk, once=True)

        if recipe.personalize is None:
            kept = recipe.train, state
            tuned, tables = bool(tree.finite(state.clients)), self.kept(state)
        else:
            own, infos = personalized(recipe.personalize)
            kept = recipe.personalize, own
            tuned = bool(tree.finite((own.clients, [info.loss for info in infos])))
            tables = evaluate.per_client(recipe.personalize, own, self.test)
        told = self.told('personal_accuracy', tables)
        for name, variant in recipe.variants.items():
            own, infos = personalized(variant)
            mean = evaluate.over_clients(evaluate.per_client(variant, own, self.test)).mean
            sound = bool(tree.finite((own.clients, [info.loss for info in infos])))
            told[f'personal_accuracy_{name}'] = float(mean) if sound else None
        if recipe.variants:  # what clients keep is a model of their own before the stage, too
            told['personal_accuracy_trained'] = float(evaluate.over_clients(self.kept(state)).mean)
        for name, view in ({} if recipe.generic else recipe.views).items():
            told[f'personal_accuracy_{name}'] = float(evaluate.over_clients(self.kept(state, view)).mean)
        tested = np.asarray(tables).sum((1, 2))
        told['clients'] = {
            **self.named(),
            'examples': np.asarray(self.train.size).tolist(),
            'tested': tested.tolist(),
            'personal_accuracy': each(evaluate.accuracy(tables), tested),
            **{f'personal_accuracy_{kind}': each(values, tested) for kind, values in self.weighted(tables).items()},
        }
        if not tuned:
            told = dict.fromkeys(told)
        if recipe.generic:
            if self.setting.tests == 'common':  # the same for every client
                before = self.table(algorithm, model)[None]
            else:
                before = evaluate.per_client(algorithm, model, self.test, personal=False)
                if tested.any():  # of the same clients: those who have a personal model
                    before = jnp.where(jnp.asarray(tested > 0)[:, None, None], before, 0)
            summed = evaluate.over_clients(before)
            told |= {
                'personal_accuracy_before': float(summed.mean),
                'personal_accuracy_before_std': float(summed.std),
            }
        return told, tuned, kept

    def final(self, state: State, delivered: tuple[Algorithm, State]) -> dict[str, Any]:
        """What else the summary says of the generic model."""
        if not self.recipe.generic:
            return {}
        algorithm, model = delivered
        table = self.table(algorithm, model)
        tested = np.asarray(table).sum(1)
        found: dict[str, Any] = {
            'class_accuracy': each(evaluate.class_accuracy(table), tested),
            'class_examples': np.asarray(self.train.counts).sum(0).tolist(),
            'class_tested': tested.tolist(),
        }
        if self.recipe.oracle is not None:
            algorithm, refit = self.recipe.oracle
            bound = refit(self.k_tune, state, self.train)
            found['global_accuracy_oracle'] = float(evaluate.accuracy(self.table(algorithm, bound)))
        return found

    def named(self) -> dict[str, Any]:
        """Which of the data's own clients the run's are, by name or number, where a partition has drawn them."""
        if self.setting.partition != NATURAL:
            return {}
        owners, _ = drawn(self.dataset, self.setting)
        return {'ids': [self.dataset.clients[k] if self.dataset.clients else int(k) for k in owners]}

    def told(self, name: str, tables: Array) -> dict[str, Any]:
        """Accuracies over clients; on a common test set also by the classes that clients have, as FedNH's PM are."""
        total = np.asarray(tables).sum((1, 2))  # which needs no compiling
        if not total.sum():  # of those who are tested nobody took part
            return {}
        summed = evaluate.over_clients(tables)
        found = {'': summed.mean, '_std': summed.std, '_pooled': summed.pooled, '_low': summed.low}
        tested = jnp.asarray(total > 0)
        for kind, values in self.weighted(tables).items():
            over = evaluate.over(values, tested)
            found |= {f'_{kind}': over.mean, f'_{kind}_std': over.std}
        return {f'{name}{end}': float(value) for end, value in found.items()}

    def weighted(self, tables: Array) -> dict[str, Array]:
        """Clients' accuracies [K] by the classes that they have, FedNH's PM(V) and PM(L), on a common test set."""
        if self.setting.tests != 'common':
            return {}
        weights = {kind: data.class_weights(self.train, kind) for kind in ('present', 'labels')}
        return {kind: evaluate.weighted_accuracy(tables, weight) for kind, weight in weights.items()}


def each(values: Array, tested: np.ndarray) -> list[float | None]:
    """Numbers of clients, with None for those who are not tested."""
    return [float(value) if n else None for value, n in zip(np.asarray(values), tested, strict=True)]
