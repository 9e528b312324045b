"""Command lines, environments and ports of the fleet's processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from vime.eval.fleet import launch
from vime.eval.fleet.launch import (
    Tokens,
    engine_argv,
    engine_environment,
    router_argv,
    router_environment,
)
from vime.eval.fleet.ports import PortReservation
from vime.eval.fleet.settings import FleetSettings

TOKENS = Tokens(api_key="the-api-key", control="the-control-token")
FLEET = FleetSettings(2, Path("/models/base"), Path("/run"), num_gpus_per_engine=2)


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_an_engine_listens_on_loopback_and_carries_the_guard_and_the_verified_load() -> None:
    argv = engine_argv(FLEET, 4711, ["0"])
    assert argv[1:3] == ["-m", "vime.eval.fleet.api_server"]
    assert option(argv, "--host") == "127.0.0.1"
    assert option(argv, "--port") == "4711"
    assert option(argv, "--model") == "/models/base"
    assert option(argv, "--tensor-parallel-size") == "2"
    assert option(argv, "--middleware") == "vime.eval.fleet.vllm_plugin.ControlGuard"
    assert option(argv, "--worker-extension-cls") == "vime.eval.fleet.vllm_plugin.VerifiedLoad"
    assert "--enable-scale-out" in argv
    assert "--trust-remote-code" not in argv
    assert "--enforce-eager" not in argv


def test_without_gpus_an_engine_does_not_compile_unless_it_is_told_to() -> None:
    assert "--enforce-eager" in engine_argv(FLEET, 1, None)


def test_further_arguments_are_passed_on_as_flags() -> None:
    fleet = FleetSettings(
        1, Path("b"), Path("r"), vllm={"max_model_len": 256, "enforce_eager": True, "dtype": "half"}
    )
    argv = engine_argv(fleet, 1, ["0"])
    assert option(argv, "--max-model-len") == "256"
    assert option(argv, "--dtype") == "half"
    assert argv.count("--enforce-eager") == 1


def test_a_relative_base_is_given_as_a_path_and_never_taken_for_a_name_on_a_hub() -> None:
    argv = engine_argv(FleetSettings(1, Path("org/model"), Path("r")), 1, ["0"])
    assert option(argv, "--model") == str(Path.cwd() / "org/model")


def test_an_engine_has_the_tokens_in_its_environment_alone() -> None:
    env = engine_environment(FLEET, 0, TOKENS, ["4", "5", "6", "7"], {"PATH": "/bin"})
    assert env == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "4,5",
        "VLLM_API_KEY": "the-api-key",
        "VIME_CONTROL_TOKEN": "the-control-token",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }
    assert "the-" not in repr([engine_argv(FLEET, 1, None), router_argv(FLEET, 1, 2), TOKENS])


def test_an_engine_does_not_take_itself_for_a_rank_of_the_trainer() -> None:
    trainer = {
        "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "GROUP_RANK": "0",
        "ROLE_RANK": "3", "TORCHELASTIC_RUN_ID": "x", "CUDA_HOME": "/cuda",
    }  # fmt: skip
    env = engine_environment(FLEET, 0, TOKENS, ["0", "1", "2", "3"], trainer)
    assert set(env) & set(trainer) == {"CUDA_HOME"}


def test_the_size_of_the_cache_on_a_cpu_is_the_users_if_there_is_one() -> None:
    env = engine_environment(FLEET, 0, TOKENS, ["0"] * 4, {"VLLM_CPU_KVCACHE_SPACE": "40"})
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "40"


def test_the_tokens_of_two_runs_differ() -> None:
    one, other = Tokens(), Tokens()
    assert len({one.api_key, one.control, other.api_key, other.control}) == 4


def test_the_router_listens_on_loopback_and_goes_round_robin() -> None:
    argv = router_argv(FLEET, 4711, 4712)
    assert option(argv, "--host") == option(argv, "--prometheus-host") == "127.0.0.1"
    assert (option(argv, "--port"), option(argv, "--prometheus-port")) == ("4711", "4712")
    assert option(argv, "--policy") == "round_robin"


def test_no_proxy_comes_between_the_router_and_the_engines() -> None:
    environ = {"http_proxy": "http://p", "HTTPS_PROXY": "http://p", "no_proxy": "x", "PATH": "/bin"}
    assert router_environment(environ) == {"PATH": "/bin"}


@pytest.mark.anyio
async def test_no_proxy_comes_between_the_supervisor_and_the_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    client = launch.loopback_client("http://127.0.0.1:1")
    assert not client._mounts
    await client.aclose()


# --- ports


def listen(port: int) -> socket.socket:
    """As servers do."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("127.0.0.1", port))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def test_one_server_can_listen_on_a_reserved_port_and_a_second_one_cannot() -> None:
    with PortReservation("127.0.0.1") as port:
        with listen(port.number), pytest.raises(OSError, match="Address already in use"):
            listen(port.number)
        with listen(port.number):  # the next life of the server
            pass


def test_a_reserved_port_is_given_to_nobody_who_asks_for_any() -> None:
    with PortReservation("127.0.0.1") as port:
        others = [PortReservation("127.0.0.1") for _ in range(500)]
        numbers = {other.number for other in others}
        for other in others:
            other.close()
        assert len(numbers) == 500
        assert port.number not in numbers


def test_a_reservation_of_an_address_of_another_machine_leaves_no_socket() -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- a look, not a walk
    with pytest.raises(OSError, match="Cannot assign"):
        PortReservation("192.0.2.1")
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 -- as above
