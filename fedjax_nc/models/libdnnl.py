"""oneDNN's own kernel gradient on x86 CPUs, from the shared library of the package onednn-cpu-gomp, if it is installed.

jaxlib ships oneDNN's forward convolution alone (see `onednn`). The library's C interface, version 3, is called by
ctypes, so that nothing has to be compiled. As with `onednn` that is done only with versions of jaxlib with which it was
checked, and only after small gradients have come out right.
"""

import ctypes
import functools
import importlib.metadata
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc.base import Array
from fedjax_nc.models import foreign, onednn

PACKAGE = 'onednn-cpu-gomp'
CALL = 'fedjax_nc_kernel_gradient'
Pair = tuple[int, int]

# Numbers of oneDNN's
CPU, IN_ORDER, F32, ANY_LAYOUT, DIRECT, ROOM_BY_CALLER, OPENMP = 1, 1, 3, 1, 1, 1, 2
ASK_KERNEL_GRADIENT, ASK_SCRATCHPAD = 132, 136
SOURCE, DESTINATION, SCRATCHPAD, RESULT_GRADIENT, KERNEL_GRADIENT = 1, 17, 80, 145, 161


def available(dtype: jnp.dtype) -> bool:
    """Whether `kernel_gradient` can be lowered for images of this type, in programs for this machine's CPU."""
    return dtype == jnp.float32 and _usable()


def kernel_gradient(x: Array, g: Array, *, size: Pair, strides: Pair, pads: Sequence[Pair]) -> Array:
    """Gradient of a convolution with respect to its kernel; to be lowered where `available` says so.

    Neither `vmap` nor gradients are defined. Threads of a machine are shared out among JAX's CPU devices.

    Args:
      x: images [B, H, W, I], float32.
      g: gradient of the result, [B, h', w', O], float32.
      size: h and w of the kernel.
      strides: of the convolution.
      pads: zeros above and below images, then on the left and on the right.

    Returns:
      [h, w, I, O], float32.
    """
    threads = max(1, _library().omp_get_max_threads() // jax.local_device_count('cpu'))
    corners = (pads[0][0], pads[1][0], pads[0][1], pads[1][1])
    numbers = (*x.shape, *size, *g.shape[1:], *strides, *corners, threads)
    sizes = _planned(numbers).sizes
    room = [jax.ShapeDtypeStruct((sizes[name],), jnp.uint8) for name in ('blocks', 'scratchpad')]
    call = jax.ffi.ffi_call(CALL, (jax.ShapeDtypeStruct((*size, x.shape[3], g.shape[3]), jnp.float32), *room))
    return call(x, g, numbers=np.array(numbers, np.int64))[0]


class _Version(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ('major', 'minor', 'patch')),
        ('hash', ctypes.c_char_p),
        ('runtime', ctypes.c_uint),
    )


class _Argument(ctypes.Structure):
    _fields_ = (('number', ctypes.c_int), ('memory', ctypes.c_void_p))


@functools.cache
def _library() -> Any:
    """The shared library, or None. Other runtimes than OpenMP's need hooks of their own."""
    try:
        files = importlib.metadata.files(PACKAGE) or ()
        library = ctypes.CDLL(next(str(file.locate()) for file in files if file.name == 'libdnnl.so.3'))
    except (importlib.metadata.PackageNotFoundError, StopIteration, OSError):  # the last one where libgomp is missing
        return None
    library.dnnl_version.restype = ctypes.POINTER(_Version)
    library.dnnl_primitive_desc_query_md.restype = ctypes.c_void_p
    library.dnnl_memory_desc_get_size.restype = ctypes.c_size_t
    version = library.dnnl_version().contents
    return library if (version.major, version.runtime) == (3, OPENMP) else None


def _checked(name: str, *args: Any) -> None:
    status = getattr(_library(), f'dnnl_{name}')(*args)
    if status:
        raise RuntimeError(f'oneDNN: dnnl_{name} gave status {status}')


def _made(name: str, *args: Any) -> ctypes.c_void_p:
    """What a function makes whose first argument is where to put it."""
    made = ctypes.c_void_p()
    _checked(name, ctypes.byref(made), *args)
    return made


def _whole(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * 12)(*numbers)


def _layout(sides: Sequence[int], apart: Sequence[int]) -> ctypes.c_void_p:
    return _made('memory_desc_create_with_strides', len(sides), _whole(sides), F32, _whole(apart))


@functools.cache
def _engine() -> ctypes.c_void_p:
    return _made('engine_create', CPU, ctypes.c_size_t(0))


class _Plan(NamedTuple):
    """What oneDNN has made for one shape of gradient, kept as long as the process."""

    gradient: ctypes.c_void_p
    reorder: ctypes.c_void_p  #: from oneDNN's blocks to [h, w, I, O]
    layouts: dict[str, ctypes.c_void_p]  #: in the order of a call
    sizes: dict[str, int]  #: in bytes


