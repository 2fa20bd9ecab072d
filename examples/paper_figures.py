"""Figures of the papers, of models that two cores train within minutes: CCVR's 5, FedLoGe's 1, 3 and 7, FedNH's 3.

    python examples/paper_figures.py ccvr --data cifar10 --data-dir ~/data
    python examples/paper_figures.py fedloge --data ~/data/imagenet100-32
    python examples/paper_figures.py frame
    python examples/paper_figures.py fednh --data ~/data/imagenet100-32

ccvr: FedAvg's features of test images in the plane (t-SNE), and how its classifier decides on them before and after it
is calibrated. For data of ten classes, such as cinic10, which the paper has.
fedloge: mean and variance of the features of one class, and what pruning them costs, with a dense ETF as the frozen
classifier and with the sparse one.
frame: cosines between the vectors of the sparse ETF, before and after they are optimised. Needs no data.
fednh: cosines between FedAvg's class vectors and between FedNH's prototypes, with boxes around super-classes. For
cifar100, or images in folders that are named by WordNet ids of the classes below.

--data is the name of a data set or a folder of images (`data.load_dataset`, `data.load_folder`), and --tiny takes
handwritten digits and a few rounds instead. Each figure is written to --out twice: NAME.png for light pages and
NAME-dark.png for dark ones. What it shows is printed in numbers, too.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from sklearn.manifold import TSNE

from fedjax_nc import data, evaluate, frames, heads, local, losses, models, plots, simulate, training
from fedjax_nc.algorithms import ccvr, fedavg, fedloge, fednh
from fedjax_nc.base import Algorithm, Array, Batch, FederatedData, Model
from fedjax_nc.data import images
from fedjax_nc.experiments import command
from fedjax_nc.metrics import degeneration, semantics, similarity
from fedjax_nc.models import layers
from fedjax_nc.objective import objective

INK, GRID, PAPER, BLUE, ORANGE = '#404040', '#e4e4e4', '#ffffff', '#0072B2', '#D55E00'
TEN = ('#1f77b4', '#ff7f0e', '#2ca02c', '#d62728', '#9467bd', '#8c564b', '#e377c2', '#7f7f7f', '#bcbd22', '#17becf')
CIFAR10 = ('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck')

Groups = dict[str, tuple[int, ...]]
"""Super-class -> its classes."""

CIFAR100 = (
    'aquatic mammals', 'fish', 'flowers', 'food containers', 'fruit, vegetables', 'household devices', 'furniture',
    'insects', 'large carnivores', 'large structures', 'landscapes', 'large herbivores', 'medium mammals',
    'invertebrates', 'people', 'reptiles', 'small mammals', 'trees', 'vehicles 1', 'vehicles 2',
)  # fmt: skip
WORDNET = {  # super-classes of ImageNet classes by what WordNet has above them, as far as there are three or more
    'sea animals': 'n01443537 n01768244 n01917289 n01983481 n02321529',  # goldfish to sea cucumber
    'insects, spiders': 'n01774384 n01784675 n02165456 n02206856 n02231487 n02236044 n02279972',
    'dogs': 'n02085620 n02099601 n02106662',
    'cats': 'n02123045 n02124075 n02129165',
    'hoofed animals': 'n02395406 n02410509 n02423022',
    'climbing mammals': 'n01882714 n02480495 n02486410 n02509815',  # koala, orangutan, baboon, red panda
    'landscapes': 'n09193705 n09256479 n09428293',
    'structures': 'n02793495 n03160309 n03388043 n03837869 n04311004 n04417672 n04532670',  # barn to viaduct
    'vehicles': 'n02814533 n03100240 n03447447 n03649909 n03670208 n04465501 n04487081',
    'clothes': 'n02669723 n02730930 n02837789 n03617480 n03770439 n03980874 n04259630 n04371430',
    'sports things': 'n02802426 n03255030 n04023962',
    'devices': 'n02977058 n03085013 n03584254 n03902125 n04070727 n04149813',  # cash machine to scoreboard
    'vessels': 'n02815834 n02909870 n03400231 n03937543 n04398044 n04560804 n04596742',  # beaker to wok
    'dishes': 'n07583066 n07615774 n07711569 n07871810 n07875152',
    'fruit': 'n07720875 n07747607 n07753592',
}
DIGITS: Groups = {'round': (0, 6, 8, 9), 'open': (2, 3, 5), 'straight': (1, 4, 7)}


class Net(nn.Module):
    """Three convolutions and a dense layer, all with ReLU: features are as many as asked for and not negative."""

    width: int = 256

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None, train: bool = False) -> Array:
        for channels in (32, 64):
            x = nn.relu(layers.Conv(channels, 3, pool=2)(x))
        x = nn.relu(layers.Conv(64, 3)(x)).reshape(x.shape[0], -1)
        return nn.relu(layers.dense(self.width, x.shape[-1], jnp.float32)(x))


def load(args: argparse.Namespace, least: int = 2, most: int = 10_000) -> data.Dataset:
    """The folder of images or the data set that is named, which must have so many classes; digits for --tiny."""
    name = 'digits' if args.tiny else args.data
    folder = Path(name).expanduser()
    source = data.load_folder(folder) if folder.is_dir() else data.load_dataset(name, args.data_dir)
    if not least <= source.num_classes <= most:
        raise ValueError(f'{name} has {source.num_classes} classes: this figure is for {least} to {most}')
    return source


def train(algorithm: Algorithm, clients: FederatedData, source: data.Dataset, **rounds: Any) -> fedavg.Server:
    """The server after so many rounds; its accuracy is shown as it goes."""

    def test(state: simulate.State) -> dict[str, Array]:
        table = evaluate.generic(algorithm, state, source.x_test, source.y_test, source.num_classes)
        return {'accuracy': evaluate.accuracy(table)}

    k_init, k_train = jax.random.split(jax.random.key(0))
    state = simulate.init(algorithm, k_init, clients)
    return training.run(algorithm, k_train, state, clients, evaluate=test, eval_every=10, **rounds).state.server


def of_all(function: Callable[[Array], Array], x: np.ndarray, size: int = 500) -> np.ndarray:
    """A function of a batch, of all examples."""
    function = jax.jit(function)
    return np.concatenate([np.asarray(function(x[i : i + size])) for i in range(0, len(x), size)])


def panels(columns: int, width: float, height: float, rows: int = 1, **kwargs: Any) -> tuple[Figure, np.ndarray]:
    """A figure for light pages, which `plots.save` then writes for dark ones, too."""
    figure = Figure(figsize=(width, height), layout='constrained', facecolor=PAPER)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    grid = figure.subplots(rows, columns, squeeze=False, **kwargs)
    for axes in grid.flat:
        axes.spines[['top', 'right']].set_visible(False)
        axes.spines[['left', 'bottom']].set_color(INK)
        axes.tick_params(colors=INK)
    return figure, grid


def note(figure: Figure, text: str) -> None:
    figure.supxlabel(text, fontsize=8, color=INK)


# CCVR, Figure 5: features in the plane, and how the classifier decides on them


class Decisions(NamedTuple):
    """Test examples: features [n, D], labels [n], decisions before and after calibration [n]."""

    features: np.ndarray
    truth: np.ndarray
    before: np.ndarray
    after: np.ndarray


def decisions(source: data.Dataset, model: Model, clients: int, samples: int, batch: int, **rounds: Any) -> Decisions:
    """FedAvg on clients of few classes each, then CCVR."""
    parts = data.dirichlet(source.y_train, clients, 0.1, seed=0)
    held = data.federate(source.x_train, source.y_train, parts, source.num_classes)
    task = objective(model, heads.linear(), losses.cross_entropy)
    plain = fedavg.algorithm(task, local.sgd(0.01, weight_decay=1e-5), plan=local.Plan(batch, 2))
    server = train(plain, held, source, **rounds)
    stage = ccvr.calibrate(task, samples=samples)
    key = jax.random.key(1)
    calibrated = simulate.join(stage, key, server, clients)
    calibrated, _ = simulate.compiled(simulate.make_round(stage, chunk=1))(key, calibrated, held)
    x = source.x_test
    return Decisions(
        of_all(lambda x: task.features(server.variables, Batch(x))[0], x),
        np.asarray(source.y_test),
        of_all(lambda x: plain.predict(server, None, x), x).argmax(1),
        of_all(lambda x: stage.predict(calibrated.server, None, x), x).argmax(1),
    )


def embedded(features: np.ndarray, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Some examples, and their places in the plane [m, 2] by t-SNE."""
    rows = np.random.default_rng(seed).permutation(len(features))[:count]
    perplexity = min(30, len(rows) / 4)
    return rows, TSNE(perplexity=perplexity, init='pca', random_state=seed).fit_transform(features[rows])


