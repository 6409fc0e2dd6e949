"""What a wave keeps beside its results where a request asks: likely tokens at each level, and the beams of each level.

Both are copies of what the levels leave in BeamState, made between them; waves of which nobody asks make none.

Letters: L levels, F finished sequences, R rows, B requests, K likely tokens, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from widebeam.constraints.trie import TrieLevel
from widebeam.engine.core import Core
from widebeam.engine.request import LevelBeams, Sequence
from widebeam.engine.selection import group_of
from widebeam.engine.staging import HostCopy
from widebeam.engine.state import WaveData
from widebeam.engine.wave import Search, Wave

ROWS_AT_ONCE = 256
"""Rows whose likely tokens are sought together: their logits are computed once more for that."""


class Trace:
    """The copies of one wave, on the device."""

    def __init__(self, core: Core, wave: Wave, data: WaveData) -> None:
        self._core, self._wave, self._data = core, wave, data
        self._likely: list[tuple[Tensor, Tensor]] = []
        self._beams: list[tuple[Tensor, Tensor, Tensor]] = []

    def before(self, level: int, trie: TrieLevel | None) -> None:
        """Hidden states lie ready: note each row's most probable tokens, over what its scores are normalised over."""
        if not self._wave.top_logprobs:
            return
        book = None
        if trie is not None and self._wave.catalog is not None and self._wave.normalizer == "level":
            book = trie.codebook_C[: len(self._wave.catalog.level_token_ids[level])]
        head_VH = None if book is None else self._core.model.head_VH[book]
        rows = self._wave.requests if level == 0 else self._wave.decoded(level)
        parts = []
        for hidden_RH in self._core.state.hidden_RH[:rows].split(ROWS_AT_ONCE):
            logits_RV = self._core.model.logits(hidden_RH, head_VH)
            best_RK, token_RK = logits_RV.topk(min(self._wave.top_logprobs, logits_RV.shape[1]))
            token_RK = token_RK if book is None else book[token_RK]
            parts.append((best_RK - logits_RV.logsumexp(-1, keepdim=True), token_RK.int()))
        self._likely.append(tuple(map(torch.cat, zip(*parts, strict=True))))  # type: ignore[arg-type]

    def after(self, level: int) -> None:
        """The next level's rows are written: note tokens, scores and parents."""
        if self._wave.return_beam_details and level < self._wave.num_levels - 1:
            state, rows = self._core.state, self._wave.decoded(level + 1)
            parent_R = state.path_RJ[:rows, level - 1] if level else torch.zeros_like(state.path_RJ[:rows, 0])
            self._beams.append((state.token_R[:rows].int(), state.cum_R[:rows].clone(), parent_R.clone()))

    def collect(self) -> TraceCopy:
        """Send it home. A sequence's likely tokens at a level are those of the row that it came from there."""
        wave, state = self._wave, self._core.state
        path_LF = state.finished.head(wave.places, wave.num_levels).path.t().long()
        room_B1 = self._data.finished_B1
        request_F = group_of(room_B1, wave.places).clamp_max(wave.requests - 1)
        row_LF = torch.cat((request_F[None], path_LF[:-1]))
        likely = [
            each[row_F.clamp_max(len(each) - 1)]
            for pair, row_F in zip(self._likely, row_LF, strict=False)
            for each in pair
        ]
        copies = [*likely, *(each for beams in self._beams for each in beams), path_LF.int()]
        return TraceCopy(wave, len(self._likely), len(self._beams), HostCopy.of(copies))


class TraceCopy:
    """A trace on its way to the host."""

    def __init__(self, wave: Wave, likely_levels: int, beam_levels: int, home: HostCopy) -> None:
        self._wave, self._home = wave, home
        self._likely_levels, self._beam_levels = likely_levels, beam_levels

    def give(self, found: list[list[Sequence]], places: list[list[int]]) -> list[list[LevelBeams] | None]:
        """Put likely tokens into the sequences, which came from these places; each request's beams by level.

        Once the device has made the copy. A request whose search failed has no sequences.
        """
        *arrays, path_LF = self._home.arrays()
        likely, beams = arrays[: 2 * self._likely_levels], arrays[2 * self._likely_levels :]
        levels: list[list[LevelBeams] | None] = []
        for search, sequences, own in zip(self._wave.searches, found, places, strict=True):
            if search.top_logprobs:
                for sequence, place in zip(sequences, own, strict=True):
                    sequence.top_logprobs = [
                        list(zip(tokens[place].tolist(), logprobs[place].tolist(), strict=True))[: search.top_logprobs]
                        for logprobs, tokens in zip(likely[::2], likely[1::2], strict=True)
                    ][: len(sequence.token_ids)]
            levels.append(self._levels(search, beams, sequences, own, path_LF) if search.return_beam_details else None)
        return levels

    def _levels(
        self, search: Search, beams: list[np.ndarray], sequences: list[Sequence], places: list[int], path_LF: np.ndarray
    ) -> list[LevelBeams]:
        """Dead rows lie behind the live ones of a request, so that places in a level are rows less the first."""
        b = self._wave.searches.index(search)
        first = [sum(self._wave.rows(level)[:b]) for level in range(search.levels)]
        levels = []
        for level in range(min(search.levels - 1, self._beam_levels)):
            some = slice(first[level], first[level] + search.widths[level])
            token, score, parent = (array[some] for array in beams[3 * level : 3 * level + 3])
            live = score > -np.inf
            parents = parent[live] - (first[level - 1] if level else 0)
            levels.append(
                LevelBeams(parents=parents.tolist(), token_ids=token[live].tolist(), scores=score[live].tolist())
            )
        left_out = search.levels - 1 - len(levels)  # no beam was live any more
        levels += [LevelBeams(parents=[], token_ids=[], scores=[]) for _ in range(left_out)]
        last = [(s, place) for s, place in zip(sequences, places, strict=True) if len(s.token_ids) == search.levels]
        depth = search.levels - 1
        levels.append(
            LevelBeams(
                parents=[int(path_LF[depth - 1, place]) - first[depth - 1] if depth else 0 for _, place in last],
                token_ids=[s.token_ids[-1] for s, _ in last],
                scores=[s.cum_logprob for s, _ in last],
            )
        )
        return levels
