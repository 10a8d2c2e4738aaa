"""Codes of several replicas on a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping

from gtp_serve.server.codes_command import Entries

CLUSTER_CODES: Mapping[str, Entries] = {
    "Several replicas (`gtp-serve cluster`)": {
        "replica-lost": (
            "HTTP 503",
            "A replica's process or node was lost after tokens of this answer were sent, or while it held an update's "
            "weights. Before its first token a request goes on elsewhere, and nobody sees this.",
            "Send the request, or push the weights, again. `GET /weights` shows the replicas.",
        ),
        "fleet-failed": (
            "HTTP 503",
            "Replicas fail to start one after the other, or the fleet's actor is gone for good.",
            "The message has the last failure; `ray logs actor` of the replicas has the rest. A fleet is started anew "
            "by `gtp-serve cluster`.",
        ),
        "fleet-restarted": (
            "HTTP 422",
            "The process that decides for the fleet ended before it had decided on the update; the old version serves.",
            "Push again.",
        ),
        "fleet-journal": (
            "Exit 6",
            "What the fleet has written down of its decisions cannot be read.",
            "Use the release that wrote it, or another `--fleet` name.",
        ),
        "stalled": (
            "In logs",
            "A replica had work and made no step for too long; it was replaced.",
            "Look at its log and its node. A pause, or an update in place, does not count.",
        ),
        "export-late": (
            "In logs",
            "A replica did not write its weights out in time for one that was to catch up.",
            "It is tried again. Look at the memory of its node if it happens again.",
        ),
        "weights-changed": (
            "In logs",
            "Other weights came to serve while they were being written out for a replica that was to catch up.",
            "It is tried again with the new ones.",
        ),
        "score-incomplete": (
            "Raised",
            "A sequence was not scored to its end, because its request was cut short.",
            "Score it again.",
        ),
        "batch-cut": (
            "Exit 6",
            "A batch ended before all of its prompts were done.",
            "Run the same command again: what is in the folder is not done twice.",
        ),
        "no-prompt": ("In the part file", "A row has neither `input_ids` nor `prompt`.", "Give it one of them."),
    },
}
