"""The MovieLens example on a generated log of the same columns, and the checkpoint that is shipped with it."""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "movielens"
sys.path.insert(0, str(EXAMPLE))  # its scripts import each other by their plain names

pytest.importorskip("sklearn")
import baselines  # noqa: E402
import catalog  # noqa: E402
import data  # noqa: E402
import demo  # noqa: E402
import metrics  # noqa: E402
import train  # noqa: E402
from model import ExactScorer, new_model  # noqa: E402

from widebeam import Client  # noqa: E402

MOVIES = 40
MICRO = train.Recipe(
    codes=8, embedding_dim=8, hidden=32, layers=2, heads=2, kv_heads=1, mlp=48, max_items=6, epochs=3, validations=2
)


def write_log(folder: Path, seed: int = 0, swap_last: int = 0) -> Path:
    """24 users walk through 40 movies in steps of 1 to 3. `swap_last` replaces each user's last events by others."""
    rng = np.random.default_rng(seed)
    events = []
    for user in range(1, 25):
        walk = (rng.integers(MOVIES) + np.cumsum(rng.integers(1, 4, rng.integers(6, 12)))) % MOVIES + 1
        if swap_last:
            walk[-swap_last:] = (walk[-swap_last:] + 17) % MOVIES + 1
        clock = np.cumsum(rng.integers(0, 2, len(walk)))  # some events share a time stamp
        events += [f"{user}\t{movie}\t4\t{880000000 + time}" for movie, time in zip(walk, clock, strict=True)]
    movies = [f"{movie}\tMovie {movie}, The\t{1950 + movie}\tDrama War" for movie in range(1, MOVIES + 1)]
    (folder / data.LOG_FILE).write_text("\n".join(["\t".join(data.LOG_COLUMNS), *events]) + "\n")
    (folder / data.MOVIE_FILE).write_text("\n".join(["\t".join(data.MOVIE_COLUMNS), *movies]) + "\n")
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> data.Log:
    return data.load(write_log(tmp_path_factory.mktemp("log")))


