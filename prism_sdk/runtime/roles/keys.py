"""The rendezvous store of a recording by roles, in which some ranks set no keys.

Responsible for whose key stands for an absent one; what the store does is keyvalue.py's.
"""

from __future__ import annotations

import re
from typing import Any

from prism_sdk.runtime.keyvalue import KeyValues
from prism_sdk.runtime.roles.layout import RolePlan


class RoleKeyValues(KeyValues):
    """The rendezvous store; a key that names an absent rank is that of the rank that stands for it."""

    plan: RolePlan | None = None

    def run(self, request: tuple[Any, ...]) -> tuple[Any, ...] | None:
        _, operation, *arguments, timeout = request
        if self.plan is not None and operation in ("get", "wait", "check", "multi_get"):
            keys = arguments[0]
            arguments = [self._stand_in(keys) if isinstance(keys, str) else [self._stand_in(key) for key in keys]]
        return super().run(("store", operation, *arguments, timeout))

    def _stand_in(self, key: str) -> str:
        plan = self.plan
        assert plan is not None
        if key in self._values:
            return key

        def replaced(match: re.Match[str]) -> str:
            rank = int(match[0])
            return str(plan.representative(rank)) if rank < plan.world_size else match[0]

        head, slash, name = key.rpartition("/")  # what stands before is prefixes of groups
        other = f"{head}{slash}{re.sub('[0-9]+', replaced, name)}"
        return other if other in self._values else key
