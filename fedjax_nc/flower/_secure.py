"""Messages that are summed unseen, by Flower's SecAgg+.

SecAgg+: Secure Single-Server Aggregation with (Poly)Logarithmic Overhead.
Bell, Bonawitz, Gascon, Lepoint, Raykova. CCS 2020. https://eprint.iacr.org/2020/704

What every aggregator but a stacked one makes of a site's message is a summand (`Aggregator.partial`). All its entries
go as one vector, each divided by what a message of ones from the largest site would give there, so that one limit holds
for all of them. Shares of keys, masking and unmasking are Flower's; here is what it is given, what a site refuses to do
for a server that asks for less than was agreed on, and what the server takes of what sites send.

Flower's own masks come of a seed of 32 bits, which can be tried out; they are drawn by ChaCha20 here, see `masks`.

The server is trusted to follow the protocol, and curious at most: it tells sites who the others are, and whoever does
that can invent them.
"""

import hashlib
import math
import types
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from flwr.app import Array as Packed
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.client.mod.secure_aggregation.secaggplus_mod import _collect_masked_vectors
from flwr.common import Code, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common import recorddict_compat
from flwr.server import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.serverapp import Grid
from flwr.supercore.primitives.asymmetric import bytes_to_public_key

from fedjax_nc import tree
from fedjax_nc.base import Tree
from fedjax_nc.flower import _plan, _wire
from fedjax_nc.flower._plan import Agreement, Secure

MODULUS = 2**32  #: masks and sums are taken modulo this


def vector(agreed: Agreement, number: int, message: Tree, size: int, largest: int) -> np.ndarray:
    """A site's summand as one vector [n] float64, each entry at most `limit` in absolute value.

    Args:
      agreed: by all.
      number: of the phase.
      message: the site's.
      size: examples of the site.
      largest: examples of the largest site.

    Raises:
      WireError: if an entry lies beyond the limit, or is NaN.
    """
    assert agreed.secure is not None
    summand = jax.device_get(_plan.summand(agreed.phases[number].algorithm, message, size))
    parts = []
    for (name, u), unit in zip(tree.by_path(summand).items(), units(agreed, number, message, largest), strict=True):
        scaled = np.asarray(u, np.float64).reshape(-1) / unit
        most = float(np.max(np.abs(scaled), initial=0.0))
        if not most <= agreed.secure.limit * (1 + 1e-6):  # what is clipped to it in float32 may be a rounding beyond
            raise _wire.WireError(
                f'{name} goes beyond the limit of secure aggregation, {agreed.secure.limit:g}: agree on a higher one, '
                'or limit messages by privacy.private'
            ) from ValueError(f'it goes to {most:.3g}')  # which the site logs, and does not send
        parts.append(np.clip(scaled, -agreed.secure.limit, agreed.secure.limit))
    return np.concatenate(parts)


def unpacked(agreed: Agreement, number: int, summed: np.ndarray, kinds: Tree, largest: int) -> Tree:
    """The sum of summands, float32, from the sum of their vectors; `kinds` are shapes of a message."""
    shapes = _plan.partial_shapes(agreed.phases[number].algorithm, kinds, 1)
    leaves, at = [], 0
    for like, unit in zip(jax.tree.leaves(shapes), units(agreed, number, kinds, largest), strict=True):
        count = int(np.prod(like.shape))
        leaves.append(jnp.asarray((summed[at : at + count] * unit).reshape(like.shape), like.dtype))
        at += count
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def length(agreed: Agreement, number: int, kinds: Tree) -> int:
    """Entries of a vector."""
    shapes = _plan.partial_shapes(agreed.phases[number].algorithm, kinds, 1)
    return sum(int(np.prod(u.shape)) for u in jax.tree.leaves(shapes))


def units(agreed: Agreement, number: int, kinds: Tree, largest: int) -> list[float]:
    """For each leaf of a summand, what a message of ones from the largest site gives there."""
    ones = jax.tree.map(lambda u: jnp.ones(u.shape, u.dtype), kinds)
    summand = jax.device_get(_plan.summand(agreed.phases[number].algorithm, ones, largest))
    return [float(np.max(np.abs(u), initial=0.0)) or 1.0 for u in jax.tree.leaves(summand)]


