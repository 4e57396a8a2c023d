"""One training step as numbers: which op makes which value, what autograd saves, what each op does. A *value* is a storage's
content between two writes. Ops and values are numbered in order of creation, so any ops can run again in that order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any, TypeVar

NO_OP = -1  # the maker of a *root*: a value that existed before, or that no recorded op can recompute


class Lineage:
    """The ops and values of one finished forward; immutable."""

    __slots__ = ("_num_linked", "ins", "maker", "num_bytes", "outs", "seconds", "taken", "users")

    num_bytes: Sequence[int]
    maker: Sequence[int]  # the op that can recompute each value, or `NO_OP`
    ins: Sequence[tuple[int, ...]]
    outs: Sequence[tuple[int, ...]]
    taken: Mapping[int, tuple[tuple[int, int], ...]]  # of ops that write to arguments: pairs of the value before and after
    seconds: Sequence[float]
    users: list[list[int]]  # the ops that read each value, as of the last `link`

    def __init__(self, known: Lineage, seconds: Sequence[float]) -> None:
        self.num_bytes, self.maker = tuple(known.num_bytes), tuple(known.maker)
        self.ins, self.outs, self.taken = tuple(known.ins), tuple(known.outs), dict(known.taken)
        self.seconds = tuple(seconds)
        self.users, self._num_linked = [], 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lineage):
            return NotImplemented
        return all(
            getattr(self, name) == getattr(other, name) for name in ("num_bytes", "maker", "ins", "outs", "taken", "seconds")
        )

    __hash__ = None  # type: ignore[assignment]  # it may grow

    def frozen(self) -> Lineage:
        return self

    def with_seconds(self, seconds: Sequence[float]) -> Lineage:
        return Lineage(self, seconds)

    def ops_to(self, value: int, kept: Collection[int]) -> set[int]:
        """Return the ops that make a value from roots and kept values, even if it is kept itself."""
        maker, ins = self.maker, self.ins
        ops, pending = set[int](), [value]
        while pending:
            op = maker[pending.pop()]
            if op != NO_OP and op not in ops:
                ops.add(op)
                pending.extend(source for source in ins[op] if source not in kept)
        return ops

    def roots_of(self, value: int, traced: set[int]) -> Iterator[int]:
        """Yield the roots that a value depends on, except those already `traced`."""
        pending = [value]
        while pending:
            value = pending.pop()
            if value in traced:
                continue
            traced.add(value)
            maker = self.maker[value]
            if maker == NO_OP:
                yield value
            else:
                pending.extend(self.ins[maker])

    def link(self) -> None:
        users = self.users
        users.extend([] for _ in range(len(self.maker) - len(users)))
        for op in range(self._num_linked, len(self.ins)):
            for value in self.ins[op]:
                users[value].append(op)
        self._num_linked = len(self.ins)


class GrowingLineage(Lineage):
    __slots__ = ()

    num_bytes: list[int]
    maker: list[int]
    ins: list[tuple[int, ...]]
    outs: list[tuple[int, ...]]
    taken: dict[int, tuple[tuple[int, int], ...]]
    seconds: list[float]

    def __init__(self) -> None:
        self.num_bytes, self.maker, self.ins, self.outs, self.taken, self.seconds = [], [], [], [], {}, []
        self.users, self._num_linked = [], 0

    def frozen(self) -> Lineage:
        return Lineage(self, self.seconds)

    def add_root(self, num_bytes: int) -> int:
        self.num_bytes.append(num_bytes)
        self.maker.append(NO_OP)
        return len(self.maker) - 1

    def add_roots(self, sizes_bytes: Sequence[int]) -> None:
        self.num_bytes += sizes_bytes
        self.maker += [NO_OP] * len(sizes_bytes)

    def add_op(
        self, ins: Sequence[int], outs_bytes: Sequence[int], seconds: float = 0.0, taken: Iterable[int] = ()
    ) -> tuple[int, ...]:
        """Return the values that a new op makes; the last ones replace those that it overwrites, in the order of `taken`."""
        op, first = len(self.ins), len(self.maker)
        outs = tuple(range(first, first + len(outs_bytes)))
        self.num_bytes += outs_bytes
        self.maker += [op] * len(outs)
        self.ins.append(tuple(ins))
        self.outs.append(outs)
        self.seconds.append(seconds)
        written = tuple(taken)
        if written:
            self.taken[op] = tuple(zip(written, outs[len(outs) - len(written) :], strict=True))
        return outs


def short_name(op: str) -> str:
    """Return an op's name without namespace and overload: "mm" for "aten.mm.default"."""
    parts = op.split(".")
    return parts[1] if len(parts) == 3 else op


