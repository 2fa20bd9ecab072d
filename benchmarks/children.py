"""Commands that may fail, hang or be killed, each in a process group of its own.

python children.py COMMAND ...      becomes the command, which ends with whoever has started it
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def environment(out: Path, **own: str) -> dict[str, str]:
    """This one's, with compilation caches in `out`, and errors without what JAX adds to them. A checkout serves without
    being installed."""
    cache = out / 'cache'
    paths = {'JAX_COMPILATION_CACHE_DIR': str(cache), 'TORCHINDUCTOR_CACHE_DIR': str(cache / 'torch')}
    found = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])
    return {**os.environ, **paths, 'PYTHONPATH': found, 'JAX_TRACEBACK_FILTERING': 'off', **own}


def carry_out(call: list[str], env: dict[str, str], seconds: float) -> tuple[int | None, list[str]]:
    """Runs a command, and all that it starts, for so long at most, and no longer than this process: two at a time would
    slow each other down.

    Returns:
      Its exit status, None if it was ended, and its lines on standard error.
    """
    with tempfile.TemporaryFile('w+', errors='replace') as said:
        child = subprocess.Popen(
            [sys.executable, __file__, *call], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=said, start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        said.seek(0)
        return code, [line.strip() for line in said if line.strip()]


if __name__ == '__main__':
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which outlasts the next line
    os.execvp(sys.argv[1], sys.argv[1:])
