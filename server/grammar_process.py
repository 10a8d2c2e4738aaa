"""A child process that compiles grammars of strangers: whatever one of them costs, it costs it here.

One JSON line in, a grammar; one out, what it is in plain form or why it is refused.  It ends with its stdin, and an
alarm of the kernel ends it when a grammar takes far too long.  Started by ``server.grammar_check``.  No torch.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gtp_serve.engine.grammar import GrammarCompiler, plain_grammar
from gtp_serve.errors import RequestRejected
from gtp_serve.loaders.tokenizer import load_tokenizer
from gtp_serve.loaders.tokenizer_files import tokenizer_at
from gtp_serve.request import Grammar
from gtp_serve.server.grammar_check import Verdict

ALARM_SECONDS = 30
MAX_BYTES = 6 << 30
"""Of address space."""


def main(argv: Sequence[str] | None = None) -> int:
    """Answer until stdin ends."""
    parser = argparse.ArgumentParser(prog="gtp-serve-grammars")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--eos", type=json.loads, required=True)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = load_tokenizer(tokenizer_at(args.tokenizer))
    compiler = GrammarCompiler(tokenizer.to_json, vocab_size=args.vocab_size, eos_token_ids=args.eos)
    compiler.warm().result()
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        signal.alarm(ALARM_SECONDS)
        verdict = judge(msgspec.json.decode(line, type=Grammar), compiler)
        signal.alarm(0)
        sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()
    compiler.close()
    return 0


def judge(grammar: Grammar, compiler: GrammarCompiler) -> Verdict:
    """Whether a grammar is served."""
    try:
        plain = plain_grammar(grammar)
        compiler.compile(plain).result()
    except RequestRejected as error:
        return Verdict(message=error.message, details=error.details)
    return Verdict(grammar=plain)


if __name__ == "__main__":
    sys.exit(main())
