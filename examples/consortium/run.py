"""A consortium on one machine: a SuperLink and three SuperNodes with TLS and known keys train FedETF on digits.

    python examples/consortium/run.py [--rounds 20] [--out runs/consortium] [--half] [--secure] [--calm]

It makes certificates and keys, starts Flower's programs on the loopback interface, registers the sites and runs the app
in `digits`. On the way site 1 is killed and comes back, and later site 2 freezes and never answers again; with `--calm`
or `--secure` nothing happens to them. At the end it compares the model with a simulation of the same rounds in this
process. Stopped and started again with the same directory it goes on where it was. About ten minutes on two cores, most
of which goes into starting a process for each message, as Flower does.
"""

import argparse
import contextlib
import datetime
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HERE = Path(__file__).parent
SITES = 3
LINK = 'loopback'
PROGRAMS = Path(sys.executable).parent  # Flower's, of this environment
PLAIN, TEXT = serialization.NoEncryption(), serialization.Encoding.PEM


def authority(folder: Path) -> None:
    """An authority `ca.pem` and a certificate for this machine, `server.pem` with `server.key`."""

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certificate(key: Any, who: str, signer: Any, by: str, extensions: list[x509.ExtensionType]) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        made = x509.CertificateBuilder().subject_name(name(who)).issuer_name(name(by)).public_key(key.public_key())
        made = made.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
        made = made.not_valid_after(now + datetime.timedelta(days=30))
        for extension in extensions:
            made = made.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return made.sign(signer, hashes.SHA256())

    ca, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    here = x509.SubjectAlternativeName([x509.DNSName('localhost'), x509.IPAddress(ipaddress.ip_address('127.0.0.1'))])
    root = certificate(ca, 'consortium', ca, 'consortium', [x509.BasicConstraints(True, None)])
    leaf = certificate(server, 'localhost', ca, 'consortium', [here, x509.BasicConstraints(False, None)])
    (folder / 'ca.pem').write_bytes(root.public_bytes(TEXT))
    (folder / 'server.pem').write_bytes(leaf.public_bytes(TEXT))
    _secret(folder / 'server.key', server.private_bytes(TEXT, serialization.PrivateFormat.PKCS8, PLAIN))


def identity(path: Path) -> None:
    """A site's key `path`, and what others may know of it in `path.pub`, as `ssh-keygen -t ecdsa -b 384` makes them."""
    key = ec.generate_private_key(ec.SECP384R1())
    _secret(path, key.private_bytes(TEXT, serialization.PrivateFormat.OpenSSH, PLAIN))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(f'{path.name}.pub').write_bytes(public)


def _secret(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 'wb') as file:
        file.write(content)


