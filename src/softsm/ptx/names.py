"""Resolves names in a function body, scope by scope: registers, variables, labels, and the predefined registers."""

from __future__ import annotations

import re

from softsm.ptx.ast import Reg, Special, Symbol, Variable, Vector

_VECTORS = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
_SCALARS = """laneid warpid nwarpid smid nsmid gridid is_explicit_cluster cluster_ctarank cluster_nctarank
    lanemask_eq lanemask_le lanemask_lt lanemask_ge lanemask_gt clock clock_hi clock64 globaltimer globaltimer_lo
    globaltimer_hi reserved_smem_offset_begin reserved_smem_offset_end reserved_smem_offset_cap
    reserved_smem_offset_0 reserved_smem_offset_1 total_smem_size aggr_smem_size dynamic_smem_size
    current_graph_exec""".split()

SPECIAL_REGISTERS = frozenset(
    [f"%{v}{c}" for v in _VECTORS for c in ("", ".x", ".y", ".z", ".w")]
    + [f"%{s}" for s in _SCALARS]
    + [f"%pm{i}" for i in range(8)]
    + [f"%pm{i}_64" for i in range(8)]
    + [f"%envreg{i}" for i in range(32)]
)
_BY_NAME = {name: Special(name) for name in SPECIAL_REGISTERS}
_RANGE = re.compile(r"(.*?)(0|[1-9]\d{0,8})", re.ASCII)
MAX_RANGE = 1 << 24


class Scope:
    """The names declared between one pair of braces. Names in nested braces become `name@k`, with k counted through
    the module, and names in a .func `name@function`, so that later stages need no scopes."""

    def __init__(self, suffix: str, parent: Scope | None):
        self.suffix, self.parent = suffix, parent
        self.registers: dict[str, str] = {}  # plain names -> type
        self.vectors: dict[str, int] = {}  # vector registers -> number of elements
        self.ranges: dict[str, tuple[int, str]] = {}  # prefix -> how many, type
        self.variables: dict[str, Variable] = {}
        self.labels: dict[str, int] = {}  # name -> line
        self.lists: dict[str, int] = {}  # .branchtargets, .calltargets, .callprototype: label -> line
        self.operands: dict = {}  # text -> operand, valid from here on in this scope

    def unique(self, name: str) -> str:
        if not self.suffix and self.parent is not None and name in self.parent.variables:
            return f"{name}@0"  # an entry's own name hides one of the module's
        return name + self.suffix

    def declared(self, name: str) -> bool:
        """Returns whether this scope declares the name. A range `a<2>` declares a0 and a1, not a."""
        digits = _RANGE.fullmatch(name)
        count = self.ranges.get(digits.group(1), (0, ""))[0] if digits else 0
        in_range = digits is not None and int(digits.group(2)) < count
        return in_range or name in self.registers or name in self.vectors or name in self.variables

    def known(self) -> list[str]:
        """Returns every name visible here, for suggestions."""
        names: list[str] = []
        scope: Scope | None = self
        while scope is not None:
            names += [*scope.registers, *scope.vectors, *scope.variables]
            names += [f"{prefix}{count - 1}" for prefix, (count, _) in scope.ranges.items() if count]
            scope = scope.parent
        return names

    def range_of(self, name: str) -> str:
        """Returns '%r0 to %r68' if the name lies outside a declared range, else ''."""
        digits = _RANGE.fullmatch(name)
        scope: Scope | None = self
        while scope is not None and digits:
            count, _ = scope.ranges.get(digits.group(1), (0, ""))
            if count:
                return f"{digits.group(1)}0 to {digits.group(1)}{count - 1}"
            scope = scope.parent
        return ""

    def label(self, name: str) -> str | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.unique(name)
            scope = scope.parent
        return None

    def target_list(self, name: str) -> str | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.lists:
                return scope.unique(name)
            scope = scope.parent
        return None

    def resolve(self, name: str, used: dict[str, str]) -> Reg | Vector | Special | Symbol | None:
        """Returns the operand that a name denotes and adds a register to `used` (name -> type). None: not declared."""
        base, _, element = name.partition(".")
        digits = _RANGE.fullmatch(base)
        scope: Scope | None = self
        while scope is not None:
            if name in scope.registers:
                unique = scope.unique(name)
                used[unique] = scope.registers[name]
                return Reg(unique)
            if name in scope.vectors:
                return Vector(tuple(self.resolve(f"{name}.{c}", used) for c in "xyzw"[: scope.vectors[name]]))
            if digits and not element:
                count, type_ = scope.ranges.get(digits.group(1), (0, ""))
                if int(digits.group(2)) < count:
                    unique = scope.unique(name)
                    used[unique] = type_
                    return Reg(unique)
            if name in scope.variables:
                return Symbol(scope.unique(name))
            scope = scope.parent
        return _BY_NAME.get(name)
