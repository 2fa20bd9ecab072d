"""ResNet-20's convolutions and their gradients, in each form: milliseconds, and how exact sums are.

python benchmarks/convolutions.py
python benchmarks/convolutions.py --lanes 1 5 10
The first is of one client on a CPU; with `--lanes`, of several clients side by side in the forms for accelerators.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc.experiments import provenance
from fedjax_nc.models import compiler_options, convolution, libdnnl
from fedjax_nc.models.looped import Form, Geometry, in_loops

LAYERS = ((32, 3, 16, 1), (32, 16, 16, 1), (32, 16, 32, 2), (16, 32, 32, 1), (16, 32, 64, 2), (8, 64, 64, 1))
"""Side of images, channels in and out, stride; kernels are 3x3."""


def geometry(batch: int, side: int, inputs: int, outputs: int, stride: int) -> Geometry:
    return Geometry((batch, side, side, inputs), (3, 3, inputs, outputs), (stride, stride), ((1, 1), (1, 1)), None)


def forms() -> dict[str, Form]:
    """With oneDNN's own library last, which the others must not take."""
    known = {'XLA': in_loops(library=False), "jaxlib's oneDNN": in_loops(library=True)}
    return known | ({f'oneDNN {libdnnl.version()}': in_loops(library=True)} if libdnnl.version() else {})


def beside(geometry: Geometry) -> dict[str, Form]:
    """Forms for several clients side by side: those of the library, and windows over several pixels, on trial."""
    grouped = convolution.GROUPED
    known = {'native': grouped._replace(kernel_gradient=derived), 'grouped': grouped}
    if geometry.strides != (1, 1):
        return known
    return known | {f'windows over {n}': over(n) for n in (2, 4, 8) if geometry.image[2] % n == 0}


def derived(x: jax.Array, g: jax.Array, geometry: Geometry) -> jax.Array:
    """A kernel gradient as JAX derives it, which `vmap` makes a forward convolution of."""
    kernel = jax.ShapeDtypeStruct(geometry.kernel, x.dtype)
    return jax.linear_transpose(lambda kernel: convolution.GROUPED.forward(x, kernel, geometry), kernel)(g)[0]


