"""What goes into a step: order within a group, budgets, turns between groups, deadlines."""

import pytest

from mstar.scheduler.base import Item, Ticket
from mstar.scheduler.default import DefaultScheduler
from mstar.scheduler.groups import GATHER, PATIENCE
from mstar.spec.deployment import SchedulerOptions

LM = ("lm", "forward", ())
CODEC = ("codec", "forward", ())


def scheduler(*items, limits=None, **options):
    s = DefaultScheduler(SchedulerOptions(**options), (limits or {}).get)
    for item in items:
        s.ready(item)
    return s


def decode(name, **kw):
    return Item(name, kw.pop("group", LM), decode=True, **kw)


def prefill(name, tokens, **kw):
    return Item(name, kw.pop("group", LM), tokens=tokens, chunkable=True, **kw)


def whole(name, tokens=1, **kw):
    return Item(name, kw.pop("group", LM), tokens=tokens, **kw)


def step(s, now=0.0):
    """The next batch as ``[(request, tokens)]``."""
    batch = s.next(now)
    return None if batch is None else [(i.request, n) for i, n in zip(batch.items, batch.tokens, strict=True)]


def advance(s, batch):
    """Hand in again what the step left undone, as a worker does."""
    for item, n in zip(batch.items, batch.tokens, strict=True):
        if n < item.tokens:
            item.tokens -= n
            s.ready(item)


def test_nothing_ready():
    assert scheduler().next(0.0) is None


def test_decodes_then_chunks_then_the_rest():
    s = scheduler(whole("w", 5), prefill("p", 20), decode("d"), max_step_tokens=100)
    assert step(s) == [("d", 1), ("p", 20), ("w", 5)]
    assert step(s) is None


def test_prefill_gets_what_decodes_leave():
    s = scheduler(prefill("p", 100), decode("a"), decode("b"), max_step_tokens=10)
    assert step(s) == [("a", 1), ("b", 1), ("p", 8)]


def test_a_lone_prefill_gets_the_whole_budget_and_a_cut_one_goes_on_first():
    s = scheduler(prefill("long", 25), prefill("short", 3), max_step_tokens=10)
    shares = []
    while (batch := s.next(0.0)) is not None:
        shares.append([(i.request, n) for i, n in zip(batch.items, batch.tokens, strict=True)])
        advance(s, batch)
    assert shares == [[("long", 10)], [("long", 10)], [("long", 5), ("short", 3)]]


def test_the_rest_of_a_call_may_come_as_a_new_item():
    call, other = object(), object()
    s = scheduler(prefill("a", 25, payload=call), prefill("b", 3), max_step_tokens=10)
    assert step(s) == [("a", 10)]
    s.ready(prefill("a", 7, payload=other))  # another call of the same request stands behind
    s.ready(prefill("a", 15, payload=call))
    assert step(s) == [("a", 10)]
    s.ready(prefill("a", 5, payload=call))
    assert step(s) == [("a", 5), ("b", 3), ("a", 2)]


def test_only_one_prefill_is_cut():
    s = scheduler(prefill("a", 6), prefill("b", 6), prefill("c", 6), max_step_tokens=10)
    assert step(s) == [("a", 6), ("b", 4)]


def test_rows_are_bounded():
    s = scheduler(*(decode(str(i)) for i in range(10)), max_step_rows=4)
    assert [len(step(s)) for _ in range(3)] == [4, 4, 2]


def test_a_node_may_have_a_lower_bound_of_rows():
    s = scheduler(*(decode(str(i)) for i in range(5)), limits={LM: 2}, max_step_rows=4)
    assert [len(step(s)) for _ in range(3)] == [2, 2, 1]


def test_too_large_and_not_to_be_cut_runs_alone():
    s = scheduler(whole("small", 4), whole("huge", 50), whole("small too", 4), max_step_tokens=10)
    assert [step(s) for _ in range(3)] == [[("small", 4)], [("huge", 50)], [("small too", 4)]]


def test_an_empty_chunk_of_a_stream_costs_a_row_but_no_tokens():
    s = scheduler(prefill("full", 10), prefill("empty", 0), max_step_tokens=10)
    assert step(s) == [("full", 10), ("empty", 0)]


def test_groups_do_not_mix():
    s = scheduler(decode("a"), decode("b", group=CODEC), decode("c"))
    assert step(s) == [("a", 1), ("c", 1)]
    assert step(s) == [("b", 1)]


