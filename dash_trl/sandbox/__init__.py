"""Runs untrusted programs in confined processes, and scores them by tests."""

from dash_trl.sandbox.box import Sandbox
from dash_trl.sandbox.checker import Test, same_output
from dash_trl.sandbox.protocol import ProgramSandbox, SandboxError, UnfitTests, Verdict, job_of, read_verdict
