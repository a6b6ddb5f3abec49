"""What may not run is refused before anything starts, by name."""

import pytest

from nanoactor.runtime.errors import TopologyError
from nanoactor.runtime.topology import ActorSpec, EdgeSpec, NodeSpec, Topology


def build(*edges, actors="abc", nodes=None):
    nodes = nodes or (NodeSpec("user", tuple(actors)),)
    return Topology(tuple(ActorSpec(n, "m:C", None) for n in actors), nodes, edges, "user")


def test_a_line_and_a_bounded_cycle_are_accepted():
    build(EdgeSpec("a", ("b",)), EdgeSpec("b", ("c",))).validate()
    build(EdgeSpec("a", ("b",)), EdgeSpec("b", ("a",), bound=4)).validate()


def test_a_broadcast_stays_in_its_node_or_leaves_it():
    edge = EdgeSpec("a", ("b", "c"), name="all")
    build(edge).validate()
    build(edge, nodes=(NodeSpec("user", ("a",)), NodeSpec("n", ("b", "c")))).validate()
    apart = (NodeSpec("user", ("a",)), NodeSpec("n", ("b",)), NodeSpec("m", ("c",)))
    build(edge, nodes=apart).validate()
    mixed = build(edge, nodes=(NodeSpec("user", ("a", "b")), NodeSpec("n", ("c",))))
    with pytest.raises(TopologyError, match=r"edge a -> all has targets .* other nodes \(c\)"):
        mixed.validate()


def test_a_cycle_without_a_bound_is_refused_with_its_path():
    edges = [EdgeSpec("a", ("b",)), EdgeSpec("b", ("c",)), EdgeSpec("c", ("a",))]
    with pytest.raises(TopologyError, match=r"cycle: .*a -> b -> c|b -> c -> a|c -> a -> b"):
        build(*edges).validate()


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        (build(EdgeSpec("a", ("x",))), "unknown or missing actors"),
        (build(EdgeSpec("a", ())), "unknown or missing actors"),
        (build(EdgeSpec("a", ("b", "c"))), "needs a name"),
        (build(EdgeSpec("a", ("a",))), "cannot send messages to itself"),
        (build(EdgeSpec("a", ("b",)), EdgeSpec("a", ("b",))), "declared twice"),
        (build(actors="aab"), "declared twice"),
        (build(nodes=(NodeSpec("user", ("a", "b")),)), "must be placed on a node"),
        (build(nodes=(NodeSpec("other", ("a", "b", "c")),)), "local node"),
        (build(nodes=(NodeSpec("user", ("a", "b", "c")), NodeSpec("n", ("a",)))), "twice"),
    ],
)
def test_a_malformed_topology_is_refused(topology, text):
    with pytest.raises(TopologyError, match=text):
        topology.validate()
