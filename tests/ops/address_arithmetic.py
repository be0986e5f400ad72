"""Finds products of 32 bits that lead to addresses in what Triton has made of a kernel, before layouts (TTIR).

A product of 32 bits that overflows addresses other memory, without an error. The search goes back from each address through
the integers that it is made of. It ends at what is loaded from memory, and at arguments. Coordinates of descriptors (TMA) are
of 32 bits by definition, and are left out.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import dlrm_fused

PACKAGE = Path(dlrm_fused.__file__).parent
_NAME = r"%[\w$.-]+(?:#\d+)?"
_RESULTS = re.compile(r"\s*(%[\w$.-]+)(?::(\d+))? = (.*)")
_OPERATION = re.compile(r'"?([a-z_]+\.[\w.]+)"?')
_BLOCK_ARGUMENTS = re.compile(r"\s*\^bb\d+\((.*)\):")
_LOCATION = re.compile(r"loc\((#loc\d*)\)\s*$")
_DEFINITION = re.compile(r"(#loc\d*) = loc\((.*)\)\s*$")
_IS_OF_32_BITS = re.compile(r": (?:tensor<[\dx]*x)?i32>? loc\(")
_ANY = 2**31 - 1
_MOST_PROGRAMS = 65535  # of the second and the third axis of a grid, by CUDA
_SUMS = ("arith.addi", "arith.subi", "arith.select")
_ENDS = ("tt.load", "tt.atomic", "tt.descriptor_load", "arith.cmp", "tt.get_program_id", "tt.get_num_programs")


class Product(NamedTuple):
    """The place of a product: a file of the package and the text of the line."""

    file: str
    line: str


class _Value(NamedTuple):
    operation: str
    text: str  # of the operation
    sources: list[int]


class _Module:
    """The integers of one kernel, as a graph: each value and what it is made of."""

    def __init__(self, ttir: str) -> None:
        self.values: list[_Value] = []
        self.addresses: list[int] = []
        self._scopes: list[dict[str, int]] = [{}]
        # For each open region, the values of its operation, and those that the next iteration begins with.
        self._regions: list[tuple[list[int], list[int]]] = []
        self._locations = dict(match.groups() for match in map(_DEFINITION.match, ttir.splitlines()) if match)
        for line in ttir.splitlines():
            if not line.startswith("#loc"):
                self._read(line)

    def _define(self, name: str, operation: str, text: str, sources: list[int]) -> int:
        self.values.append(_Value(operation, text, sources))
        self._scopes[-1][name] = len(self.values) - 1
        return len(self.values) - 1

    def _named(self, text: str) -> list[int]:
        """The values that a text names."""
        found = []
        for name in re.findall(_NAME, text):
            known = next((scope[key] for scope in reversed(self._scopes) for key in (name, name + "#0") if key in scope), None)
            if known is not None:
                found.append(known)
        return found

    def _read(self, line: str) -> None:
        if match := _BLOCK_ARGUMENTS.match(line):
            before = self._regions[-1][0] if self._regions else []
            names = re.findall(r"(%[\w$.-]+):", match[1])
            arguments = [self._define(name, "argument", line, list(before)) for name in names]
            self._regions[-1][1].extend(arguments)
            return
        stripped = line.strip()
        if stripped.startswith("}"):
            self._scopes.pop()
            results, arguments = self._regions.pop()
            if "do {" in stripped or "else {" in stripped:
                self._open(results, arguments if "do {" in stripped else [])
            return
        match = _RESULTS.match(line)
        body = match[3] if match else stripped
        operation = found[1] if (found := _OPERATION.match(body)) else ""
        if operation in ("scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return"):
            self._end_region(self._named(body))
            return
        if operation == "tt.func":
            for name in re.findall(r"(%[\w$.-]+): ", body):
                self._define(name, "argument", line, [])
        sources = [] if operation.startswith(_ENDS) else self._named(self._made_of(operation, body))
        if operation == "tt.addptr":
            self.addresses.append(self._named(body)[-1]) if self._named(body.partition(",")[2]) else None
            sources = []
        elif operation == "tt.int_to_ptr":
            self.addresses.extend(sources)
        results = []
        if match:
            names = [match[1]] if match[2] is None else [f"{match[1]}#{i}" for i in range(int(match[2]))]
            results = [self._define(name, operation, line, list(sources)) for name in names]
        if re.search(r"\{( loc\(.*\))?\s*$", line):
            self._open(results, [])
            self._begin_loop(body)

    @staticmethod
    def _made_of(operation: str, body: str) -> str:
        """The part of an operation's text that names what its result is made of."""
        if operation == "arith.select":
            return body.partition(",")[2]  # not the condition
        if operation in ("scf.if", "scf.for", "scf.while"):
            return ""
        return body

    def _open(self, results: list[int], arguments: list[int]) -> None:
        self._scopes.append({})
        self._regions.append((results, list(arguments)))

    def _begin_loop(self, body: str) -> None:
        """Define what a loop carries, from its first values."""
        if match := re.match(rf"scf\.for ({_NAME}) = ({_NAME}) to {_NAME} step ({_NAME})", body):
            outer = self._scopes.pop()
            first = self._named(f"{match[2]} {match[3]}")
            self._scopes.append(outer)
            self._define(match[1], "induction", body, first)
        if match := re.search(r"(?:iter_args|scf\.while )\((.*?)\)", body):
            for name, first_value in re.findall(rf"({_NAME}) = ({_NAME})", match[1]):
                argument = self._define(name, "argument", body, self._named(first_value))
                self._regions[-1][1].append(argument)

    def _end_region(self, ended_with: list[int]) -> None:
        """Values that a region ends with are those of its operation, and of the next iteration: any of them, to be safe."""
        results, arguments = self._regions[-1]
        for value in (*results, *arguments):
            self.values[value].sources.extend(ended_with)

    def most(self, number: int) -> int:
        """The largest magnitude that a value can have, by constants alone."""
        operation, text, sources = self.values[number]
        found = [int(digits) for digits in re.findall(r"(?:constant (?:dense<)?|end = )(-?\d+)", text)]
        if operation in ("arith.constant", "tt.make_range"):
            return abs(found[0]) if found else _ANY
        if operation in ("tt.get_program_id", "tt.get_num_programs"):
            return _ANY if " x " in text else _MOST_PROGRAMS
        if operation in ("argument", "induction") or not sources:
            return _ANY
        factors = [self.most(source) for source in sources]
        if operation == "arith.muli":
            return min(_ANY, factors[0] * factors[-1])
        if operation == "arith.shli":
            return min(_ANY, factors[0] << min(factors[-1], 31))
        if operation == "arith.remsi":
            return min(factors)
        if operation == "arith.divsi":
            # By a constant; what else divides may be 1.
            return factors[0] // max(1, factors[1]) if self.values[sources[1]].operation == "arith.constant" else factors[0]
        return min(_ANY, sum(factors) if operation in _SUMS else max(factors))

    def place(self, text: str) -> Product | None:
        """The line of the package, the innermost function's, from which an operation comes."""
        match = _LOCATION.search(text)
        location = match[1] if match else ""
        while location in self._locations:
            text = self._locations[location]
            if found := re.match(r'"([^"]+)":(\d+):\d+', text):
                # Triton's cache may hold a kernel that was compiled in another checkout, from the same lines.
                file = found[1].rpartition(f"/{PACKAGE.name}/")[2]
                return Product(file, linecache.getline(str(PACKAGE / file), int(found[2])).strip())
            inner = re.search(r"#loc\d*", text)
            location = inner[0] if inner else ""
        return None


