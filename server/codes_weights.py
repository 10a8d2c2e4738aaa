"""Codes of new weights: an update that is refused, or was begun and not taken."""

from __future__ import annotations

from collections.abc import Mapping

from gtp_serve.server.codes_command import Entries

_ASK = "HTTP 409, exit 7"
_FED = "HTTP 400, exit 7"
_LOST = "Exit 7"

WEIGHT_CODES: Mapping[str, Entries] = {
    "Updates that are refused": {
        "update-refused": (_ASK, "The update cannot be started or carried on as things are.", "Nothing has changed."),
        "update-under-way": (
            _ASK,
            "Another update is under way; there is one at a time.",
            "Wait for it, or abort it: `gtp-serve weights URL` shows it.",
        ),
        "unknown-update": ("HTTP 404", "There is no update of this id.", "`GET /weights` lists those that there are."),
        "update-ended": (_ASK, "The update has ended already.", "`GET /weights` tells how; begin another one."),
        "update-committed": (_ASK, "The update serves already.", "`rollback` takes the version before it back."),
        "id-in-use": (_ASK, "The id is another update's.", "Give each update its own id, or leave it out."),
        "base-mismatch": (
            _ASK,
            "Another version serves than the one that the update was made for.",
            "Look at what serves (`gtp-serve weights URL`) and push again with that `--base`, or without one.",
        ),
        "version-repeated": (_ASK, "This version has been served already.", "Give the new weights another label."),
        "version-reordered": (
            _ASK,
            "The version is not above the one that serves.",
            "Labels that are numbers go up. `rollback` is how to go back.",
        ),
        "bad-label": (_ASK, "The version's label cannot be.", "Letters, digits and a few signs; the error says which."),
        "bad-deadline": (_ASK, "The deadline cannot be.", "The error says the range."),
        "dry-run-inplace": (
            _ASK,
            "A dry run in place would overwrite the weights that serve.",
            "Ask for a dry run with `memory: staged`.",
        ),
        "no-staging-memory": (
            _ASK,
            "There is no memory for a second set of weights.",
            "Update in place (`--memory inplace`), or restart with a smaller `--kv-memory`.",
        ),
        "nothing-to-roll-back": (_ASK, "There is no version to go back to.", "Push the checkpoint you want."),
        "not-verified": (_ASK, "The update has not been verified, so it cannot be committed.", "Wait until it is."),
        "not-staging": (_ASK, "The rank is not staging this update.", "It has ended; begin another one."),
        "not-fed": (_ASK, "This update does not come piece by piece.", "Tensors are sent to updates of kind `fed`."),
        "feed-ended": (_ASK, "The update takes no more tensors.", "All of them were announced as sent."),
        "no-updates": (_ASK, "This engine was built without a way to change its weights.", "Use `gtp-serve serve`."),
        "bad-command": (_ASK, "A value of the command cannot be passed to the engine.", "The error names it."),
        "engine-busy": (_ASK, "Memory can be released only while nothing runs.", "Pause first."),
        "weights-released": (_ASK, "The memory of the weights is released.", "Restore it first."),
        "bad-tag": ("HTTP 400", "There is no such part of memory.", "`weights` or `kv_cache`."),
        "pause-deadline": (_ASK, "Running requests did not end in time.", "Allow more time, or abort them."),
        "resumed": (_ASK, "The pause was taken back before all requests had ended.", "Pause again."),
    },
    "Bodies and tensors of an update": {
        "bad-stream": (_FED, "The body is not one safetensors file.", "Send what `safetensors` writes."),
        "cut-off": (_FED, "The body ends before its tensors do.", "Send it again; nothing has changed."),
        "too-long": (_FED, "The body goes on after its tensors.", "Send exactly one safetensors file."),
        "doubled-tensor": (_FED, "A tensor comes twice.", "Send each once."),
        "wrong-dtype": (_FED, "A tensor is of a type that is not taken.", "float32, bfloat16 or float16."),
        "unknown-tensor": (_FED, "The model has no tensor of this name.", "Names are Hugging Face's."),
        "too-many-values": ("HTTP 400", "More values were asked for than one answer has.", "Ask for a smaller part."),
        "tensors-missing": (_LOST, "The update was ended before every tensor had come.", "Send the whole model."),
        "tensors-refused": (
            _LOST,
            "Tensors have another name, shape or type than the model's.",
            "The error names the first of them; the update is lost and the old weights serve.",
        ),
        "digest-mismatch": (
            _LOST,
            "Bytes that arrived are not those that were announced.",
            "Send again. If it repeats, memory or network damages data.",
        ),
        "no-room": ("HTTP 507", "There is no memory or disk to hold the body.", "Free some, or push from a path."),
        "pickle-refused": (
            "HTTP 400",
            "The request carries a pickle, which can run code when it is read.",
            "The message names the safe way of the same client.",
        ),
        "bad-segment": (_ASK, "A segment of shared memory is not there, or is not what was told.", "See the error."),
        "bad-shard": (
            _ASK,
            "A shard in shared memory lies outside its segment or has no known type.",
            "See the error.",
        ),
        "weights-mismatch": (
            _ASK,
            "The trainer's tensors are not the served model's.",
            "The error names the first that differ in name or shape.",
        ),
        "not-finite": (
            _LOST,
            "A new weight is not a finite number. The old ones serve.",
            "The training run has diverged, or the checkpoint is damaged; the error names the tensor.",
        ),
    },
    "Updates that were begun and not taken": {
        "update-failed": (
            "Exit 7",
            "The new weights were not taken; the old ones go on serving.",
            "The error says what happened. `gtp-serve weights URL` shows the history.",
        ),
        "update-deadline": (
            _LOST,
            "The update's time was over.",
            "`--deadline S`, or `--refit-timeout` of the server.",
        ),
        "dropped": (_LOST, "The update was given up while it ran.", "Somebody aborted it, or a rank failed."),
        "update-plan": (_LOST, "The two sides would transfer different things.", "Use one release on both."),
        "update-store": (_LOST, "No place could be opened to meet the trainer.", "`--refit-host` of this machine."),
        "trainer-lost": (_LOST, "A trainer's process ended or fell silent; it is named.", "Look at that process."),
        "peer-lost": (_LOST, "A member of the group ended or fell silent.", "Look at that process, and join again."),
        "no-device": (_LOST, "NCCL needs a GPU in every process.", "Choose the backend gloo."),
    },
    "Groups with other trainers": {
        "group-place": (_ASK, "The rank has no place in the group.", "`rank_offset` counts from 1."),
        "group-backend": (_ASK, "The backend cannot be used here.", "gloo on a CPU, nccl on GPUs."),
        "group-join": (_LOST, "The group did not come about.", "Check address, port and that all members join."),
        "group-late": (_LOST, "Members of the group did not come in time; they are named.", "Start them."),
        "group-broken": (_LOST, "The group failed in an earlier transfer.", "Leave it and join a new one."),
        "group-unknown": (_ASK, "There is no group of this name.", "Join it first."),
        "group-id": (_ASK, "The trainer's store holds no usable NCCL id.", "Use the same NCCL on both sides."),
    },
}
