"""oneDNN's convolution on x86 CPUs, up to three times as fast as the one that XLA's CPU backend chooses.

jaxlib ships oneDNN and the XLA operation that calls it, but XLA's own rewriting pass is switched off in jaxlib, so the
operation is named here directly. Its description is not a stable interface: it is used only with the jaxlib versions
it was checked with, and only after a small convolution has come out right. Everywhere else, and in what is exported for
other machines, XLA computes the same.
"""

import functools
import json
import platform
from collections.abc import Sequence
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
    strides: Pair,
    pads: Sequence[Pair],
    dilation: Pair,
    dtype: jnp.dtype,
    precision: Any = None,
) -> Array:
    """What `convolution` computes, by XLA: images [B, H, W, I] and a kernel [h, w, I, O] to [B, h', w', O] of `dtype`.

    Sums are kept in float32.
    """
    y = lax.conv_general_dilated(
        x,
        kernel,
        strides,
        pads,
        rhs_dilation=dilation,
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
        precision=precision,
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    )
    return y.astype(dtype)


def convolution(
    x: Array,
    kernel: Array,
    strides: Pair,
    pads: Sequence[Pair],
    dilation: Pair,
    dtype: jnp.dtype,
    precision: Any = None,
) -> Array:
    """`portable` by oneDNN, where a program is compiled for this machine's CPU and oneDNN can be used; else by XLA.

    That is decided when a program is lowered: what `jax.export` writes has to run anywhere. Neither `vmap` nor
    gradients are defined: `convolution.conv_onednn` adds them.
    """
    return convolution_p.bind(
        x, kernel, strides=strides, pads=pads, dilation=dilation, dtype=dtype, precision=precision
    )


def _call(
    x: Array, kernel: Array, *, strides: Pair, pads: Sequence[Pair], dilation: Pair, dtype: jnp.dtype, precision: Any
) -> Array:
    """The call into oneDNN itself, for the CPU of this machine."""
    data = {'dims': 4, 'data': {'batch_dim': 0, 'feature_dim': 3, 'spatial_dims': [1, 2]}}
    description = {
        'dims': 4,
        'feature_groups': 1,
        'input': data,
        'output': data,
        'kernel': {'dims': 4, 'filter': {'input_feature_dim': 2, 'output_feature_dim': 3, 'spatial_dims': [0, 1]}},
        'window': {
            'pad_left': [p[0] for p in pads],
            'pad_right': [p[1] for p in pads],
            'strides': strides,
            'window_dilations': dilation,
        },
    }
    sides = [
        (x.shape[d + 1] + sum(pads[d]) - (kernel.shape[d] - 1) * dilation[d] - 1) // strides[d] + 1 for d in (0, 1)
    ]
    call = jax.ffi.ffi_call(
        '__onednn$convolution',
        jax.ShapeDtypeStruct((x.shape[0], *sides, kernel.shape[3]), dtype),
        custom_call_api_version=2,
        legacy_backend_config=json.dumps({'onednn_conv_config': description}),
    )
    return call(x, kernel)


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
    """Compares one small convolution with XLA's."""
    rng = np.random.default_rng(0)
    x, k = (rng.integers(-4, 5, shape).astype(dtype) for shape in ((2, 7, 6, 16), (3, 2, 16, 16)))
    strides, pads, dilation, exact = (2, 1), ((1, 0), (2, 1)), (1, 2), jnp.dtype(jnp.float32)

    def both(x: Array, k: Array) -> tuple[Array, Array]:
        theirs = portable(x.astype(exact), k.astype(exact), strides, pads, dilation, exact)
        return _call(x, k, strides=strides, pads=pads, dilation=dilation, dtype=exact, precision=None), theirs

    try:  # compiled ahead of its call, because the first caller may be tracing
        cpu = jax.sharding.SingleDeviceSharding(jax.local_devices(backend='cpu')[0])
        ours, theirs = jax.jit(both, in_shardings=cpu, out_shardings=cpu).lower(x, k).compile()(x, k)
    except RuntimeError:  # as well if jax has no CPU here
        return False
    return bool(np.array_equal(ours, theirs))  # small whole numbers: every sum is exact


def _lowered(context: Any, x: Any, kernel: Any, **how: Any) -> Any:
    exported = context.module_context.lowering_parameters.for_export
    here = not exported and available(context.avals_in[0].dtype)
    return mlir.lower_fun(_call if here else portable, multiple_results=False)(context, x, kernel, **how)


def _shape(x: core.ShapedArray, kernel: core.ShapedArray, **how: Any) -> core.ShapedArray:
    y = jax.eval_shape(functools.partial(portable, **how), x, kernel)
    return core.ShapedArray(y.shape, y.dtype)


@functools.cache
def _compiled(**how: Any) -> Any:
    return jax.jit(functools.partial(convolution_p.bind, **how))


convolution_p = Primitive('onednn_convolution')
convolution_p.def_abstract_eval(_shape)
convolution_p.def_impl(lambda x, kernel, **how: _compiled(**how)(x, kernel))
mlir.register_lowering(convolution_p, mlir.lower_fun(portable, multiple_results=False))
mlir.register_lowering(convolution_p, _lowered, platform='cpu')
