"""oneDNN's convolution on x86 CPUs, up to three times as fast as the one that XLA's CPU backend chooses.

jaxlib ships oneDNN and the XLA operation that calls it, but XLA's own rewriting pass is switched off in jaxlib, so the
operation is named here directly. Its description is not a stable interface: it is used only with the jaxlib versions
it was checked with, and only after a small convolution has come out right. Everywhere else, and in what is exported for
other machines, XLA computes the same.
"""

import functools
import json
import math
import platform
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import core, lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from fedjax_nc.base import Array

CHECKED = ('0.10.2', '0.12.0.1')
"""Versions of jaxlib with which the tests of this file have passed; others may describe the operation differently."""

Pair = tuple[int, int]


def portable(
    x: Array,
    kernel: Array,
    strides: Sequence[int],
    pads: Sequence[Pair],
    dilation: Sequence[int],
    dtype: jnp.dtype,
    precision: Any = None,
) -> Array:
    """What `call` computes, by XLA: images [B, H, W, I] and a kernel [h, w, I, O] to [B, h', w', O] of `dtype`.

    Or with one more dimension, `[B, D, H, W, I]` and `[d, h, w, I, O]`. Sums are kept in float32 at least.
    """
    space = 'DHW'[3 - len(strides) :]
    y = lax.conv_general_dilated(
        x,
        kernel,
        strides,
        pads,
        rhs_dilation=dilation,
        dimension_numbers=(f'N{space}C', f'{space}IO', f'N{space}C'),
        precision=precision,
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    )
    return y.astype(dtype)


def either(library: Callable[..., Array], otherwise: Callable[..., Array], *arrays: Array, **how: Any) -> Array:
    """`library(*arrays, devices=n, **how)` where a program is compiled for this machine's CPU and oneDNN can be used.

    Else `otherwise(*arrays, **how)`. That is decided when a program is lowered: what `jax.export` writes has to run
    anywhere. Both are functions of a module and give the same shape; `how` is hashable, n the number of devices that
    share the program. The first array's type decides whether oneDNN can be used. Neither `vmap` nor gradients are
    defined.
    """
    return either_p.bind(*arrays, library=library, otherwise=otherwise, how=tuple(how.items()))