def test_groups_take_turns():
    s = scheduler(*(decode(f"{g}{i}", group=(g,)) for g in "xyz" for i in range(4)), max_step_rows=2)
    assert [s.next(0.0).group for _ in range(6)] == [("x",), ("y",), ("z",)] * 2


def test_a_higher_priority_goes_first_within_its_sort():
    s = scheduler(prefill("plain", 10), prefill("urgent", 10, priority=1), decode("d", priority=-1), max_step_tokens=11)
    assert step(s) == [("d", 1), ("urgent", 10)]


@pytest.mark.parametrize("rows", [1, 3])
def test_decodes_that_fill_every_step_do_not_starve_a_prefill(rows):
    s = scheduler(*(decode(str(i)) for i in range(8)), prefill("p", 4), max_step_rows=rows, max_step_tokens=8)
    for n in range(PATIENCE + 1):
        batch = s.next(0.0)
        names = [i.request for i in batch.items]
        assert ("p" in names) == (n == PATIENCE)
        for item in batch.items:
            if item.decode:
                s.ready(item)


def test_crumbs_do_not_count_as_service():
    """63 decodes leave one token in 64: the prefill may not crawl along at that."""
    s = scheduler(*(decode(str(i)) for i in range(63)), prefill("p", 200), max_step_tokens=64)
    shares = []
    while not shares or sum(shares) < 200:
        batch = s.next(0.0)
        shares.append(sum(n for i, n in zip(batch.items, batch.tokens, strict=True) if not i.decode))
        advance(s, batch)
        for item in batch.items:
            if item.decode:
                s.ready(item)
    assert shares[:6] == [1] * PATIENCE + [64, 1]
    assert len(shares) <= 20


def test_a_call_too_large_for_what_decodes_leave_gets_its_turn():
    s = scheduler(decode("d"), whole("w", 10), max_step_tokens=10)
    for _ in range(PATIENCE):
        assert step(s) == [("d", 1)]
        s.ready(decode("d"))
    assert step(s) == [("w", 10)]
    assert step(s) == [("d", 1)]


def test_batches_list_decodes_first_even_when_a_prefill_was_served_first():
    s = scheduler(*(decode(str(i)) for i in range(8)), prefill("p", 4), max_step_rows=3)
    for _ in range(PATIENCE):
        for item in s.next(0.0).items:
            s.ready(item)
    assert [i.decode for i in s.next(0.0).items] == [True, True, False]


# --- deadlines ---------------------------------------------------------------------------------------------------


def test_a_near_deadline_calls_its_group_out_of_turn():
    s = scheduler(decode("a"), decode("b", group=("other",)), decode("c", group=CODEC, deadline=1.0))
    assert step(s, now=1.5) == [("c", 1)]
    assert step(s, now=1.5) == [("a", 1)]


def test_a_far_deadline_waits_for_its_turn():
    s = scheduler(decode("a"), decode("c", group=CODEC, deadline=100.0))
    assert step(s, now=1.0) == [("a", 1)]


def test_what_is_near_depends_on_how_long_steps_take():
    """With steps of 2 s, a result due in 5 s cannot wait for another group's step beside two others that wait."""
    s = scheduler(decode("a"), decode("b", group=("other",)))
    assert step(s, now=0.0) == [("a", 1)]
    s.ready(decode("c", group=CODEC, deadline=7.0))
    assert step(s, now=2.0) == [("c", 1)]


def test_earliest_deadline_first_across_and_within_groups():
    s = scheduler(
        decode("late", group=("x",), deadline=3.0),
        decode("early", group=("y",), deadline=1.0),
        decode("second", group=("x",), deadline=2.0),
        max_step_rows=1,
    )
    assert [step(s, now=9.0)[0][0] for _ in range(3)] == ["early", "second", "late"]


def test_rows_keep_their_places_where_all_fit():
    """So that what was made for a step's rows serves the next step."""
    s = scheduler(decode("a", deadline=3.0), decode("b", deadline=1.0), decode("c"), prefill("p", 7))
    assert step(s, now=9.0) == [("a", 1), ("b", 1), ("c", 1), ("p", 7)]
    s = scheduler(decode("a", deadline=3.0), decode("b", deadline=1.0), prefill("p", 7), max_step_tokens=8)
    assert step(s, now=9.0) == [("b", 1), ("a", 1), ("p", 6)]