def draw_decisions(seen: Decisions, rows: np.ndarray, places: np.ndarray, names: Sequence[str]) -> Figure:
    """Three times the same points, coloured by class, above how many examples each class gets."""
    figure, grid = panels(3, 11.5, 5.4, rows=2, height_ratios=(3.2, 1), sharey='row')
    kinds = {
        'what the images show': seen.truth,
        f'what FedAvg takes them for: {percent(seen.before == seen.truth)} right': seen.before,
        f'and after CCVR: {percent(seen.after == seen.truth)} right': seen.after,
    }
    for i, (title, labels) in enumerate(kinds.items()):
        above, below = grid[:, i]
        above.scatter(*places.T, c=[TEN[c] for c in labels[rows]], s=7, linewidths=0, alpha=0.85)
        above.set(xticks=[], yticks=[])
        above.spines[:].set_visible(False)
        above.set_title(f'({"abc"[i]}) {title}', color=INK, fontsize=11)
        below.bar(names, np.bincount(labels, minlength=len(names)), color=TEN[: len(names)])
        below.axhline(len(labels) / len(names), color=INK, linewidth=0.8, linestyle=':')
        below.set_xticks(range(len(names)), labels=names, rotation=55, ha='right', fontsize=8)
    grid[1, 0].set_ylabel('test images', color=INK)
    note(
        figure,
        f'Points: features of {len(rows):,} test images under the FedAvg model, placed by t-SNE, alike in all three '
        'panels. Bars: how many of all test images\nbear each label; dotted: as many of each class, as in truth.',
    )
    return figure


