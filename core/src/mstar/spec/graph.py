"""What a model's dataflow looks like: nodes, walks, partitions and streams, as plain data.

A :class:`Graph` is written once per model and never holds a tensor. :mod:`mstar.spec.check` proves it sound when the
model is registered or started; :mod:`mstar.graph` runs it.

Vocabulary
----------
*node*
    One unit of compute (an ``nn.Module``) with one or more *entries*, the ways to call it.
*walk*
    A tree of :class:`Call`, :class:`Seq`, :class:`Par`, :class:`Loop` and :class:`Draft`. Calls read and write
    *values*: names in the request's own namespace, which lives as long as the request and is shared by its partitions.
*route*
    A generator, one per partition, that decides which walk comes next. It runs between walks, never per token.
*stream*
    A bounded queue between two partitions, or between the client and a partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "CLIENT",
    "Ahead",
    "AtEnd",
    "Call",
    "Codes",
    "Const",
    "Draft",
    "EndOf",
    "Entry",
    "Fixed",
    "Fresh",
    "Graph",
    "Index",
    "Layout",
    "Left",
    "Loop",
    "NodeSpec",
    "Offset",
    "Par",
    "Param",
    "Partition",
    "Port",
    "Pull",
    "Ramp",
    "Seq",
    "Source",
    "Stop",
    "Stream",
    "Times",
    "TokenStop",
    "Walk",
    "WhenTrue",
    "Whole",
]

Layout = Literal["packed", "stacked", "list"]

CLIENT = "client"
"""The name of the client's end of a stream."""


@dataclass(frozen=True)
class Port:
    """One named tensor going into or out of an entry.

    :param dtype: a torch dtype's name (``"int64"``, ``"float32"``), or ``"model"`` for the deployment's dtype.
    :param shape: the shape *of one request's* value; symbols (``"T"``, ``"C"``) stand for sizes known at run time.
        A ``packed`` port's first dimension is the one along which requests are concatenated.
    :param layout: how one step's rows are laid out for the node: ``packed`` ``[sum(T), ...]``, ``stacked``
        ``[rows, ...]`` (all rows have one shape; rows of different shapes run in different steps), ``list`` a Python
        list with one tensor a row. An entry's first packed input (its chunk port if it has one) sets the step's
        lengths; packed inputs whose first dimension has another symbol arrive as :class:`mstar.nn.node.Packed`.
    :param optional: an input that a call may leave out (the node then receives ``None``).
    :param host: of the graph's inputs: it stays in the host's memory, and each step takes to the device what it reads
        (pixels of many pictures, of which a waiting request needs none there).
    """

    name: str
    dtype: str = "model"
    shape: tuple[str | int, ...] = ("T",)
    layout: Layout = "packed"
    optional: bool = False
    host: bool = False


@dataclass(frozen=True)
class Entry:
    """One way to call a node: the method's name, its ports and the resources it uses.

    :param chunk: the packed input along which the scheduler may cut a call into several steps (chunked prefill).
        Other packed inputs whose length equals the chunk port's are cut alongside. Outputs that are not packed are
        taken from the last chunk; packed ones are joined.
    :param resources: names of the resources whose views the node finds in ``step.views``.
    :param frozen: those of *resources* that this entry reads but does not advance: its tokens see the cached context
        and each other, and are forgotten after the step (a denoise pass over a prompt's KV).
    :param prefix: a request's first call may skip the head of the chunk port that its resources already hold (prefix
        cache). Needs an integer chunk port.
    :param graph_sizes: of an entry with stacked inputs: sizes of the symbols in its inputs' shapes whose steps are
        captured before the first request. Optional inputs of other symbols are left out of them. Steps of
        other sizes are captured when they have come often enough.
    :param step_items: how many items of the chunk port count as one token of a step, where an item costs little (a
        picture's patch in an encoder that is small beside the language model).
    """

    name: str = "forward"
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    chunk: str | None = None
    resources: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    prefix: bool = False
    graph_sizes: tuple[Mapping[str, int], ...] = ()
    step_items: int = 1


