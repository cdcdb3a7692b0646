"""RemoteBackend and LocalBackend keep the promises of a Backend, on a real server."""

import pytest
from tests.conformance.backend import BackendConformance

from hone import LocalBackend, RemoteBackend


class TestRemote(BackendConformance):
    @pytest.fixture
    def backend(self, local: LocalBackend) -> RemoteBackend:
        return RemoteBackend(local.base_url)


@pytest.mark.e2e
class TestLocal(BackendConformance):
    @pytest.fixture
    def backend(self, process_server: LocalBackend) -> LocalBackend:
        return process_server
