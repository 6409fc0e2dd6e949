"""Copies between the device's pages and the host's that are on their way, and the pages that they hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from widebeam.kv.context import ContextLease, PagePool
from widebeam.kv.copies import Transfer
from widebeam.kv.eviction import CachedPage


@dataclass(eq=False)
class Flight:
    """Some pages of one prompt on their way, held at both ends."""

    transfer: Transfer
    device: ContextLease
    host: ContextLease
    fresh: list[CachedPage]
    """Those that it writes: of the host's memory, or of the device."""
    restores: bool


class Flights:
    """Those between two pools."""

    def __init__(self, device: PagePool, host: PagePool) -> None:
        self._device, self._host = device, host
        self._flights: list[Flight] = []
        self._writing: dict[CachedPage, Transfer] = {}

    def __bool__(self) -> bool:
        return bool(self._flights)

    def __contains__(self, page: CachedPage) -> bool:
        """Whether one of them writes this page, at either end."""
        return page in self._writing

    @property
    def device_pages(self) -> int:
        """Pages of the device that they hold."""
        return len({page for flight in self._flights for page in flight.device.pages})

    @property
    def saving(self) -> int:
        """Pages that leave the device."""
        return sum(len(flight.fresh) for flight in self._flights if not flight.restores)

    def add(self, flight: Flight) -> None:
        self._flights.append(flight)
        self._writing.update(dict.fromkeys(flight.fresh, flight.transfer))

    def precede(self, leases: Iterable[ContextLease]) -> None:
        """What this thread launches from now on runs behind those that write pages of these leases."""
        if self._writing:
            pages = [page for lease in leases for page in lease.shared if page in self._writing]
            for transfer in dict.fromkeys(self._writing[page] for page in pages):
                transfer.precede()

    def wait(self) -> None:
        """Until all are over."""
        for flight in self._flights:
            flight.transfer.wait()

    def over(self) -> list[Flight]:
        """Those that are: they hold nothing any more, and are returned once. Waits for none."""
        flights, self._flights = self._flights, []
        done: list[Flight] = []
        for flight in flights:
            (done if flight.transfer.done else self._flights).append(flight)
        for flight in done:
            for page in flight.fresh:
                del self._writing[page]
            self._device.release(flight.device)
            self._host.release(flight.host)
        return done

    def check_integrity(self) -> None:
        """They hold what they say, and nothing else holds pages of the host. Raises RuntimeError."""
        if self._host.leases != {flight.host for flight in self._flights}:
            raise RuntimeError("pages of the host's memory are held, but by no copy")
        if not self._device.leases >= {flight.device for flight in self._flights}:
            raise RuntimeError("a copy holds pages of the device no more")
        fresh = [page for flight in self._flights for page in flight.fresh]
        if len(fresh) != len(self._writing) or set(fresh) != set(self._writing):
            raise RuntimeError(f"{len(self._writing)} pages are said to be written, but copies write {len(fresh)}")
