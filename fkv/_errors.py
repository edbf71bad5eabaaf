"""The one error sentence."""


def sentence(argument: str, expected: str, got: str, hint: str = "") -> str:
    """`argument`: expected WHAT, got WHAT (where the expectation comes from, or the cure)."""
    return f"`{argument}`: expected {expected}, got {got}" + (f" ({hint})" if hint else "")
