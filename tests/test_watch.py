"""Trackers see every round once, as the files do."""

import sys

import pytest
import toys

from fedjax_nc import simulate, training, watch
from fedjax_nc.algorithms import fedavg

algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)


def run(data, rounds, **kwargs):
    state = simulate.init(algorithm, toys.KEY, data)
    return training.run(algorithm, toys.KEY, state, data, rounds=rounds, evaluate=lambda state: {'accuracy': 0.5},
                        eval_every=2, eval_last=1, progress=False, **kwargs).history  # fmt: skip


def test_tensorboard_reads_back_what_was_measured(data, tmp_path):
    pytest.importorskip('tensorboardX')
    from tensorboardX.proto.event_pb2 import Event

    with watch.tensorboard(tmp_path) as tracker:
        history = run(data, 3, on_round=tracker)
    (file,) = tmp_path.iterdir()
    told: dict = {}
    content = file.read_bytes()
    while content:  # records of TensorFlow: length, its checksum, the event, its checksum
        size = int.from_bytes(content[:8], 'little')
        event = Event.FromString(content[12 : 12 + size])
        content = content[16 + size :]
        for value in event.summary.value:
            told.setdefault(event.step, {})[value.tag] = value.simple_value
    for row in history:
        assert told[row['round']] == pytest.approx({k: v for k, v in row.items() if k != 'round'})
    assert set(told) == {1, 2, 3}


@pytest.mark.parametrize('calls', [1, 2])
def test_every_round_is_seen_once_with_the_state_after_its_call(data, calls):
    seen = []
    history = run(
        data, 5, rounds_per_call=calls, on_round=lambda row, state: seen.append((row, int(state.server.round)))
    )
    assert [row for row, _ in seen] == history
    assert [after for _, after in seen] == ([1, 2, 3, 4, 5] if calls == 1 else [2, 2, 4, 4, 5])


def test_a_resumed_run_tells_of_new_rounds_alone(data, tmp_path):
    seen = []
    for rounds in (2, 4):
        run(data, rounds, out=tmp_path, resume=True, on_round=lambda row, state: seen.append(row['round']))
    assert seen == [1, 2, 3, 4]


def test_other_trackers_are_told_by_their_own_names(data):
    class Told(list):
        def log(self, row, step):
            self.append((step, row))

        log_metrics = log

    ours, theirs = Told(), Told()
    history = run(data, 2, on_round=watch.wandb(ours))
    run(data, 2, on_round=watch.mlflow(theirs))
    assert [step for step, _ in ours] == [step for step, _ in theirs] == [1, 2]
    assert ours[1][1] == {k: v for k, v in history[1].items() if k != 'round'}


def test_tensorboard_leaves_no_file_without_a_round(tmp_path):
    pytest.importorskip('tensorboardX')
    with watch.tensorboard(tmp_path / 'board'):
        pass
    assert not (tmp_path / 'board').exists()


def test_without_tensorboardx_it_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'tensorboardX', None)
    with pytest.raises(ImportError, match=r'fedjax_nc\[watch\]'), watch.tensorboard(tmp_path):
        pass
