import numpy as np
import pytest
import torch

from hybridrl.controller import Pool, Role, computes, trace
from hybridrl.protocol.batch import batch
from hybridrl.protocol.errors import HybridRLError, WiringError
from hybridrl.protocol.layout import Layout
from hybridrl.protocol.register import register
from hybridrl.protocol.transfer import ALL_TO_ALL, DP_PROTO, ONE_TO_ALL, THREE_D, TransferProtocol
from hybridrl.workers.base import Worker

TOO_FEW = TransferProtocol("TOO_FEW", lambda layout, rows, weights: [np.arange(rows)], lambda layout: [0])


class Policy(Worker):
    """Nothing here is ever run: a trace builds no worker."""

    def __init__(self, config, context):
        raise AssertionError("a trace starts no worker")

    @register(DP_PROTO, reads=("prompts",), writes=("tokens", "log_probs"), rowwise=True)
    def generate(self, batch): ...

    @register(THREE_D, reads=("tokens",), writes=("values",), optional=("log_probs",), rowwise=True)
    def values(self, batch): ...

    @register(THREE_D, reads=("tokens", "advantages"), updates_weights=True, balance="tokens")
    def update(self, batch): ...

    @register(ONE_TO_ALL, reads=("tokens",), writes=("votes",))
    def vote(self, batch): ...

    @register(ALL_TO_ALL, reads=("tokens",), writes=("seen",))
    def by_hand(self, batch): ...

    @register(ONE_TO_ALL, updates_weights=True)
    def load(self): ...

    @register(TOO_FEW, reads=("tokens",))
    def too_few(self, batch): ...


class Grader(Policy):
    @staticmethod
    def also_reads(config, method):
        return (config,)


@computes(reads=("values",), writes=("advantages",))
def advantages(batch):
    raise AssertionError("a trace computes nothing")


@computes(reads=("advantages",))
def mean(batch):
    raise AssertionError("a trace computes nothing")


ROLES = {
    "actor": Role(Policy, pool=Pool("main", 4), layout=Layout(dp=4)),
    "critic": Role(Policy, pool=Pool("second", 4), layout=Layout(pp=2, dp=1, tp=2)),
}


def step(m, prompts):
    batch = prompts | m.actor.generate(prompts)
    batch |= m.critic.values(batch)
    batch |= advantages(batch)
    updates = [mean(batch)]
    for mini in batch.minibatches(4, epochs=2):
        updates.append(m.critic.update(mini) | m.actor.update(mini))
    return [update.get() for update in updates]


def traced(function, rows=6, roles=ROLES, columns=("prompts",)):
    return trace(function, roles, columns, rows)


def test_calls_become_nodes():
    nodes = traced(step).nodes
    assert [n.index for n in nodes] == list(range(12))
    assert [(str(n.call), n.rows) for n in nodes[:4]] == [
        ("actor.generate", 6),
        ("critic.values", 6),
        ("controller.advantages", 6),
        ("controller.mean", 6),
    ]
    updates = [(str(n.call), n.rows, n.version, n.after) for n in nodes[4:]]
    assert updates == [
        ("critic.update", 4, 0, -1),
        ("actor.update", 4, 0, -1),
        ("critic.update", 2, 1, 4),
        ("actor.update", 2, 1, 5),
        ("critic.update", 4, 2, 6),
        ("actor.update", 4, 2, 7),
        ("critic.update", 2, 3, 8),
        ("actor.update", 2, 3, 9),
    ]


def test_columns_and_weight_versions_become_edges():
    graph = traced(step)
    edges = list(graph.edges())
    assert edges[:5] == [(-1, 0, "prompts"), (0, 1, "tokens"), (0, 1, "log_probs"), (1, 2, "values"), (2, 3, "advantages")]
    assert [e for e in edges if e[1] == 7] == [(0, 7, "tokens"), (2, 7, "advantages"), (5, 7, "weights v1")]
    assert all(source < target for source, target, _ in edges)


def test_generating_again_sees_the_updated_weights():
    def twice(m, prompts):
        first = prompts | m.actor.generate(prompts)
        m.actor.load()
        return first | m.actor.generate(prompts)

    graph = traced(twice)
    assert [(str(n.call), n.rows, n.version) for n in graph.nodes] == [
        ("actor.generate", 6, 0),
        ("actor.load", 0, 0),
        ("actor.generate", 6, 1),
    ]
    assert list(graph.edges()) == [(-1, 0, "prompts"), (-1, 2, "prompts"), (1, 2, "weights v1")]


def test_a_column_has_the_writers_of_all_its_rows():
    def halves(m, prompts):
        left, right = m.actor.generate(prompts[:3]), m.critic.vote(m.actor.generate(prompts[3:]))
        return m.actor.by_hand([left, left[[0]], left[[1]], left[[2]]]), right

    nodes = traced(halves).nodes
    assert [(str(n.call), n.rows, dict(n.inputs)) for n in nodes] == [
        ("actor.generate", 3, {"prompts": (-1,)}),
        ("actor.generate", 3, {"prompts": (-1,)}),
        ("critic.vote", 3, {"tokens": (1,)}),
        ("actor.by_hand", 6, {"tokens": (0,)}),
    ]

    def mixed(m, prompts):
        parts = [m.actor.generate(prompts[[k]]) for k in range(4)]
        m.actor.by_hand(parts)

    assert traced(mixed).nodes[-1].inputs == {"tokens": (0, 1, 2, 3)}