def mods(secure: Secure) -> list[Callable[..., Message]]:
    """What a site does around its work: refuse settings that are not agreed on, then Flower's protocol."""

    def guard(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        said = message.content.config_records.get(RECORD_KEY_CONFIGS)
        if said is None:
            raise _wire.WireError('the server asks for a masked message without the protocol of SecAgg+')
        if said.get(Key.STAGE) == Stage.SETUP:
            _agreed_settings(said, secure)
        elif said.get(Key.STAGE) == Stage.SHARE_KEYS and len(said) - 1 < secure.least:  # one of them is the stage
            raise _wire.WireError(f'the server names {len(said) - 1} sites, and a sum is of {secure.least} at least')
        elif said.get(Key.STAGE) == Stage.COLLECT_MASKED_VECTORS:
            _distinct(said.get(Key.SOURCE_LIST))
        elif said.get(Key.STAGE) == Stage.UNMASK:
            there, gone = (_distinct(said.get(k)) for k in (Key.ACTIVE_NODE_ID_LIST, Key.DEAD_NODE_ID_LIST))
            if message.metadata.dst_node_id not in there:
                raise _wire.WireError('the server wants this site to help with a sum that it is no part of')
            if len(there) < secure.least or there & gone:
                raise _wire.WireError(
                    f'the server wants to see a sum of {len(there)} sites, of which {len(there & gone)} are said to be '
                    f'gone, and {secure.least} at least was agreed on'
                )
        return call_next(message, context)

    return [guard, _with_masks(secaggplus_mod, _collect_masked_vectors=_with_masks(_collect_masked_vectors))]


def masks(seed: bytes, modulus: int, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """What hides a vector: numbers below 2^32 from all bits of a seed, by ChaCha20.

    Flower's function of the same arguments makes one number of 32 bits of the seed, and for a seed that is Base64 of
    28 bits, before it draws.
    """
    assert modulus == MODULUS
    stream = Cipher(ChaCha20(hashlib.sha256(seed).digest(), bytes(16)), None).encryptor()
    drawn = [np.frombuffer(stream.update(bytes(4 * int(np.prod(shape)))), '<u4') for shape in shapes]
    return [u.reshape(shape).astype(np.int64) for u, shape in zip(drawn, shapes, strict=True)]


def _with_masks(function: Any, **others: Any) -> Any:
    """A function of Flower's that draws masks as above."""
    used = {*function.__code__.co_names}
    if not (used >= {*others} if others else 'pseudo_rand_gen' in used):
        raise ImportError('this version of Flower draws masks elsewhere than fedjax_nc knows: install flwr 1.41')
    names = function.__globals__ | {'pseudo_rand_gen': masks} | others
    return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def _distinct(said: Any) -> set[int]:
    """Nodes that a server lists, each once: Flower counts entries to see whether there are enough."""
    if not isinstance(said, list) or len(set(said)) != len(said):
        raise _wire.WireError('the server must list nodes, and each once')
    return set(said)


def _agreed_settings(said: ConfigRecord, secure: Secure) -> None:
    sites = said.get(Key.SAMPLE_NUMBER)
    if type(sites) is not int or sites < secure.least:
        raise _wire.WireError(
            f'the server wants a sum of {str(sites)[:20]} sites, and agreed are {secure.least} at least'
        )
    wanted = {
        Key.SHARE_NUMBER: sites,
        Key.THRESHOLD: threshold(secure, sites),
        Key.CLIPPING_RANGE: float(secure.limit),
        Key.TARGET_RANGE: secure.levels,
        Key.MOD_RANGE: MODULUS,
        Key.MAX_WEIGHT: 1.0,
    }
    for key, value in wanted.items():
        if said.get(key) != value:
            raise _wire.WireError(f'the server asks for {key} {str(said.get(key))[:20]}, and agreed is {value}')


def threshold(secure: Secure, sites: int) -> int:
    """How many of so many sites must stay to the end of a round: more than half, or the server could make two sums."""
    return max(math.ceil(secure.threshold * sites - 1e-9), sites // 2 + 1, 2)


def size(entries: int) -> int:
    """Bytes of a masked vector: int64, a last entry and a weight included."""
    return 8 * (entries + 2)


def answer(vector: np.ndarray, secure: Secure) -> RecordDict:
    """A vector as `secaggplus_mod` takes it, which masks it; each site counts once.

    A last entry, the same of all sites, tells the server whether all masks came off.
    """
    whole = np.append(vector, secure.limit)
    result = FitRes(Status(Code.OK, ''), ndarrays_to_parameters([whole]), num_examples=1, metrics={})
    return recorddict_compat.fitres_to_recorddict(result, keep_input=False)


def largest(message: Message) -> int:
    """Examples of the largest site, as the server says."""
    said = message.content.config_records.get('secure')
    value = said.get('largest') if said is not None else None
    if type(value) is not int or not 1 <= value < 2**31:
        raise _wire.WireError('the server must say how many examples the largest site has')
    return value


def summed(
    grid: Grid,
    context: Context,
    contents: dict[int, RecordDict],
    secure: Secure,
    round: int,
    entries: int,
    timeout: float,
    refused: Callable[[str], None],
    least: int,
) -> tuple[np.ndarray, list[int]]:
    """Runs the protocol once.

    Args:
      grid: of the server.
      context: of the server.
      contents: what each node is sent with the request for its message.
      secure: the settings agreed on.
      round: number of the round.
      entries: of the vector.
      timeout: seconds for each of the four stages.
      refused: told of each site whose answer to a stage is an error, or none: the others go on without it.
      least: sites whose vectors the sum is to have, or nothing is unmasked; at least `secure.least` in any case.

    Returns:
      The sum [entries] float64 of the vectors of those who stayed, and their nodes.

    Raises:
      WireError: if there is none: too few stayed, or somebody sent what cannot be read.
    """
    least = max(least, secure.least)
    if len(contents) < least:
        raise _wire.WireError(f'{len(contents)} sites are there, and a sum is of {least} at least')
    strategy = _Members(list(contents))
    legacy = LegacyContext(context, strategy=strategy)
    legacy.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: round})
    legacy.state.array_records[MAIN_PARAMS_RECORD] = recorddict_compat.parameters_to_arrayrecord(
        Parameters([], ''), False
    )
    workflow = _Workflow(
        1.0, threshold(secure, len(contents)), max_weight=1.0, clipping_range=float(secure.limit),
        quantization_range=secure.levels, modulus_range=MODULUS, timeout=timeout,
    )  # fmt: skip
    workflow.contents, workflow.least = contents, least
    try:
        workflow(cast(Grid, _Strict(grid, entries, refused)), legacy)
    except Exception as error:  # Flower reads what sites send as it comes
        raise _wire.WireError(f'a site sent what SecAgg+ cannot read: {str(error)[:200]}') from error
    if strategy.mean is None:
        raise _wire.WireError(
            f'fewer than {max(least, threshold(secure, len(contents)))} of {len(contents)} sites stayed to the end'
        )
    if len(strategy.stayed) < least:
        raise _wire.WireError(f'{len(strategy.stayed)} sites stayed, and a sum is of {least} at least')
    mean, step = strategy.mean, 2 * secure.limit / secure.levels
    if (
        mean.shape != (entries + 1,)
        or not (np.abs(mean) <= secure.limit + step).all()
        or mean[-1] < secure.limit - step
    ):
        raise _wire.WireError(
            'the sum is none of messages within the limit: a site sent a wrong share, or a wrong vector'
        )
    return mean[:-1] * len(strategy.stayed), strategy.stayed


class _Workflow(SecAggPlusWorkflow):
    """Flower's protocol with contents that are not its own."""

    contents: dict[int, RecordDict]
    least: int

    def setup_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        going = super().setup_stage(grid, context, state)
        state.nid_to_fitins = dict(self.contents)
        return going

    def share_keys_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        going = super().share_keys_stage(grid, context, state)
        # Who has shared no keys so far is not in the round; Flower would ask the others for shares of their keys.
        state.sampled_node_ids = set(state.active_node_ids)
        state.nid_to_neighbours = {
            n: state.nid_to_neighbours[n] & state.sampled_node_ids for n in state.sampled_node_ids
        }
        return going

    def unmask_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        # The round will be asked for again. Of two sums of the same messages, of different sites, the difference tells.
        if len(state.active_node_ids) < self.least:
            return False
        return bool(_with_masks(SecAggPlusWorkflow.unmask_stage)(self, grid, context, state))


class _Strict:
    """A grid that drops what is no answer to the stage of SecAgg+ that was asked for: Flower would stop at it."""

    def __init__(self, grid: Grid, entries: int, refused: Callable[[str], None]) -> None:
        self.grid, self.entries, self.refused = grid, entries, refused

    def send_and_receive(self, messages: list[Message], *, timeout: float | None = None) -> list[Message]:
        asked = {m.metadata.dst_node_id: dict(m.content.config_records[RECORD_KEY_CONFIGS]) for m in messages}
        fine, keys = [], set[bytes]()
        for reply in self.grid.send_and_receive(messages, timeout=timeout):
            node = reply.metadata.src_node_id
            try:
                said = asked.pop(node, None)
                if said is None:
                    raise _wire.WireError('it was not asked, or has answered')
                if reply.has_error():
                    raise _wire.WireError(reply.error.reason or f'error {reply.error.code}')
                self.check(node, said, reply, keys)
                fine.append(reply)
            except Exception as error:  # a site may send anything
                self.refused(f'node {node}: {error}')
        return fine

    def check(self, node: int, asked: dict[str, Any], reply: Message, keys: set[bytes]) -> None:
        """Raises WireError, or whatever else reading it raises, for a reply that Flower could not go on with."""
        told: Any = reply.content.config_records[RECORD_KEY_CONFIGS]
        stage = asked[Key.STAGE]
        if stage == Stage.SETUP:
            own = [told[Key.PUBLIC_KEY_1], told[Key.PUBLIC_KEY_2]]
            curves = [bytes_to_public_key(key).curve.name for key in own]
            fits = curves == [ec.SECP384R1.name] * 2 and len({*own} - keys) == 2
            keys.update(own)
        elif stage == Stage.SHARE_KEYS:
            others, shares = told[Key.DESTINATION_LIST], told[Key.CIPHERTEXT_LIST]
            fits = sorted(others) == sorted(int(n) for n in asked if n not in (Key.STAGE, str(node)))
            fits = fits and len(shares) == len(others) and all(type(u) is bytes for u in shares)
        elif stage == Stage.COLLECT_MASKED_VECTORS:
            recorddict_compat.recorddict_to_fitres(reply.content, True)
            vectors = told[Key.MASKED_PARAMETERS]
            fits = len(vectors) == 2
            for data, entries in zip(vectors, (1, self.entries + 1), strict=False):
                packed = Packed('int64', (entries,), 'numpy.ndarray', data)
                _wire.unpack_array('a masked vector', packed, (entries,), np.dtype(np.int64), f'node {node}')
        else:
            owners, shares = told[Key.NODE_ID_LIST], told[Key.SHARE_LIST]
            fits = sorted(owners) == sorted(asked[Key.ACTIVE_NODE_ID_LIST] + asked[Key.DEAD_NODE_ID_LIST])
            fits = fits and len(shares) == len(owners) and all(type(u) is bytes for u in shares)
        if not fits:
            raise _wire.WireError(f'what it sent in stage {stage} is not of the protocol')


class _Node:
    """A site, as Flower's protocol looks at it."""

    def __init__(self, node: int) -> None:
        self.node_id = node


class _Members(FedAvg):
    """Names the sites of a round, and takes what the protocol has made of them."""

    def __init__(self, nodes: list[int]) -> None:
        super().__init__()
        self.nodes = nodes
        self.mean: np.ndarray | None = None
        self.stayed: list[int] = []

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: Any) -> Any:
        return [(_Node(node), FitIns(Parameters([], ''), {})) for node in self.nodes]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> tuple[None, dict[str, Any]]:
        self.stayed = [proxy.node_id for proxy, _ in results]
        self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}
