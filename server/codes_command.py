"""Codes that a command ends with: ``{group: {code: (exit code or status, what it means, what to do)}}``."""

from __future__ import annotations

from collections.abc import Mapping

Entries = Mapping[str, tuple[str, str, str]]

COMMAND_CODES: Mapping[str, Entries] = {
    "Command line and configuration": {
        "usage": (
            "Exit 2",
            "An option, a key of the configuration file or an argument is unknown, or its value cannot be.",
            "The error names the option, what was given and what is possible. `gtp-serve --help` lists the options, "
            "`gtp-serve --print-config` shows each value and where it came from.",
        ),
        "output-exists": (
            "Exit 2",
            "`convert` found something at the place it was to write to.",
            "Name a folder that does not exist or is empty, or a Megatron root without that iteration. Nothing is "
            "ever overwritten.",
        ),
        "chat-template": (
            "Exit 2",
            "The chat template is not a Jinja template that can be used here, or it failed on these messages.",
            "Check `--chat-template FILE`, or the template in tokenizer_config.json. Templates run in a sandbox "
            "without files, network and Python's internals.",
        ),
        "internal": (
            "Exit 1, or HTTP 500",
            "Something happened that nobody expected: a bug in gtp-serve.",
            "Run the same command with `-v` and report what it prints. A server's log has the stack; replies never do.",
        ),
    },
    "Checkpoint": {
        "ckpt-not-found": (
            "Exit 3",
            "There is no checkpoint at the path, or it cannot be read.",
            "Give the Megatron root or one `iter_*` folder, a Hugging Face folder or a GGUF file. The error says what "
            "was looked for and what lies there instead.",
        ),
        "ckpt-corrupt": (
            "Exit 3",
            "A file of the checkpoint is short, damaged or says something of itself that is not so.",
            "Copy it again and compare sizes; a checkpoint that was being written when it was copied looks like this. "
            "Another iteration may be whole: `--iteration N`.",
        ),
        "ckpt-pickle": (
            "Exit 3",
            "A pickled file names something that is not on the short list of what Megatron writes. Nothing of it ran.",
            "The error names it. If a trainer of yours stores such an object in the common state, keep it elsewhere.",
        ),
        "ckpt-layout": (
            "Exit 3",
            "Shapes, chunk grids or saved arguments contradict one another or the model.",
            "`gtp-serve inspect PATH` shows what was understood. Where the checkpoint does not say how it was saved, "
            "`--saved-tp`, `--saved-gtp` and `--saved-config` do.",
        ),
        "ckpt-coverage": (
            "Exit 3",
            "An element of a tensor is missing, comes twice or lies outside its tensor.",
            "A rank's file may be missing or belong to another run. Copy the whole folder again.",
        ),
        "ckpt-unknown-key": (
            "Exit 3",
            "The checkpoint holds a tensor that this model has no place for.",
            "The model may be of a kind that is not served, or the configuration beside the weights is another "
            "model's. `gtp-serve inspect PATH` names the kind.",
        ),
        "ckpt-unsupported": (
            "Exit 3",
            "The model is of a kind that this server does not compute.",
            "Served are Llama, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE. The error names what is different.",
        ),
        "ckpt": ("Exit 3", "Something on disk is not what it must be.", "The error says what was seen and needed."),
        "no-tokenizer": (
            "Exit 3, or HTTP 400",
            "Text was asked for, and there is no tokenizer.",
            "`--tokenizer PATH` of a folder with tokenizer.json, or `--no-tokenizer` and token ids in every request.",
        ),
        "other-model": (
            "Exit 7, or HTTP 409",
            "The checkpoint to take weights from is of another model than the one that is served.",
            "Push a checkpoint of the same model; the error names the sizes that differ.",
        ),
    },
    "Memory and machine": {
        "too-big": (
            "Exit 4",
            "Weights and the smallest useful KV cache do not fit the memory. Found before anything was loaded.",
            "The error shows the sum. `--tp N`, `--context N`, `--dtype bfloat16`, `--refit-memory inplace` or a "
            "larger `--mem-fraction`.",
        ),
        "out-of-memory": (
            "Exit 1",
            "The process itself ran out of memory.",
            "Stop what else runs here, or lower `--mem-fraction` or `--kv-memory`.",
        ),
        "environment": (
            "Exit 5",
            "The machine lacks something: a package, a device, a directory that can be written.",
            "`gtp-serve doctor` checks the machine and names what is missing.",
        ),
        "port-in-use": (
            "Exit 5",
            "Another process listens on the port; the error says which, where that can be seen.",
            "`--port N` with another number, or `--port 0` to pick a free one.",
        ),
        "port-denied": (
            "Exit 5",
            "This user may not listen on that port.",
            "Take a port of 1024 or more and let a proxy hold the low one.",
        ),
        "port": ("Exit 5", "The port cannot be listened on.", "The error has the system's words for why."),
        "bad-host": (
            "Exit 5",
            "`--host` is no address of this machine.",
            "`--host 127.0.0.1` for this machine only, `--host 0.0.0.0` for the network.",
        ),
        "tls": (
            "Exit 5",
            "The certificate or its key cannot be used.",
            "`tls_cert` is a PEM file with the certificate and its chain, `tls_key` the PEM file of its key, without "
            "a password. Both are read at the start.",
        ),
        "server-unreachable": (
            "Exit 5",
            "No server answers at the URL.",
            "Check the address and that the server is ready: `curl URL/ready`.",
        ),
        "server-answer": (
            "Exit 7",
            "The server answered something that this command does not understand.",
            "Both sides should have the same release; a proxy in between may answer in the server's place.",
        ),
        "bench-failed": (
            "Exit 6",
            "No request of a `bench` run was answered in full.",
            "The error shows the first failure. `gtp-serve doctor` and the server's log say more.",
        ),
    },
    "Engine": {
        "worker-died": (
            "Exit 6, or HTTP 503",
            "An engine process died, or its connection was lost. The server ends with it.",
            "Signal 9 is most often the kernel's out-of-memory killer: `dmesg -T | grep -i oom`. The error names the "
            "rank and its last words.",
        ),
        "engine-error": (
            "Exit 6, or HTTP 503",
            "A step failed on a rank.",
            "The log has the failing rank's own error. Start again; with `--no-graphs` to see whether captured steps "
            "are at fault.",
        ),
        "rank-late": (
            "Exit 6",
            "A rank did not answer in time and is named; the others waited for it.",
            "Look at that rank's GPU and process. Storage that one rank reads slowly looks like this at start-up.",
        ),
        "out-of-step": (
            "Exit 6",
            "A rank has run another number of steps than rank 0.",
            "A bug; report it with the log.",
        ),
        "moved-parameter": (
            "Exit 6",
            "A parameter is not where captured steps read it. The server ends rather than serve from there.",
            "A bug; report it with the log. `--no-graphs` serves without captured steps.",
        ),
        "stopped": ("Exit 6", "The engine was stopped while this was waiting for it.", "Nothing, when that was asked."),
    },
}
