"""A worker in miniature: random arrivals, admission by memory, chunked prefill beside decodes, cancels; no device."""

import random
from dataclasses import dataclass

import pytest

from mstar.scheduler.base import Item, Ticket
from mstar.scheduler.default import DefaultScheduler
from mstar.spec.deployment import SchedulerOptions
from mstar.spec.errors import TooBusy

LM, CODEC = ("lm", "forward", ()), ("codec", "forward", ())
STEP_SECONDS = 0.01
FRAME_SECONDS = 0.08
"""Playback time of what one decode feeds to the codec."""


@dataclass
class Request:
    name: str
    prompt: int
    answer: int
    speaks: bool
    arrival: float
    first: float | None = None
    produced: int = 0
    played: int = 0


class Worker:
    """Runs requests of a language model, some of which feed every token to a codec with a playback deadline.

    *patient*: the codec's items may wait for company."""

    def __init__(self, scheduler, memory, patient=True):
        self.scheduler, self.memory, self.free, self.patient = scheduler, memory, memory, patient
        self.codec_steps = 0
        self.waiting, self.running, self.done = {}, {}, {}
        self.refused = self.late = self.steps = 0
        self.now = 0.0

    def submit(self, request):
        try:
            self.scheduler.submit(Ticket(request.name, tenant=request.name[0], arrival=self.now))
        except TooBusy:
            self.refused += 1
        else:
            self.waiting[request.name] = request

    def cancel(self, name):
        ticket = self.scheduler.forget(name)
        assert (ticket is not None) == (name in self.waiting)
        self.waiting.pop(name, None)
        self.end(name)

    def end(self, name):
        if (request := self.running.pop(name, None)) is not None:
            self.free += request.prompt + request.answer

    def admit(self, ticket):
        request = self.waiting[ticket.request]
        need = request.prompt + request.answer
        if need > self.free:
            return False
        self.free -= need
        return True

    def step(self):
        for ticket in self.scheduler.start(self.admit):
            request = self.running[ticket.request] = self.waiting.pop(ticket.request)
            self.scheduler.ready(Item(request.name, LM, tokens=request.prompt, chunkable=True))
        batch = self.scheduler.next(self.now)
        self.now += STEP_SECONDS
        if batch is None:
            return
        self.steps += 1
        self.codec_steps += batch.group == CODEC
        assert sum(batch.tokens) <= self.scheduler.options.max_step_tokens
        for item, tokens in zip(batch.items, batch.tokens, strict=True):
            item.tokens -= tokens
            if item.tokens:
                self.scheduler.ready(item)
            elif batch.group == LM:
                self.produce(self.running[item.request])
            else:
                self.play(item, self.running[item.request])

    def produce(self, request):
        request.first = request.first if request.first is not None else self.now
        request.produced += 1
        if request.speaks:
            due = request.first + FRAME_SECONDS * request.produced
            self.scheduler.ready(Item(request.name, CODEC, deadline=due, patient=self.patient))
        if request.produced < request.answer:
            self.scheduler.ready(Item(request.name, LM, decode=True))
        self.finish_if_complete(request)

    def play(self, item, request):
        request.played += 1
        self.late += self.now > item.deadline
        self.finish_if_complete(request)

    def finish_if_complete(self, request):
        if request.produced == request.answer and request.played == request.answer * request.speaks:
            assert self.scheduler.forget(request.name) is None
            self.end(request.name)
            self.done[request.name] = self.now - request.arrival


def simulate(seed, requests=60, cancels=0.0, max_queue=1024, patient=True, **options):
    rng = random.Random(seed)
    worker = Worker(DefaultScheduler(SchedulerOptions(max_queue=max_queue, **options)), 600, patient)
    left = list(range(requests))
    cancelled = set()
    while left or worker.waiting or worker.running:
        while left and rng.random() < 0.3:
            name = f"{rng.choice('abc')}{left.pop()}"
            worker.submit(
                Request(name, rng.choice([1, 7, 40, 300]), rng.randint(1, 30), rng.random() < 0.3, worker.now)
            )
        alive = [*worker.waiting, *worker.running]
        if alive and rng.random() < cancels:
            name = rng.choice(alive)
            worker.cancel(name)
            cancelled.add(name)
        worker.step()
        assert worker.steps < 20_000, "the simulation does not come to an end"
    return worker, cancelled


def assert_empty(worker):
    s = worker.scheduler
    assert worker.free == worker.memory
    assert s.waiting == 0
    assert s.next(worker.now) is None
    assert not any((s._items, s._cut, s._running, s._turns, s._deadlines))


@pytest.mark.parametrize("seed", range(5))
def test_everything_runs_to_completion(seed):
    worker, _ = simulate(seed, max_step_tokens=32, max_step_rows=8)
    assert len(worker.done) == 60
    assert worker.refused == 0
    assert_empty(worker)


@pytest.mark.parametrize("seed", range(5))
def test_cancels_leave_nothing_behind(seed):
    worker, cancelled = simulate(seed, cancels=0.05, max_step_tokens=32, max_step_rows=8)
    assert cancelled
    assert cancelled.isdisjoint(worker.done)
    assert len(worker.done) + len(cancelled) == 60
    assert_empty(worker)


def test_a_short_queue_refuses_and_recovers():
    worker, _ = simulate(1, max_queue=3, max_step_tokens=32, max_step_rows=8)
    assert worker.refused > 0
    assert len(worker.done) + worker.refused == 60
    assert_empty(worker)


def test_speech_is_in_time_while_prompts_are_read():
    """Frames of 80 ms and steps of 10 ms: long prompts beside speech must not make it stutter."""
    worker, _ = simulate(3, max_step_tokens=64, max_step_rows=16)
    assert sum(r > 0 for r in worker.done.values()) == 60
    assert worker.late == 0


def test_a_codec_that_gathers_has_fewer_steps_and_is_in_time():
    eager, _ = simulate(3, patient=False, max_step_tokens=64, max_step_rows=16)
    patient, _ = simulate(3, max_step_tokens=64, max_step_rows=16)
    assert patient.late == 0
    assert patient.codec_steps < 0.7 * eager.codec_steps


def test_the_same_arrivals_give_the_same_schedule():
    first, _ = simulate(7, cancels=0.03, max_step_tokens=32)
    second, _ = simulate(7, cancels=0.03, max_step_tokens=32)
    assert first.done == second.done
