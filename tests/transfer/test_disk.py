"""`memkit.Disk`: bytes come back as they were, nothing on disk is lost by a failure, nothing is left behind."""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import memkit
from memkit.core.sizes import DISK_PAGE_BYTES as PAGE
from memkit.device import ReferenceDevice
from memkit.errors import DiskError
from memkit.transfer import Arena, Lanes, ReferenceDisk
from memkit.transfer.disk import DiskCopy, DiskFile, DiskStore, cut_in_blocks
from memkit.transfer.host_memory import Span
from memkit.transfer.reference_disk import POISON
from tests.interrupts import interrupts
from tests.threads import num_own_threads

MIB = 2**20
SIZES = st.one_of(st.integers(1, 40), st.integers(-3, 3).map(lambda near: 4096 + near), st.integers(4000, 30000))


@dataclass
class Faults:
    """Fails at the calls that the test says, and counts them."""

    at: dict[int, int | OSError] = field(default_factory=dict)
    """By the number of the call: what it raises, or how many bytes it moves."""
    num_calls: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, what: str, offset: int, num_bytes: int) -> int:
        if what == "reserve":
            return 0
        with self._lock:
            found, self.num_calls = self.at.get(self.num_calls), self.num_calls + 1
        if isinstance(found, OSError):
            raise found
        return num_bytes if found is None else min(found, num_bytes)


class Host:
    """Host memory for the bytes of a test."""

    def __init__(self) -> None:
        self.device = ReferenceDevice()
        self.arena = Arena(self.device)

    def span(self, num_bytes: int, *, seed: int | None = None) -> Span:
        span = self.arena.take(num_bytes)
        content = filled(num_bytes, seed)
        for piece in span.pieces:
            piece.copy_(content[: len(piece)])
            content = content[len(piece) :]
        return span

    def write(self, store: DiskStore, copy: DiskCopy, seed: int) -> None:
        store.write(copy, self.span(copy.num_bytes, seed=seed))
        store.wait(copy)

    def read(self, store: DiskStore, copy: DiskCopy) -> Tensor:
        span = self.span(copy.num_bytes)
        store.read(copy, span)
        store.wait(copy)
        return bytes_of(span)

    def close(self) -> None:
        self.arena.give_all()
        self.arena.close()


def filled(num_bytes: int, seed: int | None) -> Tensor:
    if seed is None:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def bytes_of(span: Span) -> Tensor:
    return torch.cat([piece.clone() for piece in span.pieces])


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