def test_overload_of_deadlines_starves_no_other_group():
    s = scheduler(decode("lm"), decode("c", group=CODEC, deadline=0.0))
    for n in range(DefaultScheduler.URGENT_RUN + 1):
        ((name, _),) = step(s, now=float(n + 1))
        if name == "lm":
            break
        s.ready(decode("c", group=CODEC, deadline=0.0))
    assert name == "lm"
    assert n == DefaultScheduler.URGENT_RUN


def test_urgent_steps_that_passed_nobody_over_do_not_count():
    """However many there were: who comes then waits no longer than others."""
    s = scheduler()
    for n in range(DefaultScheduler.URGENT_RUN + 2):
        s.ready(decode("lm", deadline=0.0))
        assert step(s, now=float(n)) == [("lm", 1)]
    s.ready(decode("c", group=CODEC, deadline=1000.0))
    served = []
    for n in range(DefaultScheduler.URGENT_RUN + 1):
        s.ready(decode("lm", deadline=0.0))
        served.append(step(s, now=10.0 + n)[0][0])
        if served[-1] == "c":
            break
    assert served == ["lm"] * DefaultScheduler.URGENT_RUN + ["c"]


def test_overload_of_deadlines_starves_nothing_in_the_same_group():
    s = scheduler(decode("no deadline"), decode("c", deadline=0.0), max_step_rows=1)
    served = []
    for n in range(PATIENCE + 1):
        served.append(step(s, now=float(n + 1))[0][0])
        if served[-1] == "c":
            s.ready(decode("c", deadline=0.0))
    assert served == ["c"] * PATIENCE + ["no deadline"]


def test_urgent_calls_that_are_cut_again_and_again_do_not_pass_the_line():
    s = scheduler(prefill("patient", 3), max_step_tokens=1)
    for name in "ab":
        s.ready(prefill(name, 3, deadline=0.0))
    served = []
    for n in range(3 * (PATIENCE + 1)):
        batch = s.next(float(n + 1))
        served.append(batch.items[0].request)
        done = batch.tokens == [batch.items[0].tokens]
        advance(s, batch)
        if done and served[-1] != "patient":
            s.ready(prefill(served[-1], 3, deadline=0.0))
    assert served.count("patient") == 3


# --- gathering ---------------------------------------------------------------------------------------------------


def listened(*items, requests="abcdef", **options):
    """A scheduler of requests that run, whose steps take a second."""
    s = scheduler(**options)
    for name in requests:
        s.submit(Ticket(name))
    s.start(lambda ticket: True)
    s.ready(decode("a"))
    assert step(s, now=-1.0) == [("a", 1)]
    for item in items:
        s.ready(item)
    return s


def piece(name, due=1000.0, **kw):
    return Item(name, kw.pop("group", CODEC), decode=True, deadline=due, patient=kw.pop("patient", True), **kw)


def nodes(s, steps, patient=()):
    """The nodes of the next steps, one a second; the language model always has a row, and *patient* pieces come."""
    coming, found = list(patient), []
    for now in range(steps):
        s.ready(decode("z"))
        if coming:
            s.ready(coming.pop(0))
        batch = s.next(float(now))
        found.append((batch.group[0], len(batch.items)))
        if batch.group == CODEC:
            assert step(s, now=float(now)) == [("z", 1)]
    return found


def test_pieces_with_time_wait_for_company():
    s = listened(piece("a"))
    assert nodes(s, GATHER + 1, [piece("b"), piece("c")]) == [("lm", 1)] * GATHER + [("codec", 3)]


def test_a_full_step_waits_no_longer():
    s = listened(piece("a"), requests="abc")
    assert nodes(s, 2, [piece("b"), piece("c")]) == [("lm", 1), ("codec", 3)]
    limited = listened(piece("a"), max_step_rows=2)
    assert nodes(limited, 1, [piece("b")]) == [("codec", 2)]
    assert nodes(listened(piece("a"), requests="a"), 1) == [("codec", 1)]


def test_gathering_ends_while_there_is_time():
    """Two groups, so what is due within three steps is near; gathering ends at twice that."""
    due = 3.0 * DefaultScheduler.MARGIN + 2.5
    assert nodes(listened(piece("a", due)), 4) == [("lm", 1)] * 3 + [("codec", 1)]


