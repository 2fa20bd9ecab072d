"""Sites and servers that lie, break or die under `fedjax_nc.flower`: the others go on, as if those were not there."""

import io
import pickle
import time
import types
import warnings

import jax
import numpy as np
import pytest
import safetensors.numpy
import toys
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from loopback import Loopback, Seen, agreement, apart, context, deploy, own, serve, told
from numpy.lib import format as npy

import fedjax_nc
from fedjax_nc import flower, simulate
from fedjax_nc.algorithms import fedavg, scaffold
from fedjax_nc.base import Info
from fedjax_nc.flower import _plan, _rounds, _secure, _site, _sites, _wire

SIZES = (24, 24, 24, 40)
BAD = 2  # the site that lies
ROUNDS = jax.random.key(1)
SCAFFOLD = scaffold.algorithm(toys.task, toys.opt, plan=toys.PLAN._replace(tails=(8,)))  # whose info has loops
FEDAVG = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
PATIENCE = flower.Patience(1.0, None, 1.0)


@pytest.fixture(scope='module')
def data():
    return toys.ragged(SIZES)


def apps(agreed, data, out):
    """Sites without tests, which need not be compiled."""
    return [
        flower.client_app(agreed, lambda context, k=k: flower.Site(k, own(data, k), out / f'site-{k}'))
        for k in range(len(SIZES))
    ]


def changing(reply, name, change):
    """A reply of which the array `name` of the message is another; '' is the first matrix."""
    record = reply.content.array_records['message']
    name = name or next(key for key, packed in record.items() if len(packed.shape) == 2)
    reply.content['message'] = ArrayRecord({**record, name: change(record[name])})
    return reply


def valued(value):
    def change(packed):
        array = np.array(packed.numpy())
        array.reshape(-1)[0] = value
        return Array(array)

    return lambda reply: changing(reply, '', change)


def recast(dtype, claim=True):
    """Sends another type; claims the right one if not `claim`."""

    def change(packed):
        other = Array(packed.numpy().astype(dtype))
        return other if claim else Array(packed.dtype, packed.shape, packed.stype, other.data)

    return lambda reply: changing(reply, '', change)


def rebuilt(build):
    """The claims of an array with other bytes: `build` is given it as an array."""
    return lambda reply: changing(reply, '', lambda p: Array(p.dtype, p.shape, p.stype, build(np.array(p.numpy()))))


def bytes_of(array, version=(1, 0), **header):
    stream = io.BytesIO()
    said = {'descr': npy.dtype_to_descr(array.dtype), 'fortran_order': False, 'shape': array.shape, **header}
    text = (repr(said) + '\n').encode()
    stream.write(npy.magic(*version) + len(text).to_bytes(2 if version == (1, 0) else 4, 'little') + text)
    return stream.getvalue() + array.tobytes()


class Trap:
    """Whoever unpickles it is told on."""

    def __reduce__(self):
        return spring, ()


SPRUNG = []


def spring():
    SPRUNG.append(True)


def pickled(array):
    trapped = np.empty(array.shape, object)
    trapped.reshape(-1)[:] = [Trap() for _ in range(array.size)]
    stream = io.BytesIO()
    np.save(stream, trapped, allow_pickle=True)
    return stream.getvalue()


def without(*names):
    def change(reply):
        for name in names:
            reply.content.pop(name)
        return reply

    return change


def replaced(name, record):
    def change(reply):
        reply.content.pop(name)
        reply.content[name] = record
        return reply

    return change


def counting(**values):
    """Info with other numbers."""

    def change(reply):
        record = dict(reply.content.array_records['info'])
        for name, value in values.items():
            found = next(key for key in record if name in key)
            record[found] = Array(np.asarray(value, record[found].dtype))
        reply.content['info'] = ArrayRecord(record)
        return reply

    return change


def renamed(reply):
    record = dict(reply.content.array_records['message'])
    first = next(iter(record))
    record['x' * 10**5] = record.pop(first)
    reply.content['message'] = ArrayRecord(record)
    return reply


def more(reply):
    record = reply.content.array_records['message']
    reply.content['message'] = ArrayRecord({**record, 'more': next(iter(record.values()))})
    return reply


def fewer(reply):
    record = reply.content.array_records['message']
    reply.content['message'] = ArrayRecord(dict(list(record.items())[1:]))
    return reply


def instead(content):
    """Another answer to the same question."""

    def change(reply):
        other = Message(content, reply_to=reply)
        other.metadata.__dict__['_reply_to_message_id'] = reply.metadata.reply_to_message_id
        other.metadata.__dict__['_src_node_id'] = reply.metadata.src_node_id
        return other

    return change


def failing(reason):
    return instead(Error(2, reason))


ATTACKS = {
    'nan': valued(np.nan),
    'infinity': valued(np.inf),
    'minus infinity': valued(-np.inf),
    'more than most': valued(101.0),
    'less than most': valued(-101.0),
    'another shape': lambda r: changing(r, '', lambda p: Array(p.numpy()[:-1])),
    'an axis more': lambda r: changing(r, '', lambda p: Array(p.numpy()[None])),
    'a number for an array': lambda r: changing(r, '', lambda p: Array(np.array(1.0, np.float32))),
    'the shape as one axis': lambda r: changing(
        r, '', lambda p: Array(p.dtype, (int(np.prod(p.shape)),), p.stype, p.data)
    ),
    'float64': recast(np.float64),
    'float64 said to be float32': recast(np.float64, claim=False),
    'integers': recast(np.int32),
    'integers said to be float32': recast(np.int32, claim=False),
    'the other order of bytes': recast('>f4', claim=False),
    'complex': recast(np.complex64),
    'complex said to be float32': recast(np.complex64, claim=False),
    'a pickle': rebuilt(pickled),
    'a pickle that says so': lambda r: changing(
        r, '', lambda p: Array('object', p.shape, p.stype, pickled(np.array(p.numpy())))
    ),
    'a pickle and nothing else': rebuilt(lambda a: pickle.dumps(Trap()).ljust(a.nbytes + 100, b'\0')),
    'a huge shape in the header': rebuilt(lambda a: bytes_of(a, shape=(10**12,))),
    'a huge shape in both': lambda r: changing(
        r, '', lambda p: Array(p.dtype, (10**9,), p.stype, bytes_of(np.array(p.numpy()), shape=(10**9,)))
    ),
    'a negative shape': rebuilt(lambda a: bytes_of(a, shape=(-1, *a.shape[1:]))),
    'columns first': rebuilt(lambda a: bytes_of(a, fortran_order=True)),
    'a header of version 9': rebuilt(lambda a: b'\x93NUMPY\x09\x00' + bytes_of(a)[8:]),
    'no header': rebuilt(lambda a: a.tobytes()),
    'garbage for a header': rebuilt(lambda a: npy.magic(1, 0) + b'\xff\xff' + a.tobytes()),
    'a deep header': rebuilt(lambda a: npy.magic(1, 0) + (900).to_bytes(2, 'little') + b'(' * 900 + a.tobytes()),
    'signs for a header': rebuilt(
        lambda a: npy.magic(1, 0) + (901).to_bytes(2, 'little') + b'-' * 900 + b'1' + a.tobytes()
    ),
    'keys of two types': rebuilt(
        lambda a: npy.magic(1, 0) + (16).to_bytes(2, 'little') + b"{1: 2, 'a': 3}  " + a.tobytes()
    ),
    'numbers of Python 2': rebuilt(lambda a: bytes_of(a).replace(b'False', b'0L   ')),
    'bytes behind the numbers': rebuilt(lambda a: bytes_of(a) + b'1234'),
    'megabytes behind the numbers': rebuilt(lambda a: bytes_of(a) + bytes(2**22)),
    'fewer bytes': rebuilt(lambda a: bytes_of(a)[:-1]),
    'no bytes': rebuilt(lambda a: b''),
    'another kind of array': lambda r: changing(r, '', lambda p: Array(p.dtype, p.shape, 'torch', p.data)),
    'a name too many': more,
    'a name too few': fewer,
    'a long name': renamed,
    'no names': replaced('message', ArrayRecord()),
    'no message': without('message'),
    'no info': without('info'),
    'not told what it is': without('told'),
    'nothing': without('message', 'info', 'told'),
    'a config for a message': replaced('message', ConfigRecord({'a': 1.0})),
    'a message for a config': replaced('told', ArrayRecord({'a': Array(np.ones(3))})),
    'another site': lambda r: told(r, client=BAD - 1),
    'another round': lambda r: told(r, round=1),
    'another phase': lambda r: told(r, phase=1),
    'a round in words': lambda r: told(r, round='2'),
    'steps below 0': counting(steps=-1),
    'examples below 0': counting(examples=-(2**31)),
    'loops below 0': counting(loops=(24, -1)),
    'a loss of nan': counting(loss=np.nan),
    'an error of megabytes': failing('no ' * 10**6),
    'an error that paints the screen': failing('\x1b[2J\x1b]0;title\x07\n\rall is well'),
    'an error without words': failing(None),
    'silence': lambda reply: None,
}
HARMLESS = {  # what counts all the same, as it holds what it must
    'a header of version 2': rebuilt(lambda a: bytes_of(a, (2, 0))),
    'a header of version 3': rebuilt(lambda a: bytes_of(a, (3, 0))),
}
ORDER = ['nothing wrong', *ATTACKS, *HARMLESS, 'twice', 'nothing wrong again']


