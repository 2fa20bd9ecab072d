"""Parity with the authors' code: the same weights, client by client and round by round, to the last digits.

The released classes and functions of FedETF, FedNH and FedLoGe are imported from checkouts and run by a Python that has
PyTorch, ours beside them, from the same first weights, on the same images in the same order, both in double precision:
one client's update, and three rounds of clients of unequal size that lack classes and end in short batches. Options
bring the library to what was released; rows with a cause show where its defaults depart from that on purpose. Random
images serve as data, so that nothing is downloaded.

    git clone https://github.com/ZexiLee/ICCV-2023-FedETF fedetf && git -C fedetf checkout 092ace3
    git clone https://github.com/Yutong-Dai/FedNH fednh && git -C fednh checkout 60c3161
    git clone https://github.com/ZackZikaiXiao/FedLoGe fedloge && git -C fedloge checkout f4cac52
    python3 -m venv torch_env && torch_env/bin/pip install torch==2.13.0 numpy scikit-learn tqdm
    python benchmarks/parity.py --fedetf fedetf --fednh fednh --fedloge fedloge --python torch_env/bin/python

It ends with 1 if a row without a cause differs by 1e-9 or more.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

PEERS = Path(__file__).parent / 'peers'
METHODS = {
    'fedetf': 'client_funct.py',
    'fednh': 'src/flbase/strategies/FedNH.py',
    'fedloge': 'util/update_baseline.py',
}
"""The methods, and a file that the checkout of each must have."""

TOLERANCE = 1e-9
HEADER = ('method', 'quantity', 'largest difference', 'cause of a deliberate departure')


def largest(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The largest difference between arrays of the same names, each relative to the largest value of theirs.

    What is not a number differs without limit.

    Raises:
      ValueError: if names or shapes are not the same, or there are none.
    """
    if not ours or set(ours) != set(theirs):
        raise ValueError(f'arrays called {sorted(ours)} cannot be compared with {sorted(theirs)}')
    worst = 0.0
    for name, b in theirs.items():
        a = ours[name]
        if a.shape != b.shape:
            raise ValueError(f'{name or "the array"} has shape {a.shape} here and {b.shape} there')
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return np.inf
        gap, size = float(np.max(np.abs(a - b), initial=0.0)), float(np.max(np.abs(b), initial=0.0))
        worst = max(worst, gap / size if size > 0 else gap)
    return worst


def under(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays called `prefix` or `prefix/...`, by the rest of their names."""
    return {name[len(prefix) :]: a for name, a in arrays.items() if name == prefix or name.startswith(f'{prefix}/')}


def table(rows: Sequence[tuple[str, str, float, str]]) -> str:
    """Markdown of rows (method, quantity, largest difference, cause)."""
    cells = [HEADER, ('---', '---', '---:', '---')]
    cells += [(method, quantity, f'{gap:.1e}', cause) for method, quantity, gap, cause in rows]
    return '\n'.join(f'| {" | ".join(row)} |' for row in cells)


def failing(rows: Sequence[tuple[str, str, float, str]]) -> list[str]:
    """The quantities that differ without a cause."""
    return [f'{method}: {quantity}' for method, quantity, gap, cause in rows if not cause and not gap < TOLERANCE]


def theirs(python: str, checkout: Path, case: Any, folder: Path) -> dict[str, np.ndarray]:
    """What the authors' code makes of a case.

    Raises:
      RuntimeError: with the last line of the worker, if it fails.
    """
    given, results = folder / 'given.npz', folder / 'results.npz'
    np.savez(given, **case.given, settings=json.dumps(case.settings))
    command = [python, str(PEERS / 'authors_worker.py'), case.part, str(checkout.resolve()), str(given), str(results)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    except OSError as problem:
        raise RuntimeError(f'--python {python}: {problem.strerror}') from None
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(f"the authors' code of {case.part} failed: {said[-1] if said else 'without a word'}")
    with np.load(results) as file:
        return {name: file[name] for name in file.files}


class Parser(argparse.ArgumentParser):
    """Answers in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'{self.prog}: error: {message}\n')


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    for method in METHODS:
        parser.add_argument(f'--{method}', type=Path, metavar='FOLDER', help='checkout of the released code')
    parser.add_argument('--python', required=True, help='a Python that has PyTorch')
    parser.add_argument('--json', type=Path, help='also write the rows here')
    parser.add_argument(
        '--off', choices=('lr', 'rho'), help='make this number of ours wrong by 1e-6 of itself: the table must show it'
    )
    args = parser.parse_args(given)
    args.python = os.path.abspath(args.python) if os.sep in args.python else args.python
    chosen = [method for method in METHODS if getattr(args, method)]
    if not chosen:
        parser.error('name at least one checkout: --fedetf, --fednh or --fedloge')
    for method in chosen:
        if not (getattr(args, method) / METHODS[method]).is_file():
            parser.error(
                f'--{method} {getattr(args, method)} has no {METHODS[method]}: it must be a checkout of the released '
                'code, as the head of this script makes it'
            )
    try:
        has = subprocess.run([args.python, '-c', 'import numpy, torch, tqdm, sklearn'], capture_output=True, text=True)
    except OSError as problem:
        parser.error(f'--python {args.python}: {problem.strerror}')
    if has.returncode:
        said = has.stderr.strip().splitlines()[-1]
        parser.error(f'--python {args.python}: {said}; pip install torch==2.13.0 numpy scikit-learn tqdm')
    return args


def main() -> None:
    args = arguments()
    import authors_ours

    authors_ours.double_precision()
    import jax
    import results

    off = authors_ours.Off(**{args.off: 1 + 1e-6}) if args.off else authors_ours.Off()
    rows, moved, versions = [], [], ''
    for method in METHODS:
        if (checkout := getattr(args, method)) is None:
            continue
        for case in authors_ours.cases(method, off):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    peer = theirs(args.python, checkout, case, Path(folder))
                except RuntimeError as problem:
                    sys.exit(f'parity.py: error: {problem}')
            versions = str(peer['versions'])
            far = largest(under('rounds/params/body', case.ours), under('params/body', case.given))
            moved.append(f'{case.method} {far:.2g}')
            for row in case.rows:
                gap = largest(under(row.ours, case.ours), under(row.theirs, peer))
                rows.append((case.method, row.quantity, gap, row.cause))
    print(table(rows))
    print(
        f'\nThree rounds moved arrays of the bodies by up to these parts of their largest values: {", ".join(moved)}.'
    )
    print(f'{datetime.date.today()}, {results.device()}. jax {jax.__version__}; {versions}. Both sides in float64.')
    if args.json:
        named = [dict(zip(('method', 'quantity', 'gap', 'cause'), row, strict=True)) for row in rows]
        results.write(args.json, {'rows': named})
    if wrong := failing(rows):
        sys.exit(f'parity.py: {len(wrong)} of {len(rows)} rows differ without a cause, first {wrong[0]}')


if __name__ == '__main__':
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    main()
