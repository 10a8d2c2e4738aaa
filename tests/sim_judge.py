"""Judges one seed's history by a model that knows nothing of how the product works.

Each request ends exactly once, in a way that somebody asked for; its tokens are those of the versions that its spans
name, its text is the text of its tokens up to the first stop; in the end nothing is held, counted or waited for.
"""

from __future__ import annotations

import json
from typing import Any

from sim_ranks import EOS, content_of, token_after
from sim_world import TOKENIZER, Call, World

ABORTS = {"aborted", "deadline-exceeded", "paused", "weights-replaced"}


def judge(world: World) -> list[str]:
    """Everything that is wrong."""
    found = list(world.troubles)
    for call in world.calls:
        found += [f"call {call.number}: {text}" for text in _call(world, call)]
    return found + _end(world)


def _call(world: World, call: Call) -> list[str]:
    if call.error:
        return [f"the application raised {call.error}"]
    if not call.over:
        return ["it never ended"]
    if call.gone is not None or call.broke or _dropped(world, call):
        return [text for reply in _heard(call) for text in _tokens(call, reply, whole=False)]
    if call.finals != 1:
        return [f"its answer was ended {call.finals} times"]
    raw = b"".join(call.chunks)
    if call.status != 200:
        return _refused(world, call, json.loads(raw))
    if not call.stream:
        body = json.loads(raw)
        replies = body if isinstance(body, list) else [body]
        wrong = [] if len(replies) == len(call.rids) else [f"{len(replies)} replies to {len(call.rids)} prompts"]
        return wrong + [text for reply in replies for text in _reply(world, call, reply)]
    return _stream(world, call, raw)


def _dropped(world: World, call: Call) -> bool:
    """A client that takes nothing for a minute loses its connection; jumps of the clock make anybody one."""
    return bool(call.stream) and call.finals == 0 and bool({"slow_clients", "clock_jumps"} & world.on)


def _refused(world: World, call: Call, body: Any) -> list[str]:
    code = body["error"]["code"]
    allowed = {"queue-full"} if "short_queue" in world.on else set()
    allowed |= {"engine-error"} if "failed_steps" in world.on else set()
    allowed |= {"non-finite-logits"} if "not_finite" in world.on else set()
    allowed |= {"weights_torn"} if "updates" in world.on else set()
    allowed |= {"shutting-down", "stopped"} if "stop_early" in world.on else set()
    allowed |= {world.died, "worker-died", "engine-error", "engine", "stopped"} if world.died else set()
    if code not in allowed:
        return [f"it was refused with {call.status} {code}"]
    return []


