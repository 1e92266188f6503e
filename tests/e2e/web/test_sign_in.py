"""Signing in with a real browser: over a real identity provider of another site, and the approval of a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from serverless_gpu.wire.sign_in import DeviceAnswer, DeviceCode, DeviceCodeRequest, DevicePoll
from tests.support.server.identity_provider import mock_provider
from tests.support.server.served import served
from tests.support.web.browser import reader


def check_access(page: Page) -> None:
    """Fail for serious findings of axe."""
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []


@pytest.mark.long
@pytest.mark.spot
def test_an_account_of_a_real_provider_signs_in_and_approves_a_terminal(chromium: Browser, tmp_path: Path) -> None:
    ada = {"sub": "ada-1", "preferred_username": "ada", "email": "ada@lab.example", "groups": ["gpu-vision"]}
    options: dict[str, Any] = {
        "oidc_client_id": "sgpu",
        "oidc_client_secret": "x",
        "oidc_create": True,
        "oidc_name": "Lab",
    }
    with (
        mock_provider(ada) as issuer,
        served(tmp_path / "home", oidc_issuer=issuer, oidc_teams=("gpu-vision=vision",), **options) as server,
        reader(chromium, server, token="") as page,
    ):
        terminal = server.connection("")
        code = terminal.ask("POST", "/device/codes", DeviceCodeRequest(host="laptop"), answer=DeviceCode)
        page.goto(f"/ui/device?code={code.user_code}")
        check_access(page)
        page.click("text=Sign in with Lab")
        page.locator("button", has_text="ada-1").first.click()
        page.wait_for_url(f"**/ui/device?code={code.user_code}")
        assert page.locator(".user-code").inner_text() == code.user_code
        check_access(page)
        page.click("button[value=approve]")
        page.wait_for_selector(".notice")
        answer = terminal.ask("POST", "/device/token", DevicePoll(device_code=code.device_code), answer=DeviceAnswer)
        assert answer.made is not None
        assert answer.made.token.principal == "ada"
        page.goto("/ui/people/users/ada")
        assert page.locator("dl.facts").inner_text().count("vision") == 1
        check_access(page)
        for path in ("", "/teams", "/tokens", "/sessions"):
            page.goto(f"/ui/people{path}")
            check_access(page)


@pytest.mark.long
def test_dangerous_forms_ask_first_and_work_with_the_keyboard(chromium: Browser, tmp_path: Path) -> None:
    with served(tmp_path / "home") as server, reader(chromium, server) as page:
        page.goto("/ui/people")
        page.click("text=Create a user or a service")
        page.fill("input[name=name]", "eve")
        page.click("button:has-text('Create')")
        page.wait_for_selector(".once")
        page.goto("/ui/people/users/eve")
        check_access(page)
        page.click("text=Delete eve")
        dialog = page.locator("dialog")
        assert dialog.locator("button.danger").is_disabled()
        page.keyboard.press("Escape")
        assert page.locator("dialog").count() == 0
        page.click("text=Delete eve")
        page.fill("dialog input", "eve")
        page.click("dialog button.danger")
        page.wait_for_url("**/ui/people?done=deleted")
        assert "eve" not in page.locator("table").inner_text()
