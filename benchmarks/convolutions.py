"""ResNet-20's convolutions and their gradients on a CPU, in each form: milliseconds, and how exact sums are.

python benchmarks/convolutions.py
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_nc.experiments import provenance
from fedjax_nc.models import compiler_options, libdnnl
from fedjax_nc.models.looped import Form, Geometry, in_loops

LAYERS = ((32, 3, 16, 1), (32, 16, 16, 1), (32, 16, 32, 2), (16, 32, 32, 1), (16, 32, 64, 2), (8, 64, 64, 1))
"""Side of images, channels in and out, stride; kernels are 3x3."""


def geometry(batch: int, side: int, inputs: int, outputs: int, stride: int) -> Geometry:
    return Geometry((batch, side, side, inputs), (3, 3, inputs, outputs), (stride, stride), ((1, 1), (1, 1)), None)


def forms() -> dict[str, Form]:
    """With oneDNN's own library last, which the others must not take."""
    known = {'XLA': in_loops(library=False), "jaxlib's oneDNN": in_loops(library=True)}
    return known | ({f'oneDNN {libdnnl.version()}': in_loops(library=True)} if libdnnl.version() else {})


def milliseconds(function: Callable[..., Any], *arrays: Any, calls: int) -> float:
    """The shortest of so many calls."""
    spent = []
    for _ in range(calls + 1):  # the first one compiles
        start = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        spent.append(time.perf_counter() - start)
    return 1e3 * min(spent[1:])


def doubles(x: np.ndarray, g: np.ndarray, stride: int) -> np.ndarray:
    """The kernel gradient in double precision."""
    around, (rows, cols) = np.pad(np.float64(x), ((0, 0), (1, 1), (1, 1), (0, 0))), g.shape[1:3]

    def tap(i: int, j: int) -> np.ndarray:
        read = around[:, i : i + stride * rows : stride, j : j + stride * cols : stride]
        return np.tensordot(read, np.float64(g), ((0, 1, 2), (0, 1, 2)))

    return np.array([[tap(i, j) for j in range(3)] for i in range(3)])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--batch', type=int, default=128)
    parser.add_argument('--calls', type=int, default=20)
    args = parser.parse_args(argv)
    print('| side, channels, stride | form | forward | input gradient | kernel gradient | its error |')
    print('| --- | --- | --- | --- | --- | --- |')
    rng, own = np.random.default_rng(0), libdnnl.available
    for layer in LAYERS:
        where = geometry(args.batch, *layer)
        side = layer[0] // layer[3]
        x, g = (rng.normal(size=(args.batch, n, n, c)).astype('f') for n, c in ((layer[0], layer[1]), (side, layer[2])))
        kernel, exact = rng.normal(size=where.kernel).astype('f'), doubles(x, g, layer[3])
        x, g, kernel = jax.device_put((x, g, kernel))
        for name, form in forms().items():
            libdnnl.available = own if name.startswith('oneDNN') else lambda dtype: False
            jax.clear_caches()  # lowering is remembered
            steps = (form.forward, (x, kernel)), (form.input_gradient, (g, kernel)), (form.kernel_gradient, (x, g))
            programs = [
                (jax.jit(functools.partial(step, geometry=where), compiler_options=compiler_options()), arrays)
                for step, arrays in steps
            ]
            spent = [milliseconds(program, *arrays, calls=args.calls) for program, arrays in programs]
            error = np.std(programs[2][0](x, g) - exact) / np.std(exact)
            print(f'| {layer[0]}, {layer[1]} to {layer[2]}, {layer[3]} | {name} |', end='')
            print(*(f' {u:.2f} |' for u in spent), f' {error:.1e} |', sep='', flush=True)
        libdnnl.available = own
    about = provenance.about()
    print(f'\n{about["date"]}, {about["device"]}, jax {jax.__version__}, batches of {args.batch}.')


if __name__ == '__main__':
    main()
