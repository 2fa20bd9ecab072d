"""How examples come to lie on clients: labels in, one array of row numbers per client out.

Everything here is seeded NumPy and runs once, before training. The functions that spread classes over clients assign
every example to exactly one client, always terminate, and shuffle each client's rows.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_nc import checks
from fedjax_nc.data import arguments

Parts = list[NDArray[np.intp]]
"""A vector of row numbers per client: [n_k] intp."""

_MANY = 2**20  # clients, where there are not as many examples


def dirichlet(labels: ArrayLike, clients: int, alpha: float, *, seed: int, min_size: int = 10) -> Parts:
    """Spreads each class over the clients in proportions drawn from a Dirichlet distribution.

    Class c gives round(q_ck N_c) examples to client k, q_c ~ Dir(alpha 1_K); the last client takes what is left. The
    construction of FedETF (Li et al., ICCV 2023). Its code has no minimum size, which is `min_size=0`; a client may
    then be empty.

    Args:
        labels: [P] integers in [0, C).
        clients: the number of clients, K.
        alpha: concentration; small values give clients of few classes.
        seed: a non-negative integer.
        min_size: smallest client allowed. Up to 100 draws are tried; should none reach it, random examples of the
            largest clients move to those below it in the last draw.

    Returns:
        K vectors of row numbers, [n_k] intp in random order; every row is in one of them.

    Raises:
        ValueError: if `labels` are no labels, a number is out of its range (`alpha` must be positive and finite), or
            there are fewer than K `min_size` examples.

    Example:
        >>> from fedjax_nc import data
        >>> digits = data.load_dataset('digits')
        >>> parts = data.dirichlet(digits.y_train, 20, 0.1, seed=0)
        >>> len(parts), sum(len(rows) for rows in parts), min(len(rows) for rows in parts) >= 10
        (20, 1442, True)
    """
    labels, clients, seed, min_size = _checked(labels, clients, seed, min_size)
    alpha = _concentration(alpha)

    def draw(rng: np.random.Generator) -> NDArray[np.intp]:
        owner = np.empty(len(labels), np.intp)
        for rows in _shuffled_classes(rng, labels):
            ends = np.minimum(np.rint(_proportions(rng, alpha, clients) * len(rows)).cumsum(), len(rows))
            ends[-1] = len(rows)
            owner[rows] = np.repeat(np.arange(clients), np.diff(ends.astype(np.intp), prepend=0))
        return owner

    return _repaired(draw, clients, min_size, seed)


def dirichlet_capped(labels: ArrayLike, clients: int, alpha: float, *, seed: int, min_size: int = 10) -> Parts:
    """The Dirichlet partition that gives nothing more to a client once it holds P / K examples.

    The construction of CCVR (Luo et al., NeurIPS 2021) and of many others: client sizes differ less than under
    `dirichlet`. Arguments, results and what is done about small clients are those of `dirichlet`.

    Raises:
        ValueError: as `dirichlet`.
    """
    labels, clients, seed, min_size = _checked(labels, clients, seed, min_size)
    alpha = _concentration(alpha)

    def draw(rng: np.random.Generator) -> NDArray[np.intp]:
        owner = np.empty(len(labels), np.intp)
        held = np.zeros(clients, np.intp)
        for rows in _shuffled_classes(rng, labels):
            sizes = _capped_sizes(rng, alpha, len(rows), held, len(labels))
            owner[rows] = np.repeat(np.arange(clients), sizes)
            held += sizes
        return owner

    return _repaired(draw, clients, min_size, seed)


def dirichlet_multiclass(
    labels: ArrayLike, clients: int, alpha: float, *, seed: int, min_size: int = 10, attempts: int = 100
) -> Parts:
    """The capped Dirichlet partition in which every client holds at least two classes.

    The construction of FedNH (Dai et al., AAAI 2023): from the third class on, the m-th client that still has at most
    one class swaps its share of the class with client K - m. Of up to `attempts` draws, the first that leaves no client
    below `min_size` or with one class is taken. (The authors' code takes its third draw whatever it is.) The other
    arguments and the result are those of `dirichlet`; `alpha` is beta in the paper.

    Raises:
        ValueError: as `dirichlet`, or if all labels are of one class, there are fewer than 2 K examples, or no draw was
            good enough.
    """
    min_size, attempts = checks.static('`min_size`', min_size, 0), checks.static('`attempts`', attempts)
    labels, clients, seed, _ = _checked(labels, clients, seed, max(min_size, 2))
    alpha = _concentration(alpha)
    if len(np.unique(labels)) < 2:
        raise ValueError('two classes for every client need labels of at least two classes; use `iid` instead.')

    for attempt in range(attempts):
        rng = np.random.default_rng((seed, attempt))
        owner = np.empty(len(labels), np.intp)
        held = np.zeros(clients, np.intp)
        classes = np.zeros(clients, np.intp)
        for c, rows in enumerate(_shuffled_classes(rng, labels)):
            sizes = _capped_sizes(rng, alpha, len(rows), held, len(labels))
            if c >= 2:
                for m, poor in enumerate(np.flatnonzero(classes <= 1).tolist(), start=1):
                    sizes[[poor, clients - m]] = sizes[[clients - m, poor]]
            owner[rows] = np.repeat(np.arange(clients), sizes)
            held += sizes
            classes += sizes > 0
        if held.min() >= min_size and classes.min() >= 2:
            return _lists(rng, owner, clients)
    raise ValueError(
        f'no draw in {attempts} gave each of {clients} clients {min_size} examples of two classes; '
        'raise `alpha`, or lower `clients` or `min_size`, or use `dirichlet`, which moves examples instead.'
    )


def dirichlet_draws(labels: ArrayLike, clients: int, alpha: float, *, seed: int, min_size: int = 10) -> Parts:
    """The Dirichlet partition in which every example draws its client independently.

    An example of class c goes to client k with probability p_ck, p_c ~ Dir(alpha 1_K): the construction of FedLoGe
    (Xiao et al., ICLR 2024), whose code asks for two batches per client as a minimum. Arguments, results and what is
    done about small clients are those of `dirichlet`.

    Raises:
        ValueError: as `dirichlet`.
    """
    labels, clients, seed, min_size = _checked(labels, clients, seed, min_size)
    alpha = _concentration(alpha)

    def draw(rng: np.random.Generator) -> NDArray[np.intp]:
        owner = np.empty(len(labels), np.intp)
        for rows in _shuffled_classes(rng, labels):
            owner[rows] = rng.choice(clients, len(rows), p=_proportions(rng, alpha, clients))
        return owner

    return _repaired(draw, clients, min_size, seed)


def shards(labels: ArrayLike, clients: int, classes_per_client: int, *, seed: int) -> Parts:
    """Gives every client the same number of classes and nearly the same number of examples.

    Random permutations of the C classes stand in a row and client k takes the k-th block of c of them; the examples of
    a class are dealt equally to its holders. The scenes of FedRS (Li and Zhan, KDD 2021) and FedETF+GMV: `C10-100-2`
    is CIFAR-10 on 100 clients of 2 classes.

    Args:
        labels: [P] integers in [0, C), no class empty.
        clients: the number of clients, K.
        classes_per_client: c, a divisor of C, so that no client meets a class twice.
        seed: a non-negative integer.

    Returns:
        K vectors of row numbers, [n_k] intp in random order; every row is in one of them.

    Raises:
        ValueError: if the request is malformed, c does not divide C, some class would have no holder (K c < C), or a
            class has fewer examples than holders.
    """
    labels, clients, seed, _ = _checked(labels, clients, seed)
    classes_per_client = checks.static('`classes_per_client`', classes_per_client)
    sizes = np.bincount(labels)
    num_classes = len(sizes)
    if not sizes.all():
        raise ValueError(
            f'class {sizes.argmin()} has no example: number the classes that there are from 0, or take a partition '
            'that leaves it out, such as dirichlet.'
        )
    if num_classes % classes_per_client:
        raise ValueError(
            f'{classes_per_client} classes per client do not divide the {num_classes} classes, so a client could be '
            'given one class twice; choose a divisor, or use `dirichlet`.'
        )
    if clients * classes_per_client < num_classes:
        raise ValueError(
            f'{clients} clients of {classes_per_client} classes cannot hold {num_classes} classes; raise either number.'
        )
    rng = np.random.default_rng(seed)
    row = np.concatenate([rng.permutation(num_classes) for _ in range(clients)])
    classes = row[: clients * classes_per_client].reshape(clients, classes_per_client)

    owner = np.empty(len(labels), np.intp)
    for c, rows in enumerate(_shuffled_classes(rng, labels)):
        holders = rng.permutation(np.flatnonzero((classes == c).any(axis=1)))
        _deal(owner, rows, holders, f'class {c}')
    return _lists(rng, owner, clients)


def dirichlet_sizes(labels: ArrayLike, clients: int, alpha: float, *, seed: int, min_size: int = 10) -> Parts:
    """Size skew without label skew: random examples, in shares drawn from a Dirichlet distribution.

    Client k gets the shuffled examples from round(P (q_1 + .. + q_{k-1})) to round(P (q_1 + .. + q_k)),
    q ~ Dir(alpha 1_K): the quantity skew of Li et al. (Federated Learning on Non-IID Data Silos, ICDE 2022). Arguments,
    results and what is done about small clients are those of `dirichlet`, which skews both.

    Raises:
        ValueError: as `dirichlet`.
    """
    labels, clients, seed, min_size = _checked(labels, clients, seed, min_size)
    alpha = _concentration(alpha)

    def draw(rng: np.random.Generator) -> NDArray[np.intp]:
        owner = np.empty(len(labels), np.intp)
        ends = np.minimum(np.rint(_proportions(rng, alpha, clients).cumsum() * len(labels)), len(labels))
        ends[-1] = len(labels)
        owner[rng.permutation(len(labels))] = np.repeat(np.arange(clients), np.diff(ends.astype(np.intp), prepend=0))
        return owner

    return _repaired(draw, clients, min_size, seed)


def power_law(labels: ArrayLike, clients: int, exponent: float, *, seed: int, min_size: int = 10) -> Parts:
    """Size skew without label skew by a rule: the k-th largest client has a share in proportion to `k ** -exponent`.

    Every client gets `min_size` random examples, and of the rest its share, rounded so that nothing is left; which
    client is which is drawn. The skew of sizes that real populations have, as those of LEAF (Caldas et al., 2018).

    Args:
        labels: [P] integers in [0, C).
        clients: the number of clients, K.
        exponent: 0 for equal sizes; with 1 the largest of 100 clients has a fifth of what is shared out.
        seed: a non-negative integer.
        min_size: smallest client allowed.

    Returns:
        K vectors of row numbers, [n_k] intp in random order; every row is in one of them.

    Raises:
        ValueError: if `labels` are no labels, a number is out of its range (`exponent` must be finite and not
            negative), or there are fewer than K `min_size` examples.
    """
    labels, clients, seed, min_size = _checked(labels, clients, seed, min_size)
    exponent = arguments.number('`exponent`', exponent)
    rng = np.random.default_rng(seed)
    shares = np.exp(-exponent * np.log(np.arange(1, clients + 1)))  # of the largest: 0 at worst, never NaN
    rest = len(labels) - min_size * clients
    ends = np.rint(shares.cumsum() / shares.sum() * rest).astype(np.intp)
    sizes = min_size + np.diff(ends, prepend=0)
    return np.split(rng.permutation(len(labels)), rng.permutation(sizes).cumsum()[:-1])


def uneven_classes(
    labels: ArrayLike, clients: int, classes_per_client: tuple[int, int] | Sequence[int], *, seed: int
) -> Parts:
    """Gives clients different numbers of classes.

    Client k holds c_k classes, drawn uniformly from a range or given. In random order, each client takes the classes
    that fewest have taken before it, ties at random, so that none is left over; the examples of a class are dealt
    equally to its holders. A client of more classes has more examples. Where c_k differs as in the scenes of FedProto
    (Tan et al., AAAI 2022), and for equal c_k the `#C = k` of Li et al. (ICDE 2022).

    Args:
        labels: [P] integers in [0, C), no class empty.
        clients: the number of clients, K.
        classes_per_client: (fewest, most), both included; or K numbers, one for each client. For two clients a pair is
            their numbers.
        seed: a non-negative integer.

    Returns:
        K vectors of row numbers, [n_k] intp in random order; every row is in one of them.

    Raises:
        ValueError: if the request is malformed, a number lies outside of [1, C], the clients together hold fewer than
            C classes, or a class has fewer examples than holders.
    """
    labels, clients, seed, _ = _checked(labels, clients, seed)
    arguments.several('`classes_per_client`', classes_per_client, 'a range, or one number per client')
    sizes = np.bincount(labels)
    num_classes = len(sizes)
    if not sizes.all():
        raise ValueError(
            f'class {sizes.argmin()} has no example: number the classes that there are from 0, or take a partition '
            'that leaves it out, such as dirichlet.'
        )
    classes_per_client = [checks.static('each of `classes_per_client`', number) for number in classes_per_client]
    for number in classes_per_client:
        if number > num_classes:
            raise ValueError(f'a client cannot hold {number} of {num_classes} classes.')
    rng = np.random.default_rng(seed)
    if len(classes_per_client) == clients:
        numbers = np.asarray(classes_per_client)
    elif len(classes_per_client) == 2:
        low, high = classes_per_client
        if low > high:
            raise ValueError(f'`classes_per_client` goes from {low} to {high}: name the smaller number first.')
        numbers = rng.integers(low, high + 1, clients)
    else:
        raise ValueError(f'`classes_per_client` must be two numbers or {clients}; got {len(classes_per_client)}.')
    if numbers.sum() < num_classes:
        raise ValueError(f'{numbers.sum()} classes for all clients together leave some of {num_classes} with nobody.')
    holds = np.zeros((clients, num_classes), bool)
    for k in rng.permutation(clients):
        row = rng.permutation(num_classes)
        holds[k, row[np.argsort(holds.sum(axis=0)[row], kind='stable')][: numbers[k]]] = True

    owner = np.empty(len(labels), np.intp)
    for c, rows in enumerate(_shuffled_classes(rng, labels)):
        _deal(owner, rows, rng.permutation(np.flatnonzero(holds[:, c])), f'class {c}')
    return _lists(rng, owner, clients)


def by_domain(domains: Iterable[Hashable], clients: int, *, seed: int) -> Parts:
    """Clients of one domain each: the camera, hospital or style of drawing that examples come from.

    Client k holds examples of domain k mod D, domains in order of appearance; those of a domain are dealt equally to
    its clients. Feature skew as in FedBN (Li et al., ICLR 2021), where every client has a data set of its own.

    Args:
        domains: [P] hashable values, one per example, as for `natural`, which is one client per domain.
        clients: K, at least as many as there are domains.
        seed: a non-negative integer.

    Returns:
        K vectors of row numbers, [n_k] intp in random order; every row is in one of them.

    Raises:
        ValueError: if the request is malformed, a domain would have no client, or has fewer examples than clients.
    """
    groups = natural(domains)
    clients, seed = checks.static('`clients`', clients), checks.static('`seed`', seed, 0)
    if clients < len(groups):
        raise ValueError(f'{clients} clients of one domain each leave some of {len(groups)} with nobody.')
    rng = np.random.default_rng(seed)
    owner = np.empty(sum(map(len, groups)), np.intp)
    for d, rows in enumerate(groups):
        _deal(owner, rng.permutation(rows), np.arange(d, clients, len(groups)), f'domain {d}')
    return _lists(rng, owner, clients)


def iid(labels: ArrayLike, clients: int, *, seed: int) -> Parts:
    """Deals shuffled examples to clients; their sizes differ by one at most.

    Args:
        labels: [P] integers in [0, C), of which only the number matters.
        clients: the number of clients, K, not more than there are examples.
        seed: a non-negative integer.

    Returns:
        K vectors of row numbers, [n_k] intp in random order; every row is in one of them.

    Raises:
        ValueError: if an argument is not of this kind.
    """
    labels, clients, seed, _ = _checked(labels, clients, seed)
    return np.array_split(np.random.default_rng(seed).permutation(len(labels)), clients)


def natural(ids: Iterable[Hashable], owners: Iterable[Hashable] | None = None) -> Parts:
    """One client per distinct id: the writer, user or hospital that an example came from.

    Args:
        ids: [P] hashable values, one per example.
        owners: ids of the clients, in whose order of appearance they are, as `ids` themselves by default. For tests it
            is the ids of the training examples, so that each client is tested on its own.

    Returns:
        A vector of row numbers, [n_k] intp ascending, per distinct owner; of an owner without rows an empty one, and
        rows of nobody that is among the owners are left out.

    Raises:
        ValueError: if there is none, or one that cannot tell clients apart, such as a list, NaN or None; if no owner
            has a row.

    Example:
        >>> from fedjax_nc import data
        >>> train, test = ['b', 'a', 'b'], ['a', 'c', 'b', 'b']
        >>> [rows.tolist() for rows in data.natural(train)]
        [[0, 2], [1]]
        >>> [rows.tolist() for rows in data.natural(test, train)]
        [[2, 3], [0]]
    """
    rows = _rows_of('ids', ids)
    if owners is None:
        return list(rows.values())
    found = [rows.get(owner, np.zeros(0, np.intp)) for owner in _rows_of('owners', owners)]
    if not any(map(len, found)):
        raise ValueError('none of the owners has an example among `ids`: give ids of the same clients, spelled alike.')
    return found


def _rows_of(name: str, ids: Iterable[Hashable]) -> dict[Hashable, NDArray[np.intp]]:
    """The rows of each id, in order of appearance."""
    if isinstance(ids, np.ndarray | jax.Array):
        ids = arguments.array(f'`{name}`', ids).tolist()
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes):
        raise ValueError(f'`{name}` must be one client id per example; got {checks.shown(ids)}.')
    rows: dict[Hashable, list[int]] = {}
    for row, client in enumerate(ids):
        try:
            rows.setdefault(client, []).append(row)
            same = client is not None and bool(client == client)  # a missing one of pandas says neither
        except TypeError:
            same = False
        if not same:
            raise ValueError(f'`{name}` must be hashable, not NaN or None; got {checks.shown(client)} in row {row}.')
    if not rows:
        raise ValueError(f'`{name}` is empty: give one client id per example.')
    return {client: np.array(values, np.intp) for client, values in rows.items()}


def long_tail(labels: ArrayLike, imbalance_factor: float, *, seed: int) -> NDArray[np.intp]:
    """Rows that make a balanced set long-tailed: class c keeps floor(n_max IF^(-c / (C - 1))) random examples.

    The exponential profile of Cao et al. (NeurIPS 2019), used by FedLoGe; class 0 is the head. A class that holds
    fewer examples than its profile keeps them all.

    Args:
        labels: [P] integers in [0, C).
        imbalance_factor: IF >= 1, size of the head over size of the tail.
        seed: a non-negative integer.

    Returns:
        The rows kept, [n] intp ascending.

    Raises:
        ValueError: if `imbalance_factor` < 1, or so large that a class would vanish, or `labels` or `seed` are not of
            this kind.
    """
    labels, _, seed, _ = _checked(labels, 1, seed)
    factor = arguments.number('`imbalance_factor`', imbalance_factor, 1, advice='it is head size over tail size.')
    rng = np.random.default_rng(seed)
    sizes = np.bincount(labels)
    profile = sizes.max() * (1 / factor) ** (np.arange(len(sizes)) / max(len(sizes) - 1, 1))
    # a profile of exactly n examples may come out as n - 1e-13
    keep = np.floor(profile + 1e-9).astype(np.intp)
    if keep.min() < 1:
        raise ValueError(
            f'`imbalance_factor` {factor:g} leaves nothing of class {keep.argmin()}; '
            f'it can be at most {sizes.max()}, the size of the largest class.'
        )
    return np.sort(np.concatenate([rows[:n] for rows, n in zip(_shuffled_classes(rng, labels), keep, strict=True)]))


def _deal(owner: NDArray[np.intp], rows: NDArray[np.intp], holders: NDArray[np.intp], what: str) -> None:
    """Writes the holders of rows into `owner`, each as often as the next."""
    if len(rows) < len(holders):
        raise ValueError(f'{what} has {len(rows)} examples for {len(holders)} clients; lower `clients`.')
    owner[rows] = holders[np.arange(len(rows)) % len(holders)]


def _checked(labels: ArrayLike, clients: int, seed: int, min_size: int = 1) -> tuple[NDArray[np.intp], int, int, int]:
    """The same, numbers as Python has them."""
    labels = arguments.labels('`labels`', labels)
    clients, min_size = checks.static('`clients`', clients), checks.static('`min_size`', min_size, 0)
    seed = checks.static('`seed`', seed, 0)
    if min_size * clients > len(labels):
        raise ValueError(
            f'{clients} clients cannot have {min_size} examples each: there are {len(labels)}. '
            'Lower `clients` or `min_size`.'
        )
    if clients > max(len(labels), _MANY):
        raise ValueError(f'`clients` must be at most {_MANY} or one for each example, not {clients}.')
    return labels, clients, seed, min_size


def _concentration(alpha: float) -> float:
    return arguments.number('`alpha`', alpha, open_low=True, advice='for equal shares use `iid`.')


def _shuffled_classes(rng: np.random.Generator, labels: NDArray[np.intp]) -> Iterable[NDArray[np.intp]]:
    for rows in by_class(labels):
        yield rng.permutation(rows)


def by_class(labels: NDArray[np.intp], classes: int = 0) -> Parts:
    """The rows of each class in order, of all classes up to the largest label and `classes`."""
    ends = np.bincount(labels, minlength=classes).cumsum()
    return np.split(np.argsort(labels, kind='stable'), ends[:-1])


def _proportions(rng: np.random.Generator, alpha: float, clients: int) -> NDArray[np.float64]:
    q = rng.dirichlet(np.full(clients, alpha))
    if np.isfinite(q).all() and q.sum() > 0.5:
        return q
    if alpha > 1:  # the numbers overflow for a huge `alpha`, whose limit is equal shares
        return np.full(clients, 1 / clients)
    q = np.zeros(clients)  # and underflow for a minute one, whose limit is that one client takes all
    q[rng.integers(clients)] = 1
    return q


def _capped_sizes(
    rng: np.random.Generator, alpha: float, amount: int, held: NDArray[np.intp], total: int
) -> NDArray[np.intp]:
    """How many of `amount` examples each client gets when those that hold `total` / K or more get none."""
    # a Dirichlet vector with some entries removed and the rest renormalised is a Dirichlet vector of the rest;
    # drawing that one cannot end in 0 / 0
    takers = np.flatnonzero(held * len(held) < total)
    sizes = np.zeros(len(held), np.intp)
    if amount:
        ends = np.floor(_proportions(rng, alpha, len(takers)).cumsum() * amount)
        ends[-1] = amount
        sizes[takers] = np.diff(np.minimum(ends, amount).astype(np.intp), prepend=0)
    return sizes


def _repaired(draw: Callable[[np.random.Generator], NDArray[np.intp]], clients: int, min_size: int, seed: int) -> Parts:
    """Draws owners until all clients are large enough, or moves examples in the last of 100 draws."""
    for attempt in range(100):
        rng = np.random.default_rng((seed, attempt))
        owner = draw(rng)
        sizes = np.bincount(owner, minlength=clients)
        if sizes.min() >= min_size:
            break
    else:
        # The largest client always holds more than `min_size` while another holds less: `_checked` saw to the mean.
        lack = np.repeat(np.arange(clients), np.maximum(min_size - sizes, 0))
        heap = [(-size, k) for k, size in enumerate(sizes)]
        heapq.heapify(heap)
        gives = np.zeros(clients, np.intp)
        for _ in lack:
            size, k = heap[0]
            gives[k] += 1
            heapq.heapreplace(heap, (size + 1, k))
        moved = [rng.choice(np.flatnonzero(owner == k), gives[k], replace=False) for k in np.flatnonzero(gives)]
        owner[rng.permutation(np.concatenate(moved))] = lack
    return _lists(rng, owner, clients)


def _lists(rng: np.random.Generator, owner: NDArray[np.intp], clients: int) -> Parts:
    rows = rng.permutation(len(owner))
    rows = rows[np.argsort(owner[rows], kind='stable')]
    return np.split(rows, np.bincount(owner, minlength=clients).cumsum()[:-1])
