from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_inference_gateway.routing.prefix_tree import _NODE_BYTES, PrefixTree, prompt_bytes

BLOCK = 64
PROMPTS = st.tuples(
    st.lists(st.sampled_from([b"a", b"b"]), max_size=5).map(lambda blocks: b"".join(one * BLOCK for one in blocks)),
    st.sampled_from([b"", b"rest", b"a" * 63]),
).map(b"".join)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "insert", "forget"]),
        PROMPTS,
        st.sampled_from("12"),
        st.sampled_from("rst"),
    ),
    max_size=40,
)


def expected(inserted, prompt, salt):
    """The slow reference: every prompt ever inserted, compared block by block."""
    found = {}
    for other, other_salt, name in inserted:
        blocks = 0
        while (
            other_salt == salt
            and (blocks + 1) * BLOCK <= min(len(other), len(prompt))
            and other[: (blocks + 1) * BLOCK] == prompt[: (blocks + 1) * BLOCK]
        ):
            blocks += 1
        if blocks:
            found[name] = max(found.get(name, 0.0), blocks * BLOCK / len(prompt))
    return found


def reachable_bytes(tree):
    nodes, total = list(tree._roots.values()), 0
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        total += len(node.label) + _NODE_BYTES if node.parent else 0
    return total


@settings(max_examples=100, deadline=None, derandomize=True)
@given(EVENTS, PROMPTS)
def test_a_tree_with_room_agrees_with_a_list_of_all_prompts(events, asked):
    tree, inserted = PrefixTree(), []
    for kind, prompt, salt, name in events:
        if kind == "insert":
            tree.insert(prompt, salt, name)
            inserted.append((prompt, salt, name))
        else:
            tree.forget(name)
            inserted = [one for one in inserted if one[2] != name]
        for salt_asked in "12":
            for question in (asked, prompt):
                assert tree.matched(question, salt_asked) == expected(inserted, question, salt_asked)
    for name in "rst":
        tree.forget(name)
    assert tree.num_bytes == 0, "nothing is left of prompts that nobody holds"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(EVENTS, st.integers(600, 3000))
def test_memory_stays_bounded_and_evicted_prompts_are_never_made_up(events, max_bytes):
    tree, inserted = PrefixTree(max_bytes), []
    for kind, prompt, salt, name in events:
        if kind == "insert":
            tree.insert(prompt, salt, name)
            inserted.append((prompt, salt, name))
        else:
            tree.forget(name)
            inserted = [one for one in inserted if one[2] != name]
        assert 0 <= tree.num_bytes <= max_bytes
        assert reachable_bytes(tree) == tree.num_bytes, "a node lost its way to the root"
        most = expected(inserted, prompt, salt)
        assert all(part <= most.get(holder, 0.0) for holder, part in tree.matched(prompt, salt).items())


def test_what_was_used_last_survives_and_what_was_not_goes():
    tree = PrefixTree(max_bytes=20_000)
    tree.insert(b"k" * 640, "1", "keeper")
    tree.insert(b"d" * 640, "1", "dropped")
    for number in range(100):
        tree.insert(bytes([number]) * 640, "1", "other")
        tree.insert(b"k" * 640, "1", "keeper")
    assert tree.matched(b"k" * 640, "1") == {"keeper": 1.0}
    assert tree.matched(b"d" * 640, "1") == {}


def test_unique_prompts_and_salts_leave_no_trace_beyond_the_bound():
    tree = PrefixTree(max_bytes=50_000)
    for number in range(5000):
        tree.insert(number.to_bytes(4, "big") * 64, str(number), "r")
    assert tree.num_bytes <= 50_000
    assert len(tree._roots) <= 50_000 // 512
    assert tree.matched((4999).to_bytes(4, "big") * 64, "4999") == {"r": 1.0}


def test_token_ids_match_by_blocks_of_sixteen_and_only_from_the_start():
    tree, prompt = PrefixTree(), tuple(range(100, 148))
    tree.insert(prompt_bytes(prompt), "1", "r")
    assert tree.matched(prompt_bytes(prompt), "1") == {"r": 1.0}
    assert tree.matched(prompt_bytes(prompt[:20] + (7,) * 28), "1") == {"r": 16 / 48}
    assert tree.matched(prompt_bytes(prompt[16:]), "1") == {}, "a suffix in common is no prefix"
    assert tree.matched(b"", "1") == {}
