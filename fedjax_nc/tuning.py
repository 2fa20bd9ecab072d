"""Which form of convolution, how many lanes, which smaller batches and how many rounds a call are fastest here.

Measured on the device at hand. Nothing here runs unless it is called. All choices compute the same rounds up to
rounding, but for `precision`.
"""

import contextlib
import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from numpy.typing import ArrayLike, NDArray

import fedjax_nc
from fedjax_nc import _checkpoints, _fingerprint, _machine, checks, models, simulate
from fedjax_nc.base import Algorithm, FederatedData, State, Tree
from fedjax_nc.models import libdnnl
from fedjax_nc.models.convolution import ConvFn

FORMS: dict[str, ConvFn] = {
    'by_platform': models.conv_by_platform,
    'grouped': models.conv_grouped,
    'native': models.conv_native,
    'onednn': models.conv_onednn,
    'patches': models.conv_patches,
    'sequential': models.conv_sequential,
}
"""The convolutions by their names in a `Choice`."""


class Choice(NamedTuple):
    """How to compute a round. None stands for the library's own choice."""

    conv: str | None = None  #: a name in FORMS, for the model
    chunk: int | None = None  #: clients side by side, for `simulate.make_round` and `training.run`
    precision: str | None = None  #: of float32 products, as for `jax.default_matmul_precision`
    rounds_per_call: int = 1  #: for `training.run`
    tails: tuple[int, ...] = ()  #: smaller batches for what full ones leave over, for `local.Plan`
    narrower: tuple[int, ...] = ()  #: fewer lanes for those that outlast others, for `local.Plan`

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> 'Choice':
        """What a mapping describes, such as `_asdict()` read back from JSON.

        TypeError for a name that there is not; ValueError for tails or narrower lanes that are no list or tuple.
        """
        found = {name: plain.get(name, ()) for name in ('tails', 'narrower')}
        for name, numbers in found.items():
            if not isinstance(numbers, list | tuple):
                raise ValueError(f'{name} of a choice must be a tuple of numbers, not {checks.shown(numbers)}')
        return cls(**{**plain, **{name: tuple(numbers) for name, numbers in found.items()}})

    def convolution(self) -> ConvFn | None:
        """What a model takes as `conv=`; None for its own choice. ValueError for a name that is not in FORMS."""
        if self.conv is not None and self.conv not in FORMS:
            raise ValueError(
                f'there is no form {checks.shown(self.conv)} of convolutions: choose of {", ".join(FORMS)}'
            )
        return None if self.conv is None else FORMS[self.conv]

    def products(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which rounds are to be compiled: `with choice.products(): ...`."""
        return jax.default_matmul_precision(self.precision) if self.precision else contextlib.nullcontext()


class Tried(NamedTuple):
    """What came of a choice."""

    choice: Choice
    seconds: float  #: a round, extrapolated where only a part of it was run; infinity if it failed
    compile_seconds: float  #: what compiling took; 0 if it failed
    problem: str = ''  #: why it failed


class Tuned(NamedTuple):
    """What `fastest` found."""

    choice: Choice  #: the fastest
    tried: tuple[Tried, ...]  #: all of them, from the fastest on


def candidates(
    clients: int,
    convolutions: bool = True,
    platform: str | None = None,
    *,
    batch_size: int | None = None,
    sizes: ArrayLike | None = None,
    precisions: Iterable[str | None] = (None,),
) -> list[Choice]:
    """A few choices worth trying, of which the first is the library's own.

    Args:
      clients: those of a cohort.
      convolutions: whether the model has any.
      platform: 'cpu', 'cuda' or 'tpu'; the default backend's if None.
      batch_size: that of the plan, if smaller batches for what full ones leave over are to be tried too: its eighth,
        quarter and half, one client at a time, as side by side a client would wait for the batches of others; and on a
        GPU more lanes that become fewer.
      sizes: examples of each client, if they are known: where full batches leave nothing over, smaller ones are not
        tried, and no fewer lanes where all clients are of one size.
      precisions: of float32 products, each as in `Choice`. A lower one changes results by more than rounding, so that
        none is tried unless it is named here.

    Returns:
      Choices of forms and chunks; without convolutions, of chunks and rounds a call; of each precision. Those that come
      to the same lanes `fastest` tries once.

    Raises:
      ValueError: for less than one client, or one precision that is not in a list.
    """
    checks.whole('clients', clients)
    if isinstance(precisions, str):
        raise ValueError(f'precisions must be several, as in [{precisions!r}]')
    platform = platform or jax.default_backend()
    usual = (1, 4, 20) if convolutions else (1, 20, 100)
    if cpu := platform == 'cpu':
        usual = (1, 5, 8) if convolutions else (1, 16, 100)
    lanes = [None, *sorted({simulate.even(n, clients) for n in usual})]
    forms: list[str | None] = [None]
    if convolutions:
        forms += ['sequential', 'patches'] if cpu else ['native', 'patches']
        found = [Choice(form, n) for form, n in itertools.product(forms, lanes) if n is not None or form is None]
    else:
        found = [Choice(None, n, None, r) for n, r in itertools.product(lanes, (1, 10))]
    if batch_size is not None and batch_size >= 16 and (sizes is None or (np.asarray(sizes) % batch_size).any()):
        found.append(Choice(chunk=1, tails=(batch_size // 8, batch_size // 4, batch_size // 2)))
    if batch_size is not None and platform not in ('cpu', 'tpu') and clients > 4:
        unequal = sizes is None or len(np.unique(-(-np.asarray(sizes) // batch_size))) > 1
        found += [Choice(chunk=simulate.even(10, clients), narrower=(1, 2, 4))] if unequal else []
    return [choice._replace(precision=precision) for precision in precisions for choice in found]


def fastest(
    build: Callable[[Choice], Algorithm],
    data: FederatedData,
    choices: Iterable[Choice],
    *,
    cohort: int | None = None,
    seconds: float = 1.0,
    repeats: int = 3,
    cache: str | Path | None = None,
    show: Callable[[str], None] | None = None,
) -> Tuned:
    """Compiles a round for each of `choices`, times a part of it, and returns the fastest.

    Of choices that come to the same, as a chunk that is the library's own, the first is tried. The first of all decides
    the part: clients take the first of their examples, twice as many each time, until a call takes long enough or a
    round is done whole. All choices then do as much, and half of it; the line through both gives the seconds of a whole
    round of that cohort, in which a chunk takes as long as its largest client.

    Args:
      build: the algorithm of a choice: with its `convolution()` in the model, its `tails` and `narrower` in the plan.
      data: the clients.
      choices: what to try, such as `candidates(cohort)`; in doubt the first one wins.
      cohort: clients a round; all by default.
      seconds: that a timed call should take, if a whole round takes as long.
      repeats: timed calls of each; the shortest counts. Of short calls there are up to 400, for about `seconds`. Where
        they are not short, one that after the first seems to take twice as long as another is not called again.
      cache: a JSON file in which results are kept, by device, versions, algorithm, shapes and choices.
      show: called with a line on each choice.

    Returns:
      The fastest choice, and what came of each. Those that fail come last, with their problem: a form that refuses the
      model, or too little memory.

    Raises:
      ValueError: without a choice, for one with an unknown form, or as `simulate.make_round`; and what else was raised
        first, if that kept all of them from running.
      RuntimeError: if none of them runs on the device.
      OSError: before anything is timed, if the cache cannot be written.
    """
    given = () if isinstance(choices, Choice) else tuple(choices)
    if isinstance(choices, Choice) or not all(isinstance(choice, Choice) for choice in given):
        raise ValueError(f'choices must be several of Choice, such as candidates(cohort), not {checks.shown(choices)}')
    choices = tuple(dict.fromkeys(Choice.of(choice._asdict()) for choice in given))
    if not choices:
        raise ValueError('there is nothing to choose from: give at least one Choice')
    for choice in choices:
        if choice.conv is not None and choice.conv not in FORMS:
            raise ValueError(f'there is no convolution {choice.conv!r}: take one of {", ".join(FORMS)}')
        checks.whole('rounds_per_call', choice.rounds_per_call)
    checks.whole('repeats', repeats)
    checks.number('seconds', seconds, open_low=True)
    usual = build(Choice())
    choices = _distinct(usual, data, choices, cohort)
    name = _key_of(usual, data, choices, cohort) if cache is not None else ''
    if cache is not None:
        if known := _remembered(Path(cache), name, choices):
            return known
        _writable(Path(cache))
    tried: list[Tried] = []
    cap, refused = None, None
    for choice in choices:
        trial = None
        try:
            trial = Trial(build, data, choice, cohort)
            cap = cap or trial.part(seconds)
            best = min((t.seconds for t in tried), default=float('inf'))
            tried.append(Tried(choice, trial.seconds(cap, repeats, 2 * best, seconds), trial.compile_seconds))
        except (jax.errors.JaxRuntimeError, MemoryError, NotImplementedError, ValueError, TypeError) as problem:
            tried.append(Tried(choice, float('inf'), 0.0, ' '.join(str(problem).split())[:200] or repr(problem)))
            if isinstance(problem, ValueError | TypeError):
                refused = refused or problem.with_traceback(None)  # whose frames hold a trial
        finally:
            del trial  # its state, before there is the next one
        if show:
            show(_line(tried[-1]))
    ranked = tuple(sorted(tried, key=lambda t: t.seconds))  # stable: in doubt the first
    if ranked[0].problem:
        if refused is not None:
            raise refused
        raise RuntimeError(f'no choice runs here; the first one says: {tried[0].problem}')
    found = Tuned(ranked[0].choice, ranked)
    if cache is not None:
        _remember(Path(cache), name, found)
    return found


class Trial:
    """One choice, compiled, on clients of any sizes up to their own: what `fastest` times.

    Arguments and errors are those of `fastest`, with one `choice`.

    Attributes:
      data: the clients.
      sizes: [K], their examples.
      tails: those of the choice.
      narrower: likewise.
      keys: of the rounds of a call.
      state: after the last call.
      step: the compiled rounds.
      compile_seconds: what building and compiling took.
      lanes: clients side by side.
    """

    def __init__(
        self, build: Callable[[Choice], Algorithm], data: FederatedData, choice: Choice, cohort: int | None
    ) -> None:
        """Compiles it."""
        self.data, self.sizes = data, np.asarray(data.size)
        self.tails, self.narrower = choice.tails, choice.narrower
        self.keys = jax.random.split(checks.seeded(0), choice.rounds_per_call)
        begin = time.perf_counter()
        with choice.products():
            algorithm = build(choice)
            self.state = simulate.compiled_init(algorithm)(checks.seeded(0), data)
            rounds = simulate.several(simulate.make_round(algorithm, cohort=cohort, chunk=choice.chunk))
            self.step = simulate.compiled(rounds).lower(self.keys, self.state, data).compile()
        self.compile_seconds = time.perf_counter() - begin
        self.lanes = _lanes(choice, self.state.server, cohort or data.num_clients)

    def call(self, cap: int, repeats: int = 1) -> tuple[float, simulate.Report]:
        """Seconds a round if no client has more than `cap` examples, and the reports of the last call.

        The shortest of `repeats` calls counts.
        """
        cut = self.data._replace(size=jnp.minimum(self.data.size, cap))
        took = float('inf')
        for _ in range(repeats):
            begin = time.perf_counter()
            self.state, report = jax.block_until_ready(self.step(self.keys, self.state, cut))
            took = min(took, (time.perf_counter() - begin) / len(self.keys))
        return took, jax.device_get(report)

    def part(self, seconds: float) -> int:
        """How many examples of each client are enough: a call takes `seconds`, and more steps than with one each."""
        most, cap = int(self.sizes.max()), 1
        _, first = self.call(cap)  # which also has more to do than later ones
        took, report = 0.0, first
        while cap < most and (took < seconds or report.info.steps.max() == first.info.steps.max()):
            cap = min(2 * cap, most)
            took, report = self.call(cap)
            took *= len(self.keys)
        return cap

    def seconds(self, cap: int, repeats: int, limit: float = float('inf'), least: float = 0.0) -> float:
        """Of a whole round, from one in which no client has more than `cap` examples and one with half of that.

        Each is timed `repeats` times, and up to 400 times until that has taken about `least`: short calls differ more.
        Once, if the round would take longer than `limit` and is no short one.
        """
        self.call(1)
        once = self.extrapolated(cap, 1)
        times = max(repeats, min(400, round(least / max(once * len(self.keys), 1e-9))))
        if times == 1 or (once > limit and times == repeats):
            return once
        return self.extrapolated(cap, times)

    def extrapolated(self, cap: int, repeats: int) -> float:
        """Seconds of a whole round, of the shortest of `repeats` calls."""
        took, report = self.call(cap, repeats)
        if cap >= self.sizes.max():
            return took
        less, _ = self.call(half := max(cap // 2, 1), repeats)
        work = self.work(report, cap)
        part, small, whole = (work(size) for size in (cap, half, int(self.sizes.max())))
        slope = (took - less) / (part - small) if part > small and took > less else took / part
        return took + slope * (whole - part)

    def work(self, report: simulate.Report, cap: int) -> Callable[[int], float]:
        """From another cap to the batch rows of a round of the same cohort, by the `report` of one with `cap`."""
        ids, info = np.asarray(report.ids), report.info
        sizes, busy = np.append(self.sizes, 0)[ids], np.asarray(info.steps) > 0
        batch = 1.0 if self.tails else (info.slots[busy] / info.steps[busy]).max()  # tails leave little padding

        def batches(cap: int) -> NDArray[Any]:
            return np.ceil(np.minimum(sizes, cap) / batch)

        epochs = (info.steps[busy] / batches(cap)[busy]).max()

        widths = [self.lanes, *(n for n in reversed(self.narrower) if n < self.lanes)]

        def rows(cap: int) -> float:
            ranked = -np.sort(-batches(cap).reshape(len(ids), -1, self.lanes), axis=2)
            ends = ranked[..., [*widths[1:], 0]]  # until there is work for no more than the next width
            steps = np.diff(ends, axis=2, prepend=0) @ np.array(widths)
            return float(batch * epochs * steps.sum(axis=1).mean())

        return rows


def _distinct(
    algorithm: Algorithm, data: FederatedData, choices: tuple[Choice, ...], cohort: int | None
) -> tuple[Choice, ...]:
    """The first of those that come to the same form and lanes."""
    server = jax.eval_shape(lambda: simulate.init(algorithm, checks.seeded(0), data)).server
    first: dict[Choice, Choice] = {}
    for choice in choices:
        first.setdefault(choice._replace(chunk=_lanes(choice, server, cohort or data.num_clients)), choice)
    return tuple(first.values())


def _lanes(choice: Choice, server: Tree, members: int) -> int:
    """The lanes that a round of so many clients has."""
    return min(choice.chunk or simulate.default_chunk(server, members), members)


def _key_of(algorithm: Algorithm, data: FederatedData, choices: tuple[Choice, ...], cohort: int | None) -> str:
    """What a result depends on."""
    state: State = jax.eval_shape(lambda: simulate.init(algorithm, checks.seeded(0), data))
    device = jax.devices()[0]
    sizes = np.sort(np.asarray(data.size)).tolist()
    about = (
        device.platform, device.device_kind, jax.__version__, jaxlib.__version__, fedjax_nc.__version__,
        libdnnl.version(), _machine.device(), os.environ.get('XLA_FLAGS'),
        jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        _fingerprint.of_algorithm(algorithm), [(u.shape, str(u.dtype)) for u in jax.tree.leaves((state, data))],
        sizes, cohort, choices,
    )  # fmt: skip
    return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()


def _known_results(path: Path) -> dict[str, Any]:
    """What a cache holds; nothing if there is none, or a damaged one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remembered(path: Path, name: str, choices: tuple[Choice, ...]) -> Tuned | None:
    """A result of these choices, if the cache holds one."""
    try:
        tried = tuple(
            Tried(Choice.of(dict(zip(Choice._fields, choice, strict=True))), *rest)
            for choice, *rest in _known_results(path)[name]
        )
    except (KeyError, TypeError, ValueError):
        return None
    if {t.choice for t in tried} != set(choices):
        return None
    return Tuned(tried[0].choice, tried)


def _writable(path: Path) -> None:
    """Fails now, and not after all has been timed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f'{path} is a folder: name a file in it for the cache')
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def _remember(path: Path, name: str, found: Tuned) -> None:
    """Adds a result to the cache."""
    _checkpoints.replace(path, json.dumps({**_known_results(path), name: found.tried}, indent=1) + '\n')


def _line(tried: Tried) -> str:
    """A choice and what came of it."""
    choice = tried.choice
    words = [f'{choice.conv or "default"} form', f'chunk {choice.chunk or "default"}']
    words += [f'{choice.precision} products'] if choice.precision else []
    words += [f'{choice.rounds_per_call} rounds a call'] if choice.rounds_per_call > 1 else []
    for name in ('tails', 'narrower'):
        words += [f'{name} {", ".join(map(str, found))}'] if (found := getattr(choice, name)) else []
    if tried.problem:
        return f'{", ".join(words)}: {tried.problem}'
    return f'{", ".join(words)}: {tried.seconds:.4g} s a round, compiled in {tried.compile_seconds:.1f} s'