def percent(right: np.ndarray) -> str:
    return f'{100 * right.mean():.1f} %'


def make_ccvr(args: argparse.Namespace) -> dict[str, Figure]:
    source = load(args, most=len(TEN))
    if args.tiny:
        source = data.subset(source, 300, seed=0)
        seen = decisions(source, models.from_flax(models.MLP((32,))), 5, 20, 16, rounds=3)
    else:
        model = models.from_flax(models.MoonCNN(), images.pipeline())
        seen = decisions(source, model, 10, 1000, 64, rounds=15)
    rows, places = embedded(seen.features, 150 if args.tiny else 2000)
    names = source.classes or (CIFAR10 if source.name == 'cifar10' else [str(c) for c in range(source.num_classes)])
    print(f'accuracy before {percent(seen.before == seen.truth)}, after {percent(seen.after == seen.truth)}')
    for title, labels in (('before', seen.before), ('after', seen.after)):
        counts = np.bincount(labels, minlength=len(names))
        print(
            f'test images of each class, {title}: {", ".join(f"{n} {k}" for n, k in zip(names, counts, strict=True))}'
        )
    return {'ccvr_tsne': draw_decisions(seen, rows, places, names)}


# FedLoGe, Figures 1 and 3: dominant and negligible features under a dense and under a sparse frozen classifier


class Frozen(NamedTuple):
    """Test features [n, D] and labels of a model that was trained against the class vectors w [D, C]."""

    features: np.ndarray
    truth: np.ndarray
    w: np.ndarray

    def sorted(self) -> degeneration.Degeneration:
        return degeneration.degeneration(jnp.asarray(self.features), jnp.asarray(self.truth), self.w.shape[1])

    def accuracy(self, w: Array | np.ndarray) -> float:
        """In %, with other class vectors."""
        return 100 * float(np.mean((self.features @ np.asarray(w)).argmax(1) == self.truth))


