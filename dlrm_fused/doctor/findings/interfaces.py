"""Network interfaces that are named and not there, that no other host reaches, or that differ between hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dlrm_fused.doctor.facts import Interface, RankFacts
from dlrm_fused.doctor.findings.finding import Check, Finding, Level, group_by, has_many_hosts, hosts, numbers

_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


def _missing(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for backend, variable in _VARIABLES.items():
        told = [facts for facts in _users(ranks, backend) if variable in facts.network.settings]
        for alike in group_by(told, lambda facts: (facts.host, tuple(facts.network.settings.items()))).values():
            yield from _missing_on_host(alike, backend, variable)


def _missing_on_host(ranks: Sequence[RankFacts], backend: str, variable: str) -> Iterator[Finding]:
    network, host = ranks[0].network, ranks[0].host.name
    setting, used = network.settings[variable], network.uses[backend]
    # A list is gloo's to take in full; of NCCL's prefixes and exceptions, one match is enough.
    absent = [name for name in setting.split(",") if name not in used] if backend == "gloo" else [] if used else [setting]
    down = [interface.name for interface in network.interfaces if interface.name in used and not interface.is_up]
    for names, fault in ((absent, "no such interface there"), (down, "it is down")):
        if names:
            what = f"{variable}={setting} on {host}: {fault}: {', '.join(names)}"
            yield Finding("interface-missing", Level.broken, numbers(ranks), what, _set(variable, host, network.interfaces))


def _loopback(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    if not _need_a_network(ranks):
        return
    for backend, variable in _VARIABLES.items():
        for host, alike in group_by(_users(ranks, backend), lambda facts: facts.host).items():
            network = alike[0].network
            loopbacks = {interface.name for interface in network.interfaces if interface.is_loopback}
            if network.uses[backend] and loopbacks.issuperset(network.uses[backend]):
                setting = network.settings.get(variable)
                reason = f"by {variable}={setting}" if setting else f"the address that the name {host.name} has there"
                what = f"{backend} on {host.name} uses loopback, {reason}: no other host can reach it"
                yield Finding("loopback", Level.broken, numbers(alike), what, _set(variable, host.name, network.interfaces))


def _same_address(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Hosts whose interfaces have one address, as those of container engines do: each reaches itself alone."""
    for backend, variable in _VARIABLES.items():
        users = [(facts, _address(facts, backend)) for facts in _users(ranks, backend)]
        for address, pairs in group_by(users, lambda user: user[1]).items():
            alike = [facts for facts, _ in pairs]
            if address and _need_a_network(alike):
                what = f"{backend} has the address {address} on several hosts: {hosts(alike)}"
                advice = f"name an interface of the network between the hosts on each of them: {variable}"
                yield Finding("address-twice", Level.broken, numbers(alike), what, advice)


def _address(facts: RankFacts, backend: str) -> str:
    """Return an address of the first interface that the backend uses, "" for loopback, which has a finding of its own."""
    used = [interface for interface in facts.network.interfaces if interface.name in facts.network.uses[backend][:1]]
    return next((i.addresses[0] for i in used if i.addresses and not i.is_loopback), "")


def _differing(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for backend, variable in _VARIABLES.items():
        users = [(facts, tuple(facts.network.uses[backend])) for facts in _users(ranks, backend)]
        groups = group_by([(facts, names) for facts, names in users if names], lambda user: user[1])
        common = max(groups, key=lambda names: len(groups[names]), default=())
        for names in groups.keys() - {common}:
            alike, others = ([facts for facts, _ in groups[chosen]] for chosen in (names, common))
            what = f"{backend} uses {', '.join(names)} on {hosts(alike)}, {', '.join(common)} on {hosts(others)}"
            advice = f"if these are different networks, name one that all hosts share: {variable}"
            yield Finding("interfaces-differ", Level.slower, numbers(alike), what, advice)


def _need_a_network(ranks: Sequence[RankFacts]) -> bool:
    """Return whether ranks are on several hosts that do not reach each other by any address.

    Hosts that ``DLRM_FUSED_HOST`` declares on one machine do, since they share its interfaces.
    """
    places = {(facts.host.boot, facts.network.namespace) for facts in ranks}
    return has_many_hosts(ranks) and (len(places) > 1 or None in {namespace for _, namespace in places})


def _users(ranks: Sequence[RankFacts], backend: str) -> list[RankFacts]:
    return [facts for facts in ranks if backend in facts.backends]


def _set(variable: str, host: str, interfaces: Sequence[Interface]) -> str:
    usable = [f"{i.name} ({i.addresses[0]})" for i in interfaces if i.is_up and i.addresses and not i.is_loopback]
    if not usable:
        return f"bring up a network interface on {host}: none has an address but loopback"
    return f"set {variable} on {host} to {' or '.join(usable)}"


CHECKS: tuple[Check, ...] = (_missing, _loopback, _same_address, _differing)
