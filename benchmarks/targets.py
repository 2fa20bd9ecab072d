"""Accelerators that a program can be compiled for without having one, as their compilers know them."""

import os
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

PACKAGES = {'tpu': ('jax', 'jaxlib', 'libtpu'), 'cuda': ('jax', 'jaxlib', 'jax-cuda13-plugin')}
INSTALL = {
    'tpu': 'python3 -m venv ~/aot/tpu && ~/aot/tpu/bin/pip install jax==0.10.2 jaxlib==0.10.2 libtpu==0.0.42.1 -e .',
    'cuda': "python3.12 -m venv ~/aot/cuda && ~/aot/cuda/bin/pip install 'jax[cuda13]==0.11.2' -e .",
}
"""How to make an environment; a process can have only one of the two plug-ins."""
DESCRIBED = '0.11.2'
"""The version of jax whose private functions `_h100` knows."""
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 28 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class Chip(NamedTuple):
    """What no program tells."""

    memory: float  # bytes
    speed: float  # of a TPU cycles, of a GPU bytes a second: assumed, for estimates


_CHIPS = {
    'TPU v4': Chip(32e9, 1.05e9),
    'TPU v5 lite': Chip(16e9, 1.5e9),
    'TPU v5': Chip(95e9, 1.75e9),
    'TPU v6 lite': Chip(32e9, 1.75e9),
    'NVIDIA H100 80GB HBM3': Chip(80e9, 2.5e12),
}


def platform(target: str) -> str:
    """'cuda' for 'h100', 'tpu' for a TPU topology such as 'v5e:2x2'."""
    return 'cuda' if target == 'h100' else 'tpu'


def chip(device: Any) -> Chip:
    """The facts about a device.

    Raises:
      ValueError: for a device of which none are known.
    """
    if device.device_kind not in _CHIPS:
        raise ValueError(f'neither memory nor clock of a {device.device_kind} is known, only of {", ".join(_CHIPS)}')
    return _CHIPS[device.device_kind]


def environment(target: str) -> dict[str, str]:
    """Variables that a process needs before it imports jax."""
    flags = os.environ.get('XLA_FLAGS', '')
    if platform(target) == 'cuda':  # without a device nothing can be tried out
        return {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': f'{flags} --xla_gpu_autotune_level=0'.strip()}
    return {
        'JAX_PLATFORMS': 'cpu', 'TPU_SKIP_MDS_QUERY': '1', 'TPU_WORKER_HOSTNAMES': 'localhost',
        'TPU_ACCELERATOR_TYPE': 'v5litepod-4', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    }  # fmt: skip


def devices(target: str) -> list[Any]:
    """The devices of a target. Programs can be compiled for them, and not run.

    Raises:
      ValueError: for a topology that the compiler does not know, and for another version of jax than `_h100` needs.
    """
    if platform(target) == 'cuda':
        return _h100()
    # One chip alone is no whole host, which has to be said.
    alone = {'chips_per_host_bounds': [1, 1, 1]} if set(target.partition(':')[2].split('x')) == {'1'} else {}
    try:
        return list(topologies.get_topology_desc(target, 'tpu', **alone).devices)
    except (RuntimeError, ValueError, NotImplementedError) as problem:
        raise ValueError(f'the TPU compiler refuses {target}: {problem}') from problem


def _h100() -> list[Any]:
    """The one place that uses what jax keeps private: its CUDA plug-in without a driver."""
    if jax.__version__ != DESCRIBED:
        raise ValueError(f'an H100 is described with jax {DESCRIBED}, and this is {jax.__version__}')
    from jax._src import xla_bridge

    known = xla_bridge.canonicalize_platform
    # 'gpu' would be looked for among the devices that there are.
    xla_bridge.canonicalize_platform = lambda name: 'cuda' if name in ('gpu', 'cuda') else known(name)
    described = topologies.get_topology_desc('h100', 'cuda', topology='1x1x1', target_config=H100)
    return list(described.devices)
