"""Launch steps: which recordings a plan needs, what is uploaded for them, and what is done without them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from slotline.kernels.top_logprobs import top_logprobs
from slotline.plan import IntArray, LongArray, Status, StepPlan
from slotline.plugins.torch_backend.processing import Processors
from slotline.plugins.triton_backend.attention import LONG, Whole, library_length
from slotline.plugins.triton_backend.decoder import Decoder
from slotline.plugins.triton_backend.graphs import StepGraphs, size_for
from slotline.plugins.triton_backend.inputs import Layout, all_single, leading_singles
from slotline.plugins.triton_backend.results import (
    Berth,
    Draws,
    Embeddings,
    Extras,
    LaunchedStep,
    PromptTables,
    Transfer,
)
from slotline.plugins.triton_backend.rows import RowTable, columns_to_device, to_device
from slotline.plugins.triton_backend.sampling import COLUMNS, TABLED, WIDE, Kind, Wishes, choose_special, pack

PROMPT_CHUNK = 256  # prompt positions whose logits exist at the same time


class Runner:
    """Everything that a loaded backend holds.

    Attributes:
        padded_tokens: positions computed for nothing so far.
    """

    def __init__(
        self, decoder: Decoder, rows: RowTable, graphs: StepGraphs, processors: Processors, vocab: int
    ) -> None:
        self.rows = rows
        self._decoder = decoder
        self._graphs = graphs
        self._processors = processors
        self._columns = min(COLUMNS, vocab)
        self._wide = min(WIDE, vocab)
        self._device = rows.state.device
        self.padded_tokens = 0
        self._berths: list[Berth] = []
        self._unread: deque[LaunchedStep] = deque(maxlen=2)

    def close(self) -> None:
        """Let go of recordings and steps, which hold this object, so that its memory is free at once."""
        self._unread.clear()
        self._graphs.close()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step."""
        berth = self._berth()
        berth.start()
        self.rows.apply(plan)
        lines = np.flatnonzero(plan.sample)
        wishes = self._wishes(plan, lines)
        extras, draws = Extras(), None
        if wishes is not None and not self._is_slow(wishes) and all_single(plan):
            draws = self._decode(plan, lines, wishes, berth)
        else:
            extras = self._forward(plan, berth)
            if wishes is not None:
                draws = self._sample(lines, wishes, berth)
        berth.stop()
        step = LaunchedStep(plan, berth, draws, extras, self.rows.refused[plan.rows], self._finish)
        self._unread.append(step)
        return step

    def _berth(self) -> Berth:
        """Return a berth that no step holds."""
        for berth in self._berths:
            if berth.free:
                return berth
        rows = len(self.rows.state)
        self._berths.append(Berth(self._device, (self._graphs.most_words, rows * (6 + 2 * self._columns))))
        return self._berths[-1]

    # --- what sampling needs ----------------------------------------------------------

    def _wishes(self, plan: StepPlan, lines: LongArray) -> Wishes | None:
        """Return what the sampling rows want; None if there are none."""
        if not len(lines):
            return None
        rows, slots = self.rows, plan.rows[lines]
        following = (plan.start[lines] + plan.count[lines]).astype(np.int64)
        width, processed = rows.width[slots], rows.processed[slots]
        return Wishes(
            slots,
            following,
            rows.specials(slots, following) if rows.special[slots].any() else (),
            rows.adjusts(slots, following),
            np.where(processed, -1, width),
            np.where(processed, width, -1),
            rows.greedy[slots],
            plan.masks,
        )

    def _is_slow(self, wishes: Wishes) -> bool:
        """Tell whether sampling needs what is not recorded."""
        return bool(
            wishes.special
            or wishes.masks is not None
            or (wishes.processed >= 0).any()
            or (wishes.raw > self._columns).any()
        )

    def _kind(self, wishes: Wishes) -> Kind:
        if wishes.adjusted:
            return Kind.ADJUSTED
        if (wishes.raw >= 0).any():
            return Kind.LOGPROBS
        return Kind.GREEDY if wishes.greedy.all() else Kind.DRAW

    # --- the ways to compute ----------------------------------------------------------

    def _decode(self, plan: StepPlan, lines: LongArray, wishes: Wishes, berth: Berth) -> Draws:
        """Compute rows with one token each, and sample all of them."""
        graphs, kind = self._graphs, self._kind(wishes)
        size = size_for(len(plan), graphs.decode_sizes)
        assert size is not None, "a plan has more rows than there are slots"
        self.padded_tokens += size - len(plan)
        berth.send(graphs.single_words(size, plan), graphs.inputs)
        berth.receive(graphs.step(size, kind))
        return self._draws(lines, wishes, size, kind)

    def _forward(self, plan: StepPlan, berth: Berth) -> Extras:
        """Compute any rows up to the outputs that sampling rows take, and what is wanted of prompts."""
        graphs = self._graphs
        scores = bool((self.rows.prompt_width[plan.rows] >= 0).any())
        embeds = self._embedding_lines(plan)
        recorded = None if scores or embeds else self._recorded(plan)
        if recorded is None:
            return self._forward_at_once(plan, scores=scores, embeds=embeds)
        layout, replay = recorded
        self.padded_tokens += layout.tokens - plan.num_tokens
        berth.send(graphs.words(layout, plan), graphs.inputs)
        replay(layout.tokens)
        return Extras()

    def _recorded(self, plan: StepPlan) -> tuple[Layout, Callable[[int], None]] | None:
        """Return the layout of the recording that holds a plan, and what runs it; None if no recording does."""
        graphs = self._graphs
        size = size_for(plan.num_tokens, graphs.token_sizes)
        if size is not None:
            return graphs.layout(size, chunks=True), graphs.forward
        size = size_for(plan.num_tokens, graphs.whole_sizes)
        if size is not None and len(plan) == 1 and not plan.start[0]:
            return graphs.layout(size, chunks=False), graphs.whole
        return None

    def _forward_at_once(self, plan: StepPlan, *, scores: bool, embeds: list[int]) -> Extras:
        """Do what `_forward` does without a recording."""
        graphs, wholes = self._graphs, self._wholes(plan)
        layout = graphs.layout(-(-plan.num_tokens // graphs.round) * graphs.round, chunks=True)
        self.padded_tokens += layout.tokens - plan.num_tokens
        left_out = {line: whole.end - whole.begin for line, whole in wholes.items()}
        uploaded = to_device(graphs.words(layout, plan, left_out), self._device)
        columns, head = layout.split(uploaded), graphs.head_words
        graphs.inputs[:head].copy_(uploaded[:head])
        singles = 0 if self._decoder.exact else leading_singles(plan.count)
        lines = (size_for(singles, graphs.decode_sizes) or 0) if singles else 0
        if not (scores or embeds):
            graphs.picked.copy_(self._decoder.picked(columns, lines, tuple(wholes.values())))
            return Extras()
        hidden = self._decoder.hidden(columns, lines, tuple(wholes.values()))
        torch.index_select(hidden, 0, columns.picks, out=graphs.picked)
        return Extras(
            self._score_prompts(plan, hidden) if scores else None, self._embed(plan, hidden, embeds) if embeds else None
        )

    def _embedding_lines(self, plan: StepPlan) -> list[int]:
        """Return the lines of rows that are embedded and reach the end of their prompt."""
        asked = np.flatnonzero(self.rows.embeds[plan.rows]).tolist()
        ends = plan.start + plan.count
        return [i for i in asked if ends[i] == self.rows.setups[int(plan.rows[i])].prompt_len]

    def _embed(self, plan: StepPlan, hidden: Tensor, lines: list[int]) -> Embeddings:
        (places,) = columns_to_device(self._device, np.cumsum(plan.count)[lines] - 1)
        return Embeddings(lines, Transfer(hidden.index_select(0, places).float().view(torch.int32).flatten()))

    def _sample(self, lines: LongArray, wishes: Wishes, berth: Berth) -> Draws:
        """Sample from the outputs that were picked."""
        graphs, count = self._graphs, len(lines)
        if not self._is_slow(wishes):
            size, kind = size_for(count, graphs.sample_sizes), self._kind(wishes)
            assert size is not None, "a plan has more rows than there are slots"
            berth.receive(graphs.draw(size, kind))
            return self._draws(lines, wishes, size, kind)
        if wishes.special or wishes.masks is not None:
            self._catch_up()
        head = graphs.head
        logits = self._decoder.logits(graphs.picked[:count])
        slots, following = head.slots[:count], head.following[:count]
        berth.receive(choose_special(wishes, logits, self.rows, slots, following, self._processors))
        columns = min(wishes.columns, self._wide)
        return Draws(lines, count, columns, wishes.raw >= 0, wishes.processed >= 0)

    def _draws(self, lines: LongArray, wishes: Wishes, size: int, kind: Kind) -> Draws:
        columns = self._columns if kind in TABLED else -1
        return Draws(lines, size, columns, wishes.raw >= 0, wishes.processed >= 0)

    def _wholes(self, plan: StepPlan) -> dict[int, Whole]:
        """Return, by line of the plan, what library attention takes: the front of long chunks that start a sequence."""
        if not self._decoder.library:
            return {}
        begins, found = np.cumsum(plan.count) - plan.count, {}
        for i in np.flatnonzero((plan.start == 0) & (plan.count >= LONG)).tolist():
            begin = int(begins[i])
            found[i] = Whole(begin, begin + library_length(int(plan.count[i])))
        return found

    # --- logprobs of prompts ----------------------------------------------------------

    def _score_prompts(self, plan: StepPlan, hidden: Tensor) -> PromptTables:
        """Launch the tables of prompt positions: those of p come from the output at p - 1."""
        counts = np.zeros(len(plan), np.int32)
        places, tokens, widths = [], [], []
        ends = np.cumsum(plan.count)
        for i in np.flatnonzero(self.rows.prompt_width[plan.rows] >= 0).tolist():
            setup, start, count = self.rows.setups[int(plan.rows[i])], int(plan.start[i]), int(plan.count[i])
            low = max(setup.prompt_logprobs_from, 1, start + 1)
            high = min(start + count + 1, setup.prompt_len)
            if low < high and not self.rows.refused[setup.row]:
                counts[i] = high - low
                places.append(np.arange(low, high) - 1 - start + int(ends[i]) - count)
                tokens.append(setup.token_ids[low:high])
                widths.append(np.full(high - low, setup.prompt_logprobs))
        if not places:
            return PromptTables(counts, np.empty(0, np.int64), 0, [])
        return self._score(
            hidden, counts, *(np.concatenate(part).astype(np.int32) for part in (places, tokens, widths))
        )

    def _score(
        self, hidden: Tensor, counts: IntArray, places: IntArray, tokens: IntArray, widths: IntArray
    ) -> PromptTables:
        columns = self._columns if widths.max() <= self._columns else self._wide
        parts = []
        for low in range(0, len(places), PROMPT_CHUNK):
            chunk = slice(low, low + PROMPT_CHUNK)
            count = len(places[chunk])
            parts_of = places[chunk], tokens[chunk], widths[chunk], np.arange(count)
            picked, given, wide, every = columns_to_device(self._device, *parts_of)
            logits = self._decoder.logits(hidden.index_select(0, picked))
            table = top_logprobs(logits, every, given, wide, columns)
            parts.append((count, Transfer(torch.cat(pack(table)))))
        return PromptTables(counts, tokens.astype(np.int64), columns, parts)

    # --- what the host follows --------------------------------------------------------

    def _catch_up(self) -> None:
        """Wait for the steps launched before: what was sampled there decides what comes now."""
        for step in self._unread:
            step.result()

    def _finish(self, plan: StepPlan, lines: LongArray, tokens: IntArray, status: IntArray) -> None:
        """End rows at stop ids that the device does not know, and let the host's copies of rows follow."""
        rows = self.rows
        slots = plan.rows[lines]
        watched = np.flatnonzero(rows.overflowing[slots] | rows.special[slots])
        for i in watched.tolist():
            slot, epoch = int(slots[i]), int(plan.epoch[lines[i]])
            setup = rows.setups.get(slot)
            if setup is None or setup.epoch != epoch or status[i] not in (Status.OK, Status.STOP):
                continue
            token, position = int(tokens[i]), int(plan.start[lines[i]] + plan.count[lines[i]])
            if rows.overflowing[slot] and token in setup.stop_ids and position >= setup.min_len:
                status[i] = Status.STOP
            rows.observe(slot, epoch, token, position)
