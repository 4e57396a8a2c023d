"""A `StepTrace` as plain lists and numbers, for JSON, and back: values are told by their numbers, texts are written once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from memkit.plan.step import NO_OP, GrowingLineage, Lifetime, Lineage, ModuleOps, OpKind, OpWork, Step, StepTrace

_KINDS = tuple(OpKind)
_T = TypeVar("_T")


def trace_to_plain(trace: StepTrace) -> dict[str, Any]:
    """Return a trace as what JSON knows: `trace_from_plain` makes an equal one of it."""
    texts = _Texts()
    step, lineage = trace.step, trace.step.lineage
    return {
        "model": trace.model,
        "inputs": trace.inputs,
        "target": trace.target,
        "min_bytes": trace.min_bytes,
        "num_forward_ops": trace.num_forward_ops,
        "base_bytes": trace.base_bytes,
        "trainable_numel": trace.trainable_numel,
        "trainable_bytes": trace.trainable_bytes,
        "ops": [
            [texts.number(op.name), _KINDS.index(op.kind), _number(op.flops), op.num_bytes, texts.number(op.dtype)]
            for op in trace.ops
        ],
        "live_bytes": trace.live_bytes,
        "op_places": trace.op_places,
        "save_places": trace.save_places,
        "use_places": trace.use_places,
        "lifetimes": [[value, life.made_at, life.released_at, life.freed_at] for value, life in trace.lifetimes.items()],
        "names": [[value, texts.number(op), texts.number(module)] for value, (op, module) in trace.names.items()],
        "modules": [[texts.number(call.module), texts.number(call.kind), call.begin, call.end] for call in trace.modules],
        "backend_dependent": trace.backend_dependent,
        "step": {
            "num_bytes": lineage.num_bytes,
            "ins": lineage.ins,
            "outs": [[outs[0], len(outs)] if outs else [0, 0] for outs in lineage.outs],
            "taken": [[op, *pairs] for op, pairs in lineage.taken.items()],
            "seconds": lineage.seconds if any(lineage.seconds) else [],
            "saves": step.saves,
            "uses": step.uses,
            "use_ends": step.use_ends,
            "fixed": sorted(step.fixed),
            "dropped": sorted(step.dropped),
            "moved": sorted(step.moved),
            "retained_bytes": list(step.retained_bytes.items()),
            "why_kept": [[value, texts.number(why)] for value, why in step.why_kept.items()],
        },
        "texts": texts.all,
    }


def trace_from_plain(content: Mapping[str, Any]) -> StepTrace:
    """Return the trace that `trace_to_plain` was given.

    Raises:
        KeyError, TypeError, ValueError, IndexError, AttributeError: it has made no such thing.
    """
    texts = content["texts"]
    text = _texts_of(texts)
    step = _step_from(content["step"], text)
    trace = StepTrace(
        model=_checked(content["model"], str),
        inputs=_checked(content["inputs"], str),
        target=_checked(content["target"], str),
        min_bytes=_whole(content["min_bytes"]),
        ops=tuple(
            OpWork(
                name=text(name), kind=_KINDS[_whole(kind)], flops=_flops(flops), num_bytes=_whole(num_bytes), dtype=text(dtype)
            )
            for name, kind, flops, num_bytes, dtype in content["ops"]
        ),
        num_forward_ops=_whole(content["num_forward_ops"]),
        step=step,
        op_places=_wholes(content["op_places"]),
        save_places=_wholes(content["save_places"]),
        use_places=_wholes(content["use_places"]),
        lifetimes={
            _whole(value): Lifetime(made_at=_whole(made_at), released_at=_whole(released_at), freed_at=_whole(freed_at))
            for value, made_at, released_at, freed_at in content["lifetimes"]
        },
        live_bytes=_wholes(content["live_bytes"], least=None),
        base_bytes=_whole(content["base_bytes"]),
        trainable_numel=_whole(content["trainable_numel"]),
        trainable_bytes=_whole(content["trainable_bytes"]),
        names={_whole(value): (text(op), text(module)) for value, op, module in content["names"]},
        modules=tuple(
            ModuleOps(module=text(module), kind=text(kind), begin=_whole(begin), end=_whole(end))
            for module, kind, begin, end in content["modules"]
        ),
        backend_dependent=tuple(map(str, content["backend_dependent"])),
    )
    _check(trace)
    return trace


def _step_from(content: Mapping[str, Any], text: Callable[[Any], str]) -> Step:
    return Step(
        lineage=_lineage_from(content),
        saves=_wholes(content["saves"]),
        uses=_wholes(content["uses"]),
        use_ends=_wholes(content["use_ends"]),
        fixed=frozenset(_wholes(content["fixed"])),
        dropped=frozenset(_wholes(content["dropped"])),
        moved=frozenset(_wholes(content["moved"])),
        retained_bytes={_whole(value): _whole(num_bytes) for value, num_bytes in content["retained_bytes"]},
        why_kept={_whole(value): text(why) for value, why in content["why_kept"]},
    )


def _lineage_from(content: Mapping[str, Any]) -> Lineage:
    num_bytes, ins, outs = _wholes(content["num_bytes"]), content["ins"], content["outs"]
    taken = {_whole(op): tuple((_whole(before), _whole(after)) for before, after in pairs) for op, *pairs in content["taken"]}
    seconds = content["seconds"] or [0.0] * len(ins)
    lineage = GrowingLineage()
    for op, (read, (first, count), op_s) in enumerate(zip(ins, outs, seconds, strict=True)):
        while len(lineage.maker) < first:
            lineage.add_root(num_bytes[len(lineage.maker)])
        sizes_bytes = num_bytes[first : first + count]
        sources = _wholes(read)
        made = lineage.add_op(sources, sizes_bytes, float(op_s), [before for before, _ in taken.get(op, ())])
        if len(made) != count or (made and made[0] != first) or any(source >= first for source in sources):
            raise ValueError(f"op {op} of the lineage makes or reads other values than there are")
    while len(lineage.maker) < len(num_bytes):
        lineage.add_root(num_bytes[len(lineage.maker)])
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


# Numbers and texts


class _Texts:
    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def all(self) -> list[str]:
        return list(self._numbers)


def _texts_of(texts: Sequence[str]) -> Callable[[Any], str]:
    known = [_checked(text, str) for text in texts]
    return lambda number: known[_whole(number)]


def _checked(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise TypeError(f"found {value!r}; expected {kind.__name__}")
    return value


def _whole(value: Any, *, least: int | None = 0) -> int:
    if least is not None and _checked(value, int) < least:
        raise ValueError(f"found {value}; expected {least} or more")
    return _checked(value, int)


def _wholes(values: Iterable[Any], *, least: int | None = 0) -> tuple[int, ...]:
    return tuple(_whole(value, least=least) for value in values)


def _flops(value: Any) -> float:
    if not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"found {value!r} FLOPs")
    return float(value)


def _number(value: float) -> int | float:
    """Return a number as an integer where it is one, which is shorter."""
    return int(value) if value.is_integer() else value
