"""Which advice follows from what the servers are bound by."""

from __future__ import annotations

from workbench.topics.parameter_server.diagnose import _for_servers


def test_uneven_servers_are_evened_before_there_are_more_of_them() -> None:
    even, uneven = {"bytes": 1.1, "seconds": 1.2}, {"bytes": 1.1, "seconds": 1.9}
    assert _for_servers(even, 0.8, 1.5)[0].startswith("Use more servers")
    assert _for_servers(uneven, 0.8, 1.5)[0].startswith("Split large variables")