def _events(raw: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def _heard(call: Call) -> list[dict[str, Any]]:
    """What a client that left had been told of each reply."""
    if not call.stream or call.status != 200:
        return []
    return list(_joined(call, [e for e in _events(b"".join(call.chunks)) if isinstance(e, dict)]).values())


def _joined(call: Call, events: list[Any]) -> dict[str, dict[str, Any]]:
    replies: dict[str, dict[str, Any]] = {}
    for event in events:
        if "meta_info" not in event:
            continue
        before = replies.get(event["meta_info"]["id"])
        if call.stream == "delta" and before is not None:
            event = event | {key: before[key] + event[key] for key in ("text", "output_ids")}
        elif before is not None and event["output_ids"][: len(before["output_ids"])] != before["output_ids"]:
            event = event | {"broken": True}
        replies[event["meta_info"]["id"]] = event
    return replies


def _stream(world: World, call: Call, raw: bytes) -> list[str]:
    events = _events(raw)
    if events.count("[DONE]") != 1 or events[-1] != "[DONE]":
        return ["its stream has not exactly one end"]
    events = events[:-1]
    if events and "error" in events[-1]:
        wrong = _refused(world, call, events.pop())
        return wrong + [text for one in _joined(call, events).values() for text in _tokens(call, one, whole=False)]
    ends = [event["meta_info"]["id"] for event in events if event["meta_info"]["finish_reason"]]
    if sorted(ends) != sorted(call.rids):
        return [f"ends were told of {ends}"]
    return [text for reply in _joined(call, events).values() for text in _reply(world, call, reply)]


def _reply(world: World, call: Call, reply: dict[str, Any]) -> list[str]:
    meta, ids, sampling = reply["meta_info"], reply["output_ids"], call.body["sampling_params"]
    reason = meta["finish_reason"]
    wrong = _tokens(call, reply, whole=True)
    if reason is None:
        return [*wrong, "it has no end"]
    if reason["type"] == "length" and len(ids) != sampling["max_new_tokens"]:
        wrong.append(f"it ended by length after {len(ids)} tokens")
    if reason["type"] == "stop" and reason["matched"] not in (EOS, *sampling["stop"]):
        wrong.append(f"it stopped at {reason['matched']!r}")
    if reason["type"] == "abort":
        allowed = ABORTS | (
            {"engine-error", "non-finite-logits", "weights_torn", "shutting-down"} if world.on else set()
        )
        if reason["err_type"] not in allowed:
            wrong.append(f"it was aborted with {reason['err_type']}")
        if reason["err_type"] == "deadline-exceeded" and "deadline_seconds" not in call.body:
            wrong.append("it had no deadline")
    return wrong


def _tokens(call: Call, reply: dict[str, Any], *, whole: bool) -> list[str]:
    """Tokens by version, text by tokens."""
    meta, ids, sampling = reply["meta_info"], reply["output_ids"], call.body["sampling_params"]
    prompt = call.prompts[call.rids.index(meta["id"])]
    spans = meta["weight_versions"]
    edges = [0, *(span["end"] for span in spans)]
    if [span["start"] for span in spans] != edges[:-1] or edges[-1] != len(ids) or "broken" in reply:
        return [f"spans {spans} do not tile {len(ids)} tokens"]
    for span in spans:
        for at in range(span["start"], span["end"]):
            ends = () if sampling["ignore_eos"] else (EOS,)
            banned = ends if at < sampling.get("min_new_tokens", 0) else ()
            seed = f"{sampling['sampling_seed']} {at}" if sampling["temperature"] else ""
            if ids[at] != token_after([*prompt, *ids[:at]], content_of(span["version"]), seed, banned):
                return [f"token {at} of {meta['id']} is not version {span['version']}'s"]
            if at < len(ids) - 1 and ids[at] in ends and at >= sampling.get("min_new_tokens", 0):
                return [f"{meta['id']} goes on after its end"]
    return _text(reply, prompt, ids, sampling, whole)


def _text(reply: dict[str, Any], prompt: list[int], ids: list[int], sampling: Any, whole: bool) -> list[str]:
    full = TOKENIZER.decode([*prompt, *ids])[len(TOKENIZER.decode(prompt)) :]
    found = [(full.find(stop) + len(stop), -len(stop), stop) for stop in sampling["stop"] if stop in full]
    reason = reply["meta_info"]["finish_reason"]
    if found:
        end, _, stop = min(found)
        full = full[: end - len(stop)]
        if whole and reason is not None and reason != {"type": "stop", "matched": stop}:
            return [f"the stop string {stop!r} was missed: {reason}"]
    text = reply["text"]
    if (text != full) if whole and reason is not None else not full.startswith(text):
        return [f"its text is {text!r}, its tokens say {full!r}"]
    return []


def _end(world: World) -> list[str]:
    """Nothing is left behind."""
    found = []
    if world.client._streams or world.client._wire_names:
        found.append("the client still has streams")
    if world.state.rids or world.state.num_calls:
        found.append("the server still counts calls")
    if world.died:
        return found
    stats, scheduler = world.engine.stats(), world.engine._scheduler
    if (stats.running, stats.waiting, stats.kv_blocks_used) != (0, 0, 0):
        found.append(f"{stats.running} run, {stats.waiting} wait, {stats.kv_blocks_used} blocks are used")
    if scheduler.blocks.num_free != scheduler.blocks.num_blocks or scheduler.prefixes.owners or scheduler._timed:
        found.append("not all blocks are free, or something is still claimed or timed")
    status, held = world.updates.status(), world.runner.content()
    if status.update is not None:
        # An engine that was told to end gives up what is under way, and says nothing of its weights any more.
        return found if "stop_early" in world.on else [*found, f"an update is still under way: {status.update}"]
    if not status.torn and held != content_of(status.version):
        found.append(f"version {status.version} is told to serve, the ranks hold {held}")
    return found
