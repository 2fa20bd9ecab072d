"""Python functions as foreign functions of XLA's CPU programs, by cffi: they get addresses, not arrays.

That is for libraries in C whose work takes long beside the tens of microseconds of such a call. The interpreter's lock
is let go while the library works.
"""

import atexit
import contextlib
import ctypes
import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import cffi
import jax

# The part of xla/ffi/api/c_api.h, version 0.3, that is used
INTERFACE = """
typedef struct { size_t size; void *extension; int major, minor; } Version;
typedef struct { size_t size; Version version; } Metadata;
typedef struct { size_t size; int kind; void *next; Metadata *metadata; } Extension;
typedef struct { size_t size; void *extension; char *message; int code; } Error;
typedef struct { size_t size; void *extension; Version version; void *internal; void *(*make_error)(Error *); } Api;
typedef struct { size_t size; void *extension; int dtype; void *data; } Buffer;
typedef struct { size_t size; void *extension; int64_t count; void *kinds; Buffer **each; } Buffers;
typedef struct { int dtype; size_t count; int64_t *data; } Numbers;
typedef struct { size_t size; void *extension; int64_t count; void *kinds, *names; Numbers **each; } Attributes;
typedef struct {
    size_t size; Extension *extension; Api *api; void *context; int stage;
    Buffers arguments, results; Attributes attributes;
} Frame;
"""
ASKS_VERSION, EXECUTE, INTERNAL_ERROR = 1, 3, 13


def register(name: str, run: Callable[[tuple[int, ...], list[Any]], None]) -> None:
    """Makes `run` what programs for CPUs call by this name.

    Args:
      name: for `jax.ffi.ffi_call`.
      run: `(numbers, places)`, of the only attribute of a call, an array of int64, and pointers to its arguments and
        results, in this order. What it raises becomes an error of the program. So does an interruption from the
        keyboard that arrives meanwhile, in a program of little more than such calls, which the main thread runs itself.

    Raises:
      MemoryError: where the system forbids functions that are made at run time.
    """
    address = ctypes.c_void_p(int(cffi.FFI().cast('intptr_t', _handler(run))))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform='cpu', api_version=1)
    atexit.register(_wait)


QUIET = 0.5
"""Seconds without a call after which a program is taken to have ended."""
_called: dict[int, float] = {}  # thread -> when its last call ended; infinite while it lasts
_ending = threading.Event()


def _wait() -> None:
    """Waits for programs that run: when the interpreter has ended they cannot call it any more, and never end.

    Those whose results are held can be waited for; of the others nothing is known but their calls, the next of which is
    refused: a thread that goes on and on would be waited for without end.
    """
    for array in jax.live_arrays('cpu'):
        with contextlib.suppress(RuntimeError):  # one that was donated, or whose program failed
            array.block_until_ready()
    _ending.set()
    time.sleep(QUIET / 5)  # for one that has only begun
    while any(time.monotonic() - ended < QUIET for ended in list(_called.values())):
        time.sleep(QUIET / 20)


@functools.cache  # programs may call it as long as the process lives
def _handler(run: Callable[[tuple[int, ...], list[Any]], None]) -> Any:
    ffi = cffi.FFI()
    ffi.cdef(INTERFACE)

    def answer(frame: Any) -> Any:
        if frame.extension != ffi.NULL and frame.extension.kind == ASKS_VERSION:
            version = frame.extension.metadata.version
            version.major, version.minor = 0, 3
        elif frame.stage == EXECUTE:
            if _ending.is_set():
                raise RuntimeError('the interpreter is ending')
            numbers = frame.attributes.each[0]
            places = [u.each[i].data for u in (frame.arguments, frame.results) for i in range(u.count)]
            thread = threading.get_ident()
            _called[thread] = math.inf
            try:
                run(tuple(numbers.data[0 : numbers.count]), places)
            finally:
                _called[thread] = time.monotonic()
        return ffi.NULL

    def failed(kind: type[BaseException], error: BaseException, trace: Any) -> Any:
        text = ffi.new('char[]', f'{kind.__name__}: {error}'.encode())
        told = ffi.new('Error *', {'size': ffi.sizeof('Error'), 'message': text, 'code': INTERNAL_ERROR})
        return trace.tb_frame.f_locals['frame'].api.make_error(told)

    return ffi.callback('void *(Frame *)', answer, onerror=failed)
