"""A model to take away: saved and loaded with its names, or exported to a file that predicts without this library.

    saving.save('model.safetensors', algorithm, state, data)                       # the generic model
    saving.save('client-3.safetensors', stage, state, data, client=3)              # a client's own
    generic = saving.load('model.safetensors', algorithm)
    logits = algorithm.predict(generic.server, generic.client, x)

    saving.export('model.jax', algorithm, state, data)                             # needs jax alone to predict:
    predict = jax.export.deserialize(bytearray(open('model.jax', 'rb').read())).call

Nothing is pickled, and what `load` reads is arrays and JSON. What `export` writes is a program: run those of people
whom you trust.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import save as packed

from fedjax_nc import _keys, checks, population, tree
from fedjax_nc._checkpoints import replace
from fedjax_nc._fingerprint import of_arrays
from fedjax_nc.base import Algorithm, FederatedData, State, Tree

FORMAT = 'fedjax_nc model 1'  #: what files of `save` call their format
#: what files say of themselves
OWN = ('checksum', 'format', 'library', 'jax', 'example', 'num_classes', 'num_clients', 'client', 'classes')
PLATFORMS = ('cpu', 'cuda', 'tpu')  #: what `export` writes for by default


class Saved(NamedTuple):
    """What a file holds: `algorithm.predict(server, client, x)` is its model."""

    server: Tree  #: the server's state
    client: Tree | None  #: the client's state; None for the generic model
    about: dict[str, Any]  #: what was said of it, and `format`, `library`, `example`, `num_classes`, ...


def save(
    path: str | Path,
    algorithm: Algorithm,
    state: State,
    data: FederatedData,
    *,
    client: int | None = None,
    classes: Sequence[str] | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes the model of a state to a safetensors file, whole or not at all.

    The server's state goes into it, so that training can go on from it, and with `client` that client's own. Arrays
    have their paths as names, such as 'server.variables.params.head.w'.

    Args:
        path: the file, '.safetensors' by custom. What was there is replaced.
        algorithm: whose state it is; the last stage, where stages followed training.
        state: from `simulate.init`, `training.run` or a round.
        data: the clients on which it was trained: the description says what an example looks like.
        client: whose personal model it is; None for the generic one.
        classes: names of the C classes.
        about: what else the description is to say, as JSON can hold it: the model, its preprocessing.

    Raises:
        ValueError: if the algorithm has no such model, there is no such client, `classes` are not as many as there
            are, or `about` cannot be written as JSON.
        OSError: if the file cannot be written.
    """
    server, own = _chosen(algorithm, state, data, client)
    said = _description(algorithm, server, own, data, client, classes, about)
    # The file takes buffers as they lie in memory: a transposed view would come back as another array.
    arrays = {
        name: np.asarray(leaf, order='C') for name, leaf in tree.by_path(_keys.plain(_whole(server, own))).items()
    }
    said['checksum'] = of_arrays(arrays)
    replace(Path(path), packed(arrays, metadata={'fedjax_nc': json.dumps(said)}))


def load(path: str | Path, algorithm: Algorithm, like: State | None = None) -> Saved:
    """Reads what `save` wrote.

    Args:
        path: the file.
        algorithm: as it was saved with: the same model, head and method.
        like: a state of the kind that was saved, by `simulate.join` for instance, where `algorithm.init` makes another:
            stages that follow training. Shapes will do.

    Returns:
        The states, of the shapes and types that `algorithm` gives them, and the description.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is damaged, or not of this kind, or of another algorithm or model.
    """
    checks.kind('algorithm', algorithm, Algorithm)
    path = Path(path)
    content, about = _read(path)
    whole = _whole(*_shapes(algorithm, about, like))
    wanted = tree.by_path(jax.eval_shape(_keys.plain, whole))
    if set(wanted) != set(content):
        lacking, odd = sorted(set(wanted) - set(content)), sorted(set(content) - set(wanted))
        said = [
            f'{how} {names[0]}' + (f' and {len(names) - 1} more arrays' if names[1:] else '')
            for how, names in (('lacks', lacking), ('has beside them', odd))
            if names
        ]
        raise ValueError(
            f'{path} is of another algorithm or model than the one given: of its arrays it {" and ".join(said)}; after '
            'a stage, hand over a state of its kind as `like`'
        )
    for name, leaf in wanted.items():
        found = content[name]
        if found.shape != leaf.shape or found.dtype != leaf.dtype:
            raise ValueError(
                f'{path} is of another model: {name} is {found.dtype} {found.shape} and should be '
                f'{leaf.dtype} {leaf.shape}'
            )
    leaves = [_keys.again(content[name], leaf) for name, leaf in zip(wanted, jax.tree.leaves(whole), strict=True)]
    filled = jax.tree.unflatten(jax.tree.structure(whole), leaves)
    return Saved(filled['server'], filled.get('client'), about)


