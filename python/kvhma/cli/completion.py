# SPDX-License-Identifier: Apache-2.0
"""Completion in bash of words with ``=`` in them, which bash passes in pieces."""

from __future__ import annotations

import os

from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string


class WholeWords(BashComplete):
    """Joins the pieces, and returns the text after the last ``=``.

    typed              ``kvhma plan M --prefill tp=2,lay``
    bash's words       ``--prefill  tp  =  2,lay``       because ``=`` is in COMP_WORDBREAKS
    completed          ``tp=2,lay   ->   tp=2,layout=``
    bash replaces      ``2,lay      ->   2,layout=``     only its own last word
    """

    # No space after `layout=`: the value comes next.
    source_template = BashComplete.source_template.replace(
        "    return 0\n", "    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace\n\n    return 0\n"
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the completed word, and that word."""
        pieces = split_arg_string(os.environ["COMP_WORDS"])[: int(os.environ["COMP_CWORD"]) + 1]
        # The text does not have a last word that is still empty.
        pieces += [""] * (int(os.environ["COMP_CWORD"]) + 1 - len(pieces))
        words: list[str] = []
        for piece in pieces:
            if words and (piece == "=" or (words[-1].endswith("=") and not piece.startswith("-"))):
                words[-1] += piece
            else:
                words.append(piece)
        return words[1:-1], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        """Return the kind and the value of a completion in the form that the script reads."""
        _, incomplete = self.get_completion_args()
        start = incomplete.rpartition("=")[0]
        value = str(item.value)
        if start and value.startswith(f"{start}="):
            value = value[len(start) + 1 :]
        return f"{item.type},{value}"


def install() -> None:
    """Make ``_KVHMA_COMPLETE=bash_source kvhma``, and the script that it prints, use this class."""
    add_completion_class(WholeWords)
