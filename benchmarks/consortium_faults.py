"""What a consortium bears: sites and the server are killed at random, and the model must be that of simulation.

    python benchmarks/consortium_faults.py [--rounds 40] [--sites 20] [--servers 5] [--seed 0] [--out runs/faults]

It runs `examples/consortium` on this machine, kills a site (its SuperNode and whatever that has started) `--sites`
times, and the SuperLink with the running ServerApp `--servers` times, spread over the rounds, in an order and at
moments drawn at random; what was killed is started again some seconds later, on what it has on disk. A site is slowed
down to half of its speed now and then. At the end the model is compared with a simulation of the rounds as they came to
pass, and counts are printed and written to `faults.json`.
"""

import argparse
import json
import random
import runpy
import signal
import time
from pathlib import Path
from typing import Any

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parent.parent / 'examples' / 'consortium' / 'run.py'))
SITES, Consortium = EXAMPLE['SITES'], EXAMPLE['Consortium']
SLICE = 0.5  # seconds of a slowed site's turns of waiting and of working


def torment(consortium: Any, rounds: int, sites: int, servers: int, seed: int) -> dict[str, float]:
    """Runs to the end; counts of what happened."""
    rng = random.Random(seed)
    faults = ['site'] * sites + ['server'] * servers
    rng.shuffle(faults)
    consortium.start_link()
    for k in range(SITES):
        consortium.start_site(k)
    run, begun = consortium.submit(), time.monotonic()
    asleep: dict[int, float] = {}  # when a killed site is started again
    many, pause = len(faults), rng.uniform(0, 10)
    slow, counts = None, {'site kills': 0, 'server kills': 0, 'slow turns': 0}
    while True:
        now = time.monotonic()
        for k in [k for k, at in asleep.items() if now > at]:
            del asleep[k]
            consortium.start_site(k)
        if slow is not None and slow not in asleep:
            consortium.send(f'site-{slow}', signal.SIGSTOP)
            time.sleep(SLICE)
            consortium.send(f'site-{slow}', signal.SIGCONT)
            counts['slow turns'] += 1
        time.sleep(SLICE)
        consortium.revive()
        done, said = len(consortium.rows()), consortium.took_part()
        pause -= SLICE if done >= (many - len(faults)) * rounds / (many + 1) else 0  # the next fault is due
        if faults and pause < 0:
            if faults.pop() == 'site':
                k = rng.choice([k for k in range(SITES) if k not in asleep])
                consortium.send(f'site-{k}', signal.SIGKILL)
                asleep[k] = now + rng.uniform(1, 20)
                counts['site kills'] += 1
            else:
                consortium.send('superlink', signal.SIGKILL)
                time.sleep(rng.uniform(1, 5))
                consortium.start_link()
                run = consortium.submit()
                counts['server kills'] += 1
            slow = rng.choice([None, None, 0, 1, 2])
            pause = rng.uniform(0, 10)
            print(f'{now - begun:.0f} s: {counts}, {done} rounds, last by {said[-1] if said else []}', flush=True)
        elif not faults and (slow is not None or not asleep):
            slow = None
        status = consortium.status(run)
        if status.startswith('finished'):
            break
    rows = consortium.rows()
    return {
        **counts,
        'ended well': float(status == 'finished:completed'),
        'rounds': len(rows),
        'messages that counted': sum(int(row['sites']) for row in rows),
        'messages that did not come': sum(int(row['asked'] - row['sites']) for row in rows),
        'messages refused': sum(int(row['refused']) for row in rows),
        'rounds done twice': consortium.begun_again(),
        'seconds': time.monotonic() - begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description='Kills sites and servers of a consortium at random.')
    parser.add_argument('--rounds', type=int, default=40)
    parser.add_argument('--sites', type=int, default=20, help='how often a site is killed')
    parser.add_argument('--servers', type=int, default=5, help='how often the server is killed')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--out', type=Path, default=Path('runs/faults'))
    args = parser.parse_args()
    with Consortium(args.out, rounds=args.rounds, half=False, secure=False) as consortium:
        counts = torment(consortium, args.rounds, args.sites, args.servers, args.seed)
        deployed, alone, _ = EXAMPLE['simulated'](consortium)
        counts['difference'] = EXAMPLE['difference'](deployed, alone)
    (args.out / 'faults.json').write_text(json.dumps(counts, indent=1) + '\n')
    print(json.dumps(counts, indent=1))
    if not counts['ended well'] or counts['rounds'] != args.rounds or counts['difference'] > 1e-6:
        raise SystemExit('the run did not bear it')


if __name__ == '__main__':
    main()