@dataclass(frozen=True)
class NodeSpec:
    """A node and its entries. Rows of one entry run in one step whatever walk they come from, so prefill and decode
    mix."""

    name: str
    entries: tuple[Entry, ...]
    max_rows: int | None = None
    """The most rows of one step, if the node has a limit of its own."""
    graph_rows: tuple[int, ...] = ()
    """To how many rows captured steps of one item a row are filled up, where a row costs much (a picture's); steps of
    more run as plain calls. Empty: the runner's own numbers."""
    graph_fill: bool = True
    """Whether they are filled up. False where each row costs as much as the first, so that a row of nothing would be
    dear: steps of other numbers than :attr:`graph_rows` run as plain calls."""
    graph_items: int | None = None
    """The most items of a captured step whose rows have several, where they cost little: ``engine.max_graph_tokens``
    otherwise."""

    def entry(self, name: str) -> Entry:
        return next(e for e in self.entries if e.name == name)


# --- where a call's inputs come from -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Param:
    """A request parameter (a knob after validation), delivered as one scalar per row. ``[rows]``."""

    name: str
    default: float | int | bool | None = None


@dataclass(frozen=True)
class Index:
    """The iteration number, from 0, of the enclosing loop (``depth`` loops further out). int64 ``[rows]``."""

    depth: int = 0


@dataclass(frozen=True)
class Const:
    """The same scalar for every row: tells one call of an entry from another (a guidance branch's flag)."""

    value: float | int | bool


@dataclass(frozen=True)
class Pull:
    """The next chunk of a stream, cut by the stream's chunk policy. The call is ready when the chunk is complete.

    :param at_end: what a pull finds when the stream has ended and is drained: ``stop`` ends the enclosing loop with
        reason ``end_of_input`` without running its body again; ``pad`` delivers zeros of one item; ``empty`` delivers a
        chunk of length 0.
    :param optional: a pull that never waits: an empty chunk when nothing is there yet.
    """

    stream: str
    at_end: Literal["stop", "pad", "empty"] = "stop"
    optional: bool = False


@dataclass(frozen=True)
class Left:
    """How many items at the head of the call's pulled chunk of *stream* are context delivered before. int64
    ``[rows]``."""

    stream: str


@dataclass(frozen=True)
class Ahead:
    """How many items at the tail of the call's pulled chunk of *stream* are look-ahead, which will come again as new
    ones, or padding. int64 ``[rows]``."""

    stream: str


@dataclass(frozen=True)
class Offset:
    """How many items of *stream* came before the first one of the call's pulled chunk, those that it was primed with
    included: what noise and positions are counted from, so that they do not depend on how the stream is cut. int64
    ``[rows]``."""

    stream: str


@dataclass(frozen=True)
class AtEnd:
    """Whether the call's pulled chunk is known to be the stream's last. bool ``[rows]``."""

    stream: str


Source = str | Param | Index | Const | Pull | Left | Ahead | Offset | AtEnd


# --- when a loop ends --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenStop:
    """Ends on a stop token (reason ``stop``) or when the sampler's ``max_tokens`` are out (reason ``length``).

    Judged before each iteration on the current token in *value*, so that a walk may sample its first token before the
    loop. The stop ids, ``min_tokens`` and ``max_tokens`` are those of the request's sampling parameters for *sampler*.
    """

    value: str
    sampler: str = "sampler"


@dataclass(frozen=True)
class Times:
    """Ends after so many iterations: a number or a request parameter. Reason ``done``."""

    count: int | Param


@dataclass(frozen=True)
class WhenTrue:
    """Ends after an iteration whose boolean value *value* is true. Reason ``done``."""

    value: str