def frozen(source: data.Dataset, clients: FederatedData, model: Model, frame: heads.Frame, plan: local.Plan,
           rate: float, **rounds: Any) -> Frozen:  # fmt: skip
    opt = local.sgd(rate, momentum=0.5, weight_decay=0.0)
    algorithm = fedloge.algorithm(model, opt, frame=frame, plan=plan)
    v = train(algorithm, clients, source, **rounds).variables
    features = of_all(lambda x: model.features(v.params['body'], v.stats, x, None, None)[0], source.x_test)
    return Frozen(features, np.asarray(source.y_test), np.asarray(v.fixed['v']))


def draw_features(cases: dict[str, Frozen], c: int) -> Figure:
    """Features from the largest mean in a class to the smallest: means, variances, and where the frame has zeros."""
    figure, (row, low) = panels(len(cases), 11.0, 5.4, rows=2, height_ratios=(3.6, 1), sharey='row', sharex=True)
    right: list[Axes] = []
    medians = []
    for i, (title, case) in enumerate(cases.items()):
        axes, below, seen = row[i], low[i], case.sorted()
        order, mean, relative = (np.asarray(u[c]) for u in (seen.order, seen.mean, seen.relative))
        place, shown = np.arange(len(order)), relative > 0
        other = axes.twinx()
        other.spines[['top', 'left']].set_visible(False)
        other.spines['right'].set_color(INK)
        other.tick_params(colors=INK)
        other.scatter(place[shown], relative[shown], s=9, color=ORANGE, linewidths=0, label='variance / mean²')
        other.set_yscale('log')
        axes.plot(place, mean, color=BLUE, linewidth=2.2, label='mean')
        axes.set_zorder(other.get_zorder() + 1)
        axes.patch.set_visible(False)
        axes.set_title(title, color=INK, fontsize=11)
        axes.margins(x=0.01)
        bins = np.array_split(np.asarray(case.w.T == 0)[np.arange(case.w.shape[1])[:, None], seen.order], 16, axis=1)
        edges = np.cumsum([0, *(part.shape[1] for part in bins)])
        below.stairs([100 * part.mean() for part in bins], edges, fill=True, color='#9a9a9a')
        below.axhline(100 * np.mean(case.w == 0), color=INK, linewidth=0.9, linestyle=':')
        below.set_ylim(0, 100)
        below.set_xlabel('features, from dominant to negligible (by their mean)', color=INK)
        right.append(other)
        medians.append(f'{title[:3]} {np.median(seen.top):.2f} and {np.median(seen.bottom):.2f}')
    bottom, top = (f(u.get_ylim()[i] for u in right) for i, f in enumerate((min, max)))
    for other in right:
        other.set_ylim(bottom, top)
    row[0].set_ylabel('mean of the feature', color=BLUE)
    right[-1].set_ylabel('variance / mean²', color=ORANGE)
    low[0].set_ylabel('zeros [%]', color=INK)
    note(
        figure,
        f'Above: test images of class {c}. Below: share of zeros in the class vectors at these places, all classes; '
        'dotted: in all places.\nMedian over all classes of variance / mean² in the dominant and the negligible half '
        f'of the features: {"; ".join(medians)}.',
    )
    return figure


def draw_pruning(cases: dict[str, Frozen], shares: np.ndarray) -> tuple[Figure, dict[str, dict[str, list[float]]]]:
    """Accuracy when a share of every class vector is set to zero, from either end; and the numbers."""
    figure, (row,) = panels(len(cases), 9.0, 3.6, sharey=True)
    numbers: dict[str, dict[str, list[float]]] = {}
    for axes, (title, case) in zip(row, cases.items(), strict=True):
        order = case.sorted().order
        ends = {'negligible features first': (False, BLUE, 'o-'), 'dominant features first': (True, ORANGE, 's--')}
        numbers[title] = {}
        for name, (dominant, color, look) in ends.items():
            pruned = [case.accuracy(degeneration.prune(case.w, order, float(s), dominant=dominant)) for s in shares]
            axes.plot(100 * shares, pruned, look, color=color, label=name, markersize=5)
            numbers[title][name] = pruned
        axes.axhline(100 / case.w.shape[1], color=INK, linewidth=0.8, linestyle=':', label='guessing')
        axes.set_xlabel('features pruned in every class [%]', color=INK)
        axes.set_title(title, color=INK, fontsize=11)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    row[0].set_ylabel('test accuracy [%]', color=INK)
    row[0].set_ylim(0, None)
    row[0].legend(facecolor=PAPER, edgecolor='none', labelcolor=INK, fontsize=9)
    return figure, numbers


