"""oneDNN's convolution and its gradients on x86 CPUs, from the shared library of onednn-cpu-gomp, if it is installed.

jaxlib ships oneDNN's forward convolution alone (see `onednn`). The library's C interface, version 3, is called by cffi,
so that nothing has to be compiled. As with `onednn` that is done only with versions of jaxlib with which it was
checked, and only after small convolutions have come out right.
"""

import functools
import importlib.metadata
import os
import platform
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc.base import Array
from fedjax_nc.models import onednn

PACKAGE = 'onednn-cpu-gomp'
CALL = 'fedjax_nc_convolution'
Pair = tuple[int, int]

# Numbers of oneDNN's
CPU, IN_ORDER, TRAINING, F32, ANY_LAYOUT, DIRECT, ROOM_BY_CALLER, OPENMP = 1, 1, 64, 3, 1, 1, 1, 2
ASK_KERNEL, ASK_KERNEL_GRADIENT, ASK_SCRATCHPAD = 131, 132, 136
FROM, TO, X, Y, KERNEL, SCRATCHPAD, DX, DY, DKERNEL = 1, 17, 1, 17, 33, 80, 129, 145, 161
FORWARD, INPUT_GRADIENT, KERNEL_GRADIENT = range(3)


def version() -> str | None:
    """That of oneDNN, if programs for this machine's CPU may call it."""
    if not _usable():
        return None
    told = _library().dnnl_version()
    return f'{told.major}.{told.minor}.{told.patch}'


def available(dtype: jnp.dtype) -> bool:
    """Whether the functions below can be lowered for images of this type, in programs for this machine's CPU."""
    return dtype == jnp.float32 and _usable()