def ends_of(nodes: Sequence[int]) -> tuple[int, ...]:
    """Return for each request the first later one from another node; `nodes` has each request's node."""
    ends: list[int] = []
    for start in range(len(nodes)):
        if len(ends) <= start:
            end = next((place for place in range(start, len(nodes)) if nodes[place] != nodes[start]), len(nodes))
            ends += [end] * (end - start)
    return tuple(ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One whole step, immutable: its lineage, what autograd saves, and when the backward requests it."""

    lineage: Lineage
    saves: tuple[int, ...]  # the value of each save that counts, in order. A value may be saved several times.
    uses: tuple[int, ...]
    use_ends: tuple[int, ...] = ()  # for each request, the first later one from another graph node; or each is alone
    fixed: frozenset[int] = field(default_factory=frozenset)  # saves that stay under any plan: no op makes them, or by request
    dropped: frozenset[int] = field(default_factory=frozenset)
    moved: frozenset[int] = field(default_factory=frozenset)  # saves that leave under any plan, and come back for their readers
    retained_bytes: Mapping[int, int] = field(default_factory=dict)  # roots that are freed unless held on purpose
    why_kept: Mapping[int, str] = field(default_factory=dict)  # why no op recomputes a value, where a user may not expect it

    def __post_init__(self) -> None:
        object.__setattr__(self, "lineage", self.lineage.frozen())
        object.__setattr__(self, "retained_bytes", dict(self.retained_bytes))
        object.__setattr__(self, "why_kept", dict(self.why_kept))

    def use_end(self, place: int) -> int:
        return self.use_ends[place] if self.use_ends else place + 1

    @property
    def saved_bytes(self) -> int:
        return sum(self.lineage.num_bytes[value] for value in set(self.saves))


class OpKind(str, Enum):
    """What limits an op, and how far a GPU stays below its peak rates."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    NORM = "norm"
    POOL = "pool"
    POINTWISE = "pointwise"
    """All others: bound by the bytes that they read and write."""
    CONVOLUTION_OF_FEW = "convolution_of_few"
    """At most 3 input channels, forward, as the first of most nets: far slower than others of its bytes and FLOPs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """The work of one op, from its tensors alone."""

    name: str
    """PyTorch's name, such as "aten.mm.default"."""
    kind: OpKind
    flops: float
    """Source: `torch.utils.flop_counter`; 0 where that knows none."""
    num_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """When a value's bytes are on the device: from op `made_at` up to, but not including, `freed_at`.

    One storage may hold several values in turn: where an op overwrites one, that ends, and the next begins.
    """

    made_at: int
    """The index of the op that makes it; `StepTrace.live_bytes` counts its bytes from there on."""
    released_at: int
    """The first op during which only autograd holds it: if dropped or offloaded, it is gone from here on. Equal to `freed_at`
    if something else holds it that long, or until the backward has begun."""
    freed_at: int
    """The first op during which it is gone in the plain step; the number of ops if it outlives the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOps:
    """One call of a module in the forward: its ops are contiguous."""

    module: str
    """Its qualified name; "" is the model."""
    kind: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One training step, forward, loss and backward, on a device that need not exist.

    Places count the ops that have run when something happens, from 0 to `len(ops)`: an event at place 3 is after `ops[2]` and
    before `ops[3]`.
    """

    model: str = ""
    inputs: str = ""
    target: str = ""
    min_bytes: int = 0
    """Smaller saved storages stay where they are: they are part of the working bytes."""
    ops: tuple[OpWork, ...]
    """All ops that compute or make anything, even if nothing of theirs is saved: of the forward and the loss, then of the
    backward. Ops that return views are left out."""
    num_forward_ops: int
    step: Step
    """Which op makes which value, what is saved, and when it is requested. Its ops take no seconds."""
    op_places: tuple[int, ...]
    """For each op of the lineage, its place among `ops`."""
    save_places: tuple[int, ...]
    use_places: tuple[int, ...]
    lifetimes: Mapping[int, Lifetime]
    """Of each saved value, and of each other value of at least `min_bytes` that an op of the forward makes."""
    live_bytes: tuple[int, ...]
    """Bytes on the device beside `base_bytes` during each op, just after it has made its outputs."""
    base_bytes: int = 0
    """Bytes that exist before: parameters, buffers, inputs."""
    trainable_numel: int = 0
    trainable_bytes: int = 0
    names: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    modules: tuple[ModuleOps, ...] = ()
    """The calls of modules in the forward, in the order in which they begin."""
    backend_dependent: tuple[str, ...] = ()
    """The modules with ops whose execution, saves and workspaces only the backend knows, such as cuDNN's LSTM: their bytes and
    work are those of the ops that PyTorch would run without it."""

    @property
    def peak_bytes(self) -> int:
        return self.base_bytes + max(self.live_bytes, default=0)


_KINDS = tuple(OpKind)
_T = TypeVar("_T")
_TEXTS, _ROWS = ("model", "inputs", "target"), ("op_places", "save_places", "use_places")
_NUMBERS = ("min_bytes", "num_forward_ops", "base_bytes", "trainable_numel", "trainable_bytes")
_STEP_ROWS, _STEP_SETS = ("saves", "uses", "use_ends"), ("fixed", "dropped", "moved")


def trace_to_plain(trace: StepTrace) -> dict[str, Any]:
    step, lineage = trace.step, trace.step.lineage
    texts: dict[str, int] = defaultdict(lambda: len(texts))
    return {
        **{name: getattr(trace, name) for name in (*_TEXTS, *_NUMBERS, *_ROWS, "live_bytes", "backend_dependent")},
        "ops": [[texts[op.name], _KINDS.index(op.kind), op.flops, op.num_bytes, texts[op.dtype]] for op in trace.ops],
        "lifetimes": [[value, life.made_at, life.released_at, life.freed_at] for value, life in trace.lifetimes.items()],
        "names": [[value, texts[op], texts[module]] for value, (op, module) in trace.names.items()],
        "modules": [[texts[call.module], texts[call.kind], call.begin, call.end] for call in trace.modules],
        "step": {
            "num_bytes": lineage.num_bytes,
            "ins": lineage.ins,
            "outs": [[outs[0], len(outs)] if outs else [0, 0] for outs in lineage.outs],
            "taken": [[op, *pairs] for op, pairs in lineage.taken.items()],
            "seconds": lineage.seconds if any(lineage.seconds) else [],
            **{name: getattr(step, name) for name in _STEP_ROWS},
            **{name: sorted(getattr(step, name)) for name in _STEP_SETS},
            "retained_bytes": list(step.retained_bytes.items()),
            "why_kept": [[value, texts[why]] for value, why in step.why_kept.items()],
        },
        "texts": list(texts),
    }


def trace_from_plain(content: Mapping[str, Any]) -> StepTrace:
    texts = [_checked(text, str) for text in content["texts"]]

    def text(number: Any) -> str:
        return texts[_whole(number)]

    of_step = content["step"]
    rows: dict[str, Any] = {name: _wholes(of_step[name]) for name in _STEP_ROWS}  # of several types, as those below
    rows |= {name: frozenset(_wholes(of_step[name])) for name in _STEP_SETS}
    step = Step(
        lineage=_lineage_from(of_step),
        **rows,
        retained_bytes={_whole(value): _whole(num_bytes) for value, num_bytes in of_step["retained_bytes"]},
        why_kept={_whole(value): text(why) for value, why in of_step["why_kept"]},
    )
    plain: dict[str, Any] = {name: _checked(content[name], str) for name in _TEXTS}
    plain |= {name: _whole(content[name]) for name in _NUMBERS} | {name: _wholes(content[name]) for name in _ROWS}
    trace = StepTrace(
        **plain,
        ops=tuple(
            OpWork(
                name=text(name), kind=_KINDS[_whole(kind)], flops=_flops(flops), num_bytes=_whole(num_bytes), dtype=text(dtype)
            )
            for name, kind, flops, num_bytes, dtype in content["ops"]
        ),
        step=step,
        lifetimes={
            _whole(value): Lifetime(made_at=_whole(made_at), released_at=_whole(released_at), freed_at=_whole(freed_at))
            for value, made_at, released_at, freed_at in content["lifetimes"]
        },
        live_bytes=tuple(_checked(num_bytes, int) for num_bytes in content["live_bytes"]),
        names={_whole(value): (text(op), text(module)) for value, op, module in content["names"]},
        modules=tuple(
            ModuleOps(module=text(module), kind=text(kind), begin=_whole(begin), end=_whole(end))
            for module, kind, begin, end in content["modules"]
        ),
        backend_dependent=tuple(map(str, content["backend_dependent"])),
    )
    _check(trace)
    return trace


def _lineage_from(content: Mapping[str, Any]) -> Lineage:
    num_bytes, ins, outs = _wholes(content["num_bytes"]), content["ins"], content["outs"]
    taken = {_whole(op): tuple((_whole(before), _whole(after)) for before, after in pairs) for op, *pairs in content["taken"]}
    seconds = content["seconds"] or [0.0] * len(ins)
    lineage = GrowingLineage()
    for op, (read, (first, count), op_s) in enumerate(zip(ins, outs, seconds, strict=True)):
        lineage.add_roots(num_bytes[len(lineage.maker) : first])
        sizes_bytes = num_bytes[first : first + count]
        sources = _wholes(read)
        made = lineage.add_op(sources, sizes_bytes, float(op_s), [before for before, _ in taken.get(op, ())])
        if len(made) != count or (made and made[0] != first) or any(source >= first for source in sources):
            raise ValueError(f"op {op} of the lineage makes or reads other values than there are")
    lineage.add_roots(num_bytes[len(lineage.maker) :])
    if lineage.taken != taken:
        raise ValueError("the lineage writes over other values than there are")
    return lineage.frozen()


def _check(trace: StepTrace) -> None:
    step, num_ops, num_values = trace.step, len(trace.ops), len(trace.step.lineage.maker)
    lengths = {
        "live_bytes": (len(trace.live_bytes), num_ops),
        "op_places": (len(trace.op_places), len(step.lineage.ins)),
        "save_places": (len(trace.save_places), len(step.saves)),
        "use_places": (len(trace.use_places), len(step.uses)),
        "use_ends": (len(step.use_ends), len(step.uses) if step.use_ends else 0),
    }
    for name, (found, needed) in lengths.items():
        if found != needed:
            raise ValueError(f"{name} has {found} items; expected {needed}")
    _check_below("num_forward_ops", [trace.num_forward_ops], num_ops + 1)
    _check_below("op_places", trace.op_places, trace.num_forward_ops)
    _check_below("a place", (*trace.save_places, *trace.use_places), num_ops + 1)
    values = (*step.saves, *step.uses, *step.fixed, *step.retained_bytes, *trace.lifetimes, *trace.names)
    _check_below("a value", values, num_values)
    for places in (trace.op_places, trace.save_places, trace.use_places):
        if any(before > after for before, after in pairwise(places)):
            raise ValueError("places go back")
    for value, life in trace.lifetimes.items():
        if not life.made_at <= life.released_at <= life.freed_at <= num_ops:
            raise ValueError(f"value {value} lives from {life.made_at} by {life.released_at} to {life.freed_at}")
    if any(step.lineage.maker[value] == NO_OP for value in trace.names):
        raise ValueError("a value has a name that no op makes")


def _check_below(name: str, found: Iterable[int], end: int) -> None:
    largest = max(found, default=-1)
    if largest >= end:
        raise ValueError(f"{name} is {largest}; expected less than {end}")


def _checked(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise TypeError(f"found {value!r}; expected {kind.__name__}")
    return value


def _whole(value: Any) -> int:
    if _checked(value, int) < 0:
        raise ValueError(f"found {value}; expected 0 or more")
    return int(value)


def _wholes(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(_whole, values))


def _flops(value: Any) -> float:
    if not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"found {value!r} FLOPs")
    return float(value)