def call(
    x: Array,
    kernel: Array,
    strides: Sequence[int],
    pads: Sequence[Pair],
    dilation: Sequence[int],
    dtype: jnp.dtype,
    precision: Any = None,
) -> Array:
    """The call into oneDNN itself, for the CPU of this machine, in two or three dimensions; inside `either` alone."""
    space = range(x.ndim - 2)
    data = {'batch_dim': 0, 'feature_dim': x.ndim - 1, 'spatial_dims': [d + 1 for d in space]}
    windows = {'input_feature_dim': x.ndim - 2, 'output_feature_dim': x.ndim - 1, 'spatial_dims': list(space)}
    description = {
        'dims': x.ndim,
        'feature_groups': 1,
        'input': {'dims': x.ndim, 'data': data},
        'output': {'dims': x.ndim, 'data': data},
        'kernel': {'dims': x.ndim, 'filter': windows},
        'window': {
            'pad_left': [p[0] for p in pads],
            'pad_right': [p[1] for p in pads],
            'strides': strides,
            'window_dilations': dilation,
        },
    }
    sides = [(x.shape[d + 1] + sum(pads[d]) - (kernel.shape[d] - 1) * dilation[d] - 1) // strides[d] + 1 for d in space]
    by = jax.ffi.ffi_call(
        '__onednn$convolution',
        jax.ShapeDtypeStruct((x.shape[0], *sides, kernel.shape[-1]), dtype),
        custom_call_api_version=2,
        legacy_backend_config=json.dumps({'onednn_conv_config': description}),
    )
    return by(x, kernel)


@functools.cache
def available(dtype: jnp.dtype) -> bool:
    """Whether `convolution` is oneDNN's for images of this type in programs for this machine's CPU."""
    if jaxlib.__version__ not in CHECKED or platform.machine() not in ('x86_64', 'AMD64'):
        return False
    if dtype == jnp.bfloat16:
        return _has('avx512_bf16') and _right(dtype)  # without it oneDNN ends the process
    return dtype == jnp.float32 and _right(dtype)


def _has(feature: str) -> bool:
    try:
        return feature in Path('/proc/cpuinfo').read_text().split()
    except OSError:
        return False


def _right(dtype: jnp.dtype) -> bool:
    """Compares small convolutions in two and three dimensions with XLA's."""
    rng = np.random.default_rng(0)
    shapes = ((2, 7, 6, 16), (3, 2, 16, 16)), ((1, 5, 6, 16, 8), (4, 2, 1, 8, 16))
    arrays = [[rng.integers(-4, 5, shape).astype(dtype) for shape in pair] for pair in shapes]
    hows = ((2, 1), ((1, 0), (2, 1)), (1, 2)), ((1, 1, 1), ((1, 1), (1, 0), (0, 0)), (1, 2, 1))
    exact = jnp.dtype(jnp.float32)

    def both(arrays: list[list[Array]]) -> list[tuple[Array, Array]]:
        return [
            (call(x, kernel, *how, exact), portable(x.astype(exact), kernel.astype(exact), *how, exact))
            for (x, kernel), how in zip(arrays, hows, strict=True)
        ]

    return agrees(both, arrays)


def agrees(both: Callable[[Any], list[tuple[Array, Array]]], arrays: Any) -> bool:
    """Whether the pairs that `both(arrays)` makes on this CPU are equal; not, if it cannot be compiled."""
    try:  # compiled ahead of its call, because the first caller may be tracing
        cpu = jax.sharding.SingleDeviceSharding(jax.local_devices(backend='cpu')[0])
        lowered = jax.jit(both, in_shardings=cpu, out_shardings=cpu).lower(arrays)
        with warnings.catch_warnings():  # jaxlib's own operation cannot be written to the persistent cache
            warnings.filterwarnings('ignore', message='Error writing persistent compilation cache')
            results = lowered.compile()(arrays)
    except RuntimeError:  # as well if jax has no CPU here
        return False
    return all(np.array_equal(ours, theirs) for ours, theirs in results)  # small whole numbers: every sum is exact


def _lowered(context: Any, *arrays: Any, library: Any, otherwise: Any, how: Any) -> Any:
    exported = context.module_context.lowering_parameters.for_export
    here = not exported and available(context.avals_in[0].dtype)
    whole = all(math.prod(u.shape) for u in (*context.avals_in, *context.avals_out))  # of others oneDNN makes nothing
    if here and whole:
        axes = context.module_context.axis_context
        devices = axes.mesh.size if hasattr(axes, 'mesh') else axes.num_devices  # inside and outside of shard_map
        chosen = functools.partial(library, devices=devices, **dict(how))
    else:
        chosen = functools.partial(otherwise, **dict(how))
    return mlir.lower_fun(chosen, multiple_results=False)(context, *arrays)


def _otherwise(*arrays: Array, library: Any, otherwise: Any, how: Any) -> Array:
    return otherwise(*arrays, **dict(how))


def _shape(*arrays: core.ShapedArray, **chosen: Any) -> core.ShapedArray:
    y = jax.eval_shape(functools.partial(_otherwise, **chosen), *arrays)
    return core.ShapedArray(y.shape, y.dtype)


@functools.cache
def _compiled(**chosen: Any) -> Any:
    return jax.jit(functools.partial(either_p.bind, **chosen))


def _called_alone(*arrays: Array, **chosen: Any) -> Array:
    with jax.disable_jit(False):  # where users debug without it, this would call itself without end
        return _compiled(**chosen)(*arrays)


either_p = Primitive('onednn_or_xla')
either_p.def_abstract_eval(_shape)
either_p.def_impl(_called_alone)
mlir.register_lowering(either_p, mlir.lower_fun(_otherwise, multiple_results=False))
mlir.register_lowering(either_p, _lowered, platform='cpu')