class Consortium:
    """The programs of a consortium, in a folder."""

    def __init__(self, out: Path, **settings: Any) -> None:
        """Makes keys and the app, unless they are there from an earlier time. `settings` are those of the app."""
        self.out, self.running = out.resolve(), {}  # type: ignore[var-annotated]
        self.app, self.keys, self.logs = (self.out / name for name in ('app', 'keys', 'logs'))
        self.run = self.out / 'server'
        for folder in (self.keys, self.logs, self.out / 'flwr'):
            folder.mkdir(parents=True, exist_ok=True)
        if not (self.keys / f'site-{SITES - 1}.pub').exists():  # the last file to be written
            authority(self.keys)
            for k in range(SITES):
                identity(self.keys / f'site-{k}')
        shutil.copytree(HERE, self.app, dirs_exist_ok=True, ignore=shutil.ignore_patterns('__pycache__', 'run.py'))
        text = ''.join(f'{name} = {json.dumps(value)}\n' for name, value in settings.items())
        (self.app / 'digits' / 'settings.toml').write_text(text)
        # Sites start a process for each message, which compiles once and for all in this folder.
        cache = {
            'JAX_COMPILATION_CACHE_DIR': str(self.out / 'compiled'),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        }
        path = os.pathsep.join([str(PROGRAMS), os.environ.get('PATH', '')])
        self.env = {
            **os.environ, **cache, 'PATH': path, 'FLWR_HOME': str(self.out / 'flwr'), 'FLWR_TELEMETRY_ENABLED': '0',
            'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1',
        }  # fmt: skip
        self.port = _free_port()
        link = f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{self.keys / "ca.pem"}"\n'
        (self.out / 'flwr' / 'config.toml').write_text(f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\n{link}')

    def start(self, name: str, command: list[str]) -> None:
        """Starts a program, with all that it starts itself in one group."""
        with (self.logs / f'{name}.log').open('ab') as log:
            self.running[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.env,
                start_new_session=True, cwd=self.out,
            )  # fmt: skip

    def send(self, name: str, what: signal.Signals) -> None:
        """Sends a signal to a program and all that it started; after one that kills, all of it is gone."""
        begun = _started_by(self.running[name].pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.running[name].pid, what)
        _signal(begun, what)
        if what in (signal.SIGKILL, signal.SIGTERM):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.running[name].wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.running[name].pid, signal.SIGKILL)
            _signal(begun, signal.SIGKILL)
            del self.running[name]

    def flwr(self, *arguments: str) -> str:
        """A command of Flower's, to its end."""
        done = subprocess.run(
            [str(PROGRAMS / 'flwr'), *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=self.out,
        )
        if done.returncode:
            raise RuntimeError(f'flwr {arguments[0]} failed: {done.stdout[-1000:]}{done.stderr[-1000:]}')
        return done.stdout

    def start_link(self) -> None:
        """The SuperLink, and its list of sites."""
        keys = self.keys
        self.start('superlink', [
            str(PROGRAMS / 'flower-superlink'), '--host', '127.0.0.1', '--port', str(self.port),
            '--ssl-ca-certfile', str(keys / 'ca.pem'), '--ssl-certfile', str(keys / 'server.pem'),
            '--ssl-keyfile', str(keys / 'server.key'), '--enable-supernode-auth',
            '--database', str(self.out / 'superlink.db'), '--disable-runtime-dependency-installation',
        ])  # fmt: skip
        _wait(lambda: _listens(self.port), 60, 'the SuperLink does not listen')
        known = self.out / 'registered'
        if not known.exists():
            for k in range(SITES):
                self.flwr('supernode', 'register', str(keys / f'site-{k}.pub'), LINK)
            known.touch()

    def start_site(self, k: int) -> None:
        """The SuperNode of a site."""
        folder = self.out / f'site-{k}'
        self.start(f'site-{k}', [
            str(PROGRAMS / 'flower-supernode'), '--superlink', f'127.0.0.1:{self.port}',
            '--root-certificates', str(self.keys / 'ca.pem'),
            '--auth-supernode-private-key', str(self.keys / f'site-{k}'), '--port', str(_free_port()),
            '--node-config', f'site={k} folder="{folder}"',
        ])  # fmt: skip

    def revive(self) -> None:
        """Starts sites again that have ended by themselves, as a service manager does.

        Flower refuses a SuperNode that comes back before it was missed, which takes a minute, and the SuperNode ends.
        """
        for k in range(SITES):
            ended = f'site-{k}' in self.running and self.running[f'site-{k}'].poll() is not None
            if ended:
                self.send(f'site-{k}', signal.SIGKILL)
                self.start_site(k)

    def submit(self) -> str:
        """Begins, or goes on with, the run; the number that Flower gives it."""
        said = self.flwr('run', str(self.app), LINK, '-c', f'out="{self.run}"', '--format', 'json')
        self.said, self.asked = 'starting', time.monotonic()
        return str(json.loads(said[said.index('{') :])['run-id'])

    def status(self, run: str) -> str:
        """What Flower says of a run, such as 'running' or 'finished:completed'."""
        if time.monotonic() - self.asked > 10:  # asking costs a second of a core
            said = self.flwr('list', LINK, '--run-id', run, '--format', 'json')
            self.said, self.asked = str(json.loads(said[said.index('{') :])['runs'][0]['status']), time.monotonic()
        return self.said

    def rows(self) -> list[dict[str, float]]:
        """Rounds of training that are done."""
        path = self.run / '0-train' / 'metrics.jsonl'
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def took_part(self) -> list[list[int]]:
        """Whose messages counted in each round of training."""
        return list({row['round']: row['sites'] for row in self.sites()}.values())

    def begun_again(self) -> int:
        """Rounds whose messages had come when the server was stopped, and were asked for again."""
        found = self.sites()
        return len(found) - len({row['round'] for row in found})

    def sites(self) -> list[dict[str, Any]]:
        path = self.run / '0-train' / 'sites.jsonl'
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def close(self) -> None:
        for name in list(self.running):
            self.send(name, signal.SIGCONT)
            self.send(name, signal.SIGTERM)

    def __enter__(self) -> 'Consortium':
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _started_by(pid: int) -> list[int]:
    """The processes below one, also those in groups of their own, as Flower's apps are."""
    said = subprocess.run(['ps', '-A', '-o', 'pid=,ppid='], capture_output=True, text=True, check=True).stdout
    below: dict[int, list[int]] = {}
    for child, parent in (map(int, line.split()) for line in said.splitlines()):
        below.setdefault(parent, []).append(child)
    found = [pid]
    for one in found:  # grows on the way
        found += below.get(one, [])
    return found[1:]


def _signal(pids: list[int], what: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return int(s.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(1)
        return s.connect_ex(('127.0.0.1', port)) == 0


def _wait(there: Callable[[], bool], seconds: float, otherwise: str) -> None:
    end = time.monotonic() + seconds
    while not there():
        if time.monotonic() > end:
            raise TimeoutError(otherwise)
        time.sleep(0.2)


def follow(consortium: Consortium, rounds: int, events: dict[int, Callable[[], str]]) -> str:
    """Shows rounds as they come, lets events happen after theirs, and returns Flower's last word."""
    run, shown = consortium.submit(), len(consortium.rows())
    while True:
        status = consortium.status(run)
        for row in consortium.rows()[shown:]:
            shown += 1
            text = f'{row["sites"]:.0f} of {row["asked"]:.0f} sites, {row["seconds"]:.1f} s'
            text += ''.join(f', {name} {row[name]:.3f}' for name in ('loss', 'accuracy') if name in row)
            print(f'round {shown} of {rounds}: {text}', flush=True)
            if shown in events:
                print(f'  {events.pop(shown)()}', flush=True)
        if status.startswith('finished'):
            return status
        consortium.revive()
        time.sleep(1)


def simulated(consortium: Consortium) -> tuple[Any, Any, float]:
    """The same rounds in this process, by those who took part: the deployed state, the simulated, seconds a round."""
    sys.path.insert(0, str(consortium.app))
    import jax
    import numpy as np
    from digits.agreed import CLASSES, INIT, TRAIN, agreed, rows_of, train

    from fedjax_nc import data, saving, simulate

    parts, xs, ys, begin = [], [], [], 0
    for k in range(SITES):
        x, y, held_out = rows_of(k)
        xs.append(x[~held_out])
        ys.append(y[~held_out])
        parts.append(np.arange(begin, begin + len(ys[-1])))
        begin += len(ys[-1])
    clients = data.federate(np.concatenate(xs), np.concatenate(ys), parts, CLASSES)
    round = simulate.compiled(simulate.make_round(train, chunk=1))
    state, seconds = simulate.init(train, INIT, clients), []
    for t, there in enumerate(consortium.took_part()):
        begun = time.perf_counter()
        ids = np.array([k if k in there else SITES for k in range(SITES)])
        state, report = round(jax.random.fold_in(TRAIN, t), state, clients, ids)
        jax.block_until_ready(report)
        seconds.append(time.perf_counter() - begun)
    deployed = saving.load(consortium.run / '0-train' / 'model.safetensors', agreed.phases[0].algorithm).server
    return deployed, state.server, float(np.median(seconds))


def difference(a: Any, b: Any) -> float:
    """The largest one between the numbers of two states."""
    import jax
    import numpy as np

    apart = jax.tree.map(lambda u, v: float(np.max(np.abs(np.asarray(u) - np.asarray(v)))), a, b)
    return max(jax.tree.leaves(apart))


def main() -> None:
    parser = argparse.ArgumentParser(description='FedETF on digits by three sites under Flower, on this machine.')
    parser.add_argument('--rounds', type=int, default=20)
    parser.add_argument('--out', type=Path, default=Path('runs/consortium'))
    parser.add_argument('--half', action='store_true', help='send float16')
    parser.add_argument(
        '--secure', action='store_true', help='sum messages unseen, by SecAgg+; nothing happens to the sites'
    )
    parser.add_argument('--calm', action='store_true', help='let nothing happen to the sites')
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the programs end with this one
    eventful = not (args.calm or args.secure)
    if args.rounds < (4 if eventful else 1):
        parser.error(
            '--rounds must be 4 or more, so that there is time for what happens; with --calm or --secure 1 or more'
        )
    with Consortium(args.out, rounds=args.rounds, half=args.half, secure=args.secure) as consortium:
        print(f'SuperLink and {SITES} SuperNodes on 127.0.0.1:{consortium.port}; logs in {consortium.logs}', flush=True)
        consortium.start_link()
        for k in range(SITES):
            consortium.start_site(k)

        def killed() -> str:
            consortium.send('site-1', signal.SIGKILL)
            return 'site 1 is killed'

        def back() -> str:
            if 'site-1' in consortium.running:  # all sites were started anew since it was killed
                return 'site 1 is there'
            consortium.start_site(1)
            return 'site 1 is started again'

        def frozen() -> str:
            consortium.send('site-2', signal.SIGSTOP)
            return 'site 2 is frozen, and will not answer again'

        a, b, c = args.rounds // 4, args.rounds // 2, 3 * args.rounds // 4
        status = follow(consortium, args.rounds, {a: killed, b: back, c: frozen} if eventful else {})
        print(status)
        if status != 'finished:completed':
            raise SystemExit(f'the run did not end well: look into {consortium.logs}')
        deployed, alone, seconds = simulated(consortium)
        rows = consortium.rows()
        up = sum(row['bytes_up'] / row['sites'] for row in rows) / len(rows)
        sent = [bytes_ for row in consortium.sites() for bytes_ in row['bytes_down'].values()]
        down = sum(sent) / len(sent)  # to each that was asked, whether it answered or not
        took = sorted(row['seconds'] for row in rows)[len(rows) // 2]
        print(f'largest difference from the simulation of these {len(rows)} rounds: {difference(deployed, alone):.1e}')
        print(f'a round: {took:.1f} s here, {1000 * seconds:.1f} ms in simulation')
        print(f'a site in a round: {up:.0f} bytes up, {down:.0f} bytes down')
        where = consortium.out
        print(f'models: {where}/server/*/model.safetensors and {where}/site-*/*.safetensors')


if __name__ == '__main__':
    main()
