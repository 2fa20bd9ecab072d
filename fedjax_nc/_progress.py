"""How far a run is: a bar on a terminal and in a notebook, lines elsewhere."""

import shutil
import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

LINE_EVERY = 10.0  # seconds
WIDE = 100  # columns from which on there is room for a bar beside the numbers


class Progress:
    """Shows a run on the standard error, until it is left.

    A pipe or a file gets a line at the start, every ten seconds and at the end. A terminal gets one line that is
    renewed, and is all numbers where it is narrow.
    """

    def __init__(self, name: str, first: int, rounds: int, *, show: bool = True) -> None:
        """Begins.

        Args:
          name: what runs.
          first: rounds that were done before.
          rounds: rounds in all.
          show: whether anything is shown.
        """
        self.name, self.done, self.rounds, self.show = name, first, rounds, show
        self.said = 0.0
        self.timed: tuple[int, float] | None = None  # a round, and when it was done
        self.bar = None
        if show and live():
            form = '{n_fmt}/{total_fmt}{postfix}'
            if shutil.get_terminal_size().columns >= WIDE:
                form = '{l_bar}{bar}| ' + form + ' [{elapsed}<{remaining}]'
            self.bar = tqdm(total=rounds, initial=first, desc=name, dynamic_ncols=True, bar_format=form)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.close()

    def compiling(self) -> None:
        """What comes next is compiled first, which can take a minute."""
        if self.bar is not None:
            self.bar.set_postfix_str('compiling')
        elif self.show:
            self.say('compiling')

    def at(self, done: int, shown: str) -> None:
        """So many rounds are done, of which this is to be said."""
        last, self.done = self.done, done
        early = self.timed is None
        if early:  # the time before went into compiling
            self.timed = done, time.monotonic()
        if self.bar is not None:
            self.bar.set_postfix_str(shown, refresh=False)
            self.bar.update(done - last)
        elif self.show and (time.monotonic() - self.said >= LINE_EVERY or done == self.rounds or early):
            self.say(shown)

    def say(self, text: str) -> None:
        """Writes a line."""
        self.said = time.monotonic()
        left = ''
        if self.timed and self.timed[0] < self.done < self.rounds:
            seconds = (self.said - self.timed[1]) / (self.done - self.timed[0]) * (self.rounds - self.done)
            left = f', {tqdm.format_interval(seconds)} left'
        print(f'{self.name}: round {self.done} of {self.rounds}, {text}{left}', file=sys.stderr, flush=True)


def live() -> bool:
    """Whether the standard error shows the latest state of a line: a terminal, or a notebook's output."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith('ipykernel')
