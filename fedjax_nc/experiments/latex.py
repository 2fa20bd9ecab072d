"""A report's tables for LaTeX, with the package booktabs."""

from collections.abc import Collection

from fedjax_nc.experiments import cells, costs
from fedjax_nc.experiments.costs import Found
from fedjax_nc.experiments.study import Study

TEX = {
    **{char: f'\\{char}' for char in '&%_#${}'},
    '\\': '\\textbackslash{}', '^': '\\textasciicircum{}', '~': '\\textasciitilde{}',
}  # fmt: skip


def tables(study: Study, found: Found, target: float | None = None) -> str:
    """The tables for LaTeX with the package booktabs: the main one, differences, and costs.

    Published numbers are in the second line of a row. The best of ours is bold, by its mean.
    """
    scenes = [scene for scene in study.scenes if scene not in study.unavailable]
    heads = [heading for _ in scenes for heading in study.metrics]
    groups = [(scene, len(study.metrics)) for scene in scenes if scene]
    best = [column for scene in scenes for column in cells.best(study, found, scene)]
    rows, gains, bold = list[tuple[str, list[str]]](), [], set()
    for method in study.methods:
        pairs = [pair for scene in scenes for pair in cells.row(study, found, method, scene)]
        bold |= {(len(rows), i) for i, methods in enumerate(best) if method in methods}
        rows.append((method, [ours for ours, _ in pairs]))
        if any(theirs for _, theirs in pairs):
            rows.append(('', [theirs for _, theirs in pairs]))
        gain = [text for scene in scenes for text in cells.gained(study, found, method, scene)]
        if method != study.baseline and any(gain):
            gains.append((method, gain))
    lines = ['% Needs \\usepackage{booktabs}', f'% {study.title}', *tabular(groups, heads, rows, bold)]
    if gains:
        lines += ['', f'% Less {study.baseline}, same seed, with the 95 % interval', *tabular(groups, heads, gains)]
    for scene in scenes:
        if told := costs.of(study, found, scene, target):
            lines += ['', f'% Cost{f", {scene}" if scene else ""}']
            rows = [(cells.cost_name(cost), cells.cost_row(cost)) for cost in told]
            lines += tabular([], cells.cost_headings(told), rows)
    return '\n'.join([*lines, ''])


def tabular(
    groups: list[tuple[str, int]],
    heads: list[str],
    rows: list[tuple[str, list[str]]],
    bold: Collection[tuple[int, int]] = (),
) -> list[str]:
    """One table for LaTeX; a row without a name has what was published for the row before it.

    What is `bold` are cells, by row and column from 0.
    """
    lines = [f'\\begin{{tabular}}{{l{"r" * len(heads)}}}', '\\toprule']
    if groups:
        spans = (f'\\multicolumn{{{width}}}{{c}}{{{escaped(name)}}}' for name, width in groups)
        lines.append(f' & {" & ".join(spans)} \\\\')
    lines += [f' & {" & ".join(map(escaped, heads))} \\\\', '\\midrule']
    for at, (name, row) in enumerate(rows):
        first = escaped(name) if name else '\\quad published'
        texts = (f'\\textbf{{{escaped(t)}}}' if (at, i) in bold else escaped(t) for i, t in enumerate(row))
        lines.append(f'{first} & {" & ".join(texts)} \\\\')
    return [*lines, '\\bottomrule', '\\end{tabular}']


def escaped(text: str) -> str:
    """A text as LaTeX prints it."""
    return ''.join(TEX.get(char, char) for char in text).replace('±', '$\\pm$')