def over(pixels: int) -> Form:
    """Convolutions whose windows make so many neighbours of a row at once, which are channels of their results.

    Matrix units that stand idle with 16 channels have more of them, for `(width + pixels - 1) / width` times as many
    multiplications.
    """

    def wide(geometry: Geometry) -> Geometry:
        height, width, inputs, outputs = geometry.kernel
        return geometry._replace(kernel=(height, width + pixels - 1, inputs, pixels * outputs), strides=(1, pixels))

    def forward(x: jax.Array, kernel: jax.Array, geometry: Geometry) -> jax.Array:
        beside = [jnp.pad(kernel, ((0, 0), (n, pixels - 1 - n), (0, 0), (0, 0))) for n in range(pixels)]
        more = wide(geometry)
        y = convolution.GROUPED.forward(x, jnp.concatenate(beside, 3), more)
        return y.reshape(*y.shape[:2], y.shape[2] * pixels, geometry.kernel[3])

    def input_gradient(g: jax.Array, kernel: jax.Array, geometry: Geometry) -> jax.Array:
        turned = jnp.swapaxes(kernel[::-1, ::-1], 2, 3)
        height, width = (
            (n - 1 - low, n - 1 - high) for n, (low, high) in zip(kernel.shape[:2], geometry.pads, strict=True)
        )
        back = geometry._replace(image=g.shape, kernel=turned.shape, pads=(height, width))
        return forward(g, turned, back)

    def kernel_gradient(x: jax.Array, g: jax.Array, geometry: Geometry) -> jax.Array:
        height, width, inputs, outputs = geometry.kernel
        g = g.reshape(*g.shape[:2], g.shape[2] // pixels, pixels * outputs)
        found = convolution.GROUPED.kernel_gradient(x, g, wide(geometry))
        found = found.reshape(height, width + pixels - 1, inputs, pixels, outputs)
        return functools.reduce(jnp.add, (found[:, n : n + width, :, n] for n in range(pixels)))

    return Form(forward, input_gradient, kernel_gradient, lambda x, geometry: x)


def milliseconds(function: Callable[..., Any], *arrays: Any, calls: int) -> float:
    """The shortest of so many calls; on an accelerator the mean of as many in a row, which hides the host's part."""
    jax.block_until_ready(function(*arrays))  # compiled
    spent, start = list[float](), time.perf_counter()
    for _ in range(calls):
        before = time.perf_counter()
        found = function(*arrays)
        if jax.default_backend() == 'cpu':
            jax.block_until_ready(found)
            spent.append(time.perf_counter() - before)
    jax.block_until_ready(found)
    return 1e3 * min(spent, default=(time.perf_counter() - start) / calls)


def doubles(x: np.ndarray, g: np.ndarray, stride: int) -> np.ndarray:
    """The kernel gradient in double precision."""
    around, (rows, cols) = np.pad(np.float64(x), ((0, 0), (1, 1), (1, 1), (0, 0))), g.shape[1:3]

    def tap(i: int, j: int) -> np.ndarray:
        read = around[:, i : i + stride * rows : stride, j : j + stride * cols : stride]
        return np.tensordot(read, np.float64(g), ((0, 1, 2), (0, 1, 2)))

    return np.array([[tap(i, j) for j in range(3)] for i in range(3)])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--batch', type=int, default=128)
    parser.add_argument('--calls', type=int, default=20)
    parser.add_argument('--lanes', type=int, nargs='+', help='clients side by side')
    args = parser.parse_args(argv)
    print('| lanes | side, channels, stride | form | forward | input gradient | kernel gradient | its error |')
    print('| --- | --- | --- | --- | --- | --- | --- |')
    for lanes in args.lanes or [1]:
        for layer in LAYERS:
            rows(layer, lanes, args.batch, args.calls, beside if args.lanes else lambda geometry: forms())
    about = provenance.about()
    print(f'\n{about["date"]}, {about["device"]}, jax {jax.__version__}, batches of {args.batch}.')


def rows(
    layer: tuple[int, int, int, int], lanes: int, batch: int, calls: int, forms: Callable[[Geometry], dict[str, Form]]
) -> None:
    """Prints a row of each form of a layer."""
    rng, own, where = np.random.default_rng(0), libdnnl.available, geometry(batch, *layer)
    before, inputs, outputs, stride = layer
    x, g = (
        rng.normal(size=(lanes, batch, side, side, channels)).astype('f')
        for side, channels in ((before, inputs), (-(-before // stride), outputs))
    )
    kernel, exact = rng.normal(size=(lanes, *where.kernel)).astype('f'), doubles(x[-1], g[-1], stride)
    arrays = jax.device_put((x, g, kernel) if lanes > 1 else (x[0], g[0], kernel[0]))
    for name, form in forms(where).items():
        libdnnl.available = own if name.startswith('oneDNN') else lambda dtype: False
        jax.clear_caches()  # lowering is remembered
        spent, found = [], None
        for step, (one, other) in zip(form[:3], ((0, 2), (1, 2), (0, 1)), strict=True):
            of = functools.partial(step, geometry=where)
            program = jax.jit(jax.vmap(of) if lanes > 1 else of, compiler_options=compiler_options())
            spent.append(milliseconds(program, arrays[one], arrays[other], calls=calls))
            found = program(arrays[one], arrays[other])
        error = np.std(np.asarray(found)[-1 if lanes > 1 else ...] - exact) / np.std(exact)
        print(f'| {lanes} | {before}, {inputs} to {outputs}, {stride} | {name} |', end='')
        print(*(f' {u:.3f} |' for u in spent), f' {error:.1e} |', sep='', flush=True)
    libdnnl.available = own


if __name__ == '__main__':
    main()
