"""The error of a collective, in words."""

from __future__ import annotations

import pytest
from torch import distributed

from rlplug.distributed.fabric import explain_collective

PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
GONE = ", or the network to it is down"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError(f"{PAIR}pair.cc:553] Connection closed by peer [10.87.0.2]:48263."),
            "a rank on 10.87.0.2 has ended",
        ),
        (
            RuntimeError(f"{PAIR}pair.cc:537] Read error [fd00::2]:48263: Connection reset"),
            "a rank on fd00::2 has ended",
        ),
        (distributed.DistBackendError("NCCL error: ncclRemoteError: A call failed"), "a rank has ended"),
        (distributed.DistNetworkError("Connection reset by peer"), "a rank has ended"),
    ],
)
def test_a_lost_rank(error: Exception, reason: str):
    assert explain_collective(error) == reason + GONE


def test_a_time_out():
    error = RuntimeError(f"{PAIR}unbound_buffer.cc:78] Timed out waiting 7200000ms for recv operation to complete")
    assert explain_collective(error) == "another rank did not answer within 2:00:00: it hangs, or its machine is lost"


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), ValueError("Timed out waiting")])
def test_another_error(error: Exception):
    assert explain_collective(error) is None
