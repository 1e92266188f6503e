"""Shows usage policies, and creates, changes, attaches, detaches and deletes policies."""

from __future__ import annotations

from typing import Annotated

import msgspec

from serverless_gpu.errors import InvalidValue, NotFound, ServerlessGpuError
from serverless_gpu.model.spec import Priority
from serverless_gpu.model.usage_policy import HOLDER_KINDS, UsagePolicy, describe
from serverless_gpu.server import policies
from serverless_gpu.server.http.routing import FORM_BYTES_MAX, Call, Form, Query, Routes, reading, writing
from serverless_gpu.server.policies import PolicyQuery
from serverless_gpu.server.web import form_values
from serverless_gpu.server.web.site import WEB, Page, Redirect, Site
from serverless_gpu.wire.access import PolicyView, policy_of, request_of
from serverless_gpu.wire.base import NAME_CHARACTERS_MAX

routes = Routes("policy-pages", mount=WEB)
_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]
_Line = Annotated[str, msgspec.Meta(max_length=4_096)]
_Lines = Annotated[str, msgspec.Meta(max_length=65_536)]
_UNITS = ((604_800, "w"), (86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))


class PoliciesPageQuery(Query, frozen=True, kw_only=True):
    """Choice of the list: all policies, or the policies that the reader can use."""

    mine: bool = False


class PolicyForm(Form, frozen=True, kw_only=True):
    """A usage policy as a person types it. An empty field sets no limit."""

    name: _Name = ""
    pool: _Name = ""
    pools: _Line = ""
    gpu_types: _Line = ""
    gpus_per_run: _Name = ""
    gpus_at_once: _Name = ""
    max_run: _Name = ""
    total_run: _Name = ""
    idle: _Name = ""
    timeout: _Name = ""
    attempts_max: _Name = ""
    unsaved_max: _Name = ""
    priorities: tuple[Priority, ...] = ()
    team: _Name = ""
    team_required: Annotated[str, msgspec.Meta(pattern="^(yes)?$")] = ""
    mandatory: Annotated[str, msgspec.Meta(pattern="^(yes)?$")] = ""
    required_tags: _Lines = ""
    default_tags: _Lines = ""
    environments: _Lines = ""

    def policy(self) -> UsagePolicy:
        """Return the policy."""
        return UsagePolicy(
            pool=self.pool.strip(),
            pools=form_values.names(self.pools),
            gpu_types=form_values.names(self.gpu_types),
            gpus_per_run=form_values.count("GPUs of a run", self.gpus_per_run),
            gpus_at_once=form_values.count("GPUs at once", self.gpus_at_once),
            max_run_s=form_values.seconds("longest attempt", self.max_run),
            total_run_s=form_values.seconds("time of all attempts", self.total_run),
            idle_s=form_values.seconds("idle time", self.idle),
            timeout_s=form_values.seconds("default time limit", self.timeout),
            attempts_max=form_values.count("attempts", self.attempts_max),
            unsaved_max=form_values.count("attempts without a checkpoint", self.unsaved_max),
            priorities=self.priorities,
            team=self.team.strip(),
            team_required=bool(self.team_required),
            mandatory=bool(self.mandatory),
            required_tags=_required_tags(self.required_tags),
            default_tags=_default_tags(self.default_tags),
            environments=form_values.lines(self.environments),
        )


class HolderForm(Form, frozen=True, kw_only=True):
    """A user, service or team that a policy is attached to."""

    kind: Annotated[str, msgspec.Meta(max_length=16)]
    holder: _Name


@routes.get("/policies", needs=reading("policies"))
def show_policies(call: Call, site: Site, query: PoliciesPageQuery) -> Page:
    """List usage policies."""
    return _list_page(call, site, query.mine, PolicyForm())


@routes.post("/policies", needs=writing("policies"), limit=FORM_BYTES_MAX)
def create_policy(call: Call, site: Site, body: PolicyForm) -> Page | Redirect:
    """Create a policy, and refuse a name that another policy has."""
    try:
        if not body.name:
            raise InvalidValue("the policy has no name")
        _refuse_known(call, site, body.name)
        site.ask(call, policies.put_policy, name=body.name, body=request_of(body.policy()))
    except ServerlessGpuError as problem:
        return form_values.with_problem(_list_page(call, site, False, body), problem)
    return Redirect(path=f"/policies/{body.name}")


@routes.get("/policies/{name}", needs=reading("policies"))
def show_policy(call: Call, site: Site, name: str) -> Page:
    """Show a policy with its holders."""
    return _policy_page(call, site, name, None)


@routes.post("/policies/{name}", needs=writing("policies"), limit=FORM_BYTES_MAX)
def change_policy(call: Call, site: Site, name: str, body: PolicyForm) -> Page | Redirect:
    """Change a policy."""
    try:
        site.ask(call, policies.put_policy, name=name, body=request_of(body.policy()))
    except ServerlessGpuError as problem:
        return form_values.with_problem(_policy_page(call, site, name, body), problem)
    return Redirect(path=f"/policies/{name}")


