"""The exact answer to small instances: OR-tools CP-SAT minimises the formula of `reflux_placement.place.cost`.

Runs in an environment of its own (exact-requirements.txt), because OR-tools wants an older protobuf than the platform
has. Input: seeds as arguments. Output: one JSON line per seed with the placement that it proved best; the caller prices
it with the platform's own cost function, so that both sides are judged by the same code.
"""

import json
import sys
from collections.abc import Iterable

import numpy as np
from ortools.sat.python import cp_model
from small_instances import instance

from reflux_placement.gang import GangDemand
from reflux_placement.place.cost import DEFAULT_WEIGHTS, flows_of, prices_of
from reflux_placement.place.tree import Layer, tree_of
from reflux_placement.room import Room

SCALE = 1e9
"""Objective units per second: whole numbers, as CP-SAT wants them."""

MAX_SECONDS = 60.0


class ExactModel:
    """Counts of every role on every node, and the cost of them."""

    def __init__(self, room: Room, gang: GangDemand) -> None:
        self._room, self._gang = room, gang
        self._topology = room.topology
        self._tree = tree_of(room.topology)
        self._free_NR = np.maximum(room.usable_NR(), 0)
        self._model = cp_model.CpModel()
        self._x = [
            [self._model.new_int_var(0, role.count, "") for _ in range(self._topology.num_nodes)] for role in gang.roles
        ]
        self._sums: dict[tuple[int, int], list[cp_model.LinearExprT]] = {}

    def solve(self) -> dict[str, object]:
        """The status ("OPTIMAL", "INFEASIBLE", ...), and the nodes of every rank when there is a solution."""
        self._demands()
        self._model.minimize(self._traffic() + self._fragmentation())
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = MAX_SECONDS
        solver.parameters.num_workers = 2
        solver.parameters.random_seed = 1
        status = solver.status_name(solver.solve(self._model))
        if status not in ("OPTIMAL", "FEASIBLE"):
            return {"status": status}
        nodes = {
            role.role: np.repeat(np.arange(len(row)), [solver.value(each) for each in row]).tolist()
            for role, row in zip(self._gang.roles, self._x, strict=True)
        }
        bound = solver.best_objective_bound / SCALE
        return {"status": status, "nodes": nodes, "seconds": round(solver.wall_time, 3), "bound": bound}

    def _layer(self, level: str) -> Layer:
        return self._tree.layers[self._topology.tightness(level)]

    def _in_parts(self, role: int, level: int) -> list[cp_model.LinearExprT]:
        """Members of a role in every part of a level."""
        key = (role, level)
        if key not in self._sums:
            layer = self._tree.layers[level]
            self._sums[key] = [
                sum(self._x[role][int(start) : int(stop)])
                for start, stop in zip(layer.starts_P, layer.stops_P, strict=True)
            ]
        return self._sums[key]

    def _demands(self) -> None:
        model, gang = self._model, self._gang
        for index, role in enumerate(gang.roles):
            model.add(sum(self._x[index]) == role.count)
            self._inside_one(role.required_level, [index])
            if role.segment_size:
                self._only_real(index, role.segment_level)
                for held in self._in_parts(index, self._topology.tightness(role.segment_level)):
                    whole = model.new_int_var(0, role.count // role.segment_size, "")
                    model.add(held == role.segment_size * whole)
            if role.max_per_domain:
                self._only_real(index, role.spread_level)
                for held in self._in_parts(index, self._topology.tightness(role.spread_level)):
                    model.add(held <= role.max_per_domain)
        self._inside_one(gang.required_level, list(range(len(gang.roles))))
        for column in range(3):
            for node in range(self._topology.num_nodes):
                used = sum(role.each.row[column] * self._x[i][node] for i, role in enumerate(gang.roles))
                model.add(used <= int(self._free_NR[node, column]))
        names = [role.role for role in gang.roles]
        for relation in gang.relations:
            if relation.level and relation.required:
                self._beside(names.index(relation.role), names.index(relation.near), relation.level)

    def _beside(self, role: int, near: int, level: str) -> None:
        """Every peer has the same number of followers, so the counts per domain are in that proportion."""
        count, near_count = self._gang.roles[role].count, self._gang.roles[near].count
        assert count % near_count == 0, "the instances have equal shares"
        position = self._topology.tightness(level)
        for each in (role, near):
            self._only_real(each, level)
        for held, peers in zip(self._in_parts(role, position), self._in_parts(near, position), strict=True):
            self._model.add(held == count // near_count * peers)

    def _only_real(self, role: int, level: str) -> None:
        """Nodes without a label at a level take no member."""
        layer = self._layer(level)
        for node in np.flatnonzero(~layer.real_P[layer.part_N]).tolist():
            self._model.add(self._x[role][node] == 0)

    def _inside_one(self, level: str, roles: Iterable[int]) -> None:
        layer = self._layer(level)
        if layer.num_parts == 1:
            return
        chosen = [self._model.new_bool_var("") for _ in range(layer.num_parts)]
        self._model.add_exactly_one(chosen)
        for role in roles:
            self._only_real(role, level)
            for held, is_chosen in zip(self._in_parts(role, self._topology.tightness(level)), chosen, strict=True):
                self._model.add(held <= self._gang.roles[role].count * is_chosen)

    def _traffic(self) -> cp_model.LinearExprT:
        """Seconds of pairs apart, less a constant: - apart(L) * bytes(a, b) * n_a n_b / (|a| |b|), and the spread."""
        roles = self._gang.roles
        counts = tuple(role.count for role in roles)
        flows = flows_of(self._topology, roles, self._gang.relations, counts, DEFAULT_WEIGHTS)
        prices = prices_of(self._topology)
        terms: list[cp_model.LinearExprT] = []
        for level in range(len(self._tree.layers) - 1):
            for a in range(len(roles)):
                for b in range(a, len(roles)):
                    weight = -prices.apart[level] * flows.bytes_RR[a, b] * (1 if a == b else 2)
                    if a == b and flows.spread_R[a] == level:
                        weight += DEFAULT_WEIGHTS.spread_seconds
                    rate = round(weight / (counts[a] * counts[b]) * SCALE)
                    if rate:
                        terms += [rate * each for each in self._products(a, b, level)]
        return sum(terms)

    def _products(self, a: int, b: int, level: int) -> list[cp_model.IntVar]:
        products: list[cp_model.IntVar] = []
        for one, other in zip(self._in_parts(a, level), self._in_parts(b, level), strict=True):
            most = self._gang.roles[a].count * self._gang.roles[b].count
            product = self._model.new_int_var(0, most, "")
            factors = []
            for expression, role in ((one, a), (other, b)):
                factor = self._model.new_int_var(0, self._gang.roles[role].count, "")
                self._model.add(factor == expression)
                factors.append(factor)
            self._model.add_multiplication_equality(product, factors)
            products.append(product)
        return products

    def _fragmentation(self) -> cp_model.LinearExprT:
        """phi(L) * (free GPUs of touched domains), less a constant: what the gang itself takes of them."""
        prices = prices_of(self._topology)
        terms: list[cp_model.LinearExprT] = []
        members = sum(role.count for role in self._gang.roles)
        for level, price in enumerate(prices.fragment):
            layer = self._tree.layers[level]
            free_P = np.add.reduceat(self._free_NR[:, 0], layer.starts_P)
            for part in range(layer.num_parts) if price else ():
                touched = self._model.new_bool_var("")
                held = sum(self._in_parts(role, level)[part] for role in range(len(self._gang.roles)))
                self._model.add(held <= members * touched)
                terms.append(round(price * int(free_P[part]) * SCALE) * touched)
        return sum(terms)


def main() -> None:
    for seed in map(int, sys.argv[1:]):
        room, gang = instance(seed)
        print(json.dumps({"seed": seed, **ExactModel(room, gang).solve()}), flush=True)


if __name__ == "__main__":
    main()