def products_in_addresses(ttir: str) -> Iterator[Product]:
    """Products of 32 bits that lead to addresses, and may need more bits as far as the compiler knows."""
    module = _Module(ttir)
    seen, waiting = set(), list(module.addresses)
    while waiting:
        number = waiting.pop()
        if number in seen:
            continue
        seen.add(number)
        value = module.values[number]
        waiting.extend(value.sources)
        is_product = value.operation in ("arith.muli", "arith.shli") and _IS_OF_32_BITS.search(value.text)
        if is_product and module.most(number) >= _ANY:
            place = module.place(value.text)
            assert place is not None, f"no line is known of: {value.text}"
            yield place


# Products that fit all the same, by file of the package: how their line begins, and why they fit.
_DIMENSION = "the number of a tile, piece or program times its size: less than a tensor's dimension, of 31 bits, and a tile"
_ROWS = "rows of all ranks: the workspace refuses 2^31"
_INDICES = "indices of a bag: their count has 31 bits"
_ITEMS = "items of work: their count is an argument of 31 bits"
_CHUNKS = "chunks of 1,024 positions, which have 31 bits where there is more than a chunk for each multiprocessor"
_WORDS = "words of the protocol: a few for each rank"
_PARTS = "heads, rows of a tile and splits of a launch"
_BOUNDED = {
    "ops/all_gather_gemm/kernel.py": {
        "first = first_row + row_tile * TILE.rows": _DIMENSION,
        "product, out, received, 0, row_tile * TILE.rows": _DIMENSION,
        "return number + tl.cdiv(": _DIMENSION,
        "row_tile, column_tile = tile_of(": _DIMENSION,
        "tiles = row_tiles * column_tiles": _DIMENSION,
        "tiles, programs = row_tiles * column_tiles": _DIMENSION,
        "x, weight, block, number, tl.num_programs(0), peer * rows": _ROWS,
        "product = product_of_tile(": _DIMENSION,
    },
    "ops/common/scatter_rows.py": {
        "items_of_program = tl.cdiv(tl.cdiv(items, ROWS)": _ITEMS,
        "begin_of_program = tl.program_id(0) * items_of_program": _ITEMS,
        "places = (block + row * (width *": "bytes of a row",
    },
    "ops/embedding_all_to_all/kernel.py": {
        "feature = item // (receiver_count * blocks)": _ITEMS,
        "fields = lookup.features + feature * _FEATURE_FIELDS": _ITEMS,
        "first_bag = tl.load(bags + peer) + item % blocks * BAGS": _DIMENSION,
        "numbers += (tl.load(indices + (step + r) * POOLING.split": _INDICES,
        "of_receiver = receivers + item // blocks % receiver_count * 3": _ITEMS,
        "row *= tl.load(factors + (step + r) * POOLING.split": _INDICES,
    },
    "ops/embedding_all_to_all/reduce.py": {"row = (tl.program_id(0) * ROWS": _DIMENSION},
    "ops/embedding_all_to_all/scatter.py": {
        "fields = tiles + (item // row_blocks) * _FIELDS": _ITEMS,
        "row = block * ROWS + tl.arange(0, ROWS)": _DIMENSION,
    },
    "ops/embedding_all_to_all/update_kernels.py": {
        "chunk = tl.load(crossings + 1 + 2 * nth)": _CHUNKS,
        "chunk = tl.program_id(0) * BLOCK": _CHUNKS,
        "dim = tl.load(args.tables + 3 * table + 1)": "fields of a table",
        "dim = tl.multiple_of(tl.load(tables + 3 * table + 1)": "fields of a table",
        "first_bag = tl.program_id(0).to(bags.dtype.element_ty) * bags_each": "bags are counted in 64 bits from 2^31 on",
        "gradient = tl.load(args.partials + (2 * chunk + 1)": _CHUNKS,
        "sample = (bag - feature * batch_size)": "not more than the bag's number",
        "slot = 2 * chunk + tl.where(is_head, 0, 1)": _CHUNKS,
        "table = tl.load(args.chunks + 3 * chunk)": _CHUNKS,
        "tl.store(chunks + 3 * chunk, ": _CHUNKS,
        "tl.store(crossings + 1 + 2 * nth, ": _CHUNKS,
    },
    "ops/feature_all_to_all/exchange.py": {
        "bag = item % blocks * BAGS": _DIMENSION,
        "count, first = tl.load(words + 2 * run)": "runs: a feature of a rank each",
        "fields = routes + item // blocks * _FIELDS": _ITEMS,
        "words = peer_pointer(addresses, tl.load(told + 2 * peer)": _WORDS,
    },
    "ops/gemm_all_to_all/kernel.py": {
        "first_column = column_tile * TILE.columns": _DIMENSION,
        "first_of_band = number // band_tiles * BAND": _DIMENSION,
        "first_row = peer * block_rows + place % tiles_of_block * TILE.rows": _ROWS,
        "first_row = tl.load(groups.order + place) * TILE.rows": _ROWS,
        "places = tl.program_id(0) * TILES_OF_PROGRAM": _DIMENSION,
    },
    "ops/gemm_all_to_all/split.py": {"arrivals += tile * pieces": _ITEMS},
    "ops/gemm_all_to_all/weight_gradient.py": {"tiles_of_group = row_tiles * column_tiles": _DIMENSION},
    "ops/gemv_all_reduce/chunks.py": {
        "element = block * BLOCK": "of 64 bits, as the count of elements, where that has more than 31",
        "first_block, stride = tl.program_id(0) * channel.world": "at most 128 programs",
    },
    "ops/gemv_all_reduce/kernel.py": {
        "begin = split * steps * DEPTH": _DIMENSION,
        "channel, result, row, tile, half + buffer.sums_at, first_flag + channel.world * tiles": _WORDS,
        "column = (tile * COLUMNS": _DIMENSION,
        "column = tile * COLUMNS": _DIMENSION,
        "row, column = tl.arange(0, BLOCKS.rows), tile * BLOCKS.columns": _DIMENSION,
        "item = tile * WIDTH": _DIMENSION,
    },
    "ops/hstu_attention/backward.py": {
        "begin = seen_by_all + step * KEYS": _DIMENSION,
        "begin_of_tile = (tiles - 1 - number) * ROWS": _DIMENSION,
        "first = number * KEYS": _DIMENSION,
        "bias, by_time, head, first_key, first_place, begin_row + step * ROWS": _DIMENSION,
    },
    "ops/hstu_attention/kernel.py": {
        "begin = seen_by_all + step * KEYS": _DIMENSION,
        "begin_of_tile = (tiles - 1 - number) * ROWS": _DIMENSION,
        "first = number // (band * tiles) * band": _ITEMS,
        "in_band = number - first * tiles": _ITEMS,
    },
    "ops/moe/crossing_steps.py": {
        "token = (tl.program_id(0) - others) * TOKENS": _ROWS,
        "token = tl.program_id(0) * ROWS": _ROWS,
        "row = tl.program_id(0) * ROWS": _ROWS,
        "column, choice = tl.program_id(1) * COLUMNS": _DIMENSION,
    },
    "ops/moe/dispatch.py": {
        "end_of_rows = tl.sum(": _ROWS,
        "expert = tl.program_id(0) * EXPERTS": _DIMENSION,
        "slot = program * _SLOTS_OF_PROGRAM": _ROWS,
        "slot = tl.program_id(0) * CHUNK": _ROWS,
    },
    "ops/moe/products.py": {
        "first_row = tl.load(groups.order + place) * TILE.rows": _ROWS,
        "places = tl.multiple_of(hidden + row.to(tl.int64) * (parts * columns)": "columns of a row",
        "return first_row, column_tile * WIDTH": _DIMENSION,
    },
    "ops/moe/steps.py": {"row = (end - 1) * tile_rows + in_tile": _ROWS},
    "ops/schedules/piece_flags.py": {
        "call = _wait_for_call(": _WORDS,
        "seen = wait(channel, pieces.flags + source * pieces.of_rank": _WORDS,
        "tl.store(flags + channel.world * pieces.of_rank": _WORDS,
    },
    "inference/online/cached_attention.py": {
        "first = split * steps * KEYS": _DIMENSION,
        "keys = peer_pointer(cache, 0, 0, DTYPE) + (layer * 2 * HEADS": "heads of all layers",
        "part = (split * HEADS + head) * rows + row": _PARTS,
        "query = projected + row[:, None] * (HEADS * 3 * D_HEAD)": _PARTS,
        "tl.store(parts + part[:, None] * D_HEAD": _PARTS,
        "own = projected + (row * HEADS + head) * 3 * D_HEAD": _PARTS,
        "at_result = result + (row * HEADS + head) * D_HEAD": _PARTS,
        "attended = tl.load(parts + part[:, None] * D_HEAD": _PARTS,
    },
}


