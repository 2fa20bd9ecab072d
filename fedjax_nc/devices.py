"""Several devices, of one process or of many: who holds what, and who works on which clients.

A mesh has the single axis 'clients'. The devices share the cohort of a round; the server's state and the data are on
all of them. With many processes, call `jax.distributed.initialize` first and run the same program in each.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fedjax_nc import checks
from fedjax_nc.base import Array, FederatedData, State, Tree

AXIS = 'clients'  #: the axis of a mesh
#: whole on every device, or split along the first axis
EVERYWHERE, BY_CLIENT = PartitionSpec(), PartitionSpec(AXIS)


def mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axis 'clients' over all devices, of all processes, or over those given. ValueError for none."""
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise ValueError('a mesh needs one device or more: leave them out for all')
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def shardings(mesh: Mesh, clients: Tree) -> tuple[NamedSharding, NamedSharding]:
    """Where server and client states live: the server everywhere, the clients split where their number allows it.

    Args:
      mesh: from the function `mesh`.
      clients: client states, leading axis K; shapes will do. Not split if there are none.

    Returns:
      The sharding of the server's state and that of the clients'.
    """
    leaves = jax.tree.leaves(clients)
    even = bool(leaves) and leaves[0].shape[0] % mesh.size == 0
    return NamedSharding(mesh, EVERYWHERE), NamedSharding(mesh, BY_CLIENT if even else EVERYWHERE)


def place(mesh: Mesh, state: State, data: FederatedData) -> tuple[State, FederatedData]:
    """Puts state and data onto the devices of a mesh, as rounds made with it expect them and hand them back.

    Client states are split over the devices if their number is a multiple of the devices', else every device holds all
    of them. The data are on every device. With several processes each must hand over the same values.

    Args:
      mesh: from the function `mesh`.
      state: from `simulate.init`, say.
      data: the clients.

    Returns:
      State and data, with the same values.

    Raises:
      ValueError: for client states that are kept off the devices.
    """
    checks.stacked('state.clients', state.clients)
    server, clients = shardings(mesh, state.clients)
    state = State(jax.device_put(state.server, server), jax.device_put(state.clients, clients))
    return state, jax.device_put(data, server)


def settled(mesh: Mesh, server: Tree, clients: Tree) -> tuple[Tree, Tree]:
    """The states `server` and `clients` inside a compiled round, held to where `place` puts them on the `mesh`.

    So the next round finds them there.
    """
    at_server, at_clients = shardings(mesh, clients)
    return jax.lax.with_sharding_constraint(server, at_server), jax.lax.with_sharding_constraint(clients, at_clients)


def balanced(costs: Array, devices: int) -> Array:
    """Shares out chunks, given in order of falling cost, evenly in number and about evenly in cost.

    Each goes to the device with the least to do that still has room.

    Args:
      costs: [n] with n a multiple of `devices`.
      devices: their number.

    Returns:
      [n] int32, a permutation: device `p // (n / devices)` takes the chunk with place p.
    """
    room = len(costs) // devices

    def give(carry: tuple[Array, Array], cost: Array) -> tuple[tuple[Array, Array], Array]:
        load, taken = carry
        to = jnp.argmin(jnp.where(taken < room, load, jnp.inf))
        return (load.at[to].add(cost), taken.at[to].add(1)), to * room + taken[to]

    start = jnp.zeros(devices, jnp.float32), jnp.zeros(devices, jnp.int32)
    return jax.lax.scan(give, start, costs.astype(jnp.float32))[1]