def make_fedloge(args: argparse.Namespace) -> dict[str, Figure]:
    source = load(args, least=9)  # the ninth class is shown
    source = data.keep(source, data.long_tail(source.y_train, 10 if args.tiny else 100, seed=0))
    few, plan = (4, local.Plan(16, 1)) if args.tiny else (20, local.Plan(32, 3))
    parts = data.dirichlet_draws(source.y_train, few, 0.5, seed=0, min_size=2 * plan.batch_size)
    clients = data.federate(source.x_train, source.y_train, parts, source.num_classes)
    model = models.from_flax(models.MLP((32,))) if args.tiny else models.from_flax(Net(), images.pipeline(flip=True))
    rounds = {'rounds': 2} if args.tiny else {'rounds': 60, 'cohort': 8}
    rate = 0.1 if args.tiny else 0.03
    kinds = {'(a) trained against a dense ETF': frames.simplex_etf, '(b) trained against the sparse ETF': sparse(args)}
    cases = {title: frozen(source, clients, model, frame, plan, rate, **rounds) for title, frame in kinds.items()}
    for title, case in cases.items():
        seen = case.sorted()
        share = degeneration.masked_share(jnp.asarray(case.w), seen.order)
        print(f'{title}: accuracy {case.accuracy(case.w):.1f} %; median over classes of variance / mean²: '
              f'upper half {np.median(seen.top):.2f}, lower half {np.median(seen.bottom):.2f}; '
              f'zeros in the lower half {100 * float(jnp.mean(share)):.0f} %')  # fmt: skip
    pruning, numbers = draw_pruning(cases, np.linspace(0, 1, 11))
    for title, lines in numbers.items():
        for name, pruned in lines.items():
            print(f'{title}, {name}: {" ".join(f"{a:.1f}" for a in pruned)}')
    return {'fedloge_features': draw_features(cases, 8), 'fedloge_pruning': pruning}


# FedLoGe, Figure 7: the sparse ETF


def sparse(args: argparse.Namespace) -> heads.Frame:
    if not args.tiny:
        return frames.sparse_etf
    return lambda key, dim, classes: frames.sparse_etf(key, dim, classes, solver='gram', steps=200)


def draw_frame(before: np.ndarray, after: np.ndarray) -> Figure:
    """Cosines of class vectors with zeros, as they were drawn and as they were then moved."""
    figure, (row,) = panels(2, 9.6, 4.4)
    (dim, classes), zeros = after.shape, 100 * np.mean(after == 0)
    for axes, (title, w) in zip(
        row, {'(a) zeros drawn at random': before, '(b) other entries optimised': after}.items(), strict=True
    ):
        cosines = np.asarray(similarity.pairwise_cosine(jnp.asarray(w.T)))
        image = axes.imshow(cosines, cmap='viridis', vmin=-0.2, vmax=0.2, interpolation='nearest')
        axes.spines[:].set_visible(False)
        axes.set_xlabel('class', color=INK)
        apart = cosines[~np.eye(len(cosines), dtype=bool)]
        axes.set_title(f'{title}: {apart.min():.4f} to {apart.max():.4f}', color=INK, fontsize=11)
    row[0].set_ylabel('class', color=INK)
    bar = figure.colorbar(image, ax=row, pad=0.02, extend='max')
    bar.set_label('cosine of two class vectors', color=INK)
    bar.ax.tick_params(colors=INK)
    bar.outline.set_visible(False)
    note(
        figure,
        f'{classes} class vectors in {dim} dimensions, {zeros:.0f} % of their entries zero. Every vector has cosine 1 '
        f'with itself, beyond the scale;\nbetween those of a dense ETF all are {-1 / (classes - 1):.4f}. Titles: '
        'the range between different vectors.',
    )
    return figure