@pytest.fixture(params=["real", "buffered", "late", "random", "threads"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> memkit.Disk:
    if request.param == "buffered":
        monkeypatch.setattr(DiskFile, "_set_direct", _no_direct)
    if request.param in ("real", "buffered"):
        return memkit.Disk(tmp_path)
    return ReferenceDisk(seed=3 if request.param == "random" else None, is_late=request.param != "threads")


def _no_direct(_file: DiskFile, is_direct: bool) -> None:
    if is_direct:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.mark.filterwarnings("ignore:Disk")
def test_bytes_come_back_as_they_were(disk: memkit.Disk, host: Host) -> None:
    sizes = [1, 4095, 4096, 4097, 100_000, 8 * MIB, 20 * MIB + 5]
    store = disk.open(sum(sizes) + len(sizes) * PAGE, host.device)
    copies = [store.add(f"chunk {size}", size) for size in sizes]
    for seed, copy in enumerate(copies):
        store.write(copy, host.span(copy.num_bytes, seed=seed))
    for copy in copies:
        store.wait(copy)

    spans = [host.span(copy.num_bytes) for copy in copies]
    for copy, span in zip(copies, spans, strict=True):
        store.read(copy, span)
    for copy in copies:
        store.wait(copy)

    for seed, span in enumerate(spans):
        assert torch.equal(bytes_of(span), filled(span.num_bytes, seed))
    assert store.read_bytes == store.written_bytes == sum(sizes)
    store.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(), sizes=st.lists(SIZES, min_size=1, max_size=5), kind=st.sampled_from(["real", "late", "random", "threads"])
)
def test_any_sequence_of_reads_and_writes(data: st.DataObject, sizes: list[int], kind: str, tmp_path: Path) -> None:
    """What is read is what was written last, however chunks of odd sizes change places, and however late it lands."""
    host = Host()
    disk = (
        memkit.Disk(tmp_path)
        if kind == "real"
        else ReferenceDisk(seed=data.draw(st.integers(0, 99)) if kind == "random" else None, is_late=kind != "threads")
    )
    room = sum(-(-size // PAGE) * PAGE for size in sizes) + 2 * -(-max(sizes) // PAGE) * PAGE
    store = disk.open(room, host.device)
    copies = [store.add(str(number), size) for number, size in enumerate(sizes)]
    expected: dict[DiskCopy, int] = {}
    for seed in range(data.draw(st.integers(1, 12))):
        copy = data.draw(st.sampled_from(copies))
        if copy in expected and data.draw(st.booleans()):
            assert torch.equal(host.read(store, copy), filled(copy.num_bytes, expected[copy]))
        else:
            store.write(copy, host.span(copy.num_bytes, seed=seed))
            expected[copy] = seed
        assert_places_are_apart(store, copies)

    for copy in expected:
        store.wait(copy)
    assert store.in_use_bytes == sum(-(-copy.num_bytes // PAGE) * PAGE for copy in expected)
    store.close()
    host.close()


def assert_places_are_apart(store: DiskStore, copies: list[DiskCopy]) -> None:
    ranges = sorted(place for copy in copies for places in copy.places for place in places)
    assert all(start % PAGE == end % PAGE == 0 and start < end for start, end in ranges)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    assert sum(end - start for start, end in ranges) == store.in_use_bytes


@settings(max_examples=20)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=6),
    offsets=st.lists(st.integers(0, 1), min_size=6, max_size=6),
    block=st.integers(1, 4),
)
def test_blocks_cover_all_bytes_once(sizes: list[int], offsets: list[int], block: int) -> None:
    memory = torch.arange(sum(sizes) + len(sizes) + PAGE, dtype=torch.int64).to(torch.uint8)
    pieces, at = [], -memory.data_ptr() % PAGE
    for size, offset in zip(sizes, offsets, strict=False):
        pieces.append(memory[at + offset : at + offset + size])
        at += offset + size
    pieces = [piece for piece in pieces if len(piece)]
    room = -(-sum(map(len, pieces)) // PAGE) * PAGE

    blocks = cut_in_blocks([(0, PAGE), (3 * PAGE, 3 * PAGE + room)], pieces, block_bytes=block * PAGE)

    found = b"".join(bytes(memory) for block in blocks for memory in block.buffers)
    assert found == b"".join(bytes(piece.numpy()) for piece in pieces)
    assert all(block.offset % PAGE == 0 for block in blocks)
    assert all(block.num_bytes == sum(map(len, block.buffers)) <= 4 * PAGE for block in blocks)
    ends = [(block.offset, block.offset + -(-block.num_bytes // PAGE) * PAGE) for block in blocks]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))


def test_all_but_the_last_page_of_an_aligned_chunk_needs_no_buffer(host: Host) -> None:
    (span,) = host.arena.take_pinned_as_one([20 * MIB + 5])

    blocks = cut_in_blocks([(0, 21 * MIB)], span.pieces)

    assert [block.is_aligned for block in blocks] == [True, True, True, False]
    assert blocks[-1].num_bytes == 5


def test_failed_write_loses_nothing(host: Host) -> None:
    faults = Faults()
    store = ReferenceDisk(fault=faults).open(64 * MIB, host.device)
    copy = store.add("layers.3.exp_avg", 20 * MIB)
    host.write(store, copy, 1)
    faults.at = {faults.num_calls + 1: OSError(errno.EIO, os.strerror(errno.EIO))}
    store.write(copy, host.span(copy.num_bytes, seed=2))

    with pytest.raises(DiskError, match=re.escape('writing "layers.3.exp_avg" (20.00 MiB) failed')) as caught:
        store.wait(copy)

    assert (caught.value.errno, caught.value.path) == (errno.EIO, Path("reference"))
    assert os.strerror(errno.EIO) in str(caught.value)
    assert torch.equal(host.read(store, copy), filled(copy.num_bytes, 1))
    assert store.in_use_bytes == 20 * MIB
    store.close()


@settings(max_examples=15)
@given(
    fails_at=st.dictionaries(st.integers(0, 30), st.sampled_from([errno.EIO, errno.ENOSPC, errno.EINTR, -1, -2]), max_size=6),
    seed=st.one_of(st.none(), st.integers(0, 99)),
    is_late=st.booleans(),
)
def test_every_chunk_is_old_or_new_whatever_fails(fails_at: dict[int, int], seed: int | None, is_late: bool) -> None:
    """Errors, interrupted calls and short ones at any of them."""
    host = Host()
    at: dict[int, int | OSError] = {
        call: OSError(number, os.strerror(number)) if number > 0 else {-1: PAGE, -2: 1}[number]
        for call, number in fails_at.items()
    }
    store = ReferenceDisk(fault=Faults(at), seed=seed, is_late=is_late).open(10 * PAGE, host.device)
    store._block_bytes = PAGE
    copies = [store.add(str(number), size) for number, size in enumerate((PAGE, 2 * PAGE + 1, 5))]
    known: dict[DiskCopy, int] = {}

    def settled(act: Callable[[], None]) -> bool:
        try:
            act()
        except DiskError:
            return False
        return True

    for step in range(3):
        for copy in copies:
            span, content = host.span(copy.num_bytes, seed=step), step
            while not settled(lambda span=span, copy=copy: (store.write(copy, span), store.wait(copy))[0]):  # type: ignore[misc]
                if copy in known:
                    there = host.span(copy.num_bytes)
                    if settled(lambda there=there, copy=copy: (store.read(copy, there), store.wait(copy))[0]):  # type: ignore[misc]
                        assert torch.equal(bytes_of(there), filled(copy.num_bytes, known[copy]))
            known[copy] = content
            assert_places_are_apart(store, copies)
    for copy in copies:
        there = host.span(copy.num_bytes)
        while not settled(lambda there=there, copy=copy: (store.read(copy, there), store.wait(copy))[0]):  # type: ignore[misc]
            pass
        assert torch.equal(bytes_of(there), filled(copy.num_bytes, 2))
    store.close()
    host.close()


def test_file_without_room_for_the_new_bytes_beside_the_old(host: Host) -> None:
    store = ReferenceDisk().open(3 * PAGE, host.device)
    copy = store.add("chunk", 2 * PAGE)
    store.write(copy, host.span(copy.num_bytes, seed=1))

    with pytest.raises(DiskError, match=r'"chunk" needs 8.00 KiB .* found 4.00 KiB of 12.00 KiB free. Reserve more'):
        store.write(copy, host.span(copy.num_bytes, seed=2))

    assert torch.equal(host.read(store, copy), filled(copy.num_bytes, 1))
    store.close()


def test_missing_wait_shows(host: Host) -> None:
    store = ReferenceDisk().open(MIB, host.device)
    copy, source, span = store.add("chunk", 5000), host.span(5000, seed=1), host.span(5000)
    host.write(store, copy, 1)

    store.read(copy, span)

    assert bool((bytes_of(span) == POISON).all())
    store.wait(copy)
    assert torch.equal(bytes_of(span), filled(5000, 1))
    store.write(copy, source)
    for piece in source.pieces:
        piece.fill_(7)  # too early
    store.wait(copy)
    store.read(copy, span)
    store.wait(copy)
    assert bool((bytes_of(span) == 7).all())
    store.close()


@pytest.mark.filterwarnings("ignore:Disk")
def test_waits_for_copies_of_the_device(disk: memkit.Disk, host: Host) -> None:
    """What a copy from the device still makes is written when it is there; what one still reads is not overwritten."""
    device, lanes = host.device, Lanes(host.device)
    storage, back = device.allocate(20_000), device.allocate(20_000)
    on_device = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    on_device.copy_(filled(20_000, 5))
    out_span, span = host.arena.take(20_000), host.arena.take(20_000)
    store = disk.open(MIB, device)
    copy = store.add("chunk", 20_000)

    out = lanes.copy_out(storage, out_span, after=device.record_event())
    store.write(copy, out_span, after=[out.done])
    store.wait(copy)
    sent = lanes.copy_back(out_span, back, after=())
    host.arena.give(out_span, sent.done)
    taken = host.arena.take(20_000)
    assert taken.free_events
    other = store.add("other", 20_000)
    store.write(other, host.span(20_000, seed=6))
    store.read(other, taken)
    store.wait(other)
    store.read(copy, span)
    store.wait(copy)

    device.synchronize()
    assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(back), filled(20_000, 5))  # type: ignore[call-overload]
    assert torch.equal(bytes_of(span), filled(20_000, 5))
    assert torch.equal(bytes_of(taken), filled(20_000, 6))
    store.close()


# The file


@pytest.mark.parametrize("has_unnamed", [True, False])
def test_file_is_private_unnamed_and_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_unnamed: bool) -> None:
    if not has_unnamed:  # it is unlinked at once
        monkeypatch.delattr(os, "O_TMPFILE")
    file = DiskFile(tmp_path, MIB)
    found = os.fstat(file._handle)

    assert list(tmp_path.iterdir()) == []
    assert (stat.S_IMODE(found.st_mode), found.st_nlink, found.st_size) == (0o600, 0, MIB)
    assert found.st_blocks * 512 >= MIB, "reserved"
    assert not os.get_inheritable(file._handle)
    file.close()
    file.close()


def test_without_direct_reads_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskFile, "_set_direct", _no_direct)

    with pytest.warns(UserWarning, match=rf"'{tmp_path}' has no direct reads and writes \(O_DIRECT: Invalid arg") as said:
        store = memkit.Disk(tmp_path).open(MIB, ReferenceDevice())

    assert said[0].filename == __file__
    assert not store.file.is_direct
    store.close()


@pytest.mark.parametrize(
    ("call", "number", "message"),
    [
        ("posix_fallocate", errno.ENOSPC, r"2\.00 MiB is needed in '.*'; found: No space left on device \(.* are free\)"),
        ("open", errno.EACCES, "found: Permission denied"),
    ],
)
def test_file_that_cannot_be_made_is_told_before_anything_moves(tmp_path, monkeypatch, call, number, message) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    disk, handles, threads = memkit.Disk(tmp_path), _num_handles(tmp_path), num_own_threads()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)  # root may write anywhere
        with pytest.raises(DiskError, match=message) as caught:
            disk.open(2 * MIB, ReferenceDevice())

    assert (caught.value.errno, caught.value.path) == (number, tmp_path)
    assert (_num_handles(tmp_path), num_own_threads()) == (handles, threads)


def test_directory_that_all_may_write_to_needs_the_sticky_bit(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)

    with pytest.raises(ValueError, match=r"mode 777.*chmod \+t"):
        memkit.Disk(tmp_path)

    tmp_path.chmod(0o1777)
    assert memkit.Disk(str(tmp_path), limit="3KiB") == memkit.Disk(tmp_path, limit=3072)


@pytest.mark.parametrize(
    ("directory", "limit", "kind", "message"),
    [
        (3, None, TypeError, 'a directory, such as "/scratch"; found 3'),
        ("/no/such/place", None, ValueError, "found none at '/no/such/place'"),
        ("/tmp", "much", ValueError, "limit is a number of bytes"),
        ("/tmp", 0, ValueError, "limit must be more than 0"),
    ],
)
def test_bad_input(directory: str, limit: int | str | None, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        memkit.Disk(directory, limit=limit)


def _num_handles(directory: Path) -> int:
    """Return how many files in a directory this process has open: elsewhere, others may close theirs at any time."""
    links = []
    for handle in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of what is read here, which is closed by now
            links.append(os.readlink(handle))
    return sum(link.startswith(f"{directory}/") for link in links)


def test_nothing_is_left_behind(tmp_path: Path, host: Host) -> None:
    handles, threads = _num_handles(tmp_path), num_own_threads()
    for is_closed in (True, False):
        store = memkit.Disk(tmp_path).open(MIB, host.device, num_threads=3)
        assert (_num_handles(tmp_path), num_own_threads()) == (handles + 1, threads + 3)
        copy = store.add("chunk", 5000)
        store.write(copy, host.span(5000))
        if is_closed:
            store.close()
        del store, copy

        assert (_num_handles(tmp_path), num_own_threads()) == (handles, threads)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_may_end_while_a_thread_of_its_parent_writes(tmp_path: Path, host: Host) -> None:
    store = memkit.Disk(tmp_path).open(MIB, host.device)
    copy = store.add("chunk", 5000)
    with store._queue._changed:  # type: ignore[attr-defined]  # as a thread may hold it
        child = os.fork()
        if not child:
            store._shut()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    store.write(copy, host.span(5000, seed=1))
    assert torch.equal(host.read(store, copy), filled(5000, 1))
    store.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_killed_process_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import memkit, sys, time; from memkit.device import ReferenceDevice\n"
        f"store = memkit.Disk({str(tmp_path)!r}).open(2**20, ReferenceDevice())\n"
        "print('open', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert child.stdout is not None
    assert child.stdout.readline() == b"open\n"

    child.kill()
    child.wait()
    child.stdout.close()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_late", [False, True])
def test_chunk_is_old_or_new_wherever_an_interrupt_comes(host: Host, is_late: bool) -> None:
    store = ReferenceDisk(is_late=is_late).open(MIB, host.device)
    copy, other = store.add("chunk", 9000), store.add("other", 5000)
    spans = [host.span(9000, seed=0), host.span(9000, seed=1)]
    there, beside = host.span(9000), host.span(5000)
    host.write(store, copy, 0)
    host.write(store, other, 7)
    turn = 0

    def step() -> None:
        nonlocal turn
        store.write(copy, spans[turn % 2])
        store.wait(copy)
        turn += 1

    for place in interrupts(step, 60):
        store.wait(copy)
        for read, span in ((copy, there), (other, beside)):
            store.read(read, span)
            store.wait(read)
        found = bytes_of(there)
        assert any(torch.equal(found, filled(9000, seed)) for seed in (0, 1)), place
        assert torch.equal(bytes_of(beside), filled(5000, 7)), place
        assert_places_are_apart(store, [copy, other])
    store.close()


@pytest.mark.filterwarnings("ignore:Disk")
def test_a_store_is_extended_while_bytes_move(disk: memkit.Disk, host: Host) -> None:
    store = disk.open(4 * PAGE, host.device)
    copies = []
    for number in range(6):
        disk.extend(store, (4 + 2 * number) * PAGE)
        copies.append(store.add(str(number), 2 * PAGE - 5))
        store.write(copies[-1], host.span(2 * PAGE - 5, seed=number))
        assert store.file.num_bytes == (4 + 2 * number) * PAGE
    for number, copy in enumerate(copies):
        assert torch.equal(host.read(store, copy), filled(copy.num_bytes, number))
    assert store.sizes == [2 * PAGE - 5] * 6
    assert_places_are_apart(store, copies)
    store.close()


@pytest.mark.filterwarnings("ignore:Disk")
def test_a_store_is_extended_up_to_the_limit_and_to_what_is_free(host: Host, tmp_path: Path) -> None:
    for disk in (memkit.Disk(tmp_path, limit=8 * PAGE), ReferenceDisk(limit=8 * PAGE)):
        store = disk.open(4 * PAGE, host.device)
        with pytest.raises(DiskError, match="Raise the limit"):
            disk.extend(store, 9 * PAGE)
        disk.extend(store, 8 * PAGE)
        assert store.file.num_bytes == 8 * PAGE
        store.close()
    disk = memkit.Disk(tmp_path)
    store = disk.open(PAGE, host.device)
    with pytest.raises(DiskError) as caught:
        disk.extend(store, 2**50)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert store.file.num_bytes == PAGE
    store.close()


@pytest.mark.filterwarnings("ignore:Disk")
def test_mapped_bytes_are_those_that_are_read(disk: memkit.Disk, host: Host) -> None:
    """What is written through a mapping is read past the system's cache, before it is settled and after."""
    store = disk.open(16 * PAGE, host.device)
    copies = [store.add(str(number), 3 * PAGE + 7) for number in range(3)]
    mapped = [store.map(copy) for copy in copies]
    for seed in range(4):
        for number, (copy, memory) in enumerate(zip(copies, mapped, strict=True)):
            content = filled(copy.num_bytes, 10 * seed + number)
            memory[: copy.num_bytes] = content.numpy().data
            if seed % 2:
                store.settle_map(copy, memory)
            assert torch.equal(host.read(store, copy), content)
    assert_places_are_apart(store, copies)
    store.close()
    assert bytes(mapped[0][:5]) == bytes(filled(3 * PAGE + 7, 30)[:5].numpy())


def test_mapping_needs_room_in_one_place(host: Host) -> None:
    store = ReferenceDisk().open(4 * PAGE, host.device)
    first, second, third = (store.add(str(number), PAGE) for number in range(3))
    for copy in (first, second, third):
        store.map(copy)
    store.remove(second)
    with pytest.raises(DiskError, match="no room in one place"):
        store.map(store.add("large", 2 * PAGE))
    store.close()