def loads_that_warps_make_by_themselves_in_waits(ttir: str) -> list[str]:
    """Return the lines of plain loads of single words inside of ``while`` loops, where warps may see different values.

    A load that is nothing but an atomic operation's operand is none of them: one thread makes that operation for all warps.
    """
    found: list[str] = []
    for loop in re.finditer(r"scf\.while", ttir):
        depth, regions, end = 0, 0, loop.start()
        while regions < 2:  # what decides whether it goes on, and what it does
            end = re.compile("[{}]").search(ttir, end).end()  # type: ignore[union-attr]
            depth += 1 if ttir[end - 1] == "{" else -1
            regions += depth == 0
        found += re.findall(r".*tt\.load [^\n]*: !tt\.ptr<.*", ttir[loop.start() : end])
    return [line for line in found if not _only_atomics_use(line.split()[0], ttir)]


def _only_atomics_use(value: str, ttir: str) -> bool:
    uses = [line for line in ttir.splitlines() if re.search(rf"{re.escape(value)}\b(?! =)", line)]
    return all("tt.atomic_rmw" in line for line in uses)


def unbounded_products_in_addresses(ttir: str) -> set[Product]:
    """Those of :func:`products_in_addresses` that nothing is known to bound."""
    found = set(products_in_addresses(ttir))
    return {product for product in found if not product.line.startswith(tuple(_BOUNDED.get(product.file, ())))}


def bounds_of_no_line() -> list[str]:
    """Return what :data:`_BOUNDED` says of lines that are not in the package (any more)."""
    found = []
    for file, bounds in _BOUNDED.items():
        lines = [line.strip() for line in (PACKAGE / file).read_text().splitlines()]
        found += [f"{file}: {begin}" for begin in bounds if not any(line.startswith(begin) for line in lines)]
    return found
