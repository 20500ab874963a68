"""The cases SC-*, KV-* and PR-* that show over HTTP: company, cached prefixes, making room.

docs/cases.md says what each case is about. ``tight`` has room for 512 tokens and twelve sequences; a salt of its own
keeps a request from what others left in the cache.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

GREEDY = {"temperature": 0}
HELLO = [{"role": "user", "content": "Hello"}]
SALT = (f"salt {number}" for number in itertools.count())


def together(server, bodies):
    """Return the bodies of answers that were asked for at the same time."""

    def one(body):
        reply = httpx.post(f"{server.url}/v1/completions", json={"model": "smollm2-135m", **body}, timeout=100)
        assert reply.status_code == 200, reply.text
        return reply.json()

    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(one, bodies))


def metric(server, name):
    """Return the sum of a metric over its labels."""
    lines = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def assert_idle(server):
    """Check that nothing holds memory; what is cached can be had."""
    assert metric(server, "slotline:kv_blocks_active") == 0
    assert metric(server, "slotline:num_requests_running") == metric(server, "slotline:num_requests_waiting") == 0


def numbered(count, length, **fields):
    """Return bodies whose prompts have nothing in common."""
    return [
        {"prompt": list(range(1000 + i * length, 1000 + (i + 1) * length)), **GREEDY, **fields} for i in range(count)
    ]


def test_sc_01_what_never_fits_is_refused_and_blocks_nobody(tight):
    error = tight.refused("completions", prompt=[260] * 600, max_tokens=8)
    assert error["code"] == "context_length_exceeded"
    tight.assert_alive()


def test_sc_04_more_than_memory_holds_all_end(tight):
    bodies = numbered(30, 20, max_tokens=20, ignore_eos=True)
    found = together(tight, bodies)
    assert [body["usage"]["completion_tokens"] for body in found] == [20] * 30
    assert_idle(tight)


def test_sc_05_answers_do_not_mix(server):
    asked = [{"prompt": f"Repeat the word W{t}:", "logit_bias": {str(t): 100}} for t in range(49, 65)]
    found = together(server, [{**body, "max_tokens": 12, **GREEDY} for body in asked])
    for token, body in zip(range(49, 65), found, strict=True):
        (choice,) = body["choices"]
        assert choice["text"] == chr(ord("A") + token - 49) * 12 and choice["finish_reason"] == "length"


def test_sc_07_prompts_of_one_list_run_together(server):
    prompts = ["The capital of France is", "1, 2, 3, 4, 5, 6,", "Here is the English alphabet: ABC", "Once upon a time"]
    before = metric(server, "slotline:engine_steps_total")
    found = server.post("completions", prompt=prompts, max_tokens=20, ignore_eos=True, **GREEDY).json()
    steps = metric(server, "slotline:engine_steps_total") - before
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3] and steps < 2 * 20
    assert found["usage"]["completion_tokens"] == 80


@pytest.mark.parametrize("length", [15, 16, 17, 32, 64])
def test_kv_01_a_prompt_of_whole_blocks_comes_from_the_cache(tight, length):
    salt = next(SALT)
    asked = {"prompt": list(range(1000, 1000 + length)), "max_tokens": 4, "cache_salt": salt, **GREEDY}
    found = [tight.ask("completions", **asked) for _ in range(3)]
    assert len({answer.text for answer in found}) == 1
    cached = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in found]
    assert cached[0] == 0 and all(0 <= count <= length - 1 for count in cached)
    assert (cached[1] > 0) == (length > 16)


@pytest.mark.parametrize(("length", "max_tokens"), [(15, 0), (16, 4), (33, 0), (64, 4)])
def test_kv_02_scores_do_not_come_from_the_cache(tight, length, max_tokens):
    salt = next(SALT)
    prompt = list(range(1000, 1000 + length))
    tight.ask("completions", prompt=[*prompt[:16], 7, 8], max_tokens=1, cache_salt=salt)
    asked = {"prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 1, "cache_salt": salt, **GREEDY}
    first, second = (tight.ask("completions", **asked) for _ in range(2))
    values, again = first.logprobs["token_logprobs"], second.logprobs["token_logprobs"]
    assert values[0] is again[0] is None and len(values) == len(again) == length + max_tokens
    assert again[1:] == pytest.approx(values[1:], abs=1e-4)


def test_kv_04_a_block_is_found_by_all_that_came_before_it(tight):
    x, z, y = ([*range(low, low + 16)] for low in (1000, 1016, 1032))
    salt = next(SALT)
    for prompt in (x + y, z + y, y, x + y):
        asked = {"prompt": prompt, "max_tokens": 4, **GREEDY}
        cold = tight.ask("completions", **asked, cache_salt=next(SALT))
        assert tight.ask("completions", **asked, cache_salt=salt).text == cold.text


def test_kv_06_a_second_turn_from_the_cache_is_the_cold_one(server):
    salt = next(SALT)
    first = server.ask("chat", messages=HELLO, max_tokens=30, cache_salt=salt, **GREEDY)
    turns = [*HELLO, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Name a colour."}]
    warm = server.ask("chat", messages=turns, max_tokens=12, cache_salt=salt, **GREEDY)
    cold = server.ask("chat", messages=turns, max_tokens=12, cache_salt=next(SALT), **GREEDY)
    assert warm.text == cold.text
    cached = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in (warm, cold)]
    assert cached[0] > 0 and cached[1] == 0


def test_kv_06_a_session_pays_for_its_new_tokens_only(server):
    body = {"session_id": 77, "interactive_mode": True, "request_output_len": 30, **GREEDY}

    def say(prompt):
        reply = server.http.post("/v1/chat/interactive", json={**body, "prompt": prompt})
        assert reply.status_code == 200, reply.text
        return reply.json()

    first, second = say("Hello"), say("Name a colour.")
    assert first["history_tokens"] == 0 and second["history_tokens"] >= first["input_tokens"] + first["tokens"] - 1
    assert second["cached_tokens"] >= (first["input_tokens"] + first["tokens"]) // 16 * 16 - 16 > 0
    assert second["input_tokens"] < 20


def test_kv_08_another_salt_shares_nothing(tight):
    asked = {"prompt": list(range(2000, 2064)), "max_tokens": 1, **GREEDY}
    found = [tight.ask("completions", **asked, cache_salt=salt) for salt in ("tenant-a", "tenant-a", "tenant-b")]
    cached = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in found]
    assert cached[0] == cached[2] == 0 < cached[1] and len({answer.text for answer in found}) == 1


def test_kv_09_nothing_is_lost_in_a_mixed_crowd(tight):
    bodies = [
        {"prompt": [1000 + (i * 37 + j) % 300 for j in range(5 + i * 7 % 110)], "max_tokens": 1 + i * 11 % 24,
         "n": 3 if i % 5 == 0 else 1, "stop": ["e"] if i % 3 == 0 else None, "seed": i}
        for i in range(28)
    ]  # fmt: skip

    def one(body):
        with httpx.stream(
            "POST", f"{tight.url}/v1/completions", json={"model": "smollm2-135m", **body, "stream": True}, timeout=100
        ) as reply:
            lines = reply.iter_lines()
            for _ in range(2 if body["seed"] % 5 == 1 else 10**6):  # a fifth hang up after two lines
                if next(lines, None) is None:
                    return

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(one, bodies))
    answer = tight.ask("completions", prompt=[260] * 248, max_tokens=8)
    assert answer.tokens >= 1
    assert_idle(tight)
    tight.assert_alive()


def test_pr_01_answers_that_made_room_are_those_that_need_not(server, tight):
    bodies = numbered(9, 20, max_tokens=60, ignore_eos=True)
    before = metric(tight, "slotline:num_preemptions_total")
    found = together(tight, bodies)
    assert metric(tight, "slotline:num_preemptions_total") > before
    alone = [server.ask("completions", **body) for body in bodies[::5]]
    assert [body["choices"][0]["text"] for body in found[::5]] == [answer.text for answer in alone]
    assert all(body["usage"]["completion_tokens"] == 60 for body in found)


def test_pr_04_logprobs_outlive_making_room(server, tight):
    bodies = numbered(6, 64, max_tokens=40, ignore_eos=True, logprobs=1, echo=True)
    before = metric(tight, "slotline:num_preemptions_total")
    found = together(tight, bodies)
    assert metric(tight, "slotline:num_preemptions_total") > before
    for body, answer in zip(bodies[::3], found[::3], strict=True):
        values = answer["choices"][0]["logprobs"]["token_logprobs"]
        calm = server.ask("completions", **body).logprobs["token_logprobs"]
        assert len(values) == len(calm) == 104 and values[1:] == pytest.approx(calm[1:], abs=1e-3)


def test_pr_05_a_shared_prefix_and_little_room(tight):
    shared = list(range(1000, 1064))
    bodies = [{"prompt": [*shared, 2000 + i], "max_tokens": 20, "ignore_eos": True, **GREEDY} for i in range(24)]
    assert all(body["usage"]["completion_tokens"] == 20 for body in together(tight, bodies))
    assert_idle(tight)
