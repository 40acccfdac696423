"""PyTorch's CUDA caching allocator, slow and plain: a list of segments, each a list of blocks, every number summed anew.

Written from c10/cuda/CUDACachingAllocator.cpp without the implementation: nothing is kept that can be counted, and every
search looks at everything. A block is used, free, or a hole: addresses of an expandable segment with no memory behind
them. There is one stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Rules:
    """The settings, in bytes; `divisions` has one entry for each power of two from 1 MiB to 32 GiB."""

    expandable: bool = False
    max_split: int | None = None
    slack: int = 20 * MIB
    divisions: tuple[int, ...] = (0,) * 16
    collect_from: float = 0.0
    large_segment: int = 20 * MIB
    allowed: int | None = None
    rejects: bool = False


@dataclass(eq=False)
class Piece:
    start: int
    size: int
    state: str
    asked: int = 0
    cached_at: int = 0


@dataclass(eq=False)
class Segment:
    small: bool
    expandable: bool
    pieces: list[Piece]

    def pages_from(self) -> int:
        return self.pieces[0].start


class NoRoom(Exception):  # noqa: N818
    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers


class PlainAllocator:
    def __init__(self, capacity: int, rules: Rules) -> None:
        self.capacity = capacity
        self.rules = rules
        self.segments: list[Segment] = []
        self.next_address = 0x7F0000000000
        self.searches = {True: 0, False: 0}
        self.peaks = dict.fromkeys(self.now(), 0)
        self.retries = 0
        self.ooms = 0
        self.rejections = 0
        self.history: list[tuple[str, int, int]] = []

    # What there is, summed.

    def now(self) -> dict[str, int]:
        pieces = [(segment, piece) for segment in self.segments for piece in segment.pieces]
        return {
            "allocated": sum(p.size for _, p in pieces if p.state == "used"),
            "requested": sum(p.asked for _, p in pieces if p.state == "used"),
            "reserved": sum(p.size for _, p in pieces if p.state != "hole"),
            "inactive_split": sum(
                p.size for s, p in pieces if p.state == "free" and len(s.pieces) > 1 and not s.expandable
            ),
            "num_segments": sum(not segment.expandable for segment in self.segments),
        }

    def free_on_card(self) -> int:
        taken = 0
        for segment in self.segments:
            size = sum(piece.size for piece in segment.pieces if piece.state != "hole")
            taken += size if segment.expandable else up_to(size, 2 * MIB)
        return self.capacity - taken

    def look(self) -> None:
        """Take note of the peaks: called after every single change."""
        self.peaks = {name: max(self.peaks[name], value) for name, value in self.now().items()}

    def note(self, action: str, address: int, size: int) -> None:
        self.history.append((action, address, size))

    # What a user calls.

    def malloc(self, size: int) -> Piece | None:
        if size == 0:
            return None
        if size >= 2**60:
            raise self.no_room(size)
        rounded = self.rounded(size)
        small = rounded <= MIB
        if self.collecting():
            self.searches[small] += 1
        found = self.best_cached(rounded, small) or self.from_card(size, rounded, small)
        return self.hand_out(*found, rounded, size)

    def free(self, piece: Piece | None) -> None:
        if piece is None:
            return
        self.note("free_requested", piece.start, piece.asked)
        self.return_to_cache(piece)

    def empty_cache(self) -> None:
        for small in (False, True):
            for segment, piece in self.cached(small):
                if segment.expandable:
                    self.unmap_within(segment, piece)
                    if [each.state for each in segment.pieces] == ["hole"]:
                        self.segments.remove(segment)
                elif len(segment.pieces) == 1:
                    self.release(segment)

    # Sizes.

    def rounded(self, size: int) -> int:
        power = 1
        while power * 2 <= size:
            power *= 2
        interval = 0
        while interval < 15 and (MIB << (interval + 1)) <= power:
            interval += 1
        steps = self.rules.divisions[interval]
        if steps > 1 and size > 512 * steps:
            return next(power + k * power // steps for k in range(steps + 1) if power + k * power // steps >= size)
        return max(up_to(size, 512), 512)

    def segment_size(self, rounded: int) -> int:
        if rounded <= MIB:
            return 2 * MIB
        return self.rules.large_segment if rounded < 10 * MIB else up_to(rounded, 2 * MIB)

    # Finding a cached block.

    def cached(self, small: bool) -> list[tuple[Segment, Piece]]:
        """Free blocks by size, address."""
        found = [
            (segment, piece)
            for segment in self.segments
            for piece in segment.pieces
            if piece.state == "free" and segment.small == small
        ]
        return sorted(found, key=lambda pair: (pair[1].size, pair[1].start))

    def best_cached(self, rounded: int, small: bool) -> tuple[Segment, Piece] | None:
        enough = [pair for pair in self.cached(small) if pair[1].size >= rounded]
        if not enough:
            return None
        best = enough[0]
        for other in enough[1:]:
            if not best[0].expandable or self.grown(*other) >= self.grown(*best):
                break
            best = other
        limit = self.rules.max_split
        if limit is not None:
            if rounded < limit and best[1].size >= limit:
                return None
            if rounded >= limit and best[1].size >= rounded + self.rules.slack:
                return None
        return best

    def grown(self, segment: Segment, piece: Piece) -> int:
        after = segment.pieces[segment.pieces.index(piece) + 1 :]
        return piece.size + (after[0].size if after and after[0].state == "hole" else 0)

    # Asking the card.

    def from_card(self, size: int, rounded: int, small: bool) -> tuple[Segment, Piece]:
        if self.collecting():
            self.collect()
        found = self.new_block(size, rounded, small)
        if found is None and self.release_oversize(rounded, small):
            found = self.new_block(size, rounded, small)
        if found is None:
            self.empty_cache()
            self.retries += 1
            found = self.new_block(size, rounded, small)
        if found is None:
            self.ooms += 1
            self.note("oom", self.free_on_card(), rounded)
            raise self.no_room(size)
        return found

    def new_block(self, size: int, rounded: int, small: bool) -> tuple[Segment, Piece] | None:
        wanted = self.segment_size(rounded)
        if self.rules.allowed is not None and self.now()["reserved"] + wanted > self.rules.allowed:
            if self.rules.rejects:
                self.rejections += 1
                raise self.no_room(size)
            return None
        if self.rules.expandable:
            return self.grow(rounded, small)
        if up_to(wanted, 2 * MIB) > self.free_on_card():
            return None
        segment = Segment(small, False, [Piece(self.addresses(wanted), wanted, "free")])
        self.segments.append(segment)
        self.note("segment_alloc", segment.pieces[0].start, wanted)
        self.look()
        return segment, segment.pieces[0]

    def addresses(self, size: int) -> int:
        start = self.next_address
        self.next_address += up_to(size, 2 * MIB)
        return start

    def release(self, segment: Segment) -> None:
        (piece,) = segment.pieces
        assert piece.state == "free"
        self.segments.remove(segment)
        self.note("segment_free", piece.start, piece.size)

    def release_oversize(self, rounded: int, small: bool) -> bool:
        if self.rules.max_split is None:
            return False
        target = max(rounded, self.rules.max_split)
        oversize = [s for s, p in self.cached(small) if p.size >= self.rules.max_split and not s.expandable]
        single = [segment for segment in oversize if segment.pieces[0].size >= target]
        if single:
            self.release(single[0])
            return True
        released = 0
        for segment in reversed(oversize):
            if released < target:
                released += segment.pieces[0].size
                self.release(segment)
        return released >= target

    def collecting(self) -> bool:
        return self.rules.allowed is not None and self.rules.collect_from > 0

    def collect(self) -> None:
        assert self.rules.allowed is not None
        target = self.now()["reserved"] - int(self.rules.collect_from * self.rules.allowed)
        reclaimed = 0
        while reclaimed < target:
            whole = [(s, p) for s, p in self.cached(False) if len(s.pieces) == 1 and not s.expandable]
            if not whole:
                return
            ages = [self.searches[False] - piece.cached_at for _, piece in whole]
            mean = sum(ages) / len(ages)
            for (segment, piece), age in zip(whole, ages, strict=True):
                if age >= mean:
                    reclaimed += piece.size
                    self.release(segment)

    # Expandable segments, page by page.

    def grow(self, rounded: int, small: bool) -> tuple[Segment, Piece] | None:
        page = 2 * MIB if small else self.rules.large_segment
        segment, start = self.lowest_place(rounded, small, page)
        while True:
            run = 0
            for piece in segment.pieces:
                if piece.start == start + run and piece.state == "free":
                    run += piece.size
            if run >= rounded:
                return segment, next(piece for piece in segment.pieces if piece.start == start)
            hole = next(piece for piece in segment.pieces if piece.start == start + run)
            assert hole.state == "hole"
            mapped = up_to(min(rounded - run, hole.size), page)
            if mapped > self.free_on_card():
                return None
            self.cut(segment, hole, [(mapped, "free"), (hole.size - mapped, "hole")])
            self.note("segment_map", start + run, mapped)
            self.look()

    def lowest_place(self, rounded: int, small: bool, page: int) -> tuple[Segment, int]:
        mine = [s for s in self.segments if s.expandable and s.small == small]
        for segment in sorted(mine, key=Segment.pages_from):
            for at, piece in enumerate(segment.pieces):
                if piece.state != "hole":
                    continue
                first = at - 1 if at and segment.pieces[at - 1].state == "free" else at
                room = 0
                for each in segment.pieces[first:]:
                    if each.state not in ("free", "hole"):
                        break
                    room += each.size
                if room >= rounded:
                    return segment, segment.pieces[first].start
        size = up_to(self.capacity + self.capacity // 8, page)
        segment = Segment(small, True, [Piece(self.addresses(size), size, "hole")])
        self.segments.append(segment)
        return segment, segment.pieces[0].start

    def unmap_within(self, segment: Segment, piece: Piece) -> None:
        page = 2 * MIB if segment.small else self.rules.large_segment
        base = segment.pages_from()
        end = base + sum(each.size for each in segment.pieces)
        inside = [p for p in range(base, end, page) if piece.start <= p and p + page <= piece.start + piece.size]
        if not inside:
            return
        before, after = inside[0] - piece.start, piece.start + piece.size - inside[-1] - page
        size = len(inside) * page
        self.cut(segment, piece, [(before, "free"), (size, "hole"), (after, "free")])
        self.note("segment_unmap", inside[0], size)

    # Blocks.

    def segment_of(self, piece: Piece) -> Segment:
        return next(segment for segment in self.segments if piece in segment.pieces)

    def cut(self, segment: Segment, piece: Piece, parts: list[tuple[int, str]]) -> None:
        """Put blocks of these sizes and states in the place of one, and join like neighbours."""
        at, start = segment.pieces.index(piece), piece.start
        new = []
        for size, state in parts:
            if size:
                new.append(Piece(start, size, state, cached_at=self.searches[segment.small]))
                start += size
        segment.pieces[at : at + 1] = new
        self.join(segment)

    def join(self, segment: Segment) -> None:
        joined: list[Piece] = []
        for piece in segment.pieces:
            if joined and piece.state in ("free", "hole") and joined[-1].state == piece.state:
                size = joined[-1].size + piece.size
                joined[-1] = Piece(joined[-1].start, size, piece.state, cached_at=self.searches[segment.small])
            else:
                joined.append(piece)
        segment.pieces = joined

    def hand_out(self, segment: Segment, piece: Piece, rounded: int, size: int) -> Piece:
        rest = piece.size - rounded
        if segment.small or self.rules.expandable:
            split = rest >= 512
        else:
            split = rest > MIB and (self.rules.max_split is None or rounded < self.rules.max_split)
        if split:
            self.cut(segment, piece, [(rounded, "used"), (rest, "free")])
            piece = next(each for each in segment.pieces if each.start == piece.start)
        piece.state, piece.asked = "used", size
        self.note("alloc", piece.start, size)
        self.look()
        return piece

    def return_to_cache(self, piece: Piece) -> None:
        segment = self.segment_of(piece)
        self.note("free_completed", piece.start, piece.asked)
        # A copy, so that whoever still holds the block cannot be mistaken for its next holder.
        freed = replace(piece, state="free", asked=0, cached_at=self.searches[segment.small])
        segment.pieces[segment.pieces.index(piece)] = freed
        self.join(segment)
        self.look()

    def no_room(self, size: int) -> NoRoom:
        now = self.now()
        return NoRoom(size, now["allocated"], now["reserved"], self.free_on_card(), self.capacity)

    def layout(self) -> list[tuple[object, ...]]:
        """Every stretch of mapped memory with its blocks, by address."""
        names = {"used": "active_allocated", "free": "inactive"}
        stretches: list[tuple[Segment, list[Piece]]] = []
        for segment in self.segments:
            fresh = True
            for piece in segment.pieces:
                if piece.state == "hole":
                    fresh = True
                    continue
                if fresh:
                    stretches.append((segment, []))
                    fresh = False
                stretches[-1][1].append(piece)
        return [
            (
                pieces[0].start,
                "small" if segment.small else "large",
                segment.expandable,
                tuple((piece.start, piece.size, piece.asked, names[piece.state]) for piece in pieces),
            )
            for segment, pieces in sorted(stretches, key=lambda pair: pair[1][0].start)
        ]


def up_to(size: int, unit: int) -> int:
    """Round up to a multiple."""
    return (size + unit - 1) // unit * unit
