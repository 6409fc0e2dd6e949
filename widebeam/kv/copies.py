"""Pages in the host's memory, and copies of them either way, on streams of their own beside the waves.

A page in the host's memory is one piece, with the keys and values of all layers; in the pools it lies in as many
pieces as there are layers, twice. A few pages are put together on the device first, so that each is one copy over the
bus. On a CPU copies are over when they are launched.

Letters: N layers, P pages of the device's pools, B staged pages, H pages in the host's memory, W words that a page
takes in a layer's keys or in its values.
"""

from __future__ import annotations

import itertools
import time
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import torch
from torch import Tensor

from widebeam.errors import ConfigError

STAGED_BYTES = 64 << 20
"""Of each of the two buffers on the device."""
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Transfer:
    """Copies that were launched together, one way."""

    def __init__(self, num_bytes: int, stream: torch.cuda.Stream | None) -> None:
        self.num_bytes = num_bytes
        self._stream = stream
        self._begun = self._mark()
        self._ended = self._begun

    def end(self) -> None:
        """All of them are launched."""
        self._ended = self._mark()

    def _mark(self) -> torch.cuda.Event | float:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self._stream)
        return event

    @property
    def done(self) -> bool:
        return isinstance(self._ended, float) or self._ended.query()

    def wait(self) -> None:
        """Until it is done, on the host."""
        if not isinstance(self._ended, float):
            self._ended.synchronize()

    def precede(self) -> None:
        """What this thread launches from now on runs behind it, and nobody waits here."""
        if not isinstance(self._ended, float):
            torch.cuda.current_stream().wait_event(self._ended)

    @property
    def seconds(self) -> float:
        """That it took, once it is done."""
        if isinstance(self._begun, float) or isinstance(self._ended, float):
            return self._ended - self._begun  # type: ignore[operator]
        return self._begun.elapsed_time(self._ended) / 1e3


