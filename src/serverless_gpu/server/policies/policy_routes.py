"""Routes of `wire/access.py`: usage policies, and whom they are attached to."""

from __future__ import annotations

from serverless_gpu.server.http.routing import Call, Query, Routes, reading, writing
from serverless_gpu.server.policies.policy_service import PolicyService
from serverless_gpu.wire.access import PolicyList, PolicyRequest, PolicyView, policy_of

routes = Routes("policies")


class PolicyQuery(Query, frozen=True, kw_only=True):
    """Whether only those that one's own runs can be under."""

    mine: bool = False


@routes.get("/policies", needs=reading("policies"))
def list_policies(call: Call, policies: PolicyService, query: PolicyQuery) -> PolicyList:
    """List usage policies."""
    return PolicyList(policies=policies.view_all(call.who, mine=query.mine))


@routes.get("/policies/{name}", needs=reading("policies"))
def get_policy(call: Call, policies: PolicyService, name: str) -> PolicyView:
    """Return a usage policy."""
    return policies.view(call.who, name)


@routes.put("/policies/{name}", needs=writing("policies"))
def put_policy(call: Call, policies: PolicyService, name: str, body: PolicyRequest) -> PolicyView:
    """Make a usage policy, or put another one in its place."""
    return policies.put(call.who, name, policy_of(body))


@routes.delete("/policies/{name}", needs=writing("policies"))
def delete_policy(call: Call, policies: PolicyService, name: str) -> PolicyView:
    """Delete a usage policy that is attached to nobody; runs that named it keep what they got."""
    return policies.delete(call.who, name)


@routes.put("/policies/{name}/holders/{kind}/{holder}", needs=writing("policies"))
def attach(call: Call, policies: PolicyService, name: str, kind: str, holder: str) -> PolicyView:
    """Attach a usage policy to a user, service or team."""
    return policies.attach(call.who, name, kind, holder)


@routes.delete("/policies/{name}/holders/{kind}/{holder}", needs=writing("policies"))
def detach(call: Call, policies: PolicyService, name: str, kind: str, holder: str) -> PolicyView:
    """Detach a usage policy from somebody; their runs that were submitted keep what they got."""
    return policies.detach(call.who, name, kind, holder)