class Twice(Loopback):
    """A grid on which one answer comes twice."""

    def pull_messages(self, message_ids):
        found = super().pull_messages(message_ids)
        again = [m for m in found if m.metadata.group_id == f'0-{1 + ORDER.index("twice")}']
        return found + [m for m in again if m.metadata.src_node_id == 101 + BAD]


def begun(agreed, grid, out, patience=PATIENCE, most=1e30, least=1, there=4):
    """A server that has met its sites, and keeps nothing on disk."""
    out.mkdir(exist_ok=True)
    sites = _sites.Sites(grid, agreed, out / 'sites.json', None)
    sites.gather(there, 1.0 if there == 4 else 0.05)
    return _rounds.Server(grid, context(1), agreed, _plan.checked(agreed), sites, patience, least, most)


@pytest.fixture(scope='module')
def played(data, tmp_path_factory):
    """A run with an attack in each round, one in which that site is silent instead, and the first one's warnings."""
    agreed = agreement([flower.Phase(SCAFFOLD, ROUNDS, len(ORDER))], data)

    def run(name, grid, answer):
        out = tmp_path_factory.mktemp(name)

        def change(node, message, reply):
            ask = message.content.config_records.get('ask')
            return answer(ORDER[ask['round'] - 1], reply) if ask is not None and node == 101 + BAD else reply

        server = begun(agreed, grid(apps(agreed, data, out), change), out, flower.Patience(0.3), most=100.0)
        (state, begin), accepted, step, seen = server.begin(0, None), np.zeros(4, int), server.step(0), []
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            for t in range(len(ORDER)):
                key = jax.random.fold_in(ROUNDS, t)
                answers = server.ask(_rounds.Asking(0, t + 1, key, state, [begin], [accepted]))
                state, loss, finite = step(key, state, answers)
                assert finite
                accepted[answers.there] = t + 1
                seen.append(Seen('train', {**loss, **answers.told}, jax.device_get(state)))
        return seen, [str(w.message) for w in said if w.category is UserWarning]

    attacked = run('attacked', Twice, lambda name, reply: {**ATTACKS, **HARMLESS}.get(name, lambda r: r)(reply))
    absent = run('absent', Loopback, lambda name, reply: failing('away')(reply) if name in ATTACKS else reply)
    return *attacked, absent[0]


@pytest.mark.parametrize('name', ATTACKS)
def test_a_site_that_sends_nonsense_is_nobody_in_that_round(played, name):
    seen, _, absent = played
    t = ORDER.index(name)
    assert seen[t].row['sites'] == 3
    assert seen[t].row['refused'] == (0 if name == 'silence' else 1)
    assert apart(seen[t].server, absent[t].server) == 0.0
    assert seen[t].row['loss'] == absent[t].row['loss']


@pytest.mark.parametrize('name', ['nothing wrong', *HARMLESS, 'twice', 'nothing wrong again'])
def test_what_is_right_counts_and_counts_once(played, name):
    seen, _, absent = played
    t = ORDER.index(name)
    assert seen[t].row['sites'] == 4
    assert seen[t].row['refused'] == (name == 'twice')
    assert apart(seen[t].server, absent[t].server) == 0.0


def test_nothing_is_unpickled(played):
    assert not SPRUNG
    pickle.loads(pickle.dumps(Trap()))
    assert SPRUNG.pop()  # the trap works


def test_what_sites_say_is_short_and_does_not_steer_the_terminal(played):
    said = [text for text in played[1] if text.startswith('round')]
    assert len(said) == len(ATTACKS)  # with 'twice', and without 'silence'
    assert all(len(text) < 500 and text.isprintable() for text in said)
    assert any('all is well' in text for text in said)


def test_a_lying_count_moves_the_loss_that_is_shown_and_no_model(data, tmp_path):
    """2^31 - 1 examples visited: the row's loss is this site's, and the weights of the mean are sizes, as ever."""
    phase = flower.Phase(SCAFFOLD, ROUNDS, 1)
    kinds = _plan.checked(agreement([phase], data))[0]
    server = simulate.init(SCAFFOLD, jax.random.key(0), data).server
    blank = _plan.blank(agreement([phase], data), SIZES)
    rng = np.random.default_rng(0)
    send = lambda: jax.tree.map(lambda u: rng.normal(size=u.shape).astype(u.dtype), kinds.message)  # noqa: E731

    def info(loss, n):
        return Info(np.float32(loss), *np.array([1, n, 24], 'i4'), loops=np.array([16, 8], 'i4'))

    messages = [send() for _ in SIZES]
    step = _rounds.seen_step(phase)
    losses, servers = [], []
    for lie in (24, 2**31 - 1):
        told_ = [info(9.0 if k == BAD else 1.0, lie if k == BAD else 24) for k in range(4)]
        replies = _rounds.stacked([_rounds.Reply(m, i) for m, i in zip(messages, told_, strict=True)], kinds)
        key = jax.random.key(3)
        own = _rounds.own_key(key, secret=False)
        after, report = step(key, own, server, blank, np.arange(4, dtype=np.int32), replies)
        assert bool(report.finite)
        losses.append(float(report.loss))
        servers.append(after)
    assert losses[0] == pytest.approx(3.0)
    assert losses[1] == pytest.approx(9.0, rel=1e-3)
    assert apart(*servers) == 0.0


