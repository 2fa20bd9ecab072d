"""`examples/consortium` with Flower's own programs on the loopback interface: TLS, known keys, processes that die."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DETACHED = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True).pid, flush=True)
time.sleep(60)
"""


def wait(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def run(script, *arguments, out):
    command = [sys.executable, str(ROOT / script), *arguments, '--out', str(out)]
    # As users have it: flags of this process alone, not of the sites', would round otherwise.
    env = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(not Path('/proc/self/stat').exists(), reason='looks into /proc')
def test_what_a_killed_program_has_detached_is_killed_too(tmp_path):
    pytest.importorskip('cryptography')
    consortium = runpy.run_path(str(ROOT / 'examples/consortium/run.py'))['Consortium'](tmp_path)
    consortium.start('parent', [sys.executable, '-c', DETACHED])
    log = consortium.logs / 'parent.log'
    wait(log.read_text)
    stat = Path(f'/proc/{int(log.read_text())}/stat')
    assert stat.exists()
    consortium.send('parent', signal.SIGKILL)
    wait(lambda: not stat.exists() or stat.read_text().split()[2] == 'Z')


@pytest.mark.slow
def test_the_example_bears_two_lost_sites_and_equals_simulation(tmp_path):
    said = run('examples/consortium/run.py', '--rounds', '4', out=tmp_path)
    assert 'site 1 is killed' in said
    assert 'site 1 is started again' in said
    assert 'site 2 is frozen' in said
    rounds = re.findall(r'^round (\d) of 4: (\d) of 3 sites', said, re.M)
    assert [int(r) for r, _ in rounds] == [1, 2, 3, 4]
    assert rounds[0][1] == '3'
    assert rounds[-1][1] in '12'
    assert float(re.search(r'rounds: (\S+)\n', said)[1]) <= 1e-6
    assert (tmp_path / 'server/1-personal/model.safetensors').exists()
    assert (tmp_path / 'site-0/1-personal.safetensors').exists()
    # Whoever starts it again finds it done.
    assert 'finished:completed' in run('examples/consortium/run.py', '--rounds', '4', '--calm', out=tmp_path)


@pytest.mark.slow
def test_secure_aggregation_of_processes(tmp_path):
    said = run('examples/consortium/run.py', '--rounds', '1', '--secure', out=tmp_path)
    assert 0 < float(re.search(r'rounds: (\S+)\n', said)[1]) < 2e-5  # rounding to whole numbers, in one round


@pytest.mark.slow
def test_kills_at_random(tmp_path):
    run('benchmarks/consortium_faults.py', '--rounds', '6', '--sites', '2', '--servers', '1', out=tmp_path)
    counts = json.loads((tmp_path / 'faults.json').read_text())
    assert counts['rounds'] == 6
    assert counts['site kills'] == 2
    assert counts['server kills'] == 1
    assert counts['difference'] <= 1e-6
