"""Python functions as foreign functions of XLA's CPU programs, by cffi: they get addresses, not arrays.

That is for libraries in C whose work takes long beside the tens of microseconds of such a call. The interpreter's lock
is let go while the library works.
"""

import _thread
import ctypes
import functools
import threading
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
LATER = 0.01  # seconds


def register(name: str, run: Callable[[tuple[int, ...], list[Any]], None]) -> None:
    """Makes `run` what programs for CPUs call by this name.

    Args:
      name: for `jax.ffi.ffi_call`.
      run: `(numbers, places)`, of the only attribute of a call, an array of int64, and pointers to its arguments and
        results, in this order. What it raises becomes an error of the program; it may be called once more for the same
        call, after an interruption from the keyboard, which reaches the main thread when its program has ended.

    Raises:
      MemoryError: where the system forbids functions that are made at run time.
    """
    address = ctypes.c_void_p(int(cffi.FFI().cast('intptr_t', _handler(run))))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform='cpu', api_version=1)


@functools.cache  # programs may call it as long as the process lives
def _handler(run: Callable[[tuple[int, ...], list[Any]], None]) -> Any:
    ffi = cffi.FFI()
    ffi.cdef(INTERFACE)

    def answer(frame: Any) -> Any:
        if frame.extension != ffi.NULL and frame.extension.kind == ASKS_VERSION:
            version = frame.extension.metadata.version
            version.major, version.minor = 0, 3
        elif frame.stage == EXECUTE:
            numbers = frame.attributes.each[0]
            places = [u.each[i].data for u in (frame.arguments, frame.results) for i in range(u.count)]
            run(tuple(numbers.data[0 : numbers.count]), places)
        return ffi.NULL

    def failed(kind: type[BaseException], error: BaseException, trace: Any) -> Any:
        frame = trace.tb_frame.f_locals['frame']
        try:
            if not isinstance(error, KeyboardInterrupt):
                raise error
            result = completed(answer, frame)
            threading.Timer(LATER, _thread.interrupt_main).start()
        except BaseException as error:
            text = ffi.new('char[]', f'{type(error).__name__}: {error}'.encode())
            return frame.api.make_error(
                ffi.new('Error *', {'size': ffi.sizeof('Error'), 'message': text, 'code': INTERNAL_ERROR})
            )
        return result

    return ffi.callback('void *(Frame *)', answer, onerror=failed)


def completed(function: Callable[..., Any], *args: Any) -> Any:
    """The result of `function`, which interruptions from the keyboard only start anew."""
    while True:
        try:
            return function(*args)
        except KeyboardInterrupt:
            continue