@pytest.fixture(scope="module")
def trained(log: data.Log, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A micro training run: the folder with checkpoint/, sids.csv, metrics.json and, for once, the catalog."""
    folder = tmp_path_factory.mktemp("trained")
    train.run(log, MICRO, folder, folder)
    return folder


def test_files_are_parsed_and_sorted_by_time_then_line(tmp_path: Path) -> None:
    rows = ["7\t3\t5\t30", "9\t1\t1\t5", "7\t2\t3\t10", "7\t1\t3\t30", "9\t2\t1\t5", "9\t3\t2\t4", "7\t4\t1\t20"]
    write_log(tmp_path)
    (tmp_path / data.LOG_FILE).write_text("\n".join(["\t".join(data.LOG_COLUMNS), *rows]) + "\n")
    log = data.load(tmp_path)
    assert log.movies[1] == data.Movie(2, "Movie 2, The", "1952", ["Drama", "War"])
    assert log.users == ["7", "9"]
    assert [[log.movies[row].item_id for row in history] for history in log.histories] == [[2, 4, 3, 1], [3, 1, 2]]
    assert [times.tolist() for times in log.times] == [[10, 20, 30, 30], [4, 5, 5]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["1\t1\t5\t30", "1\t99\t5\t31"], "line 3: item 99 is not in ml-100k.item"),
        (["1\t1\t5\t30", "1\t2\t5"], "line 3: 3 fields instead of 4"),
        (["1\t1\t5\t30", "1\t2\t5\t31"], "user 1 has 2 events"),
    ],
)
def test_a_bad_log_is_refused(tmp_path: Path, rows: list[str], message: str) -> None:
    write_log(tmp_path)
    (tmp_path / data.LOG_FILE).write_text("\n".join(["\t".join(data.LOG_COLUMNS), *rows]) + "\n")
    with pytest.raises(ValueError, match=message):
        data.load(tmp_path)


def test_other_columns_are_refused(tmp_path: Path) -> None:
    write_log(tmp_path)
    (tmp_path / data.LOG_FILE).write_text("user\titem\n")
    with pytest.raises(ValueError, match="expected the columns"):
        data.load(tmp_path)


def test_fetch_takes_two_files_out_of_the_wheel_and_installs_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "wheels", tmp_path / "data"
    source.mkdir()
    write_log(source)
    with zipfile.ZipFile(source / "recbole-1.2.1-py3-none-any.whl", "w") as wheel:
        for name in (data.LOG_FILE, data.MOVIE_FILE):
            wheel.write(source / name, data.MEMBERS + name)
        info = "recbole-1.2.1.dist-info/"
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: recbole\nVersion: 1.2.1\n")
        wheel.writestr(
            info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(info + "RECORD", "")
    data.fetch(target, ["--no-index", "--find-links", str(source)])
    assert sorted(path.name for path in target.iterdir()) == [data.LOG_FILE, data.MOVIE_FILE]
    assert (target / data.LOG_FILE).read_bytes() == (source / data.LOG_FILE).read_bytes()
    with pytest.raises(SystemExit, match="could not download recbole"):
        data.fetch(tmp_path / "other", ["--no-index"])


def test_nothing_that_is_learnt_depends_on_the_held_out_events(log: data.Log, tmp_path: Path) -> None:
    other = data.load(write_log(tmp_path, swap_last=2))
    assert any((one != two).any() for one, two in zip(log.histories, other.histories, strict=True))
    for one, two in zip(log.train(), other.train(), strict=True):
        np.testing.assert_array_equal(one, two)
    for one, two in zip(train.plan(log, MICRO), train.plan(other, MICRO), strict=True):
        np.testing.assert_array_equal(np.concatenate(one), np.concatenate(two))
    histories, targets = log.test()
    for history, target, known, whole in zip(histories, targets, log.validation()[0], log.histories, strict=True):
        assert [*history, target] == whole.tolist()
        assert history[:-1].tolist() == known.tolist()


def test_popularity_and_knn_equal_naive_loops(log: data.Log) -> None:
    sets = [set(history.tolist()) for history in log.train()]
    has = [{user for user, items in enumerate(sets) if item in items} for item in range(MOVIES)]
    np.testing.assert_array_equal(baselines.most_popular(log.train(), MOVIES), [len(users) for users in has])

    knn = baselines.ItemKnn.fit(log.train(), MOVIES, neighbours=5, recent=3)
    similarity = np.zeros((MOVIES, MOVIES))
    for one in range(MOVIES):
        for two in range(MOVIES):
            if one != two and has[one] & has[two]:
                similarity[one, two] = len(has[one] & has[two]) / math.sqrt(len(has[one]) * len(has[two]))
    expected = np.zeros((len(sets), MOVIES))
    for user, history in enumerate(log.test()[0]):
        for item in history[-3:].tolist():
            best = sorted(range(MOVIES), key=lambda other: (-similarity[item, other], other))[:5]
            for other in best:
                expected[user, other] += similarity[item, other]
    np.testing.assert_allclose(knn.scores(log.test()[0]), expected, atol=1e-12)


def test_metrics_by_hand() -> None:
    assert metrics.target_rank([5, 1, 7, 2], seen=[1, 5], target=2) == 1
    assert metrics.target_rank([5, 1], seen=[], target=2) == metrics.MISSING
    ranks = np.array([0, 2, 9, 10, metrics.MISSING])
    assert metrics.recall(ranks, 10) == pytest.approx(3 / 5)
    assert metrics.ndcg(ranks, 10) == pytest.approx((1 + 1 / 2 + 1 / math.log2(11)) / 5)
    assert metrics.rankings_of(np.array([[0.1, 0.9, 0.9, 0.5]])) == [[1, 2, 3, 0]]
    assert metrics.summary(np.array([0, metrics.MISSING])) == {"recall@10": 0.5, "ndcg@10": 0.5}


def test_windows_hold_every_training_event_once_and_in_order(log: data.Log) -> None:
    recipe = train.Recipe(max_items=4, skip=0.0, batch=8)
    parts = [part for batch in train.windows(log, recipe, np.random.default_rng(3)) for part in batch]
    assert {len(part) for part in parts} <= {1, 2, 3, 4}
    events = sorted(np.concatenate(parts).tolist())
    assert events == sorted(np.concatenate(log.train()).tolist())
    walks = {tuple(history[start:].tolist()) for history in log.train() for start in range(len(history))}
    strict = data.Log(log.movies, log.users, log.histories, [np.arange(len(times)) for times in log.times])
    for batch in train.windows(strict, recipe, np.random.default_rng(3)):
        assert all(any(walk[: len(part)] == tuple(part.tolist()) for walk in walks) for part in batch)


def test_exact_scores_equal_one_forward_pass_per_item(log: data.Log) -> None:
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    tokenizer = catalog.build_tokenizer([5, 4, 6])
    model = new_model(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, mlp=48, positions=64).eval()
    token_ids = rng.integers([4, 9, 13], [9, 13, 19], (30, 3))
    prompts = [[3, *rng.integers(4, 19, length).tolist()] for length in (2, 9, 0, 5)]
    found = ExactScorer(token_ids)(model, prompts, batch=3)
    for prompt, scores in zip(prompts, found, strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + sid.tolist() for sid in token_ids])).logits
        for item, sid in enumerate(token_ids):
            expected = 0.0
            for level in range(3):
                book = np.unique(token_ids[:, level])
                logprobs = logits[item, len(prompt) - 1 + level, book].log_softmax(dim=-1)
                expected += float(logprobs[book.tolist().index(sid[level])])
            assert scores[item] == pytest.approx(expected, abs=1e-4)


def test_training_leaves_a_plain_hugging_face_folder(log: data.Log, trained: Path) -> None:
    names = {path.name for path in (trained / "checkpoint").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    model = AutoModelForCausalLM.from_pretrained(trained / "checkpoint")
    assert model.dtype == torch.bfloat16 and model.config.model_type == "qwen3"
    result = json.loads((trained / "metrics.json").read_text())
    assert result["recipe"]["max_items"] == 6
    assert set(result["test"]) >= {"WideBeam model", "most popular"}
    assert 1 <= result["validation"]["epoch"] <= MICRO.epochs
    prompts = train.Prompts(log, trained / "movies.jsonl", trained / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(trained / "checkpoint")
    sids = catalog.read_sids(trained / "sids.csv")
    text = "".join([catalog.HISTORY, *(token for row in (4, 0, 9) for token in sids[row + 1])])
    assert prompts(np.array([4, 0, 9])) == tokenizer.encode(text, add_special_tokens=False)
    assert prompts(np.arange(30)) == prompts(np.arange(24, 30))  # the newest six


def test_one_seed_gives_the_same_weights(log: data.Log, trained: Path, tmp_path: Path) -> None:
    train.run(log, MICRO, tmp_path, tmp_path)
    for name in ("sids.csv", "checkpoint/model.safetensors", "checkpoint/tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes(), name


def test_the_served_model_ranks_as_the_exact_scores_do(
    log: data.Log, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with demo.serving(trained / "checkpoint", trained / "movies.jsonl", "cpu") as url:
        demo.show(log, url, ["3", "11"])
        served = asyncio.run(demo.evaluate(log, url))
        told = demo.how_to_go_on(log, trained / "movies.jsonl")
        body = json.loads(re.findall(r"curl -s localhost:8000/v1/recommend -d '(.*)'", told)[0])
        with Client(url) as client:
            answer = client.recommend(**body)
    assert answer.warnings == [] and len(answer.items) == len(body["history"]) == 3
    assert f"serve {EXAMPLE.relative_to(demo.REPOSITORY) / 'checkpoint'} --catalog" in told
    exact = json.loads((trained / "metrics.json").read_text())["test"]["WideBeam model"]
    assert served == pytest.approx(exact, abs=1e-3)
    assert served["recall@10"] > 0
    shown = capsys.readouterr().out
    newest = log.movies[log.histories[log.users.index("3")][-2]]
    assert "User 3" in shown and "User 11" in shown and f"{newest.title} ({newest.year})" in shown


def test_the_shipped_files_fit_together() -> None:
    folder = EXAMPLE / "checkpoint"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 5 << 20
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    sids = catalog.read_sids(EXAMPLE / "sids.csv")
    assert len(sids) == 1682 and len(set(map(tuple, sids.values()))) == 1682
    vocabulary = tokenizer.get_vocab()
    assert all(vocabulary[token] < model.config.vocab_size for sid in sids.values() for token in sid)
    result = json.loads((EXAMPLE / "metrics.json").read_text())
    for name in ("recall@10", "ndcg@10"):
        assert result["test"]["WideBeam model"][name] > result["test"]["most popular"][name]
