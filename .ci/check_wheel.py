"""Installs a built wheel in a fresh environment outside of the repository and uses it there as a stranger would.

python .ci/check_wheel.py dist/*.whl --python python3.13 --jax 0.12.0
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PROGRAM = """
import importlib.metadata, importlib.resources, sys
import jax
import fedjax_nc
from fedjax_nc import data, evaluate, experiments, local, models, simulate, training
from fedjax_nc.algorithms import fedetf

assert fedjax_nc.__version__ == importlib.metadata.version('fedjax_nc')
assert 'site-packages' in fedjax_nc.__file__, fedjax_nc.__file__
assert importlib.resources.files('fedjax_nc').joinpath('py.typed').is_file()
digits = data.load_dataset('digits')
train = data.federate(digits.x_train, digits.y_train, data.dirichlet(digits.y_train, clients=10, alpha=0.3, seed=0))
model = models.from_flax(models.MLP((32,)))
algorithm = fedetf.algorithm(model, local.sgd(0.05), scale=4.0, plan=local.Plan(16, 5))
key = jax.random.key(0)
run = training.run(algorithm, key, simulate.init(algorithm, key, train), train, rounds=10, cohort=5, progress=False)
right = float(evaluate.accuracy(evaluate.generic(algorithm, run.state, digits.x_test, digits.y_test, 10)))
assert right > 0.7, right
print(f'fedjax_nc {fedjax_nc.__version__}, Python {sys.version.split()[0]}, jax {jax.__version__}: FedETF {right:.3f}')
"""


def contents(wheel: Path) -> None:
    """What must be inside, and what must not."""
    names = zipfile.ZipFile(wheel).namelist()
    tables = [name for name in names if name.startswith('fedjax_nc/experiments/tables/') and name.endswith('.toml')]
    stray = [name for name in names if not name.startswith(('fedjax_nc/', 'fedjax_nc-'))]
    if 'fedjax_nc/py.typed' not in names or len(tables) < 15 or stray:
        raise SystemExit(f'{wheel.name}: py.typed, {len(tables)} tables; does not belong there: {stray}')
    print(f'{wheel.name}: {len(names)} files, {len(tables)} tables, {wheel.stat().st_size / 1e3:.0f} kB')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('wheel', type=Path)
    parser.add_argument('--python', default=sys.executable, help='which Python')
    parser.add_argument('--jax', help='a version of jax and jaxlib; the newest by default')
    args = parser.parse_args()
    contents(args.wheel)
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, 'venv/bin/python')
        subprocess.run([args.python, '-m', 'venv', Path(folder, 'venv')], check=True)
        pins = [f'jax=={args.jax}', f'jaxlib=={args.jax}'] if args.jax else []
        wanted = [f'{args.wheel.resolve()}[examples]', *pins]
        subprocess.run([python, '-m', 'pip', 'install', '-q', *wanted], check=True)
        subprocess.run([python, '-c', PROGRAM], check=True, cwd=folder)
        for command in (['-m', 'fedjax_nc.experiments', 'list'], ['-m', 'fedjax_nc.experiments', 'show', 'fednh_1']):
            subprocess.run([python, *command], check=True, cwd=folder, stdout=subprocess.DEVNULL)
        subprocess.run([python.with_name('fedjax-nc'), 'list'], check=True, cwd=folder, stdout=subprocess.DEVNULL)


if __name__ == '__main__':
    main()
