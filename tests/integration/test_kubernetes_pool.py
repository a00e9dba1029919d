"""Warm pods: made ahead for nobody, and bound to whoever leases them. Beside test_pools.py, because all that wants the one cluster runs in one go."""

import pytest
from tests import kubehost
from tests.integration.test_pools import warm_is_as_good_as_cold

import untax

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cluster():
    with kubehost.cluster() as cluster:
        cluster.wait_schedulable()  # after whatever the module before this one did to a node
        yield cluster


async def test_a_warm_pod_is_as_good_as_a_cold_one(cluster, tmp_path):
    async with untax.Engine("kubernetes", kubeconfig=cluster.kubeconfig, state_dir=tmp_path / "state") as engine:
        await warm_is_as_good_as_cold(engine, untax.EnvSpec(image=kubehost.SMALL, isolation="container"), 1)
