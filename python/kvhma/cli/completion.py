# SPDX-License-Identifier: Apache-2.0
"""Completion in bash of words with ``=`` in them, which bash hands over in pieces."""

from __future__ import annotations

import os

from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string


class WholeWords(BashComplete):
    """Puts the pieces together, and gives back what follows the last ``=``.

    typed              kvhma plan M --prefill tp=2,lay
    bash's words       --prefill  tp  =  2,lay              = is one of COMP_WORDBREAKS
    completed          tp=2,lay   ->   tp=2,layout=
    bash replaces      2,lay      ->   2,layout=            only its own last word
    """

    # No space after `layout=`: the value comes next.
    source_template = BashComplete.source_template.replace(
        "    return 0\n", "    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace\n\n    return 0\n"
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one that is completed, and that word."""
        pieces = split_arg_string(os.environ["COMP_WORDS"])[: int(os.environ["COMP_CWORD"]) + 1]
        # A last word of which nothing is written yet is not in the text.
        pieces += [""] * (int(os.environ["COMP_CWORD"]) + 1 - len(pieces))
        words: list[str] = []
        for piece in pieces:
            if words and (piece == "=" or (words[-1].endswith("=") and not piece.startswith("-"))):
                words[-1] += piece
            else:
                words.append(piece)
        return words[1:-1], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        """Return the kind and the value of a completion, as the script reads it."""
        _, incomplete = self.get_completion_args()
        start = incomplete.rpartition("=")[0]
        value = str(item.value)
        if start and value.startswith(f"{start}="):
            value = value[len(start) + 1 :]
        return f"{item.type},{value}"


def install() -> None:
    """Let ``_KVHMA_COMPLETE=bash_source kvhma``, and what it prints, use this."""
    add_completion_class(WholeWords)