@dataclass(frozen=True)
class EndOf:
    """Ends when the pulled stream has ended and is drained. Reason ``end_of_input``."""

    stream: str


Stop = TokenStop | Times | WhenTrue | EndOf


# --- walks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """Run one entry of one node for this request.

    :param inputs: port name → source. A plain string is a value's name.
    :param outputs: port name → the value it becomes.
    :param emit: port name → stream that its value is pushed to, every time the call completes.
    :param context: which copy of the resources' per-request state the call uses: one request may hold several
        (guidance branches ``"cond"`` and ``"uncond"``).
    """

    node: str
    entry: str = "forward"
    inputs: Mapping[str, Source] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    emit: Mapping[str, str] = field(default_factory=dict)
    context: str = "main"


@dataclass(frozen=True, init=False)
class Seq:
    """Run the parts one after the other."""

    parts: tuple[Walk, ...]

    def __init__(self, *parts: Walk):
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True, init=False)
class Par:
    """Run the parts side by side; done when all are. Calls of one entry share a step."""

    parts: tuple[Walk, ...]

    def __init__(self, *parts: Walk):
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True)
class Loop:
    """Repeat *body* until one of *until* holds. The engine iterates it without asking the route.

    :param progress: a stream to the client that is told after each iteration how many are done and how many there will
        be (0: not known), as int64 ``[2]``; if the request wants that stream's modality, or ``preview``, which is seen
        with it; else nothing is sent. A client that does not keep up misses some.
    """

    body: Walk
    until: Stop | tuple[Stop, ...]
    progress: str | None = None

    @property
    def stops(self) -> tuple[Stop, ...]:
        return self.until if isinstance(self.until, tuple) else (self.until,)


@dataclass(frozen=True)
class Draft:
    """Run *body*; what its calls add to *resources* is forgotten when it ends, and the contexts stand where they stood.

    For answers to input that is not complete yet (a transcript of the speech so far): what came before them is computed
    once, and each draft begins after it. What the body emits and the values that it makes stay. The tokens of its
    loops do not count towards the sampler's ``max_tokens`` afterwards: each draft has as many as the one before.

    :param resources: those that can be taken back any number of tokens (``PagedKV``, ``Positions``). Others keep what
        they have seen.
    """

    body: Walk
    resources: tuple[str, ...]


Walk = Call | Seq | Par | Loop | Draft


# --- streams and partitions --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fixed:
    """Chunks of *size* units, preceded by up to *left* units of context already delivered (sliding window).

    A short last chunk is delivered at the end of the stream (the flush).

    :param ahead: units behind the new ones that a chunk shows before their turn: the reader waits for them, and they
        come again as new ones. At the end of the stream there are fewer, then none (:func:`mstar.spec.chunks.cut`).
    :param unit: items that belong together (the codes of a frame). *size*, *left*, *ahead* and *padded* count units;
        what is left of one at the end of the stream is dropped.
    :param padded: sizes, in units, that whole chunks (context, new, ahead) are filled up to with copies of their last
        unit, so that chunks of many requests share few shapes. For readers that look to the left only. A chunk that is
        larger than all of them stays as it is.
    """

    size: int = 1
    left: int = 0
    ahead: int = 0
    unit: int = 1
    padded: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ramp:
    """Chunks that grow: 1, 3, 8, 16, 25, 25…: first output early, throughput later. The rest as in :class:`Fixed`."""

    sizes: tuple[int, ...] = (1, 3, 8, 16, 25)
    left: int = 0
    ahead: int = 0
    unit: int = 1
    padded: tuple[int, ...] = ()


@dataclass(frozen=True)
class Whole:
    """One chunk with everything, when the stream ends. The stream's capacity bounds what may be written in all: more
    fails the request, since a writer that waited would wait for ever."""


@dataclass(frozen=True)
class Codes:
    """Which emissions of a call are items of a stream: those whose token is the next code.

    :param ranges: (first id, one behind the last) of the codes at each position of a frame, over and over. A token that
        is not in the range of the position that comes next (text, the end of the answer, a code of another position) is
        left out, and the position waits for one that is: so a slip of the model costs a frame, not the rest.
    :param token: output port of the emitting call that has the token, int64 ``[rows]``; the item itself, if that is
        what is emitted, or what goes with it (all codes of a frame).
    """

    ranges: tuple[tuple[int, int], ...]
    token: str = "token"


@dataclass(frozen=True)
class Fresh:
    """What of an output goes into a stream, where a call makes it for a whole pulled chunk: what belongs to new units.

    :param pull: the stream that the emitting call pulls. :param per_unit: items of the output that one unit of it
        becomes. The output may begin later than the chunk does (a reader that spares itself its context), and ends with
        it, look-ahead and padding included.
    :param cut: the output begins with what is new instead: the reader is told :class:`Left` and has cut the rest off.
    :param overlap: items behind the new ones that are emitted as well while more follows, as the next emission brings
        them again: to be blended (:class:`mstar.processing.crossfade.Crossfade`). Needs look-ahead; at most a unit's.
        Of streams to the client only.
    """

    pull: str
    per_unit: int
    overlap: int = 0
    cut: bool = False


@dataclass(frozen=True)
class Stream:
    """A bounded queue of items from *source* to *target* (partition names, or :data:`CLIENT`).

    :param port: dtype and shape *of one item* (no leading length).
    :param modality: for streams to or from the client: ``tokens``, ``text``, ``audio``, ``image``, ``video``,
        ``action``, ``state``…; a renderer is chosen by it.
    :param chunk: how the reader's pulls cut it. Ignored for streams to the client, which gets what was emitted, as
        emitted.
    :param capacity: items held before the writer must wait (back-pressure); context kept for *left* is not counted.
    :param seconds_per_item: playback time of one item, if a person listens or watches: work that feeds the stream gets
        a deadline from it, and with *fresh* playback begins when the next piece will come in time
        (:mod:`mstar.graph.preroll`).
    :param max_items: the most items that one request may send in total (client streams; more is a 400).
    :param codes: of a stream between partitions: which emissions are its items. They travel over the host.
    :param primed: of a stream between partitions: an input of the graph, packed items, that comes before the first item
        as context (a cloned voice's codes). It is not delivered as new.
    :param fresh: which part of what is emitted goes there, if not all.
    """

    name: str
    source: str
    target: str
    port: Port = Port("item", "int64", (), "stacked")
    modality: str = "tokens"
    chunk: Fixed | Ramp | Whole = Fixed()
    capacity: int = 4096
    seconds_per_item: float | None = None
    max_items: int | None = None
    codes: Codes | None = None
    primed: str | None = None
    fresh: Fresh | None = None


@dataclass(frozen=True)
class Partition:
    """A part of a request that advances on its own. Its route may only yield *walks*; without a route of the model's
    own, they run in the order written."""

    name: str
    walks: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """Everything about a model's dataflow.

    :param inputs: values that a prepared request brings along (port per name). ``optional`` ones may be absent.
    :param sessions: resources whose state a session keeps after its request ends.
    """

    nodes: tuple[NodeSpec, ...]
    walks: Mapping[str, Walk]
    partitions: tuple[Partition, ...]
    streams: tuple[Stream, ...] = ()
    inputs: tuple[Port, ...] = ()
    sessions: tuple[str, ...] = ()

    def node(self, name: str) -> NodeSpec:
        return next(n for n in self.nodes if n.name == name)

    def stream(self, name: str) -> Stream:
        return next(s for s in self.streams if s.name == name)

    def streams_from(self, end: str) -> Sequence[Stream]:
        return [s for s in self.streams if s.source == end]

    def streams_to(self, end: str) -> Sequence[Stream]:
        return [s for s in self.streams if s.target == end]
