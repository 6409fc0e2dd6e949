"""Random requests of every dialect, and whether two answers to one of them agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

EPS = 1e-4
"""How far scores in float32 may lie apart."""
VOCABULARY = 59
MAX_WIDTH = 64
ROUTES = ("/v1/recommend", "/generate", "/v1/chat/completions")
_ID_FIELDS = dict(zip(ROUTES, ("request_id", "rid", "rid"), strict=True))


@dataclass
class Case:
    """One HTTP request and what becomes of its client."""

    name: str
    route: str
    body: dict[str, Any]
    fate: str
    """stays, leaves, aborted (by another client), late (its deadline may pass), wrong or flood (answered `refusal`)."""
    refusal: int = 0
    searches: int = 1

    def named(self, name: str) -> dict[str, Any]:
        """The body under a name, which comes back in the answer."""
        return self.body | {_ID_FIELDS[self.route]: name}

    @property
    def search_ids(self) -> list[str]:
        """Request ids of its searches in the engine."""
        return [self.name] if self.searches == 1 else [f"{self.name}_{index}" for index in range(self.searches)]


FATES = {"stays": 0.57, "leaves": 0.16, "aborted": 0.08, "late": 0.12, "wrong": 0.05, "flood": 0.02}


def random_cases(seed: int, count: int, items: list[str], limit: int) -> list[Case]:
    """Any dialect, prompt, width, levels, policy, catalog, filters and priority. `limit`: searches at a time."""
    rng = np.random.default_rng(seed)
    makers: list[Callable[..., Case]] = [_recommend, _recommend, _generate, _generate, _generate, _chat]
    fates = rng.choice(list(FATES), size=count, p=list(FATES.values()))
    cases = [makers[int(rng.integers(len(makers)))](rng, f"case{index}", items) for index in range(count)]
    for case, fate in zip(cases, fates.tolist(), strict=True):
        case.fate = fate
        case.body["priority"] = int(rng.integers(-3, 4))
        if fate == "late":
            case.body["timeout_ms"] = int(10 ** rng.uniform(0, 3))
        elif fate == "wrong":
            field_name, value, case.refusal = _WRONG[int(rng.integers(len(_WRONG)))]
            case.body[field_name] = value
        elif fate == "flood":
            case.route, case.refusal = "/generate", 429
            case.body = {"input_ids": [[7]] * (limit + 1), "sampling_params": {"n": 2}, "catalog": "other"}
    return cases


_WRONG: list[tuple[str, Any, int]] = [
    ("catalog", "no-such-catalog", 404),
    ("wdith", 4, 400),
    ("timeout_ms", 0, 400),
    ("policy", {"name": "no-such-policy"}, 400),
]


def _prompt(rng: np.random.Generator) -> list[int]:
    longest = int(rng.choice([8, 40, 160]))
    tokens: list[int] = rng.integers(0, VOCABULARY, int(rng.integers(1, longest))).tolist()
    return tokens


def _width(rng: np.random.Generator) -> int:
    return int(2 ** rng.uniform(0, np.log2(MAX_WIDTH)))


def _catalog(rng: np.random.Generator) -> str:
    return str(rng.choice(["items", "items", "other"]))


def _recommend(rng: np.random.Generator, name: str, items: list[str]) -> Case:
    body: dict[str, Any] = {"catalog": _catalog(rng), "n": _width(rng)}
    kind = rng.integers(3)
    if kind == 0:
        body["history"] = rng.choice(items, int(rng.integers(1, 15))).tolist()
    elif kind == 1:
        body["prompt"] = " ".join(rng.choice(["watched", "a", "b", "<a_3>", "next"], int(rng.integers(1, 40))))
    else:
        body["input_ids"] = _prompt(rng)
    if rng.random() < 0.5:
        body["policy"] = {"name": "scheduled", "widths": [_width(rng), _width(rng), MAX_WIDTH]}
    if rng.random() < 0.4:
        some = rng.choice(items, int(rng.integers(1, 40)), replace=False).tolist()
        body["filters"] = {"deny" if rng.integers(2) else "allow": some}
    if rng.random() < 0.3:
        body["normalizer"] = str(rng.choice(["vocab", "level", "legal"]))
    return Case(name, "/v1/recommend", body, "stays")


def _generate(rng: np.random.Generator, name: str, items: list[str]) -> Case:
    width, batch = _width(rng) + 1, int(rng.choice([1, 1, 1, 2, 4]))
    params: dict[str, Any] = {"beam_width": width, "n": int(rng.integers(1, width + 1))}
    body: dict[str, Any] = {"catalog": "none", "sampling_params": params}
    kind = rng.integers(3)
    if kind == 0:
        body["catalog"] = _catalog(rng)
    elif kind == 1:
        params |= {"max_new_tokens": int(rng.integers(1, 9)), "ignore_eos": bool(rng.integers(2))}
    else:  # text, of the most probable tokens or drawn
        body["sampling_params"] = {"max_new_tokens": int(rng.integers(1, 26)), "temperature": 0, "ignore_eos": True}
        if rng.integers(2):
            body["sampling_params"] = {
                "max_new_tokens": int(rng.integers(1, 9)),
                "sampling_seed": int(rng.integers(99)),
            }
        body["return_logprob"], body["stream"] = True, int(name.removeprefix("case")) % 2 == 0
    body["input_ids"] = _prompt(rng) if batch == 1 else [_prompt(rng) for _ in range(batch)]
    return Case(name, "/generate", body, "stays", searches=batch)


def _chat(rng: np.random.Generator, name: str, items: list[str]) -> Case:
    words = " ".join(rng.choice(["a", "b", "watched", "<b_1>"], int(rng.integers(1, 20))))
    body = {"messages": [{"role": "user", "content": words}], "n": _width(rng) + 1, "catalog": _catalog(rng)}
    return Case(name, "/v1/chat/completions", body, "stays")


Ranking = list[tuple[Any, float]]
"""What came back, best first, with scores."""


def rankings(case: Case, answer: Any) -> list[Ranking]:
    """The ranking of each of the case's searches."""
    if case.route == "/v1/recommend":
        return [[(item["id"], item["score"]) for item in answer["items"]]]
    if case.route == "/generate":
        return [_generated(one) for one in (answer if case.searches > 1 else [answer])]
    return [[(c["message"]["content"], c["sglext"]["sequence_score"]) for c in answer["choices"]]]


def _generated(answer: Any) -> Ranking:
    meta = answer["meta_info"]
    if "beam_results" in meta:
        return [(tuple(b["output_ids"]), b["meta_info"]["sequence_score"]) for b in meta["beam_results"]]
    return [(tuple(answer["output_ids"]), sum(logprob for logprob, *_ in meta["output_token_logprobs"]))]


def same(found: list[Ranking], quiet: list[Ranking]) -> bool:
    """Whether two answers agree on each of their searches."""
    return all(_same(mine, other) for mine, other in zip(found, quiet, strict=True))


def _same(found: Ranking, quiet: Ranking) -> bool:
    """Equal scores, and the same sequences but for those that tie with each other or with the last."""
    if len(found) != len(quiet) or len(dict(found)) != len(found):
        return False
    scores = dict(quiet)
    at_each_place = all(abs(mine - other) <= EPS for (_, mine), (_, other) in zip(found, quiet, strict=True))
    return at_each_place and all(abs(score - scores.get(key, quiet[-1][1])) <= EPS for key, score in found)
