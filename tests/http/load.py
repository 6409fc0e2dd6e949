"""Clients that ask again and again while something happens to what they ask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tests.http.service import wait_until

Told = TypeVar("Told")
"""What a client takes down of an answer."""


@dataclass
class Load(Generic[Told]):
    """`ask` sends one request, given the number of the client and of its request; `leaves`: whether a client goes
    away behind such an answer."""

    ask: Callable[[int, int], Told]
    leaves: Callable[[Told], bool] = lambda told: False
    by_client: list[list[Told]] = field(default_factory=list)

    @property
    def answers(self) -> list[Told]:
        return [told for answers in self.by_client for told in answers]

    @contextmanager
    def running(self, clients: int) -> Iterator[Load[Told]]:
        """So many clients, until the end of the block."""
        over = threading.Event()

        def client(number: int, answers: list[Told]) -> None:
            while not over.wait(0.005) and not (answers and self.leaves(answers[-1])):
                answers.append(self.ask(number, len(answers)))

        self.by_client = [[] for _ in range(clients)]
        threads = [threading.Thread(target=client, args=each) for each in enumerate(self.by_client)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            over.set()
            for thread in threads:
                thread.join(60)

    def grows(self, count: int) -> None:
        """Wait for that many more answers."""
        wanted = len(self.answers) + count
        wait_until(lambda: len(self.answers) >= wanted, 30)