class Canned(Loopback):
    """Nodes whose answers are written down: `answers[node](message)` is a record, an error or None."""

    def __init__(self, answers):
        super().__init__([])
        self.apps = answers
        self.contexts = dict.fromkeys(answers)
        self.asked = []

    def push_messages(self, messages):
        for node, answer in list(self.apps.items()):
            self.apps[node] = answer if callable(answer) else lambda message, context, a=answer: a
        messages = list(messages)
        self.asked += [m.metadata.dst_node_id for m in messages]
        wrapped = {n: self.wrap(a) for n, a in self.apps.items()}
        self.apps, kept = wrapped, self.apps
        try:
            return super().push_messages(messages)
        finally:
            self.apps = kept

    @staticmethod
    def wrap(answer):
        def reply(message, context):
            found = answer(message, context)
            if found is None:
                raise TimeoutError
            return Message(found, reply_to=message)

        return reply


def hello(agreed, **changes):
    said = {'client': 0, 'size': 24, 'library': _plan.library(), 'agreement': _plan.fingerprint(agreed)}
    said |= {'versions': _plan.versions()}
    return RecordDict({'told': ConfigRecord({**said, **changes})})


LIES = {
    'another site': ({'client': 1}, 'another node is'),
    'no such site': ({'client': 4}, 'it is site 4 of 4'),
    'site -1': ({'client': -1}, 'it is site -1 of 4'),
    'site True': ({'client': True}, 'it is site True of 4'),
    'a site in words': ({'client': '2'}, 'it is site 2 of 4'),
    'too large': ({'client': 2, 'size': 2**40}, 'no number of examples'),
    'less than nothing': ({'client': 2, 'size': -1}, 'no number of examples'),
    'True examples': ({'client': 2, 'size': True}, 'no number of examples'),
    'examples in words': ({'client': 2, 'size': '24'}, 'no number of examples'),
    'half an example': ({'client': 2, 'size': 0.5}, 'no number of examples'),
    'another version': ({'client': 2, 'library': '0.0'}, 'version 0.0'),
    'other code': ({'client': 2, 'library': f'{fedjax_nc.__version__}+00000000'}, 'version 0.*[+]00000000'),
    'a long version': ({'client': 2, 'library': '0' * 10**5}, 'version 00000'),
    'another agreement': ({'client': 2, 'agreement': 'f' * 32}, 'another agreement'),
    'no agreement': ({'client': 2, 'agreement': b''}, 'another agreement'),
    'another agreement of another Python': (
        {'client': 2, 'agreement': 'f' * 32, 'versions': 'python 2.7, ' + 'x' * 10**5},
        'it has python 2.7',
    ),
}


@pytest.mark.parametrize('name', LIES)
def test_a_node_that_lies_about_itself_takes_no_part(data, tmp_path, name):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    lie, match = LIES[name]
    grid = Canned({11: hello(agreed, client=1), 12: hello(agreed, client=3)})
    sites = _sites.Sites(grid, agreed, tmp_path / 'sites.json', None)
    sites.gather(2, 0.05)
    grid.apps[13] = hello(agreed, **lie)
    grid.contexts[13] = None
    with pytest.warns(UserWarning, match=match) as said:
        sites.greet(0.05)
    assert sites.node == {1: 11, 3: 12}
    assert sites.sizes.tolist() == [0, 24, 0, 24]
    assert all(len(str(w.message)) < 500 for w in said)


@pytest.mark.parametrize(
    'answer',
    [RecordDict(), RecordDict({'told': ArrayRecord({'a': Array(np.ones(1))})}), Error(2, 'x' * 10**7), None],
    ids=['nothing', 'an array', 'megabytes', 'a failure'],
)
def test_a_node_that_does_not_say_who_it_is_takes_no_part(data, tmp_path, answer):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    sites = _sites.Sites(Canned({11: hello(agreed), 12: answer}), agreed, tmp_path / 'sites.json', None)
    with pytest.warns(UserWarning, match='node 12 takes no part'):
        sites.gather(1, 0.05)
    assert sites.node == {0: 11}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with pytest.raises(RuntimeError, match=r'1 of at least 2 .*node 12: '):
            sites.gather(2, 0.05)


