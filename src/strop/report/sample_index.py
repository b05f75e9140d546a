"""Selection of the samples that the page shows, without keeping the others in memory."""

from pathlib import Path

from strop._types import Json
from strop.data.formats import as_text
from strop.report.lines import LineReader
from strop.training.logging import parse_line

MAX_SAMPLES, MAX_STEPS = 6, 40


class SampleIndex:
    """An index of the samples in a growing file: each one's line, offset, length, step and hash of the prompt."""

    def __init__(self, path: Path):
        self.reader = LineReader(path)
        self._places: list[tuple[int, int, int, int, int]] = []  # line, offset, length, step, prompt

    def update(self) -> None:
        """Read the lines added to the file since the last call."""
        for number, offset, lines in self.reader.blocks():
            found = []
            for i, line in enumerate(lines):
                if line.strip():
                    row = parse_line(line, self.reader.path, number + i)
                    found.append((number + i, offset, len(line), row["step"], hash(as_text(row.get("prompt", "")))))
                offset += len(line)
            self._places += found

    def shown(self) -> tuple[list[Json], list[int]]:
        """Return the samples to show, and the steps whose samples are all among them.

        Shown are all samples of up to MAX_STEPS evenly spread steps. Shown too are the first and the last sample of
        each of the first MAX_SAMPLES prompts that were sampled at several steps.
        """
        steps = list(dict.fromkeys(step for *_, step, _ in self._places))
        if len(steps) > MAX_STEPS:
            steps = [steps[round(i * (len(steps) - 1) / (MAX_STEPS - 1))] for i in range(MAX_STEPS)]
        firsts: dict[int, int] = {}
        lasts: dict[int, int] = {}
        for index, (*_, prompt) in enumerate(self._places):
            firsts.setdefault(prompt, index)
            lasts[prompt] = index
        again = [(first, lasts[prompt]) for prompt, first in firsts.items()]
        again = [pair for pair in again if self._places[pair[0]][3] != self._places[pair[1]][3]][:MAX_SAMPLES]
        chosen, wanted = {index for pair in again for index in pair}, set(steps)
        chosen |= {index for index, (*_, step, _) in enumerate(self._places) if step in wanted}
        return self._read(sorted(chosen)), steps

    def _read(self, indices: list[int]) -> list[Json]:
        if not indices:
            return []
        rows = []
        with self.reader.path.open("rb") as file:
            for number, offset, length, _, _ in (self._places[index] for index in indices):
                file.seek(offset)
                rows.append(parse_line(file.read(length), self.reader.path, number))
        return rows
