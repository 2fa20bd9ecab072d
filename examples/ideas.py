"""The pictures of docs/ideas.md: why classifiers drift, what a simplex is, and what five systems change.

    python examples/ideas.py [--out docs/pictures] [--quick]

Needs no network, and one to two minutes on two cores. What is no schematic is computed on handwritten digits, often on
three of them (3, 8 and 9) with features of two dimensions, which can be drawn as they are. Writes each picture for
light and for dark pages, `NAME.png` and `NAME-dark.png`, and prints the numbers that the page tells.
"""

import argparse
from pathlib import Path

import ideas_drawn as drawn
import ideas_measured as measured

from fedjax_nc import plots

PICTURES = {
    'drift': (measured.drift, drawn.draw_drift),
    'agreement': (measured.agreement, drawn.draw_agreement),
    'collapse': (measured.collapsing, drawn.draw_collapse),
    'fedetf': (measured.with_etf, drawn.draw_etf),
    'gmv': (measured.with_memory, drawn.draw_memory),
    'fedloge': (measured.with_lengths, drawn.draw_lengths),
    'ccvr': (measured.with_calibration, drawn.draw_calibration),
    'fednh': (measured.with_prototypes, drawn.draw_meaning),
}


def main() -> None:
    parser = argparse.ArgumentParser(description='The pictures of docs/ideas.md.')
    parser.add_argument('--out', type=Path, default=Path('docs/pictures'))
    parser.add_argument('--quick', action='store_true', help='little training: to see that it runs')
    parser.add_argument('--only', nargs='+', choices=PICTURES, help='these pictures alone')
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.only:
        plots.save(drawn.draw_clients(), args.out / 'clients.png', dpi=110)
        plots.save(drawn.draw_frames(), args.out / 'frames.png', dpi=140)
    for name in args.only or PICTURES:
        compute, draw = PICTURES[name]
        found = compute(measured.QUICK if args.quick else measured.Setting())
        plots.save(draw(found), args.out / f'{name}.png', dpi=140)
        for line in measured.told(found):
            print(f'{name}: {line}')


if __name__ == '__main__':
    main()