def convolution(x: Array, kernel: Array, *, strides: Pair, pads: Sequence[Pair], devices: int = 1) -> Array:
    """Convolution, to be lowered where `available` says so; neither `vmap` nor gradients are defined.

    Args:
      x: images [B, H, W, I], float32.
      kernel: [h, w, I, O], float32.
      strides: two.
      pads: zeros above and below images, then on the left and on the right.
      devices: CPU devices that compute at a time; each has its share of the machine's threads.

    Returns:
      [B, h', w', O], float32.
    """
    sides = [(x.shape[d + 1] + sum(pads[d]) - kernel.shape[d]) // strides[d] + 1 for d in (0, 1)]
    return _called(FORWARD, x, kernel, x.shape, kernel.shape, (len(x), *sides, kernel.shape[3]), strides, pads, devices)


def input_gradient(
    g: Array, kernel: Array, *, sides: Pair, strides: Pair, pads: Sequence[Pair], devices: int = 1
) -> Array:
    """Gradient of `convolution` with respect to images of these sides, from [B, h', w', O] to [B, H, W, I]."""
    image = (len(g), *sides, kernel.shape[2])
    return _called(INPUT_GRADIENT, g, kernel, image, kernel.shape, g.shape, strides, pads, devices)


def kernel_gradient(x: Array, g: Array, *, size: Pair, strides: Pair, pads: Sequence[Pair], devices: int = 1) -> Array:
    """Gradient of `convolution` with respect to a kernel of this size: [B, H, W, I], [B, h', w', O] to [h, w, I, O]."""
    kernel = (*size, x.shape[3], g.shape[3])
    return _called(KERNEL_GRADIENT, x, g, x.shape, kernel, g.shape, strides, pads, devices)


def _called(
    kind: int,
    a: Array,
    b: Array,
    image: Sequence[int],
    kernel: Sequence[int],
    result: Sequence[int],
    strides: Pair,
    pads: Sequence[Pair],
    devices: int,
) -> Array:
    here = min(devices, jax.local_device_count('cpu'))  # others are those of other processes
    threads = max(1, _library().omp_get_max_threads() // here)
    corners = (pads[0][0], pads[1][0], pads[0][1], pads[1][1])
    numbers = (kind, *image, *kernel[:2], *result[1:], *strides, *corners, threads)
    sizes = _planned(numbers).sizes
    shape = (result, image, kernel)[kind]
    room = [jax.ShapeDtypeStruct((sizes[name],), jnp.uint8) for name in ('blocks', 'scratchpad')]
    call = jax.ffi.ffi_call(CALL, (jax.ShapeDtypeStruct(shape, jnp.float32), *room))
    return call(a, b, numbers=np.array(numbers, np.int64))[0]


# The part of oneapi/dnnl/dnnl.h that is used
INTERFACE = """
typedef struct { int major, minor, patch; char *hash; unsigned runtime, gpu_runtime; } Version;
typedef struct { int number; void *memory; } Argument;
typedef int64_t Dims[12];
const Version *dnnl_version(void);
int dnnl_engine_create(void **, int kind, size_t index);
int dnnl_stream_create(void **, void *engine, unsigned flags);
int dnnl_stream_destroy(void *);
int dnnl_memory_desc_create_with_strides(void **, int sides, const Dims, int dtype, const Dims apart);
int dnnl_memory_desc_create_with_tag(void **, int sides, const Dims, int dtype, int tag);
size_t dnnl_memory_desc_get_size(const void *);
int dnnl_memory_create(void **, const void *layout, void *engine, void *place);
int dnnl_memory_destroy(void *);
int dnnl_primitive_attr_create(void **);
int dnnl_primitive_attr_set_scratchpad_mode(void *, int mode);
int dnnl_convolution_forward_primitive_desc_create(
    void **, void *engine, int kind, int algorithm, const void *x, const void *kernel, const void *bias, const void *y,
    const Dims strides, const Dims dilations, const Dims lows, const Dims highs, const void *how);
int dnnl_convolution_backward_data_primitive_desc_create(
    void **, void *engine, int algorithm, const void *x, const void *kernel, const void *y,
    const Dims strides, const Dims dilations, const Dims lows, const Dims highs, const void *forward, const void *how);
int dnnl_convolution_backward_weights_primitive_desc_create(
    void **, void *engine, int algorithm, const void *x, const void *kernel, const void *bias, const void *y,
    const Dims strides, const Dims dilations, const Dims lows, const Dims highs, const void *forward, const void *how);
int dnnl_reorder_primitive_desc_create(
    void **, const void *from, void *from_engine, const void *to, void *to_engine, const void *how);
const void *dnnl_primitive_desc_query_md(const void *, int what, int index);
int dnnl_primitive_create(void **, const void *description);
int dnnl_primitive_execute(const void *, void *stream, int count, const Argument *);
int omp_get_max_threads(void);
void omp_set_num_threads(int);
"""


@functools.cache
def _interface() -> Any:
    import cffi

    interface = cffi.FFI()
    interface.cdef(INTERFACE)
    return interface


@functools.cache
def _library() -> Any:
    """The shared library, or None. Other runtimes than OpenMP's need hooks of their own."""
    # Threads that wait by spinning, as libgomp's do unless told when it is loaded, take time from XLA's.
    spin = {} if {'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT'} & os.environ.keys() else {'GOMP_SPINCOUNT': '0'}
    os.environ.update(spin)
    try:
        files = importlib.metadata.files(PACKAGE) or ()
        library = _interface().dlopen(next(str(file.locate()) for file in files if file.name == 'libdnnl.so.3'))
    except (ImportError, StopIteration, OSError):  # no such package, no such file, no libgomp
        return None
    finally:
        for name in spin:
            del os.environ[name]
    version = library.dnnl_version()
    return library if (version.major, version.runtime) == (3, OPENMP) else None


def _checked(name: str, *args: Any) -> None:
    status = getattr(_library(), f'dnnl_{name}')(*args)
    if status:
        raise RuntimeError(f'oneDNN: dnnl_{name} gave status {status}')


def _made(name: str, *args: Any) -> Any:
    """What a function makes whose first argument is where to put it."""
    made = _interface().new('void **')
    _checked(name, made, *args)
    return made[0]


def _layout(sides: Sequence[int], apart: Sequence[int]) -> Any:
    return _made('memory_desc_create_with_strides', len(sides), sides, F32, apart)


@functools.cache
def _engine() -> Any:
    return _made('engine_create', CPU, 0)


class _Plan(NamedTuple):
    """What oneDNN has made for one shape of convolution, kept as long as the process."""

    steps: list[tuple[Any, dict[int, str]]]  #: primitives, and what they take by number
    layouts: dict[str, Any]  #: in the order of a call
    sizes: dict[str, int]  #: in bytes


@functools.cache
def _planned(numbers: tuple[int, ...]) -> _Plan:
    kind, batch, height, width, inputs, h, w, rows, cols, outputs, *windows, threads = numbers
    library, engine, nothing = _library(), _engine(), _interface().NULL

    def images(height: int, width: int, channels: int) -> Any:
        apart = height * width * channels, 1, width * channels, channels
        return _layout((batch, channels, height, width), apart)

    x, y = images(height, width, inputs), images(rows, cols, outputs)
    kernel = _layout((outputs, inputs, h, w), (1, outputs, w * inputs * outputs, inputs * outputs))
    free = _made('memory_desc_create_with_tag', 4, (outputs, inputs, h, w), F32, ANY_LAYOUT)
    how = _made('primitive_attr_create')
    _checked('primitive_attr_set_scratchpad_mode', how, ROOM_BY_CALLER)  # calls may overlap
    down, across, *corners = windows
    geometry = (down, across), (0, 0), corners[:2], corners[2:]
    usual = library.omp_get_max_threads()
    library.omp_set_num_threads(threads)  # of this thread, for as long as work is shared out
    try:
        told = 'convolution_forward_primitive_desc_create'
        forward = _made(told, engine, TRAINING, DIRECT, x, free, nothing, y, *geometry, how)
        if kind == FORWARD:
            description, asked, takes = forward, ASK_KERNEL, {X: 'x', KERNEL: 'blocks', Y: 'y'}
        elif kind == INPUT_GRADIENT:
            told = 'convolution_backward_data_primitive_desc_create'
            description = _made(told, engine, DIRECT, x, free, y, *geometry, forward, how)
            asked, takes = ASK_KERNEL, {DX: 'x', KERNEL: 'blocks', DY: 'y'}
        else:
            told = 'convolution_backward_weights_primitive_desc_create'
            description = _made(told, engine, DIRECT, x, free, nothing, y, *geometry, forward, how)
            asked, takes = ASK_KERNEL_GRADIENT, {X: 'x', DY: 'y', DKERNEL: 'blocks'}
        work = _made('primitive_create', description)
    finally:
        library.omp_set_num_threads(usual)
    blocks, scratchpad = (
        library.dnnl_primitive_desc_query_md(description, what, 0) for what in (asked, ASK_SCRATCHPAD)
    )
    steps = [(work, {**takes, SCRATCHPAD: 'scratchpad'})]
    if kind == KERNEL_GRADIENT:
        steps.append((_reorder(blocks, kernel, how), {FROM: 'blocks', TO: 'kernel'}))
    else:
        steps.insert(0, (_reorder(kernel, blocks, how), {FROM: 'kernel', TO: 'blocks'}))
    order = (('x', 'kernel', 'y'), ('y', 'kernel', 'x'), ('x', 'y', 'kernel'))[kind]
    of = {'x': x, 'y': y, 'kernel': kernel, 'blocks': blocks, 'scratchpad': scratchpad}
    layouts = {name: of[name] for name in (*order, 'blocks', 'scratchpad')}
    sizes = {name: max(1, library.dnnl_memory_desc_get_size(layout)) for name, layout in layouts.items()}
    return _Plan(steps, layouts, sizes)


def _reorder(a: Any, b: Any, how: Any) -> Any:
    """From one layout to another: oneDNN has kernels in blocks of its own."""
    return _made('primitive_create', _made('reorder_primitive_desc_create', a, _engine(), b, _engine(), how))


def _run(numbers: tuple[int, ...], places: list[Any]) -> None:
    plan, library = _planned(numbers), _library()
    stream, memory = _made('stream_create', _engine(), IN_ORDER), {}
    try:
        for (name, layout), place in zip(plan.layouts.items(), places, strict=True):
            memory[name] = _made('memory_create', layout, _engine(), place)
        for work, takes in plan.steps:
            arguments = [(number, memory[name]) for number, name in takes.items()]
            _checked('primitive_execute', work, stream, len(arguments), arguments)
    finally:
        for made in memory.values():
            library.dnnl_memory_destroy(made)
        library.dnnl_stream_destroy(stream)


_ONE = threading.RLock()  # XLA keeps the address of the first function registered, which a second thread would free


def _usable() -> bool:
    with _ONE:
        return _found_usable()


@functools.cache
def _found_usable() -> bool:
    here = platform.system(), platform.machine()
    if here != ('Linux', 'x86_64') or not onednn.available(jnp.dtype('float32')) or _library() is None:
        return False
    from fedjax_nc.models import foreign  # which needs cffi

    try:
        foreign.register(CALL, _run)
    except MemoryError:  # from systems that forbid functions made at run time
        return False
    return _right()


def _right() -> bool:
    """Compares small convolutions and their gradients with XLA's."""
    rng = np.random.default_rng(0)
    shapes = ((2, 7, 6, 16), (3, 2, 16, 6)), ((3, 5, 5, 3), (3, 3, 3, 8))
    arrays = [[rng.integers(-4, 5, shape).astype(np.float32) for shape in pair] for pair in shapes]
    hows: Any = {'strides': (2, 1), 'pads': ((1, 1), (1, 0))}, {'strides': (1, 1), 'pads': ((1, 1), (1, 1))}

    def pairs(x: Array, kernel: Array, how: Any) -> list[tuple[Array, Array]]:
        def theirs(x: Array, kernel: Array) -> Array:
            return onednn.portable(x, kernel, **how, dilation=(1, 1), dtype=x.dtype)

        y = convolution(x, kernel, **how)
        g = jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 7 - 3
        to_x = jax.linear_transpose(lambda x: theirs(x, kernel), x)
        to_kernel = jax.linear_transpose(lambda kernel: theirs(x, kernel), kernel)
        return [
            (y, theirs(x, kernel)),
            (input_gradient(g, kernel, sides=(x.shape[1], x.shape[2]), **how), to_x(g)[0]),
            (kernel_gradient(x, g, size=(kernel.shape[0], kernel.shape[1]), **how), to_kernel(g)[0]),
        ]

    def both(arrays: list[list[Array]]) -> list[tuple[Array, Array]]:
        return [pair for (x, kernel), how in zip(arrays, hows, strict=True) for pair in pairs(x, kernel, how)]

    return onednn.agrees(both, arrays)