def about(path: str | Path) -> dict[str, Any]:
    """What a file of `save` says of itself, without reading its arrays.

    Args:
        path: the file.

    Returns:
        What `save` was given as `about`, and `format`, `checksum`, `library`, `jax`, `example`, `num_classes`,
        `num_clients`, `client` and, where they were named, `classes`.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is damaged, or not of this kind.
    """
    return _read(Path(path), arrays=False)[1]


def export(
    path: str | Path,
    algorithm: Algorithm,
    state: State | Saved,
    data: FederatedData | None = None,
    *,
    client: int | None = None,
    platforms: Sequence[str] = PLATFORMS,
    batch_size: int | None = None,
    classes: Sequence[str] | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes the model of a state as a program of `jax.export`, and its description beside it as `<path>.json`.

    The program takes raw examples [B, ...] for any B, as `data` holds them, and returns logits [B, C]; preprocessing
    and parameters are in it. jax and flatbuffers are all that it needs:

        program = jax.export.deserialize(bytearray(open(path, 'rb').read()))
        logits = program.call(x)

    The format is StableHLO, which jax reads for six months after it was written, and longer where it can; keep what
    `save` writes, too.

    Args:
        path: the file.
        algorithm: as for `save`.
        state: as for `save`; or what `load` has read, which is `saved` of a run that `experiments.load` has read, with
            neither `data` nor `client`.
        data: the clients: their examples have the shape and type that the program takes.
        client: whose personal model; None for the generic one.
        platforms: what it runs on: any of 'cpu', 'cuda', 'rocm' and 'tpu'.
        batch_size: B, for models that must know it; None for any.
        classes: as for `save`; of a file, by default those that it names.
        about: as for `save`; of a file, beside what it says.

    Raises:
        ValueError: as `save`, for platforms that there are not, or a model that must know the size of a batch.
        OSError: if a file cannot be written.
    """
    known = {*PLATFORMS, 'rocm'}
    if isinstance(platforms, str) or not platforms or not {*platforms} <= known:
        raise ValueError(f'platforms must name some of {", ".join(sorted(known))}, not {checks.shown(platforms)}')
    if isinstance(state, Saved):
        checks.kind('algorithm', algorithm, Algorithm)
        if data is not None or client is not None:
            raise ValueError('a model that was read is of one client or of none, and needs no data: give neither')
        server, own = state.server, state.client
        data, client = clients(state.about), state.about['client']
        classes = state.about.get('classes') if classes is None else classes
        said = {name: value for name, value in state.about.items() if name not in OWN}
        about = {**said, **about} if isinstance(about, Mapping) else said if about is None else about
    elif not isinstance(state, State):
        raise ValueError(
            f'state must be a State, or Saved as saving.load reads it (`saved` of a run), not {checks.shown(state)}'
        )
    elif data is None:
        raise ValueError('data must be given with a state: what the program takes are examples as these')
    else:
        server, own = _chosen(algorithm, state, data, client)
    said = _description(algorithm, server, own, data, client, classes, about)
    if batch_size is not None:
        checks.whole('batch_size', batch_size)
    batch: Any = batch_size or jax.export.symbolic_shape('batch')[0]
    x = jax.ShapeDtypeStruct((batch, *data.x.shape[1:]), data.x.dtype)
    predict = jax.jit(lambda x: algorithm.predict(server, own, x))
    try:
        program = jax.export.export(predict, platforms=tuple(platforms))(x)
    except (TypeError, ValueError, jax.errors.JAXTypeError) as error:
        if batch_size is not None:
            raise
        raise ValueError(
            'the model does not work for a batch of unknown size: write x.shape[0] for len(x), or export it for one '
            f'`batch_size` ({" ".join(str(error).split())[:200]})'
        ) from error
    path = Path(path)
    text = json.dumps({**said, 'platforms': list(platforms)}, indent=2) + '\n'
    replace(path, bytes(program.serialize()))
    replace(path.with_name(path.name + '.json'), text)


def _whole(server: Tree, client: Tree | None) -> dict[str, Tree]:
    return {'server': server} if client is None else {'server': server, 'client': client}


def _chosen(algorithm: Algorithm, state: State, data: FederatedData, client: int | None) -> tuple[Tree, Tree | None]:
    """The server's state and a client's."""
    checks.kind('algorithm', algorithm, Algorithm)
    checks.kind('state', state, State)
    checks.kind('data', data, FederatedData)
    if client is None:
        return state.server, None
    checks.whole('client', client, 0)
    if client >= data.num_clients:
        raise ValueError(f'client must be one of {data.num_clients}, not {client}')
    stored = isinstance(state.clients, population.Store)
    held = {state.clients.num_clients} if stored else {len(u) for u in jax.tree.leaves(state.clients)}
    if held - {data.num_clients}:
        raise ValueError(f'the state has {held.pop()} clients, and the data have {data.num_clients}')
    if stored:
        return state.server, jax.tree.map(lambda u: u[0], state.clients.take(np.array([client])))
    if not jax.tree.leaves(state.clients):
        raise ValueError('clients of this algorithm keep nothing: their models come from a stage such as finetune')
    return state.server, jax.tree.map(lambda u: u[client], state.clients)


def _description(
    algorithm: Algorithm,
    server: Tree,
    own: Tree | None,
    data: FederatedData,
    client: int | None,
    classes: Sequence[str] | None,
    about: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What a file says of itself."""
    import fedjax_nc

    x = jax.ShapeDtypeStruct((1, *data.x.shape[1:]), data.x.dtype)
    logits = jax.eval_shape(lambda x: algorithm.predict(server, own, x), x)
    if about is not None and not isinstance(about, Mapping):
        raise ValueError(f'about must be what JSON can hold by name, not {checks.shown(about)}')
    if taken := sorted({*(about or {})} & {*OWN}):
        raise ValueError(f'about must not say {", ".join(taken)}, which the file says itself: choose other names')
    if classes is not None and (isinstance(classes, str) or np.ndim(classes) != 1 or len(classes) != logits.shape[-1]):
        raise ValueError(f'classes must name all {logits.shape[-1]} of them, not {checks.shown(classes)}')
    said = {
        **(about or {}),
        'format': FORMAT,
        'library': fedjax_nc.__version__,
        'jax': jax.__version__,
        'example': {'shape': list(x.shape[1:]), 'dtype': str(x.dtype)},
        'num_classes': logits.shape[-1],
        'num_clients': data.num_clients,
        'client': None if client is None else int(client),
        **({} if classes is None else {'classes': [str(name) for name in classes]}),
    }
    try:
        json.dumps(said, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f'about must be what JSON can hold: {error}') from error
    return said


def _read(path: Path, arrays: bool = True) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a file, if they are wanted, and its description."""
    if not path.is_file():
        raise FileNotFoundError(f'{path} is not there')
    try:
        with safetensors.safe_open(path, framework='numpy') as file:
            about = json.loads((file.metadata() or {}).get('fedjax_nc', 'null'))
            names = file.keys() if arrays else ()
            content = {name: file.get_tensor(name) for name in names}
    except (safetensors.SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f'{path} is damaged, or no safetensors file: {" ".join(str(error).split())}') from error
    if not isinstance(about, dict) or about.get('format') != FORMAT:
        raise ValueError(f'{path} was not written by saving.save, or by a later version of it')
    if arrays and 'checksum' in about and about['checksum'] != of_arrays(content):
        raise ValueError(f'{path} is damaged: its numbers are not those that were written')
    return content, about


def _shapes(algorithm: Algorithm, about: dict[str, Any], like: State | None) -> tuple[Tree, Tree | None]:
    """The shapes of the states that a file describes."""
    data = clients(about)
    personal = about['client'] is not None
    if like is not None:
        checks.kind('like', like, State)
        held = like.clients.take(np.zeros(1, int)) if isinstance(like.clients, population.Store) else like.clients
        return jax.eval_shape(
            lambda server, held: (server, jax.tree.map(lambda u: u[0], held) if personal else None), like.server, held
        )
    key = jax.random.key(0)
    try:
        server = jax.eval_shape(algorithm.init, key, data)
        return server, jax.eval_shape(algorithm.init_client, key, server) if personal else None
    except ValueError as error:
        raise ValueError(f'{error}; or hand over a state of the kind that was saved as `like`') from error


def clients(about: dict[str, Any]) -> FederatedData:
    """The clients that a file of `save` describes, as shapes: one example, as many clients and classes as there were.

    Args:
        about: what it says of itself.

    Raises:
        ValueError: if the description is damaged.
    """

    def of(shape: Sequence[int], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(tuple(shape), dtype)

    try:
        example, number, classes, one = (about[name] for name in ('example', 'num_clients', 'num_classes', 'client'))
        for name, value in {'num_clients': number, 'num_classes': classes}.items():
            checks.whole(name, value)
        if one is not None:
            checks.whole('client', one, 0)
            if one >= number:
                raise ValueError(f'client {one} of {number}')
        for side in example['shape']:
            checks.whole('the shape of an example', side, 0)
        if max(number, classes, *example['shape']) >= 2**31:
            raise ValueError('its sizes are beyond counting')
        x = of((1, *example['shape']), example['dtype'])
        jnp.zeros(0, x.dtype)  # a type that jax has
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f'the description of the file is damaged: {" ".join(str(error).split())}') from error
    return FederatedData(x, of((1,)), of((number, 1)), of((number,)), of((number, classes)))