def test_text_and_mermaid():
    def short(m, prompts):
        batch = m.actor.generate(prompts)
        m.critic.values(batch)
        m.actor.load()
        m.actor.vote(batch)

    graph = traced(short)
    assert graph.mermaid().splitlines() == [
        "flowchart TD",
        '    n_1(["input"])',
        '    n0["actor.generate<br/>6 rows"]',
        '    n1["critic.values<br/>6 rows"]',
        '    n2["actor.load<br/>0 rows"]',
        '    n3["actor.vote<br/>6 rows"]',
        '    n_1 -->|"prompts"| n0',
        '    n0 -->|"tokens, log_probs"| n1',
        '    n0 -->|"tokens"| n3',
        '    n2 -->|"weights v1"| n3',
    ]
    assert str(graph).splitlines() == [
        "node  call            rows  weights  reads (from node)        writes",
        "0     actor.generate  6     v0       prompts(input)           tokens, log_probs",
        "1     critic.values   6     v0       tokens(0), log_probs(0)  values",
        "2     actor.load      0     v0",
        "3     actor.vote      6     v1       tokens(0)                votes",
    ]


def test_a_step_that_does_nothing_has_an_empty_graph():
    graph = traced(lambda m, prompts: None)
    assert graph.nodes == () and list(graph.edges()) == [] and str(graph).startswith("node  call  rows")


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_fewer_rows_than_ranks_are_fine(rows):
    nodes = traced(step, rows).nodes
    assert [n.rows for n in nodes] == ([0] * 4 if not rows else [rows] * 8)


def test_rows_that_every_rank_made_cannot_be_merged_with_those_they_came_from():
    """On four ranks ONE_TO_ALL leaves four rows for one; a run would refuse this merge, and so does the trace."""

    def wrong(m, prompts):
        batch = prompts | m.actor.generate(prompts)
        return batch | m.actor.vote(batch)

    with pytest.raises(WiringError, match=r"Reference\(24 rows: votes\): they hold different rows"):
        traced(wrong)
    traced(wrong, roles={"actor": Role(Policy)})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda m, p: m.critic.values(p), r"critic\.values reads column 'tokens', which nobody wrote; the batch has prompts"),
        (lambda m, p: m.actor.generat(p), r"no registered method 'generat' \(did you mean 'generate'\?\)"),
        (lambda m, p: m.actr.generate(p), r"no role 'actr' \(did you mean 'actor'\?\); this run has actor, critic"),
        (lambda m, p: advantages(p), r"controller\.advantages reads column 'values', which nobody wrote"),
        (lambda m, p: p | m.actor.generate(p[:3]), "they hold different rows"),
        (lambda m, p: p.repeat(2) | m.actor.generate(p), "they hold different rows"),
        (lambda m, p: m.critic.generate(p), "needs a purely data-parallel layout, not pp2dp1tp2; use THREE_D"),
        (lambda m, p: m.actor.values(), r"actor\.values reads tokens, but was called without a batch"),
        (lambda m, p: m.actor.by_hand(m.actor.generate(p)), "give a list with one input per rank"),
        (lambda m, p: m.actor.by_hand([m.actor.generate(p)]), "takes one reference per rank: 4, not 1"),
        (lambda m, p: m.actor.too_few(m.actor.generate(p)), "TOO_FEW distributes to 1 ranks, but pp1dp4tp1 has 4"),
        (lambda m, p: p.fetch(), "a traced step has no data to fetch"),
        (lambda m, p: p.lengths("prompts"), "a traced step has no row lengths"),
    ],
)
def test_what_does_not_fit_is_found_before_anything_starts(wrong, message):
    with pytest.raises(WiringError, match=message):
        traced(wrong)


def test_columns_that_a_configuration_asks_for_are_checked():
    roles = {"actor": Role(Grader, "tokens")}
    traced(lambda m, p: m.actor.generate(p), roles=roles, columns=("prompts", "tokens"))
    with pytest.raises(WiringError, match=r"actor\.generate reads column 'tokens', which nobody wrote"):
        traced(lambda m, p: m.actor.generate(p), roles=roles)


def test_streams_and_the_controllers_own_rows_can_be_traced():
    def streams(m, prompts):
        made = m.actor.generate(prompts)
        for part in made.stream("tokens"):
            m.critic.values(part)
        own = made.store.rows(batch({"tokens": torch.zeros(5, 2)}))
        m.critic.values(own)

    assert [(n.rows, dict(n.inputs)) for n in traced(streams).nodes[1:]] == [
        (6, {"tokens": (0,), "log_probs": (0,)}),
        (5, {"tokens": (-1,)}),
    ]


def test_roles_are_checked_as_in_a_run():
    with pytest.raises(WiringError, match="no role to start"):
        traced(step, roles={})
    with pytest.raises(HybridRLError, match="two sizes"):
        traced(step, roles={"a": Role(Policy), "b": Role(Policy, pool=Pool("main", 2))})
