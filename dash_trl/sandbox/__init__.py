"""Runs untrusted programs in confined processes, and scores them by tests."""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.sandbox.box import Sandbox
    from dash_trl.sandbox.checker import Test, same_output
    from dash_trl.sandbox.protocol import ProgramSandbox, SandboxError, UnfitTests, Verdict
    from dash_trl.sandbox.remote import SandboxFusion

__getattr__, __dir__, __all__ = lazy(__name__)