@pytest.mark.parametrize("other", [piece("b", 0.5), piece("b", patient=False), piece("b", due=None)])
def test_what_cannot_wait_takes_its_group_along(other):
    s = listened(piece("a"), other)
    assert nodes(s, 1) == [("codec", 2)]


def test_nothing_waits_when_nothing_else_could_run():
    s = listened(piece("a"), piece("b", group=("codec", "other", ())))
    assert [batch.group[1] for batch in (s.next(0.0), s.next(1.0))] == ["forward", "other"]
    elsewhere = listened(piece("a"), decode("b"))
    assert elsewhere.next(0.0, lambda group: group == CODEC).group == CODEC


def test_gathering_begins_anew_with_each_step():
    s = listened(piece("a"))
    for _ in range(2):
        assert nodes(s, GATHER + 1)[-1] == ("codec", 1)
        s.ready(piece("a"))


# --- endings -----------------------------------------------------------------------------------------------------


def test_forget_drops_everything_of_a_request():
    items = [decode("a"), prefill("a", 5, group=CODEC, deadline=0.0), decode("b")]
    s = scheduler(*items)
    s.forget("a")
    assert [i.cancelled for i in items] == [True, True, False]
    assert step(s, now=1.0) == [("b", 1)]
    assert step(s, now=1.0) is None


def test_forget_between_two_chunks():
    s = scheduler(prefill("a", 20), prefill("b", 3), max_step_tokens=10)
    batch = s.next(0.0)
    s.forget("a")
    assert [i.request for i in batch.items] == ["a"]
    assert step(s) == [("b", 3)]
    again = prefill("a", 10)  # a later request of the same name starts at the end of the line
    s.ready(prefill("c", 10))
    s.ready(again)
    assert step(s) == [("c", 10)]


def test_an_item_cancelled_on_its_own_is_dropped():
    gone, stays = decode("a"), prefill("a", 4)
    s = scheduler(gone, stays, decode("b", deadline=0.0), max_step_tokens=5)
    gone.cancelled = True
    assert step(s, now=1.0) == [("b", 1), ("a", 4)]
    assert step(s) is None
    s.ready(gone)
    assert step(s) is None


def test_a_group_of_cancelled_items_is_no_step():
    gone = decode("a", deadline=0.0)
    s = scheduler(gone, decode("b", group=CODEC))
    gone.cancelled = True
    assert step(s, now=1.0) == [("b", 1)]


def test_an_item_is_ready_once():
    item = decode("a")
    s = scheduler(item)
    with pytest.raises(ValueError, match="'a' is ready already"):
        s.ready(item)


def test_groups_that_come_and_go_are_not_kept_for_ever():
    s = scheduler()
    for n in range(1000):
        s.ready(decode("a", group=("denoise", n)))
        assert step(s) == [("a", 1)]
    assert len(s._groups) <= DefaultScheduler.SPARE_GROUPS + 1


def test_forgotten_deadlines_are_not_kept_for_ever():
    s = scheduler(decode("stays", group=CODEC, deadline=0.0))
    for n in range(1000):
        s.ready(decode(str(n), deadline=1000.0 + n))
        s.forget(str(n))
    assert len(s._deadlines._heap) < 50
    assert len(s._groups[LM].deadlines._heap) < 50


# --- cohorts: items that stand for calls of several requests ------------------------------------
def cohort(*items, **kw):
    due = [item.deadline for item in items if item.deadline is not None]
    return Item(
        "",
        kw.pop("group", LM),
        len(items),
        decode=True,
        deadline=min(due, default=None),
        rows=len(items),
        apart=lambda: [item for item in items if not item.cancelled],
        **kw,
    )


def test_a_cohort_is_one_item_of_as_many_rows_as_it_stands_for():
    s = scheduler(cohort(decode("a"), decode("b"), decode("c")), prefill("p", 20), max_step_rows=4, max_step_tokens=23)
    batch = s.next(0.0)
    assert [(i.request, i.rows, n) for i, n in zip(batch.items, batch.tokens, strict=True)] == [
        ("", 3, 3),
        ("p", 1, 20),
    ]
    assert s.idle