def make_frame(args: argparse.Namespace) -> dict[str, Figure]:
    dim, classes = (32, 10) if args.tiny else (512, 100)
    key = jax.random.key(0)
    before, after = (
        np.asarray(frame(key, dim, classes)) for frame in (lambda *u: frames.sparse_etf(*u, steps=0), sparse(args))
    )
    for name, w in (('zeros drawn', before), ('optimised', after)):
        seen = frames.frame_quality(jnp.asarray(w))
        print(f'{name}: angles {seen.angle_mean:.4f} ± {seen.angle_var**0.5:.4f} degrees, '
              f'largest gap to the cosine of an ETF {seen.gap:.5f}')  # fmt: skip
    return {'fedloge_frame': draw_frame(before, after)}


# FedNH, Figure 3: whether class vectors know super-classes


def groups_of(source: data.Dataset) -> Groups:
    """The super-classes of a data set, whose classes are known by name or by WordNet id.

    Raises:
      ValueError: if fewer than two are known of.
    """
    if source.name == 'digits':
        return DIGITS
    if source.name == 'cifar100':
        return dict(zip(CIFAR100, semantics.CIFAR100_SUPERCLASSES, strict=True))
    place = {name: c for c, name in enumerate(source.classes or ())}
    known = {name: tuple(place[i] for i in ids.split() if i in place) for name, ids in WORDNET.items()}
    known = {name: members for name, members in known.items() if len(members) > 1}
    if len(known) < 2:
        raise ValueError(f'nothing is known of super-classes of {source.name}: name its folders by WordNet ids')
    return known


def class_vectors(source: data.Dataset, clients: FederatedData, model: Model, plan: local.Plan, rate: float,
                  **rounds: Any) -> dict[str, tuple[np.ndarray, float]]:  # fmt: skip
    """FedAvg and FedNH: name -> (class vectors [C, D], accuracy in %)."""
    opt = local.sgd(rate, weight_decay=1e-5, decay=0.99, clip=10.0)
    task = objective(model, heads.linear(bias=False), losses.cross_entropy)
    kinds = {
        'FedAvg': fedavg.algorithm(task, opt, plan=plan, **fedavg.UNWEIGHTED),
        'FedNH': fednh.algorithm(model, opt, plan=plan, scale=10.0),
    }
    found = {}
    for name, algorithm in kinds.items():
        server = train(algorithm, clients, source, **rounds)
        v = server.variables
        w = v.fixed['w'] if name == 'FedNH' else v.params['head']['w'].T
        table = evaluate.generic(algorithm, simulate.State(server, ()), source.x_test, source.y_test, len(w))
        found[name] = np.asarray(w), 100 * float(evaluate.accuracy(table))
    return found


def gap(w: np.ndarray, groups: Groups) -> semantics.SemanticGap:
    """How much more alike class vectors are within super-classes; a class of no group is one of its own."""
    label = np.arange(len(w)) + len(groups)
    for i, members in enumerate(groups.values()):
        label[list(members)] = i
    return semantics.semantic_gap(jnp.asarray(w), label)


