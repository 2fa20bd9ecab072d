"""oneDNN's convolution on x86 CPUs, up to three times as fast as the one that XLA's CPU backend chooses.

jaxlib ships oneDNN and the XLA operation that calls it, but XLA's own rewriting pass is switched off in jaxlib, so the
operation is named here directly. Its description is not a stable interface: it is used only with the jaxlib versions
it was checked with, and only after a small convolution has come out right. Everywhere else `available` says no.
"""

import functools
import json
import platform
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax

from fedjax_nc.base import Array

CHECKED = ('0.10.2', '0.12.0.1')
"""Versions of jaxlib with which the tests of this file have passed; others may describe the operation differently."""

Pair = tuple[int, int]


def convolution(
    x: Array, kernel: Array, strides: Pair, pads: Sequence[Pair], dilation: Pair, dtype: jnp.dtype | None = None
) -> Array:
    """Images [B, H, W, I] and a kernel [h, w, I, O] to [B, h', w', O], of `dtype` (default: that of the images).

    Sums are kept in float32. Neither `vmap` nor gradients are defined: `convolution.conv_onednn` adds them.
    """
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
        jax.ShapeDtypeStruct((x.shape[0], *sides, kernel.shape[3]), dtype or x.dtype),
        custom_call_api_version=2,
        legacy_backend_config=json.dumps({'onednn_conv_config': description}),
    )
    return call(x, kernel)


@functools.cache
def available(dtype: jnp.dtype) -> bool:
    """Whether `convolution` can be used on the default backend with images of this type."""
    known = jaxlib.__version__ in CHECKED and platform.machine() in ('x86_64', 'AMD64')
    if not known or jax.default_backend() != 'cpu':
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
        theirs = lax.conv_general_dilated(
            x.astype(exact), k.astype(exact), strides, pads,
            rhs_dilation=dilation, dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
        )  # fmt: skip
        return convolution(x, k, strides, pads, dilation, exact), theirs

    try:  # compiled ahead of its call, because the first caller may be tracing
        ours, theirs = jax.jit(both).lower(x, k).compile()(x, k)
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return False
    return bool(np.array_equal(ours, theirs))  # small whole numbers: every sum is exact
