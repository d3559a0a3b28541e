# SPDX-License-Identifier: Apache-2.0
"""Tables that a program writes into a page, between two comments that name the program."""


def put(page: str, name: str, program: str, text: str) -> str:
    """Return a page with another text between the comments of a table.

    Raises:
        ValueError: the page has no such comments.
    """
    begin, end = f"<!-- {name}: made by {program} -->", f"<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"the page has no line {begin!r} followed by {end!r}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