def draw_semantics(found: dict[str, tuple[np.ndarray, float]], groups: Groups) -> Figure:
    """Cosines of class vectors less their mean, super-class by super-class, with a box around each."""
    figure, (row,) = panels(len(found), 5.6 * len(found) + 1.0, 6.6)
    (first, _), *_ = found.values()
    inside = [c for members in groups.values() for c in members]
    others = [c for c in range(len(first)) if c not in inside]
    order, alone = np.array(inside + others), len(others)
    names = [*groups, *(['others'] if alone else [])]
    for i, (axes, (name, (w, accuracy))) in enumerate(zip(row, found.items(), strict=True)):
        cosines = np.asarray(similarity.pairwise_cosine(jnp.asarray(w - w.mean(0))))[order][:, order]
        image = axes.imshow(cosines, cmap='viridis', vmin=-0.2, vmax=0.5, interpolation='nearest')
        start, places = 0, []
        for members in groups.values():
            box = Rectangle((start - 0.5, start - 0.5), len(members), len(members), fill=False, edgecolor='#ff5050',
                            linewidth=1.3)  # fmt: skip
            axes.add_patch(box)
            places.append(start + (len(members) - 1) / 2)
            start += len(members)
        if alone:
            places.append(start + (alone - 1) / 2)
        axes.set_yticks(places, labels=names if i == 0 else [''] * len(places), fontsize=8)
        axes.set_xticks(places, labels=names, rotation=60, ha='right', fontsize=8)
        axes.tick_params(length=2)
        axes.spines[:].set_visible(False)
        axes.set_title(f'({"abc"[i]}) {name}, {accuracy:.1f} % right: gap {gap(w, groups).centred:.2f}', color=INK)
    bar = figure.colorbar(image, ax=row, pad=0.02, extend='both', shrink=0.8)
    bar.set_label('cosine of two class vectors, less the mean of all', color=INK)
    bar.ax.tick_params(colors=INK)
    bar.outline.set_visible(False)
    note(
        figure,
        'Boxes: classes of one super-class. Gap: mean cosine within them less that between all others.'
        + (f' The {alone} others belong to none.' if alone else ''),
    )
    return figure


def make_fednh(args: argparse.Namespace) -> dict[str, Figure]:
    source = load(args)
    groups = groups_of(source)
    few, rounds = (5, {'rounds': 3}) if args.tiny else (100, {'rounds': 60, 'cohort': 10})
    parts = data.dirichlet_multiclass(source.y_train, few, 0.3, seed=0)
    clients = data.federate(source.x_train, source.y_train, parts, source.num_classes)
    model = models.from_flax(models.MLP((32,))) if args.tiny else models.from_flax(Net(), images.pipeline(flip=True))
    plan, rate = (local.Plan(16, 2), 0.05) if args.tiny else (local.Plan(64, 5), 0.02)
    found = class_vectors(source, clients, model, plan, rate, **rounds)
    for name, (w, accuracy) in found.items():
        seen = gap(w, groups)
        print(
            f'{name}: accuracy {accuracy:.1f} %, semantic gap {seen.plain:.3f}, of centred vectors {seen.centred:.3f}'
        )
    return {'fednh_semantics': draw_semantics(found, groups)}


MAKERS = {'ccvr': make_ccvr, 'fedloge': make_fedloge, 'frame': make_frame, 'fednh': make_fednh}


def main(argv: list[str] | None = None) -> list[Path]:
    """Makes the figures of a command line and returns their paths."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument('figure', choices=MAKERS, help='which figures')
    parser.add_argument('--data', help='a data set, or a folder of images')
    parser.add_argument('--data-dir', type=Path, help='where data sets lie or are put')
    parser.add_argument('--out', type=Path, default=Path('runs/paper_figures'))
    parser.add_argument('--tiny', action='store_true', help='handwritten digits and a few rounds')
    args = parser.parse_args(argv)
    if args.data is None and not args.tiny and args.figure != 'frame':
        parser.error(f'{args.figure} needs --data')
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f'--out {args.out} cannot be made a directory: {error.strerror}')
    begin, work = time.monotonic(), time.process_time()
    drawn = MAKERS[args.figure](args)
    paths = [path for name, figure in drawn.items() for path in plots.save(figure, args.out / f'{name}.png', dpi=100)]
    for path in paths:
        if path.stat().st_size > 200_000:
            Image.open(path).convert('RGB').quantize(256).save(path, optimize=True)  # a third as large
    print(f'{time.monotonic() - begin:.0f} s, {time.process_time() - work:.0f} s of processor time')
    print(f'Pictures: {", ".join(map(str, paths))}')
    return paths


if __name__ == '__main__':
    command.script(main, 'paper_figures.py', resume=None)
