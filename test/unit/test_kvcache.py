"""Pages, prefix cache and their accounting."""

import random

import pytest

from truespec.core import Req
from truespec.kvcache import KVCache
from truespec.params import SamplingParams


def make_cache(num_pages=32, page_size=4, lookahead=0, enable_prefix=True, max_rows=8):
    return KVCache(
        num_pages=num_pages,
        page_size=page_size,
        max_rows=max_rows,
        max_tokens=64,
        lookahead=lookahead,
        enable_prefix=enable_prefix,
    )


def make_req(ids, rid="r"):
    return Req(rid=rid, prompt_ids=list(ids), params=SamplingParams(), stop_ids=frozenset())


def admit(cache, req):
    assert cache.try_admit(req, max_hit=req.num_tokens - 1, num_tokens=req.num_tokens)
    return req


def test_a_finished_prompt_is_found_again_up_to_its_last_full_page():
    cache = make_cache()
    first = admit(cache, make_req(range(10)))
    pages = list(first.pages)
    first.num_computed = 10
    cache.release(first, keep=True)
    second = admit(cache, make_req(range(10)))
    assert second.num_computed == 8
    assert second.pages[:2] == pages[:2]
    third = admit(cache, make_req([*range(6), 99, 98, 97]))
    assert third.num_computed == 4


def test_a_hit_never_covers_the_last_known_token():
    cache = make_cache()
    first = admit(cache, make_req(range(8)))
    first.num_computed = 8
    cache.release(first, keep=True)
    assert admit(cache, make_req(range(8))).num_computed == 4


def test_lookahead_keys_a_page_by_the_tokens_after_it():
    cache = make_cache(lookahead=2)
    first = admit(cache, make_req(range(10)))
    first.num_computed = 10
    cache.release(first, keep=True)
    assert cache.prefix.num_pages == 2
    assert admit(cache, make_req([*range(8), 8, 77, 1])).num_computed == 4
    assert admit(cache, make_req([*range(8), 8, 9, 1])).num_computed == 8


def test_two_requests_with_one_prompt_end_up_on_the_same_pages():
    cache = make_cache()
    first, second = admit(cache, make_req(range(9))), admit(cache, make_req(range(9)))
    assert set(first.pages).isdisjoint(second.pages)
    for req in (first, second):
        req.num_computed = 9
        cache.share(req, 9)
    assert first.pages[:2] == second.pages[:2]
    assert cache.page_table[second.row, :2].tolist() == first.pages[:2]
    assert cache.allocator.num_free == 32 - 2 - 2
    for req in (first, second):
        cache.release(req, keep=True)
    cache.check_idle()


def test_without_keep_nothing_enters_the_cache():
    cache = make_cache()
    req = admit(cache, make_req(range(9)))
    req.num_computed = 9
    cache.release(req, keep=False)
    assert cache.prefix.num_pages == 0
    cache.check_idle()


def test_locked_pages_are_not_evicted_and_idle_ones_are_least_recent_first():
    cache = make_cache(num_pages=4)
    old = admit(cache, make_req(range(4)))
    old.num_computed = 4
    cache.release(old, keep=True)
    new = admit(cache, make_req(range(10, 14)))
    new.num_computed = 4
    cache.release(new, keep=True)
    user = admit(cache, make_req([*range(10, 14), 1]))
    assert cache.num_available == 2
    assert cache.try_grow(user, 16)
    assert cache.prefix.num_pages == 1
    assert not cache.try_grow(user, 17)
    cache.release(user, keep=False)
    cache.check_idle()


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("enable_prefix", [True, False])
def test_random_traffic_loses_no_page(lookahead, enable_prefix):
    rng = random.Random(5)
    cache = make_cache(num_pages=24, lookahead=lookahead, enable_prefix=enable_prefix)
    running: list[Req] = []
    for step in range(3000):
        action = rng.random()
        if action < 0.4:
            req = make_req([rng.randrange(2) for _ in range(rng.randrange(1, 30))], f"r{step}")
            if cache.try_admit(req, max_hit=req.num_tokens - 1, num_tokens=req.num_tokens + 1):
                assert req.num_computed < req.num_tokens
                running.append(req)
        elif running and action < 0.7:
            req = rng.choice(running)
            if cache.try_grow(req, req.num_tokens + 1) and req.num_tokens < 60:
                req.num_computed = req.num_tokens
                req.output_ids.append(rng.randrange(2))
                if rng.random() < 0.3:
                    cache.share(req, req.num_computed)
        elif running:
            cache.release(running.pop(rng.randrange(len(running))), keep=rng.random() < 0.7)
        shared = {page for req in running for page in req.pages[: req.num_shared_pages]}
        own = [page for req in running for page in req.pages[req.num_shared_pages :]]
        assert len(own) == len(set(own))
        assert not shared & set(own)
        assert cache.allocator.num_free + cache.prefix.num_pages + len(own) == 24
        assert cache.prefix.num_idle_pages == cache.prefix.num_pages - len(shared)
    for req in running:
        cache.release(req, keep=True)
    cache.check_idle()
    cache.flush()
    assert cache.allocator.num_free == 24
