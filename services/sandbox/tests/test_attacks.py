"""Runs every attack of `sandbox_attacks`: each fails, the host is untouched, the pool goes on; checks the table."""

import hashlib
import os
import re
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_attacks import ATTACKS, FORGED_VERDICTS, GROUPS, X86_64

from reflux_sandbox.execution import CodeRequest, GradeSession, SessionLost, run_code
from reflux_sandbox.isolation.base import IsolationUnavailable
from reflux_sandbox.isolation.choose import TIERS

in_one_loop = pytest.mark.asyncio(loop_scope="module")
DOCS = Path(__file__).parents[3] / "docs/sandbox-isolation.md"
NAMES = [name for name in ATTACKS if name not in X86_64 or os.uname().machine == "x86_64"]


def host_state():
    """What no attack may change."""
    verifiers = (Path(__file__).parent / "sample_graders.py").read_bytes()
    probes = [path for folder in ("/", "/usr", "/tmp", "/dev/shm") for path in Path(folder).glob("*probe*")]
    return hashlib.sha256(verifiers).hexdigest(), probes, Path("/usr/bin/env").exists(), os.uname().nodename


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prefork(namespaces, isolation_options):
    isolation = TIERS["prefork"](**isolation_options(warm_modules=("numpy", "numpy.random")))
    await isolation.start()
    before = host_state()
    yield isolation
    await isolation.close()
    assert host_state() == before


async def run(isolation, code, seconds=20.0, memory_bytes=256 << 20):
    request = CodeRequest(code=code, wall_seconds=seconds, memory_bytes=memory_bytes)
    return await run_code(await isolation.acquire(), request)


async def attacked(isolation, name, patience=1.0):
    attack = ATTACKS[name]
    result = await run(isolation, attack.code, attack.seconds * patience, attack.memory_bytes)
    assert result.status in attack.endings, result
    if attack.prints:
        assert result.stdout.startswith(attack.prints.encode()), result
    assert b"through" not in result.stdout
    if attack.endings == ("nonzero",):
        assert result.exit_code > 1 or b"Error" in result.stderr, result
    after = await run(isolation, "print('alive')")
    assert (after.status, after.stdout) == ("ok", b"alive\n"), "the pool goes on"


@in_one_loop
@pytest.mark.parametrize("name", NAMES)
async def test_an_attack_fails_and_the_pool_goes_on(prefork, name):
    await attacked(prefork, name)


@in_one_loop
@pytest.mark.parametrize("name", FORGED_VERDICTS)
async def test_a_forged_verdict_is_a_lost_session_never_a_grade(prefork, name):
    async with GradeSession(prefork, "grade", 256 << 20, 60, family="test") as session:
        with pytest.raises((SessionLost, ConnectionError)):
            await session.grade("test/hostile", "{}", [FORGED_VERDICTS[name]])
    async with GradeSession(prefork, "grade", 256 << 20, 60, family="test") as session:
        assert (await session.grade("test/length", "{}", ["abc"]))["grades"][0]["reward"] == 3.0


SAMPLE = [
    "write to the system",
    "write to verifier code",
    "read shadow",
    "root through /proc/1/root",
    "hard link to the system",
    "delete its own tree",
    "memory of the supervisor",
    "descriptors of the supervisor",
    "become root",
    "start a program",
    "ptrace",
    "mount",
    "new user namespace",
    "bpf",
    "keyring: add a key",
    "IPv4",
    "unix socket",
    "fork bomb",
    "memory at once",
    "fill the disk",
    "output without end",
    "endless loop",
    "setsid and double fork",
    "fake verdict on every descriptor",
]


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["bwrap", "gvisor"])
async def test_the_other_tiers_withstand_a_sample(namespaces, isolation_options, tier):
    isolation = TIERS[tier](**isolation_options(warm_modules=("numpy", "numpy.random")))
    try:
        isolation.check()
    except IsolationUnavailable as error:
        pytest.skip(f"tier {tier}: {error}")
    await isolation.start()
    before = host_state()
    try:
        for name in SAMPLE:
            await attacked(isolation, name, patience=2.0)
    finally:
        await isolation.close()
    assert host_state() == before


def table():
    """The rows of the documentation: group, attempt, how it ends."""
    rows = [
        (group, name, " or ".join(attack.endings))
        for group, attacks in GROUPS.items()
        for name, attack in attacks.items()
    ]
    return rows + [("escape and forgery", name, "lost session") for name in FORGED_VERDICTS]


def test_the_documentation_has_a_row_for_every_attack():
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", DOCS.read_text().partition("## Attacks")[2], re.MULTILINE)
    wanted = [(f"{group}", f"{name}", ending) for group, name, ending in table()]
    assert [row for row in rows if row[0] in GROUPS] == wanted, (
        "write the table anew: python services/sandbox/tests/test_attacks.py"
    )
    assert len(wanted) >= 40


if __name__ == "__main__":
    print("\n".join(f"| {' | '.join(row)} |" for row in table()))