@routes.post("/policies/{name}/attach", needs=writing("policies"), limit=FORM_BYTES_MAX)
def attach_policy(call: Call, site: Site, name: str, body: HolderForm) -> Page | Redirect:
    """Attach a policy."""
    try:
        site.ask(call, policies.attach, name=name, kind=body.kind, holder=body.holder.strip())
    except ServerlessGpuError as problem:
        return form_values.with_problem(_policy_page(call, site, name, None), problem)
    return Redirect(path=f"/policies/{name}")


@routes.post("/policies/{name}/detach", needs=writing("policies"), limit=FORM_BYTES_MAX)
def detach_policy(call: Call, site: Site, name: str, body: HolderForm) -> Page | Redirect:
    """Detach a policy."""
    try:
        site.ask(call, policies.detach, name=name, kind=body.kind, holder=body.holder)
    except ServerlessGpuError as problem:
        return form_values.with_problem(_policy_page(call, site, name, None), problem)
    return Redirect(path=f"/policies/{name}")


@routes.post("/policies/{name}/delete", needs=writing("policies"), limit=FORM_BYTES_MAX)
def delete_policy(call: Call, site: Site, name: str, body: Form) -> Page | Redirect:
    """Delete a policy."""
    try:
        site.ask(call, policies.delete_policy, name=name)
    except NotFound:
        raise
    except ServerlessGpuError as problem:
        return form_values.with_problem(_policy_page(call, site, name, None), problem)
    return Redirect(path="/policies")


def form_of(view: PolicyView) -> PolicyForm:
    """Return the form with a policy's current values."""
    policy = policy_of(view)
    required = (key + (f"={','.join(values)}" if values else "") for key, values in policy.required_tags.items())
    return PolicyForm(
        name=view.name,
        pool=policy.pool,
        pools=", ".join(policy.pools),
        gpu_types=", ".join(policy.gpu_types),
        gpus_per_run=_number(policy.gpus_per_run),
        gpus_at_once=_number(policy.gpus_at_once),
        max_run=_span(policy.max_run_s),
        total_run=_span(policy.total_run_s),
        idle=_span(policy.idle_s),
        timeout=_span(policy.timeout_s),
        attempts_max=_number(policy.attempts_max),
        unsaved_max=_number(policy.unsaved_max),
        priorities=policy.priorities,
        team=policy.team,
        team_required="yes" if policy.team_required else "",
        mandatory="yes" if policy.mandatory else "",
        required_tags="\n".join(required),
        default_tags="\n".join(f"{key}={value}" for key, value in policy.default_tags.items()),
        environments="\n".join(policy.environments),
    )


def _list_page(call: Call, site: Site, mine: bool, form: PolicyForm) -> Page:
    found = site.ask(call, policies.list_policies, query=PolicyQuery(mine=mine)).policies
    return site.page(
        call,
        "policies.html",
        title="Policies",
        nav="policies",
        policies=[(one, describe(policy_of(one))) for one in found],
        mine=mine,
        form=form,
        priorities=[one.value for one in Priority],
        problem=None,
    )


def _policy_page(call: Call, site: Site, name: str, form: PolicyForm | None) -> Page:
    view = site.ask(call, policies.get_policy, name=name)
    return site.page(
        call,
        "policy.html",
        title=f"Policy {name}",
        nav="policies",
        policy=view,
        rules=describe(policy_of(view)),
        form=form or form_of(view),
        priorities=[one.value for one in Priority],
        kinds=HOLDER_KINDS,
        problem=None,
    )


def _refuse_known(call: Call, site: Site, name: str) -> None:
    try:
        site.ask(call, policies.get_policy, name=name)
    except NotFound:
        return
    raise InvalidValue(f"there is already a policy {name!r}", hint="open the policy to change it")


def _required_tags(text: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in form_values.lines(text):
        key, sign, values = line.partition("=")
        accepted = form_values.names(values)
        if sign and not accepted:
            raise InvalidValue(f"the tag {line[:80]!r} accepts no value", hint=f"write {key!r} to accept any value")
        found[key.strip()] = accepted
    return found


def _default_tags(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in form_values.lines(text):
        key, sign, value = line.partition("=")
        if not sign:
            raise InvalidValue(f"{line[:80]!r} is not a tag", hint="write one tag of the form key=value per line")
        found[key.strip()] = value.strip()
    return found


def _number(value: int | None) -> str:
    return "" if value is None else f"{value}"


def _span(seconds: float | None) -> str:
    """Return a duration as a person types it, such as 12h."""
    if seconds is None:
        return ""
    size, unit = next((size, unit) for size, unit in _UNITS if seconds % size == 0 or size == 1)
    return f"{round(seconds / size)}{unit}"