@functools.cache
def _planned(numbers: tuple[int, ...]) -> _Plan:
    batch, height, width, inputs, h, w, rows, cols, outputs, down, across, top, left, bottom, right, threads = numbers
    library, engine = _library(), _engine()

    def images(height: int, width: int, channels: int) -> ctypes.c_void_p:
        apart = height * width * channels, 1, width * channels, channels
        return _layout((batch, channels, height, width), apart)

    x, g = images(height, width, inputs), images(rows, cols, outputs)
    kernel = _layout((outputs, inputs, h, w), (1, outputs, w * inputs * outputs, inputs * outputs))
    free = _made('memory_desc_create_with_tag', 4, _whole((outputs, inputs, h, w)), F32, ANY_LAYOUT)
    how = _made('primitive_attr_create')
    _checked('primitive_attr_set_scratchpad_mode', how, ROOM_BY_CALLER)  # calls may overlap
    windows = [_whole(u) for u in ((down, across), (0, 0), (top, left), (bottom, right))]
    usual = library.omp_get_max_threads()
    library.omp_set_num_threads(threads)  # of this thread, for as long as work is shared out
    try:
        told = 'convolution_backward_weights_primitive_desc_create'
        description = _made(told, engine, DIRECT, x, free, None, g, *windows, None, how)
        gradient = _made('primitive_create', description)
    finally:
        library.omp_set_num_threads(usual)
    blocks, scratchpad = (
        ctypes.c_void_p(library.dnnl_primitive_desc_query_md(description, what, 0))
        for what in (ASK_KERNEL_GRADIENT, ASK_SCRATCHPAD)
    )
    reorder = _made('primitive_create', _made('reorder_primitive_desc_create', blocks, engine, kernel, engine, how))
    layouts = {'x': x, 'g': g, 'kernel': kernel, 'blocks': blocks, 'scratchpad': scratchpad}
    sizes = {name: max(1, library.dnnl_memory_desc_get_size(layout)) for name, layout in layouts.items()}
    return _Plan(gradient, reorder, layouts, sizes)


def _run(numbers: list[int], places: list[int]) -> None:
    plan, library = _planned(tuple(numbers)), _library()
    stream, memory = _made('stream_create', _engine(), IN_ORDER), {}
    try:
        for (name, layout), place in zip(plan.layouts.items(), places, strict=True):
            memory[name] = _made('memory_create', layout, _engine(), ctypes.c_void_p(place))
        gradient = {SOURCE: 'x', RESULT_GRADIENT: 'g', KERNEL_GRADIENT: 'blocks', SCRATCHPAD: 'scratchpad'}
        for work, takes in (plan.gradient, gradient), (plan.reorder, {SOURCE: 'blocks', DESTINATION: 'kernel'}):
            arguments = [_Argument(number, memory[name]) for number, name in takes.items()]
            _checked('primitive_execute', work, stream, len(takes), (_Argument * len(takes))(*arguments))
    finally:
        for made in memory.values():
            library.dnnl_memory_destroy(made)
        library.dnnl_stream_destroy(stream)


_HANDLER = foreign.handler(_run)


@functools.cache
def _usable() -> bool:
    here = platform.system(), platform.machine()
    if here != ('Linux', 'x86_64') or not onednn.available(jnp.dtype('float32')) or _library() is None:
        return False
    jax.ffi.register_ffi_target(CALL, jax.ffi.pycapsule(_HANDLER), platform='cpu', api_version=1)
    return _right()


def _right() -> bool:
    """Compares gradients of small convolutions with XLA's."""
    rng = np.random.default_rng(0)
    shapes = ((2, 7, 6, 16), (2, 4, 6, 16)), ((3, 5, 5, 3), (3, 5, 5, 8))
    arrays = [[rng.integers(-4, 5, shape).astype(np.float32) for shape in pair] for pair in shapes]
    hows: Any = ((3, 2), (2, 1), ((1, 1), (1, 0))), ((3, 3), (1, 1), ((1, 1), (1, 1)))

    def pair(x: Array, g: Array, size: Pair, strides: Pair, pads: Sequence[Pair]) -> tuple[Array, Array]:
        def forward(kernel: Array) -> Array:
            return onednn.portable(x, kernel, strides, pads, (1, 1), g.dtype)

        kernel = jax.ShapeDtypeStruct((*size, x.shape[3], g.shape[3]), g.dtype)
        theirs = jax.linear_transpose(forward, kernel)(g)[0]
        return kernel_gradient(x, g, size=size, strides=strides, pads=pads), theirs

    def both(arrays: list[list[Array]]) -> list[tuple[Array, Array]]:
        return [pair(x, g, *how) for (x, g), how in zip(arrays, hows, strict=True)]

    return onednn.agrees(both, arrays)