def test_versions_that_differ_are_told_and_take_part(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    grid = Canned({11: hello(agreed, versions='python 3.11.7, jax 0.9.9')})
    sites = _sites.Sites(grid, agreed, tmp_path / 'sites.json', None)
    with pytest.warns(UserWarning, match='last digits: site 0 has python 3.11.7, jax 0.9.9, and the server python'):
        sites.greet(0.05)
    assert sites.node == {0: 11}


def test_only_nodes_that_were_named_are_sites(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    grid = Canned({11: hello(agreed), 12: hello(agreed, client=1), 13: hello(agreed, client=2)})
    sites = _sites.Sites(grid, agreed, tmp_path / 'sites.json', {11: 0, 12: 2})
    with pytest.warns(UserWarning, match='it is site 1, and it is 2'), pytest.warns(UserWarning, match='it is none'):
        sites.gather(1, 0.05)
    assert sites.node == {0: 11}


def test_a_site_with_other_examples_than_at_the_beginning_takes_no_part(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    _sites.Sites(Canned({11: hello(agreed)}), agreed, tmp_path / 'sites.json', None).gather(1, 0.05)
    sites = _sites.Sites(Canned({11: hello(agreed, size=2**31 - 1)}), agreed, tmp_path / 'sites.json', None)
    with pytest.warns(UserWarning, match='began with 24'), pytest.raises(RuntimeError, match='0 of at least 1'):
        sites.gather(1, 0.05)
    assert sites.sizes.tolist() == [24, 0, 0, 0]


def test_a_silent_node_does_not_hold_up_every_round(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    grid = Canned({11: hello(agreed), 12: hello(agreed, client=9)})
    sites = _sites.Sites(grid, agreed, tmp_path / 'sites.json', None)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for _ in range(200):
            sites.greet(0.01)
    assert grid.asked.count(11) == 1
    assert grid.asked.count(12) < 10
    del grid.apps[12]
    sites.greet(0.01)
    assert not sites.later  # nothing is kept of who has gone


def test_a_node_that_does_not_fit_is_asked_once(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    grid = Canned({11: hello(agreed), 12: hello(agreed, library='0'), 13: hello(agreed, agreement='f' * 32)})
    sites = _sites.Sites(grid, agreed, tmp_path / 'sites.json', None)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for _ in range(5):
            sites.greet(0.01)
            sites.later.clear()
    assert sorted(grid.asked) == [11, 12, 13]


def test_a_node_that_goes_and_comes_back_is_a_site_again(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    answers = {11: hello(agreed), 12: hello(agreed, client=9)}
    grid = Canned(dict(answers))
    sites = _sites.Sites(grid, agreed, tmp_path / 'sites.json', None)
    with pytest.warns(UserWarning, match='it is site 9 of 4'):
        sites.greet(0.01)
    assert (sites.node, set(sites.why)) == ({0: 11}, {12})
    grid.apps[12] = hello(agreed, client=1)
    sites.later[12] = 40, 0.0
    began = time.monotonic()
    grid.apps[13], grid.contexts[13] = Error(2, 'no'), None
    sites.later[13] = 40, 0.0
    with pytest.warns(UserWarning, match='node 13 takes no part'):
        sites.greet(0.01)
    assert (sites.node, set(sites.why)) == ({0: 11, 1: 12}, {13})
    assert sites.later[13][0] == 41
    assert began < sites.later[13][1] <= time.monotonic() + _sites.LATER
    del grid.apps[11], grid.apps[13]
    sites.greet(0.01)
    assert (sites.node, sites.why) == ({1: 12}, {})
    assert sites.sizes.tolist() == [24, 24, 0, 0]
    grid.apps[11] = answers[11]
    sites.greet(0.01)
    assert sites.node == {0: 11, 1: 12}


def test_a_server_that_was_started_again_knows_who_was_there_first(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    grid = Canned({11: hello(agreed), 12: hello(agreed, client=1, size=7)})
    path = tmp_path / 'sites.json'
    sites = _sites.Sites(grid, agreed, path, None)
    with pytest.warns(UserWarning, match='2 of 4 sites are there'):
        sites.gather(2, 0.05)
    grid.apps[13], grid.contexts[13] = hello(agreed, client=2, size=5), None
    sites.greet(0.01)
    for _ in range(2):
        assert sites.sizes.tolist() == [24, 7, 5, 0]
        assert sites.first.tolist() == [24, 7, 0, 0]
        sites = _sites.Sites(grid, agreed, path, None)
    with pytest.warns(UserWarning, match='3 of 4 sites are there'):
        sites.gather(2, 0.05)
    assert sites.first.tolist() == [24, 7, 0, 0]
    with pytest.warns(UserWarning, match='site 1, node 12, takes no part: why'):
        sites.leave(1, 'why')
    assert _sites.Sites(grid, agreed, path, None).sizes.tolist() == [24, 0, 5, 0]
    with pytest.raises(ValueError, match='holds a run of another agreement'):
        _sites.Sites(grid, agreed._replace(half=True), path, None)


def test_those_who_are_late_have_no_longer_than_a_round(data):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    grid = Canned({11: hello(agreed), 12: hello(agreed)})
    grid.change = lambda node, message, reply: None if node == 12 else reply
    began = time.monotonic()
    messages = [_sites.message('query.hello', node, RecordDict()) for node in (11, 12)]
    assert len(_sites.collect(grid, messages, 0.2, 1, 60.0)) == 1
    assert time.monotonic() - began < 30


def test_a_silent_node_holds_up_the_beginning_no_longer_than_a_hello(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)._replace(clients=1)
    grid = Canned({11: hello(agreed), 12: hello(agreed)})
    grid.change = lambda node, message, reply: None if node == 12 else reply
    began = time.monotonic()
    _sites.Sites(grid, agreed, tmp_path / 'sites.json', None).gather(1, 60.0, 0.2)
    assert time.monotonic() - began < 30


def test_the_beginning_waits_for_more_than_the_least(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)._replace(clients=2)
    grid = Canned({11: hello(agreed)})
    sites = _sites.Sites(grid, agreed, tmp_path / 'sites.json', None)
    looks = []

    def comes():
        looks.append(True)
        if len(looks) == 3:
            grid.apps[12], grid.contexts[12] = hello(agreed, client=1, size=7), None
        return list(grid.apps)

    grid.get_node_ids = comes
    with pytest.warns(UserWarning, match='1 of 2 sites are there, and 1 not'):
        sites.gather(1, 5.0)
    assert sites.first.tolist() == [24, 7]


def test_sites_begin_a_phase_with_what_was_before_it(data, tmp_path):
    def enter(stage, key, state, data):
        v = state.server.variables
        params = jax.tree.map(lambda u: u + 1, v.params)
        return simulate.join(stage, key, state.server._replace(variables=v._replace(params=params)), data.num_clients)

    agreed = agreement([flower.Phase(FEDAVG, ROUNDS), flower.Phase(FEDAVG, ROUNDS, enter=enter)], data)
    grid = Canned({11 + k: hello(agreed, client=k, size=SIZES[k]) for k in range(4)})
    server = begun(agreed, grid, tmp_path)
    before, begin = server.begin(0, None)
    assert apart(begin, before) == 0.0
    state, begin = server.begin(1, before)
    assert apart(begin, before) == 0.0
    assert apart(state, before) > 0.1


@pytest.fixture
def server(data, tmp_path):
    """A server of four sites whose answers are canned."""
    agreed = agreement([flower.Phase(SCAFFOLD, ROUNDS, 2)], data)
    grid = Canned({11 + k: hello(agreed, client=k, size=SIZES[k]) for k in range(4)})
    return begun(agreed, grid, tmp_path, flower.Patience(0.05))


@pytest.mark.parametrize('algorithm', [SCAFFOLD, FEDAVG])
def test_who_comes_later_takes_part_if_the_first_state_does_not_count_sites(algorithm, data, tmp_path):
    """SCAFFOLD's total is the number of clients; with a late one the mean of variates would be 4/3 of what it is."""
    agreed = agreement([flower.Phase(algorithm, ROUNDS, 2)], data)
    hellos = {11 + k: hello(agreed, client=k, size=SIZES[k]) for k in range(4)}
    grid = Canned({node: hellos[node] for node in (11, 12, 13)})
    with pytest.warns(UserWarning, match='3 of 4 sites are there, and 3 not: waits for them up to 0 s'):
        server = begun(agreed, grid, tmp_path, flower.Patience(0.05), there=3)
    grid.apps[14], grid.contexts[14] = hellos[14], None
    server.sites.greet(1.0)
    assert set(server.sites.node) == {0, 1, 2, 3}
    if algorithm is FEDAVG:
        server.admit()
        assert set(server.sites.node) == {0, 1, 2, 3}
        return
    with pytest.warns(UserWarning, match='site 3, node 14, takes no part: it was not there at the beginning'):
        server.admit()
    server.sites.greet(1.0)
    server.admit()
    assert set(server.sites.node) == {0, 1, 2}
    assert server.sites.sizes.tolist() == [24, 24, 24, 0]
    assert server.begin(0, None)[0].extra.total == 3
    again = _sites.Sites(grid, agreed, tmp_path / 'sites.json', None)  # a server that was started again
    assert again.sizes.tolist() == again.first.tolist() == [24, 24, 24, 0]


def asking(server, round=1, counted=None):
    state, begin = server.begin(0, None)
    return _rounds.Asking(0, round, ROUNDS, state, [begin], [np.zeros(4, int) if counted is None else counted])


def found(**changes):
    said = {'client': 0, 'examples': 10, 'right': 5, 'examples_personal': 10, 'right_personal': 8}
    return RecordDict({'told': ConfigRecord({**said, **changes})})


@pytest.mark.parametrize(
    'answer',
    [
        found(right=11), found(right_personal=11), found(right=-1), found(examples=-1), found(examples=2**40),
        found(right=True), found(right=5.0), found(examples='10'), found(right=[5]), RecordDict(),
        Error(2, 'x' * 10**7), RecordDict({'told': ArrayRecord({'a': Array(np.ones(1))})}), None,
    ],
)  # fmt: skip
def test_tests_that_cannot_be_do_not_count(server, answer):
    for node in (11, 12, 13):
        server.grid.apps[node] = found()
    server.grid.apps[14] = answer
    with pytest.warns(UserWarning, match='the tests of node 14 do not count'):
        assert server.tested(asking(server, 3)) == {'tested': 30, 'accuracy': 0.5, 'personal_accuracy': 0.8}


def test_who_cannot_be_reached_is_away_and_has_sent_nothing(server):
    """The SuperLink answers in the place of a node whose connection is gone."""
    server.grid.apps |= dict.fromkeys((11, 12, 13), found()) | {14: Error(5, 'Error: Node Unavailable')}
    pull = server.grid.pull_messages

    def gone(ids):
        replies = list(pull(ids))
        for reply in replies:
            if reply.has_error():
                reply.metadata.__dict__['_src_node_id'] = 1
        return replies

    server.grid.pull_messages = gone
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        assert server.tested(asking(server, 3))['tested'] == 30
    assert [str(w.message) for w in told] == ['node 14 cannot be reached: Error: Node Unavailable']


def test_tests_count_once(server):
    for node in (11, 12, 13, 14):
        server.grid.apps[node] = found(examples=20 if node == 14 else 10, right=20 if node == 14 else 0)
    pull = server.grid.pull_messages
    server.grid.pull_messages = lambda ids: [m for m in pull(ids) for _ in range(3)]
    with pytest.warns(UserWarning, match='has answered'):
        assert server.tested(asking(server, 3))['tested'] == 50


def test_filters_that_make_errors_of_warnings_do_not_end_the_run(server):
    server.grid.apps |= dict.fromkeys((11, 12, 13), found()) | {14: found(right=11)}
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert server.tested(asking(server, 3))['tested'] == 30
        server.grid.apps[15], server.grid.contexts[15] = RecordDict(), None
        server.sites.greet(0.1)
        server.grid.apps = dict.fromkeys((11, 12, 13, 14), Error(2, 'no'))
        answers = server.ask(asking(server))
    assert answers.told['refused'] == 4
    assert 'answered' in answers.missing


# A server that lies to a site.


@pytest.fixture(scope='module')
def trained(data, tmp_path_factory):
    """A site that has taken part in two of four rounds, and what an honest server would ask next."""
    out = tmp_path_factory.mktemp('site')
    agreed = agreement([flower.Phase(SCAFFOLD, ROUNDS, 4), flower.Phase(SCAFFOLD, ROUNDS, 1, name='more')], data)
    app = apps(agreed, data, out)[BAD]
    state = simulate.init(SCAFFOLD, jax.random.key(0), data).server

    def ask(round=3, accepted=(2,), phase=0, kind='train.round', server=state, begun=None, **changes):
        said = {
            'phase': phase, 'round': round, 'accepted': list(accepted), 'library': _plan.library(),
            'agreement': _plan.fingerprint(agreed), **changes,
        }  # fmt: skip
        content = {'ask': ConfigRecord({k: v for k, v in said.items() if v is not None}), 'server': _wire.pack(server)}
        content['key'] = _wire.pack(ROUNDS)
        for q in range(2) if begun is None else begun:
            content[f'begin-{q}'] = _wire.pack(state)
        message = Message(RecordDict(content), dst_node_id=103, message_type=kind)
        message.metadata.__dict__.update(_message_id='m', _src_node_id=1, _run_id=1)
        return message

    here = context(103)
    for t, counted in ((1, 0), (2, 1)):
        assert app(ask(t, [counted]), here).content.config_records['told']['round'] == t
    return types.SimpleNamespace(app=app, ask=ask, state=state, folder=out / f'site-{BAD}', context=here, agreed=agreed)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refuses(trained, message, match):
    before = files(trained.folder)
    with pytest.raises(flower.WireError, match=match) as error:
        trained.app(message, trained.context)
    assert files(trained.folder) == before
    assert len(str(error.value)) < 400
    assert str(trained.folder.parent) not in str(error.value)


WRONG = {
    'another agreement': ({'agreement': 'f' * 32}, 'another agreement'),
    'no agreement': ({'agreement': None}, 'another agreement'),
    'another version': ({'library': '9.9'}, 'version 9.9'),
    'a version of megabytes': ({'library': '9' * 10**6}, 'version 999'),
    'a phase beyond the last': ({'phase': 2, 'accepted': [2, 0, 0]}, 'phase 2'),
    'phase -1': ({'phase': -1, 'accepted': []}, 'phase -1'),
    'a phase in words': ({'phase': '../../etc'}, 'phase ../../etc'),
    'phase False': ({'phase': False}, 'phase False'),
    'phase 0.0': ({'phase': 0.0}, 'phase 0.0'),
    'round 0': ({'round': 0, 'accepted': [0]}, 'round 0'),
    'a round beyond the last': ({'round': 6}, 'round 6'),
    'one round more': ({'round': 5}, 'more than 4 rounds'),
    'round -3': ({'round': -3}, 'round -3'),
    'a round in words': ({'round': '../1'}, 'round ../1'),
    'a round of bytes': ({'round': b'\0'}, 'round b'),
    'round True': ({'round': True, 'accepted': [0]}, 'round True'),
    'a round of many digits': ({'round': 2**62}, 'round 4611'),
    'a future that counted': ({'accepted': [3]}, 'rounds that counted'),
    'a past below 0': ({'accepted': [-1]}, 'rounds that counted'),
    'a long past': ({'accepted': [0] * 10**4}, 'rounds that counted'),
    'no past': ({'accepted': []}, 'rounds that counted'),
    'a past in words': ({'accepted': ['../2']}, 'rounds that counted'),
    'a past of halves': ({'accepted': [1.5]}, 'rounds that counted'),
    'a past that is true': ({'accepted': [True]}, 'rounds that counted'),
    'a past that this site has not seen': ({'round': 5, 'accepted': [4], 'kind': 'evaluate'}, '0-000004.state is not'),
    'a past of another phase': ({'phase': 1, 'round': 1, 'accepted': [2**31 - 1, 0]}, '0-2147483647.state is not'),
    'no beginning': ({'round': 1, 'accepted': [0], 'begun': ()}, 'did not send begin-0'),
}


@pytest.mark.parametrize('name', WRONG)
def test_a_site_refuses_what_no_server_asks(trained, name):
    changes, match = WRONG[name]
    refuses(trained, trained.ask(**changes), match)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf, 3e38])
def test_a_site_refuses_a_server_that_is_not_finite(trained, value):
    floats = lambda u: np.full_like(u, value) if u.dtype == np.float32 else u  # noqa: E731
    refuses(trained, trained.ask(server=jax.tree.map(floats, trained.state)), '1e[+]30 is the most')


@pytest.mark.parametrize('name', ['ask', 'server', 'key'])
@pytest.mark.parametrize('other', [None, ConfigRecord({'a': 1}), ArrayRecord({'a': Array(np.ones(2))})])
def test_a_site_refuses_what_lacks_something(trained, name, other):
    message = trained.ask()
    message.content.pop(name)
    if other is not None:
        message.content[name] = other
    refuses(trained, message, 'the server')


def test_a_site_refuses_a_pickle(trained):
    message = trained.ask()
    record = dict(message.content.array_records['server'])
    name, packed = next(iter(record.items()))
    record[name] = Array(packed.dtype, packed.shape, packed.stype, pickled(np.array(packed.numpy())))
    message.content['server'] = ArrayRecord(record)
    refuses(trained, message, 'the server sent as')
    assert not SPRUNG


def test_a_state_of_another_site_is_not_taken_up(trained, tmp_path):
    name, kinds = _plan.fingerprint(trained.agreed), _plan.checked(trained.agreed)[0]
    for client, fingerprint in ((BAD - 1, name), (BAD, 'f' * 32)):
        with pytest.raises(ValueError, match='another agreement or site'):
            _site.restore(flower.Site(client, None, trained.folder), fingerprint, 0, 2, kinds.client)
    with pytest.raises(ValueError, match='does not hold a state of phase 0'):
        _site.restore(flower.Site(BAD, None, trained.folder), name, 0, 2, {'a': jax.ShapeDtypeStruct((1,), np.float32)})


@pytest.mark.parametrize(
    'content',
    [b'', b'\xff' * 8, b'{}', None, 'flipped'],
    ids=['empty', 'huge header', 'text', 'cut', 'a bit flipped'],
)
def test_a_damaged_state_is_told_and_left_as_it_is(trained, content):
    path = trained.folder / '0-000002.state'
    whole = path.read_bytes()
    try:
        if content == 'flipped':
            content = whole[:-1] + bytes([whole[-1] ^ 1])
        path.write_bytes(whole[: len(whole) // 2] if content is None else content)
        refuses(trained, trained.ask(), '0-000002.state of site 2 is damaged')
        path.unlink()
        refuses(trained, trained.ask(), '0-000002.state is not in the folder')
    finally:
        path.write_bytes(whole)
    assert trained.app(trained.ask(), trained.context).content.config_records['told']['round'] == 3


def test_what_a_site_fails_with_stays_there(data, tmp_path):
    """The text of an exception goes to the server, and may hold anything."""
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)

    def site(context):
        raise ValueError('could not convert string to float: Jane Doe, born 1970, in /home/clinic/patients.csv')

    message = Message(RecordDict(), dst_node_id=1, message_type='query.hello')
    message.metadata.__dict__.update(_message_id='m', _src_node_id=1, _run_id=1)
    with pytest.raises(flower.WireError) as error:
        flower.client_app(agreed, site)(message, context(1))
    assert 'ValueError' in str(error.value)
    assert 'Doe' not in str(error.value)
    assert 'clinic' not in str(error.value)
    assert 'Doe' in str(error.value.__cause__)  # which the site's log shows


# Servers and sites that die.


@pytest.fixture(scope='module')
def lasting(data, tmp_path_factory):
    """Six rounds without a fault but for a site that is away in two of them."""
    agreed = agreement([flower.Phase(SCAFFOLD, ROUNDS, 6)], data)
    out = tmp_path_factory.mktemp('lasting')
    seen = deploy(agreed, Loopback(apps(agreed, data, out), away), out / 'server', PATIENCE)
    return agreed, seen, [files(out / f'site-{k}') for k in range(4)]


def away(node, message, reply):
    ask = message.content.config_records.get('ask')
    gone = node == 102 and message.metadata.message_type == 'train.round' and ask['round'] in (3, 4)
    return Message(Error(2, 'away'), reply_to=message) if gone else reply


def cut(folder):
    """Damages the newest checkpoint of a run, in all of its files of numbers."""
    newest = max((p for p in (folder / '0-train/checkpoints').iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    for path in newest.glob('state/**/d/*'):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.slow
@pytest.mark.parametrize('how', ['before it is kept', 'after it is kept', 'damaged', 'sites, too'])
@pytest.mark.filterwarnings('ignore::UserWarning')
def test_a_server_that_dies_goes_on_as_if_it_had_not(data, tmp_path, lasting, how):
    agreed, want, states = lasting
    there = apps(agreed, data, tmp_path)
    died = []

    def die(node, message, reply):
        ask = message.content.config_records.get('ask')
        if how != 'after it is kept' and not died and node == 104 and ask is not None and ask['round'] == 4:
            died.append(True)  # three sites have trained, and so has this one
            raise KeyboardInterrupt
        return away(node, message, reply)

    def last(phase, row, state):
        if how == 'after it is kept' and row['round'] == 4 and not died:
            died.append(True)
            raise KeyboardInterrupt

    app = flower.server_app(agreed, tmp_path / 'server', patience=PATIENCE, on_round=last, progress=False)
    with pytest.raises(KeyboardInterrupt):
        serve(app, Loopback(there, die))
    if how == 'damaged':
        cut(tmp_path / 'server')
    if how == 'sites, too':
        there = apps(agreed, data, tmp_path)
    seen = deploy(agreed, Loopback(there, die), tmp_path / 'server', PATIENCE)
    assert seen[0].row['round'] == {'after it is kept': 5, 'damaged': 3}.get(how, 4)
    assert apart(seen[-1].server, want[-1].server) == 0.0
    assert [s.row['loss'] for s in seen] == [s.row['loss'] for s in want[-len(seen) :]]
    for k, held in enumerate(states):
        got = files(tmp_path / f'site-{k}')
        assert max(n for n in got if n.endswith('.state')) == max(n for n in held if n.endswith('.state'))
        newest = max(n for n in got if n.endswith('.state'))
        a, b = (safetensors.numpy.load(files[newest]) for files in (got, held))
        assert all(a[name].tobytes() == b[name].tobytes() for name in {*a, *b})
        assert sum(name.endswith('.state') for name in got) <= 3
        assert {name for name in got if not name.endswith('.state')} <= {*held}


def test_a_site_keeps_no_more_than_can_be_asked_for(lasting):
    for held in lasting[2]:
        assert sum(name.endswith('.state') for name in held) <= 3


# Sums unseen.

SECURE = flower.Secure(limit=4.0, threshold=0.6)
STAGES = (Stage.SETUP, Stage.SHARE_KEYS, Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK)


@pytest.fixture(scope='module')
def hidden(data, tmp_path_factory):
    """An agreement, its sites, and what becomes of one round without each site, and with all of them."""
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS, 1)], data, secure=SECURE)
    there = apps(agreed, data, tmp_path_factory.mktemp('hidden'))
    state = simulate.init(FEDAVG, jax.random.key(0), data)
    round = jax.jit(simulate.make_round(FEDAVG, chunk=1))
    want = {}
    for gone in (None, BAD):
        ids = np.array([4 if k == gone else k for k in range(4)], np.int32)
        want[gone] = jax.device_get(round(jax.random.fold_in(ROUNDS, 0), state, data, ids)[0].server)
    return agreed, there, want


def meddling(stage, change):
    def meddle(node, message, reply):
        said = message.content.config_records.get(RECORD_KEY_CONFIGS)
        if node == 101 + BAD and said is not None and said[Key.STAGE] == stage:
            return change(reply)
        return reply

    return meddle


def saying(**changes):
    """A reply of SecAgg+ in which something else stands; None leaves it out."""

    def change(reply):
        said = {**reply.content.config_records[RECORD_KEY_CONFIGS], **{k: v for k, v in changes.items() if v}}
        reply.content[RECORD_KEY_CONFIGS] = ConfigRecord({k: v for k, v in said.items() if changes.get(k, 1) != 0})
        return reply

    return change


def masked(*arrays):
    def change(reply):
        record = reply.content.config_records[RECORD_KEY_CONFIGS]
        record[Key.MASKED_PARAMETERS] = [bytes_of(a) if isinstance(a, np.ndarray) else a for a in arrays]
        return reply

    return change


def other_curve():
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


DROPS = {
    **{f'an error in {stage}': (stage, failing('no')) for stage in STAGES},
    **{f'nothing in {stage}': (stage, instead(RecordDict())) for stage in STAGES},
    'no key': (Stage.SETUP, saying(pk1=b'-----BEGIN')),
    'a key for a number': (Stage.SETUP, saying(pk1=5)),
    'one key twice': (
        Stage.SETUP,
        lambda r: saying(pk1=r.content.config_records[RECORD_KEY_CONFIGS][Key.PUBLIC_KEY_2])(r),
    ),
    'a key of another curve': (Stage.SETUP, lambda r: saying(pk2=other_curve())(r)),
    'shares for nobody': (Stage.SHARE_KEYS, saying(dsts=[1, 2, 3])),
    'fewer shares than sites': (Stage.SHARE_KEYS, saying(ctxts=[b'1'])),
    'shares for one site alone': (Stage.SHARE_KEYS, saying(dsts=[101] * 3)),
    'a short vector': (Stage.COLLECT_MASKED_VECTORS, masked(np.ones(1, np.int64), np.ones(3, np.int64))),
    'one vector': (Stage.COLLECT_MASKED_VECTORS, masked(np.ones(1, np.int64))),
    'a vector of floats': (Stage.COLLECT_MASKED_VECTORS, masked(np.ones(1), np.ones(3))),
    'a vector that is a pickle': (Stage.COLLECT_MASKED_VECTORS, masked(np.ones(1, np.int64), pickled(np.ones(3)))),
    'a huge vector': (
        Stage.COLLECT_MASKED_VECTORS,
        masked(np.ones(1, np.int64), bytes_of(np.ones(3, np.int64), shape=(10**12,))),
    ),
    'fewer shares than asked for': (Stage.UNMASK, saying(nids=[101], shares=[b'1'])),
    'shares of strangers': (Stage.UNMASK, saying(nids=[1, 2, 3, 4])),
}
LATE = {Stage.UNMASK}  # whose vector counts already


@pytest.mark.parametrize('name', DROPS)
def test_a_sum_goes_on_without_who_fails_in_a_stage(hidden, data, tmp_path, name):
    agreed, there, want = hidden
    stage, change = DROPS[name]
    with pytest.warns(UserWarning, match='the sum is made without it'):
        total, stayed = once(agreed, there, meddling(stage, change), tmp_path)
    gone = None if stage in LATE else BAD
    assert stayed == [k for k in range(4) if k != gone]
    assert apart(total, want[gone]) < 1e-5
    assert not SPRUNG


@pytest.mark.filterwarnings('ignore::UserWarning')
def test_what_is_summed_is_what_those_who_stayed_have_sent(hidden, tmp_path):
    """Their numbers of examples, for one, by which a mean divides."""
    agreed, there, _ = hidden
    for stage, names in ((Stage.COLLECT_MASKED_VECTORS, [0, 1, 3]), (Stage.UNMASK, [0, 1, 2, 3])):
        grid = Loopback(there, meddling(stage, failing('no')))
        server = begun(agreed, grid, tmp_path)
        answers = server.ask(asking(server))
        assert answers.there == names
        assert float(answers.summed['delta'][1]) == pytest.approx(sum(SIZES[k] for k in names), rel=1e-5)
        assert (answers.told['sites'], answers.told['refused']) == (len(names), 1)
        sent = [m.content.config_records.get(RECORD_KEY_CONFIGS, {}) for m in grid.log if not m.has_error()]
        vectors = [said[Key.MASKED_PARAMETERS] for said in sent if Key.MASKED_PARAMETERS in said]
        assert len(vectors) == len(names)
        assert answers.told['bytes_up'] == sum(len(v) - 128 for said in vectors for v in said)  # NumPy's header


def test_a_site_that_takes_the_keys_of_another_is_not_in_the_sum(hidden, tmp_path):
    agreed, there, _ = hidden
    first = []

    def change(node, message, reply):
        said = message.content.config_records.get(RECORD_KEY_CONFIGS, {})
        if said.get(Key.STAGE) == Stage.SETUP:
            first.append((node, dict(reply.content.config_records[RECORD_KEY_CONFIGS])))
            if len(first) == 2:
                reply.content[RECORD_KEY_CONFIGS] = ConfigRecord(first[0][1])
        return reply

    class InOrder(Loopback):
        def pull_messages(self, message_ids):
            return super().pull_messages(sorted(message_ids, key=lambda name: int(name[1:])))

    with pytest.warns(UserWarning, match='not of the protocol; the sum is made without it'):
        _, stayed = once(agreed, there, change, tmp_path, InOrder)
    assert stayed == [k for k in range(4) if 101 + k != first[1][0]]


@pytest.mark.filterwarnings('ignore::UserWarning')
def test_a_masked_vector_counts_once(hidden, tmp_path):
    agreed, there, want = hidden

    class Doubled(Loopback):
        def pull_messages(self, message_ids):
            return [m for m in super().pull_messages(message_ids) for _ in range(2)]

    total, stayed = once(agreed, there, None, tmp_path, Doubled)
    assert stayed == [0, 1, 2, 3]
    assert apart(total, want[None]) < 1e-5


@pytest.mark.parametrize('largest', [10, 0, True, '24', None])
def test_a_site_does_not_take_another_for_the_largest_than_is(hidden, tmp_path, largest):
    """Its vector is divided by what the largest one may send."""
    agreed, there, _ = hidden

    def lied(message, context):
        if 'secure' in message.content:
            message.content['secure'] = ConfigRecord({} if largest is None else {'largest': largest})
        return there[BAD](message, context)

    match = 'is smaller than this one' if largest == 10 else 'how many examples the largest site has'
    with pytest.warns(UserWarning, match=match):
        assert once(agreed, [*there[:BAD], lied, *there[BAD + 1 :]], None, tmp_path)[1] == [0, 1, 3]


def once(agreed, there, change, out, grid=Loopback, **options):
    """One sum unseen, and who is in it; the step of the server is that of simulation."""
    server = begun(agreed, grid(there, change), out, **options)
    state, begin = server.begin(0, None)
    key = jax.random.fold_in(ROUNDS, 0)
    answers = server.ask(_rounds.Asking(0, 1, key, state, [begin], [np.zeros(4, int)]))
    if answers.missing:
        return answers.missing, []
    ids = np.where(np.isin(answers.ids, answers.there), answers.ids, 4).astype(np.int32)
    return UNSEEN(key, state, _plan.blank(agreed, server.sites.sizes), ids, answers.summed), answers.there


@pytest.mark.parametrize('stage', [Stage.SHARE_KEYS, Stage.COLLECT_MASKED_VECTORS])
@pytest.mark.filterwarnings('ignore::UserWarning')
def test_a_server_that_wants_all_sites_sees_no_sum_of_fewer(hidden, tmp_path, stage):
    """The round is asked for again, and a sum of all less one of the others would be a site's message."""
    agreed, there, _ = hidden
    asked = []

    def change(node, message, reply):
        said = message.content.config_records.get(RECORD_KEY_CONFIGS)
        if said is not None:
            asked.append(said[Key.STAGE])
            if node == 101 + BAD and said[Key.STAGE] == stage:
                return None
        return reply

    missing, stayed = once(agreed, there, change, tmp_path, least=4)
    assert stayed == []
    assert 'fewer than 4 of 4 sites stayed' in missing
    assert stage in asked
    assert Stage.UNMASK not in asked
    asked.clear()
    assert len(once(agreed, there, change, tmp_path / 'three', least=3)[1]) == 3
    assert Stage.UNMASK in asked
    assert once(agreed, there, None, tmp_path / 'all', least=4)[1] == [0, 1, 2, 3]


UNSEEN = _rounds.unseen_step(flower.Phase(FEDAVG, ROUNDS, 1))

SPOILS = {
    'shares that cannot be read': (
        Stage.SHARE_KEYS,
        lambda r: saying(ctxts=[b'x'] * len(r.content.config_records[RECORD_KEY_CONFIGS][Key.CIPHERTEXT_LIST]))(r),
    ),
    'shares that are wrong': (
        Stage.UNMASK,
        lambda r: saying(
            shares=[u[:4] + bytes(len(u) - 4) for u in r.content.config_records[RECORD_KEY_CONFIGS][Key.SHARE_LIST]]
        )(r),
    ),
    'shares that are short': (
        Stage.UNMASK,
        lambda r: saying(shares=[b''] * len(r.content.config_records[RECORD_KEY_CONFIGS][Key.SHARE_LIST]))(r),
    ),
}


@pytest.mark.parametrize('name', SPOILS)
@pytest.mark.filterwarnings('ignore::UserWarning')
def test_a_site_can_spoil_a_sum_and_is_found_out(hidden, tmp_path, name):
    """Nobody can tell who it was; the round is asked for again, and no wrong sum is taken."""
    agreed, there, _ = hidden
    stage, change = SPOILS[name]
    missing, stayed = once(agreed, there, meddling(stage, change), tmp_path)
    assert stayed == []
    assert isinstance(missing, str)


def test_a_masked_vector_moves_the_sum_by_no_more_than_the_limit(hidden, tmp_path):
    """What is masked cannot be looked at, but the mean can."""
    agreed, there, _ = hidden
    entries = _secure.length(agreed, 0, _plan.checked(agreed)[0].message) + 1
    wild = np.random.default_rng(0).integers(0, 2**32, entries)
    change = meddling(Stage.COLLECT_MASKED_VECTORS, masked(np.ones(1, np.int64), wild))
    missing, stayed = once(agreed, there, change, tmp_path)
    assert stayed == []
    assert 'none of messages within the limit' in missing


@pytest.mark.parametrize('entry', [0, -1])
def test_one_wrong_entry_of_a_masked_vector_is_found_out(hidden, tmp_path, entry):
    """Beyond the limit, or, of the last one, which is the limit at all sites, below it."""
    agreed, there, _ = hidden

    def change(reply):
        weight, vector = reply.content.config_records[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS]
        vector = np.load(io.BytesIO(vector))
        vector[entry] = (vector[entry] + (2**31 if entry == 0 else 2**32 - SECURE.levels // 4)) % 2**32
        return masked(weight, vector)(reply)

    missing, stayed = once(agreed, there, meddling(Stage.COLLECT_MASKED_VECTORS, change), tmp_path)
    assert stayed == []
    assert 'none of messages within the limit' in missing


def test_a_sum_that_is_always_spoiled_ends_in_a_clear_error(hidden, data, tmp_path):
    agreed, there, _ = hidden
    stage, change = SPOILS['shares that are wrong']
    app = flower.server_app(agreed, tmp_path / 'run', patience=flower.Patience(1.0, None, 0.3), progress=False)
    with pytest.raises(RuntimeError, match='round 1 of train: a site sent what SecAgg'):
        serve(app, Loopback(there, meddling(stage, change)))


def test_masks_need_all_of_their_seed():
    """Flower's own are drawn from 32 bits of it: two seeds whose words have the same XOR give the same mask."""
    one, other = b'abcdefgh' * 4, b'efghabcd' * 4
    assert (pseudo_rand_gen(one, 2**32, [(9,)])[0] == pseudo_rand_gen(other, 2**32, [(9,)])[0]).all()
    a, b = (_secure.masks(seed, 2**32, [(1,), (100, 50), ()]) for seed in (one, other))
    assert [u.shape for u in a] == [(1,), (100, 50), ()]
    assert all(u.dtype == np.int64 and u.min() >= 0 and u.max() < 2**32 for u in a)
    assert np.mean(a[1] == b[1]) < 0.01
    assert np.mean(a[1] == _secure.masks(one[:-1] + b'x', 2**32, [(1,), (100, 50)])[1]) < 0.01
    assert abs(a[1].mean() / 2**31 - 1) < 0.05
    for function, names in (
        (_secure.secaggplus_mod, ('_collect_masked_vectors',)),
        (_secure._collect_masked_vectors, ('pseudo_rand_gen',)),
        (_secure.SecAggPlusWorkflow.unmask_stage, ('pseudo_rand_gen',)),
    ):
        assert set(names) <= set(function.__code__.co_names)  # a Flower that draws elsewhere would not use ours


@pytest.fixture(scope='module')
def asked(hidden, tmp_path_factory):
    """What a server has asked the bad site in each stage."""
    agreed, there, _ = hidden
    log = {}

    def note(node, message, reply):
        said = message.content.config_records.get(RECORD_KEY_CONFIGS)
        if node == 101 + BAD and said is not None:
            log[said[Key.STAGE]] = dict(said)
        return reply

    once(agreed, there, note, tmp_path_factory.mktemp('asked'))
    assert set(log) == set(STAGES)
    return agreed, there, log


WEAK = {
    'a threshold of one': (Stage.SETUP, {Key.THRESHOLD: 1}, 'threshold'),
    'another limit': (Stage.SETUP, {Key.CLIPPING_RANGE: 1e6}, 'clip'),
    'other levels': (Stage.SETUP, {Key.TARGET_RANGE: 2}, 'range'),
    'a small modulus': (Stage.SETUP, {Key.MOD_RANGE: 2}, 'mod'),
    'a small weight': (Stage.SETUP, {Key.MAX_WEIGHT: 1e-9}, 'weight'),
    'two sites': (Stage.SETUP, {Key.SAMPLE_NUMBER: 2, Key.SHARE_NUMBER: 2}, '3 at least'),
    'True sites': (Stage.SETUP, {Key.SAMPLE_NUMBER: True}, '3 at least'),
    'fewer shares': (Stage.SETUP, {Key.SHARE_NUMBER: 3}, 'share'),
    'two keys': (Stage.SHARE_KEYS, {'102': None, '104': None}, 'names 2 sites'),
    'shares of one site many times': (
        Stage.COLLECT_MASKED_VECTORS,
        {Key.SOURCE_LIST: [101, 101], Key.CIPHERTEXT_LIST: [b'', b'']},
        'each once',
    ),
    'a sum of two': (Stage.UNMASK, {Key.ACTIVE_NODE_ID_LIST: [101, 103]}, 'a sum of 2 sites'),
    'a sum of two, one of them twice': (Stage.UNMASK, {Key.ACTIVE_NODE_ID_LIST: [101, 103, 103]}, 'each once'),
    'there and gone': (Stage.UNMASK, {Key.DEAD_NODE_ID_LIST: [101]}, '1 are said to be'),
    'a sum of others': (Stage.UNMASK, {Key.ACTIVE_NODE_ID_LIST: [101, 102, 104]}, 'no part of'),
    'itself gone': (
        Stage.UNMASK,
        {Key.ACTIVE_NODE_ID_LIST: [101, 102, 104], Key.DEAD_NODE_ID_LIST: [103]},
        'no part of',
    ),
    'nobody': (Stage.UNMASK, {Key.ACTIVE_NODE_ID_LIST: None}, 'list nodes'),
    'a list that is none': (Stage.UNMASK, {Key.ACTIVE_NODE_ID_LIST: 'abc'}, 'list nodes'),
}


@pytest.mark.parametrize('name', WEAK)
def test_a_site_helps_with_no_weaker_sum_than_agreed(asked, name):
    _, there, log = asked
    stage, changes, match = WEAK[name]
    said = {k: v for k, v in {**log[stage], **changes}.items() if v is not None}
    message = Message(RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(said)}), dst_node_id=103, message_type='train')
    message.metadata.__dict__.update(_message_id='m', _src_node_id=1, _run_id=1)
    with pytest.raises(flower.WireError, match=match):
        there[BAD](message, context(103))


def test_a_site_sends_nothing_openly_when_sums_are_agreed_on(asked, data):
    agreed, there, _ = asked
    state = simulate.init(FEDAVG, jax.random.key(0), data).server
    said = {'phase': 0, 'round': 1, 'accepted': [0], 'library': _plan.library()}
    ask = ConfigRecord({**said, 'agreement': _plan.fingerprint(agreed)})
    records = {'ask': ask, 'server': _wire.pack(state), 'key': _wire.pack(ROUNDS), 'begin-0': _wire.pack(state)}
    for kind, match in (('train.round', 'openly'), ('train', 'without the protocol')):
        message = Message(RecordDict(records), dst_node_id=103, message_type=kind)
        message.metadata.__dict__.update(_message_id='m', _src_node_id=1, _run_id=1)
        with pytest.raises(flower.WireError, match=match):
            there[BAD](message, context(103))
