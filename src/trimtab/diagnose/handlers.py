"""How an `except` clause may end: by going on, or by raising something. Reads source; runs nothing."""

from __future__ import annotations

import ast

_ENDING = ("exit", "_exit", "abort", "quit")


def outcome(handler: ast.ExceptHandler) -> tuple[bool, list[ast.expr | None]]:
    """Whether a way through the clause leads on, and what the others raise (None: the error that it was given)."""
    raises: list[ast.expr | None] = []
    falls, leaves = _ways(handler.body, raises)
    given = [None if isinstance(one, ast.Name) and one.id == handler.name else one for one in raises]
    return falls or leaves, given


def _ways(body: list[ast.stmt], raises: list[ast.expr | None]) -> tuple[bool, bool]:
    """Whether statements may come to their end, and whether they may leave by return, continue or break."""
    leaves = False
    for statement in body:
        if isinstance(statement, ast.Raise):
            raises.append(statement.exc)
            return False, leaves
        if isinstance(statement, ast.Return | ast.Continue | ast.Break):
            return False, True
        if _ends_the_program(statement):
            return False, leaves
        parts = [_ways(part, raises) for part in _branches(statement)]
        leaves |= any(left for _, left in parts)
        if parts and not any(falls for falls, _ in parts):
            return False, leaves
    return True, leaves


def _branches(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The ways that one statement may go; an empty one goes on at once."""
    match statement:
        case ast.If():
            return [statement.body, statement.orelse]
        case ast.For() | ast.AsyncFor() | ast.While():
            return [statement.body, []]
        case ast.With() | ast.AsyncWith():
            return [statement.body]
        case ast.Try():
            return [statement.body + statement.orelse, *(one.body for one in statement.handlers)]
        case ast.Match():
            return [*(case.body for case in statement.cases), []]
    return []


def _ends_the_program(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = statement.value.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in _ENDING
