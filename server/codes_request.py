"""Codes that a request is answered with."""

from __future__ import annotations

from collections.abc import Mapping

from gtp_serve.server.codes_command import Entries

REQUEST_CODES: Mapping[str, Entries] = {
    "Requests": {
        "unknown-field": (
            "HTTP 400",
            "The body has a field that this route does not know.",
            "`error.did_you_mean` has the nearest one. Nothing is ever ignored in silence.",
        ),
        "missing-field": ("HTTP 400", "A field that is needed is not there.", "`error.param` names it."),
        "invalid-value": (
            "HTTP 400",
            "A field has a value that cannot be: another type, out of range, not finite.",
            "`error.param` names the field, the message what is possible.",
        ),
        "not-supported": (
            "HTTP 400",
            "A known field asks for something that this server does not do.",
            "Leave the field out, or at its default. The message says why.",
        ),
        "duplicate-key": (
            "HTTP 400",
            "A key comes twice in one JSON object or query.",
            "Send it once: which of the two counts would be a guess.",
        ),
        "invalid-json": ("HTTP 400", "The body is not a JSON object.", "The message says where reading ended."),
        "invalid-text": (
            "HTTP 400",
            "The text holds half of a surrogate pair, which is no character, or the tokenizer gives up on it.",
            "Send valid Unicode; break up very long runs of one character.",
        ),
        "wrong-media-type": ("HTTP 415", "The body is of another type.", "Send `content-type: application/json`."),
        "body-too-large": ("HTTP 413", "The body is larger than the route takes.", "Send fewer prompts in one call."),
        "body-too-slow": ("HTTP 408", "The body did not arrive in time.", "Check the connection, and send it at once."),
        "bad-http": (
            "HTTP 400",
            "What came is not HTTP/1.1, or URL and headers are too large.",
            "A TLS client on a plain port looks like this: use http://, or set `tls_cert`.",
        ),
        "not-found": ("HTTP 404", "There is nothing at this path.", "`/openapi.json` lists the routes."),
        "method-not-allowed": ("HTTP 405", "The path does not take this method.", "The message lists those it takes."),
        "http-error": ("HTTP 4xx", "The HTTP layer refused the request.", "The message says why."),
        "api-key-needed": (
            "HTTP 401",
            "The server has an API key, and the request has none or another.",
            "Send `authorization: Bearer KEY`. `/health`, `/ready` and `/` need no key.",
        ),
        "admin-key-needed": (
            "HTTP 401",
            "The route changes or tells about weights and needs the admin key.",
            "Send `authorization: Bearer KEY` with the admin key; `gtp-serve push` takes `--admin-key-file`.",
        ),
        "admin-only-local": (
            "HTTP 403",
            "No admin key is set, so weight routes answer programs on the server's own machine only.",
            "Start the server with `--admin-key-file FILE`, and send the key.",
        ),
        "conflict": ("HTTP 409", "The request contradicts one that is running.", "The message names it."),
        "duplicate-rid": (
            "HTTP 409",
            "A request with this `rid` is running.",
            "Leave `rid` out, or give each request its own.",
        ),
    },
    "Prompts and sampling": {
        "empty-prompt": ("HTTP 400", "The prompt has no tokens.", "Send at least one token."),
        "prompt-too-long": (
            "HTTP 400",
            "Prompt plus new tokens are more than the context.",
            "Shorten one of them, or start with a larger `--context` where the model allows it.",
        ),
        "never-fits": (
            "HTTP 400",
            "The request alone needs more KV cache than there is.",
            "Ask for fewer new tokens, or give the server more `--kv-memory`.",
        ),
        "bad-token-id": (
            "HTTP 400",
            "A token id is not one of the model's.",
            "Ids run from 0 to the vocabulary's size less one; padding rows are no tokens.",
        ),
        "bad-grammar": (
            "HTTP 400",
            "The JSON schema, regular expression or grammar cannot be used, or two were given.",
            "The message says which part; unsupported keywords are refused, never passed over.",
        ),
        "model-not-found": (
            "HTTP 404",
            "`/v1/models/NAME` was asked for another model than the one that is served.",
            "`GET /v1/models` has the name; `--name` sets it.",
        ),
        "chat-template-refused": (
            "HTTP 400",
            "The model's chat template refuses these messages, or cannot print them as it is asked to.",
            "The message says why. Change the messages, or start with another `--chat-template FILE`.",
        ),
        "control-token": (
            "HTTP 400",
            "A message spells a control token, and this tokenizer cannot write that spelling as plain text.",
            "Take it out of the message, or send token ids. What users type never becomes a control token.",
        ),
        "no-chat-template": (
            "HTTP 400",
            "The tokenizer has no chat template.",
            "Start with `--chat-template FILE`, or send text or token ids to `/generate`.",
        ),
        "grammar-dead-end": (
            "finish_reason abort",
            "No token could follow that the grammar allows.",
            "The tokenizer cannot spell what the grammar asks for; widen the grammar.",
        ),
        "no-token-allowed": (
            "finish_reason abort",
            "`allowed_token_ids`, `bad_words` and `min_new_tokens` together leave no token to choose.",
            "Allow more tokens, or forbid fewer words.",
        ),
        "non-finite-logits": (
            "finish_reason abort",
            "The model computed something that is not a finite number.",
            "The weights are broken, or overflow in this type: try `--dtype float32` and look at the last push.",
        ),
        "deadline-exceeded": (
            "finish_reason abort",
            "The request's own time was over.",
            "Allow more time, or ask for fewer tokens.",
        ),
    },
    "Server state": {
        "not-ready": ("HTTP 503", "The server is starting.", "Ask `/ready`, which tells the phase, and try again."),
        "shutting-down": ("HTTP 503", "The server is ending and takes nothing new.", "Send it to another replica."),
        "queue-full": (
            "HTTP 503",
            "As many requests wait as may.",
            "Send fewer at once, or try again after `retry-after`.",
        ),
        "unhealthy": (
            "HTTP 503",
            "`/health`: the engine has work and makes no progress, or is gone.",
            "The message has the age of the last step. Restart the server when it stays so.",
        ),
        "weights_torn": (
            "HTTP 503",
            "An update in place failed half-way: the live weights are a mixture, so nothing is served from them.",
            "Push a good checkpoint. `--refit-memory staged` cannot come to this.",
        ),
    },
}