class LastUses:
    """When the device is done with pages 1 .. P: the waves that used them last."""

    def __init__(self, num_pages: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._wave = 0
        self._wave_P = np.zeros(num_pages + 1, dtype=np.int64)
        self._ends: deque[tuple[int, torch.cuda.Event]] = deque()
        """Of waves that the device may not have passed."""

    def note(self, pages: Iterable[list[int]]) -> None:
        """All is launched that uses these pages from a wave that ends here."""
        self._wave += 1
        for some in pages:
            self._wave_P[some] = self._wave
        if self._cuda:
            while self._ends and self._ends[0][1].query():
                self._ends.popleft()
            end = torch.cuda.Event()
            end.record()
            self._ends.append((self._wave, end))

    def of(self, pages: list[int]) -> torch.cuda.Event | None:
        """The end of the last wave that used one of them; None: the device is past it."""
        last = max(self._wave_P[page] for page in pages)
        return next((end for wave, end in self._ends if wave == last), None)


def _unpin(address: int, streams: Iterable[torch.cuda.Stream | None]) -> None:
    """Give pinned memory back once no copy reads or writes it."""
    for stream in streams:
        with suppress(RuntimeError):  # a broken device copies nothing any more
            if stream is not None:
                stream.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


def runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where neighbours that follow each other begin in a list, and how many they are: one copy each."""
    first = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield first, end - first
            first = end


class PageCopies:
    """H pages in the host's memory, pinned if there is a GPU, numbered 1 .. H, and what copies them."""

    def __init__(
        self, num_layers: int, layer_bytes: int, num_pages: int, device: torch.device, check: bool = False
    ) -> None:
        """`layer_bytes`: what a page takes in a layer's keys. `check`: note a checksum of each page that is saved.

        Raises ConfigError if there is no memory for them.
        """
        self._checksums: dict[int, int] | None = {} if check else None
        self.num_pages = num_pages
        self.page_bytes = 2 * num_layers * layer_bytes
        self._word = next(word for word in WORDS if layer_bytes % word.itemsize == 0)
        page = (2, num_layers, layer_bytes // self._word.itemsize)
        staged = max(1, min(STAGED_BYTES // self.page_bytes, num_pages))
        cuda = device.type == "cuda"
        self.device = device
        self._saving, self._restoring, self._placing = (torch.cuda.Stream(device) if cuda else None for _ in range(3))
        self._leaving, self._arriving = (
            torch.empty((staged, *page), dtype=self._word, device=device) for _ in range(2)
        )
        """Staged pages, [B, 2, N, W]. Half of those that arrive are on the bus while the others go to their places."""
        self._placed = [torch.cuda.Event() for _ in range(2)] if cuda else []
        """Of each half: its pages are in the pools, so others may arrive."""
        try:
            self._host = torch.empty((num_pages, *page), dtype=self._word)
            if cuda:
                self._pin()
        except (RuntimeError, torch.cuda.CudaError) as error:
            size = num_pages * self.page_bytes / 2**30
            raise ConfigError(f"the host has no {size:.1f} GiB for --prefix-cache-host-gib: {error}") from None
        self.bytes_per_s = self._measured_rate()
        """From the host to the device, alone on the bus."""

    def _pin(self) -> None:
        """In place: torch's own pinned memory comes in powers of two, which may be twice as much."""
        address = self._host.data_ptr()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, self._host.nbytes, 0))
        weakref.finalize(self, _unpin, address, (self._saving, self._restoring)).atexit = False

    @torch.inference_mode()
    def _measured_rate(self) -> float:
        for _ in range(2):  # the first one is slower
            with self._launching(self._restoring, len(self._arriving)) as transfer:
                for slot, page in enumerate(self._arriving):
                    page.copy_(self._host[slot], non_blocking=True)
            transfer.wait()
        return transfer.num_bytes / max(transfer.seconds, 1e-9)

    @torch.inference_mode()
    def save(self, pools: Sequence[Tensor], pages: list[int], places: list[int]) -> Transfer:
        """Copy pages of the pools, as all that is launched so far leaves them, to places in the host's memory."""
        if self._saving is not None:
            self._saving.wait_stream(torch.cuda.current_stream(self.device))
        with self._launching(self._saving, len(pages)) as transfer:
            for index, staged, copies in self._parts([self._leaving], pages, places):
                for half, pool in enumerate(pools):
                    torch.index_select(self._by_page(pool), 0, index, out=staged[:, half])
                for host, device in copies:
                    host.copy_(device, non_blocking=True)
        return transfer

    @torch.inference_mode()
    def restore(
        self, pools: Sequence[Tensor], pages: list[int], places: list[int], after: torch.cuda.Event | None
    ) -> Transfer:
        """Copy places in the host's memory to pages of the pools, which are written once the device has
        passed `after`."""
        with self._launching(self._restoring, len(pages)) as transfer:
            if self._placing is not None and after is not None:
                self._placing.wait_event(after)
            halves = self._arriving.chunk(2)
            for turn, (index, staged, copies) in enumerate(self._parts(halves, pages, places)):
                with self._arriving_at(turn % len(halves)):
                    for host, device in copies:
                        device.copy_(host, non_blocking=True)
                with torch.cuda.stream(self._placing):
                    for half, pool in enumerate(pools):
                        self._by_page(pool).index_copy_(0, index, staged[:, half])
                    if self._placing is not None:
                        self._placed[turn % len(halves)].record()
            if self._restoring is not None and self._placing is not None:
                self._restoring.wait_stream(self._placing)
        return transfer

    @contextmanager
    def _arriving_at(self, half: int) -> Iterator[None]:
        """Copies to one half of the staged pages: behind what was there, and before what is launched next to place
        them."""
        if self._restoring is not None:
            self._restoring.wait_event(self._placed[half])
        yield
        if self._restoring is not None and self._placing is not None:
            self._placing.wait_stream(self._restoring)

    @contextmanager
    def _launching(self, stream: torch.cuda.Stream | None, num_pages: int) -> Iterator[Transfer]:
        with torch.cuda.stream(stream):
            transfer = Transfer(num_pages * self.page_bytes, stream)
            yield transfer
            transfer.end()

    def _parts(
        self, buffers: Sequence[Tensor], pages: list[int], places: list[int]
    ) -> Iterator[tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]]:
        """As many pages as a buffer holds at a time, the buffers by turns: their index [B] in the pools, their part of
        the buffer, and which pieces of the host's memory and of that part belong together."""
        numbers = torch.tensor(pages, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        index = numbers.to(self.device, non_blocking=True)
        first = 0
        for buffer in itertools.cycle(buffers):
            if first >= len(pages):
                return
            part = places[first : first + len(buffer)]
            staged = buffer[: len(part)]
            copies = [
                (self._host[part[at] - 1 : part[at] - 1 + count], staged[at : at + count]) for at, count in runs(part)
            ]
            yield index[first : first + len(part)], staged, copies
            first += len(part)

    def _by_page(self, pool: Tensor) -> Tensor:
        """Keys or values of all layers, [N, P S, K, D], as [P, N, W] words."""
        words = pool.flatten(1).view(self._word)
        return words.view(len(words), -1, self._leaving.shape[-1]).transpose(0, 1)

    def fence(self) -> None:
        """What this thread launches from now on runs behind all copies, those of a launch that failed too."""
        for stream in (self._saving, self._restoring, self._placing):
            if stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(stream)

    def note(self, places: list[int]) -> None:
        """These are saved now."""
        if self._checksums is not None:
            self._checksums.update((place, self._checksum(place)) for place in places)

    def intact(self, places: list[int]) -> int:
        """How many of them, from the first, are as they were saved; all, if nothing is checked."""
        sums = self._checksums
        if sums is None:
            return len(places)
        return next((n for n, place in enumerate(places) if sums[place] != self._checksum(place)), len(places))

    def _checksum(self, place: int) -> int:
        return zlib.crc32(self._host[place - 1].numpy().data)
