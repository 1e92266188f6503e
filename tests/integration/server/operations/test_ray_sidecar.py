"""`sgpu up --engine ray`, but for Ray: settings, what is refused at the start, and where others are told to come."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.engines.ray import ray_machine
from serverless_gpu.engines.ray.pool_join import read_join_file
from serverless_gpu.errors import InvalidValue, ServerProblem
from serverless_gpu.server.core.settings import RaySettings, Settings, read_settings
from serverless_gpu.server.operations import sidecars
from tests.support.golden import golden
from tests.support.server.certificates import Authority

RAY = RaySettings(port=7900, node_address="127.0.0.2")


def told(home: Path, **more: object) -> Settings:
    (home / "server").mkdir(exist_ok=True)
    (home / "server" / "join.token").write_text("sgpu_join\n")
    settings = Settings(home=home, database="", ray=RAY)
    return msgspec.structs.replace(settings, **more)


def test_without_a_word_of_ray_there_is_none(home: Path) -> None:
    assert read_settings(home).ray is None
    assert sidecars.offer_joining(read_settings(home), url="http://127.0.0.1:7878", port=7878) == []


def test_ray_is_what_option_variable_and_file_say(home: Path) -> None:
    (home / "server.toml").write_text('engine = "ray"\nray_port = 8100\n')
    said = read_settings(home, {"node_address": "10.0.0.5"}, environ={"SGPU_RAY_PORT": "8200"})
    assert said.ray == RaySettings(port=8200, node_address="10.0.0.5")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node_address": "10.0.0.5"}, "--node-address: node_address needs engine = 'ray'"),
        ({"ray_address": "h:1"}, "--ray-address: ray_address needs engine = 'ray'"),
        ({"engine": "ray", "ray_port": 80}, "--ray-port: ray_port: Ray's port range cannot start at 80"),
        (
            {"engine": "ray", "node_address": "127.0.0.1"},
            "--node-address: node_address: Ray would silently replace the node address 127.0.0.1 by another address of "
            "the machine",
        ),
        ({"engine": "ray", "ray_address": "h:1"}, "--ray-address: ray_address comes without ray_token_file"),
        ({"engine": "ray", "ray_token_file": "f"}, "--ray-token-file: ray_token_file comes without ray_address"),
        ({"engine": "ray", "ray_address": "h", "ray_token_file": "f"}, "--ray-address: ray_address is 'h'"),
    ],
)
def test_what_cannot_be_is_refused_where_it_was_said(home: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        read_settings(home, options)
    assert refused.value.message == message
    assert refused.value.hint


def test_a_cluster_that_is_there_has_to_answer_and_its_token_is_private(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_machine, "check_ray", lambda: "2.60.0")
    token = home / "ray-token"
    token.write_text("f" * 64)
    ray = msgspec.structs.replace(RAY, address="127.0.0.1:1", token_file=str(token))
    token.chmod(0o644)
    with pytest.raises(InvalidValue, match=re.escape(golden("server.ray_beside.lets-whoever"))):
        sidecars.refuse_ray(told(home, ray=ray))
    token.chmod(0o600)
    with pytest.raises(ServerProblem) as refused:
        sidecars.refuse_ray(told(home, ray=ray))
    assert refused.value.message == golden("server.ray_beside.ray-answers-127")


def test_on_loopback_the_first_machine_says_that_no_other_can_join_and_why(home: Path) -> None:
    settings = told(home)
    lines = sidecars.offer_joining(settings, url="http://127.0.0.1:7878", port=7878)
    assert lines == [
        "Ray at 127.0.0.2:7900, ports 7900-7999",
        golden("server.ray_beside.another-home-machine", directory=settings.directory),
        golden("server.ray_beside.other-machines-cannot"),
    ]
    path = settings.directory / "join.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_join_file(path).token == "sgpu_join"


def test_with_an_address_of_a_network_homes_of_this_machine_are_not_spoken_of(home: Path) -> None:
    settings = told(home, ray=msgspec.structs.replace(RAY, node_address="10.0.0.5"))
    lines = sidecars.offer_joining(settings, url="http://127.0.0.1:7878", port=7878)
    assert lines[1:] == [golden("server.ray_beside.other-machines-cannot-join")]


def test_with_a_certificate_the_join_file_has_its_name_and_who_issued_it(home: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("gpu-1", "127.0.0.2")
    settings = told(home, tls_cert=str(cert), tls_key=str(key), tls_ca=str(authority.ca))
    url = "http://127.0.0.1:7879"
    lines = sidecars.offer_joining(settings, url=url, port=7878, certified=("gpu-1", "127.0.0.2"))
    path = settings.directory / "join.json"
    assert lines == [
        "Ray at 127.0.0.2:7900, ports 7900-7999",
        golden("server.ray_beside.another-machine-joins", path=path),
        golden("server.ray_beside.sgpu-join-127"),
        golden("server.ray_beside.good-one-machine"),
    ]
    file = read_join_file(path)
    assert (file.server, file.ca) == ("https://127.0.0.2:7878", authority.ca.read_text())
    assert "f" * 64 not in path.read_text()  # Ray's token is not in it


@pytest.mark.parametrize(
    ("hosts", "certified", "server"),
    [
        ((), ("gpu-1",), "https://gpu-1:7878"),
        ((), ("*.internal", "localhost"), "https://127.0.0.2:7878"),
        (("gpus.internal",), ("*.internal",), "https://gpus.internal:7878"),
        ((), ("fd00::5",), "https://[fd00::5]:7878"),
    ],
)
def test_others_are_told_a_name_that_the_certificate_has(
    home: Path, hosts: tuple[str, ...], certified: tuple[str, ...], server: str
) -> None:
    settings = told(home, tls_cert="x", hosts=hosts)
    url = "http://127.0.0.1:7879"
    assert sidecars.server_url(settings, url=url, port=7878, address="127.0.0.2", certified=certified) == server


def test_behind_a_proxy_others_are_told_its_name(home: Path) -> None:
    settings = told(home, hosts=("gpu.example.com",))
    found = sidecars.server_url(settings, url="http://127.0.0.1:7878", port=7878, address="127.0.0.2", certified=())
    assert found == "https://gpu.example.com"


def test_a_certificate_that_is_its_own_authority_travels_in_the_join_file(home: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)  # its own certificate is one
    settings = told(home, tls_cert=str(authority.ca), tls_key="x")
    sidecars.offer_joining(settings, url="http://127.0.0.1:7879", port=7878, certified=("gpu-1",))
    assert read_join_file(settings.directory / "join.json").ca == authority.ca.read_text()
    cert, _ = authority.sign("gpu-1")
    sidecars.offer_joining(msgspec.structs.replace(settings, tls_cert=str(cert)), url="http://127.0.0.1:7879", port=1)
    assert read_join_file(settings.directory / "join.json").ca == ""