@pytest.mark.parametrize(("rows", "tokens"), [(2, 100), (100, 2)])
def test_a_cohort_that_does_not_fit_is_taken_apart(rows, tokens):
    s = scheduler(cohort(decode("a"), decode("b"), decode("c")), max_step_rows=rows, max_step_tokens=tokens)
    assert step(s) == [("a", 1), ("b", 1)]
    assert step(s) == [("c", 1)]
    assert s.idle


def test_a_cohort_over_its_groups_own_limit_is_taken_apart():
    s = scheduler(cohort(decode("a"), decode("b")), limits={LM: 1})
    assert [step(s), step(s), step(s)] == [[("a", 1)], [("b", 1)], None]


def test_where_not_all_fits_deadlines_decide_row_by_row():
    members = (decode("late", deadline=90.0), decode("soon", deadline=1.0))
    s = scheduler(cohort(*members), decode("sooner", deadline=0.5), max_step_rows=2)
    assert step(s, now=1.0) == [("sooner", 1), ("soon", 1)]
    assert step(s, now=1.0) == [("late", 1)]


def test_who_has_ended_is_not_among_the_items_of_a_cohort_taken_apart():
    a, b, c = decode("a"), decode("b"), decode("c")
    s = scheduler(cohort(a, b, c), max_step_rows=2)
    b.cancelled = True
    assert step(s) == [("a", 1), ("c", 1)]
    assert s.idle


def test_an_item_of_a_cohort_that_was_taken_apart_goes_with_its_request():
    s = scheduler(cohort(decode("a"), decode("b"), decode("c")), max_step_rows=1)
    assert step(s) == [("a", 1)]
    s.forget("b")
    assert step(s) == [("c", 1)]
    assert s.idle


def test_a_cohort_keeps_its_turn_and_its_deadline_calls_it_out_of_turn():
    s = scheduler(whole("w", group=CODEC), cohort(decode("a", deadline=0.0), decode("b", deadline=9.0)))
    assert step(s, now=5.0) == [("", 2)]
    assert step(s, now=5.0) == [("w", 1)]


def test_a_cohort_can_be_dropped():
    whole_cohort = cohort(decode("a"), decode("b"))
    s = scheduler(whole_cohort)
    s.drop(whole_cohort)
    assert s.idle
    assert step(s) is None


# --- many decodes: new calls have steps of their own ------------------------------------------------------------
def test_beside_many_decodes_prompts_have_steps_of_their_own_in_turn():
    s = scheduler(decode("a"), decode("b"), max_mixed_rows=1, max_step_tokens=10)
    s.ready(prefill("p", 15))
    steps = []
    for _ in range(4):
        batch = s.next(0.0)
        steps.append([(i.request, n) for i, n in zip(batch.items, batch.tokens, strict=True)])
        advance(s, batch)
        for item in batch.items:
            if item.decode:
                s.ready(item)
    assert steps == [[("p", 10)], [("a", 1), ("b", 1)], [("p", 5)], [("a", 1), ("b", 1)]]


def test_beside_few_decodes_prompts_share_their_step():
    s = scheduler(decode("a"), decode("b"), prefill("p", 5), whole("w"), max_mixed_rows=2)
    assert step(s) == [("a", 1), ("b", 1), ("p", 5), ("w", 1)]


def test_a_cohort_counts_with_its_rows_and_stays_whole_beside_a_prompt_of_many_steps():
    s = scheduler(cohort(decode("a"), decode("b")), prefill("p", 100), max_mixed_rows=1, max_step_tokens=10)
    batch = s.next(0.0)
    assert [i.request for i in batch.items] == ["p"]
    advance(s, batch)
    assert step(s) == [("", 2)]


def test_an_urgent_prompt_does_not_keep_many_decodes_from_their_turn():
    s = scheduler(max_mixed_rows=1, max_step_rows=2)
    for name in "abcd":
        s.ready(decode(name, deadline=50.0))
    for name in "pqrs":
        s.ready(prefill(name, 5, deadline=0.0))
    assert [step(s, now=1.0) for _ in range(4)] == [
        [("p", 5), ("q", 5)],
        [("a", 1), ("b", 1)],
        [("r", 5), ("s", 5)],
        [("c", 1), ("d", 1)],
    ]


def test_cancelled_prompts_leave_the_step_to_the_decodes():
    p = prefill("p", 5)
    s = scheduler(decode("a"), decode("b"), p, max_mixed_rows=1)
    p.cancelled = True
    assert step(s) == [("a", 1), ("b", 1)]
    assert s.idle
