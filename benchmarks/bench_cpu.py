"""The torch backend on a CPU beside its peers: SmolLM2-135M, greedy, the same prompts in one run.

Engines: slotline in float32, int8 and int4; transformers' `generate` with the same weights in float32, one padded
batch; llama.cpp with the 4-bit file that the weights come from, if `--llama-python` names an interpreter that has
llama-cpp-python. Loads: one request alone; 8 at once with equal lengths of prompts and answers; 8 at once with mixed
ones, where only tokens that were asked for count; 32 at once with equal ones. Each engine runs with 1 and with 2
threads, each in a process of its own, in turn, several times; the best thread count of each is what is compared.

Left alone, it takes float32 and int8 beside transformers and leaves out 32 at once: about four minutes on two cores.

    python benchmarks/bench_cpu.py [--repeats 5] [--tokens 32] [--loads alone equal8 mixed8 equal32]
        [--engines fp32 int8 int4] [--threads 1 2] [--llama-python PATH] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from peer import HERE, Peer, default_file
from record import RESULTS, keep

from slotline import EngineConfig
from slotline.manager import PluginManager

TEXT = (
    "The tram climbs from the harbour past the old customs house, stops at the market where the fish is sold before "
    "sunrise, and ends at the reservoir. On Sundays the conductor rings the bell twice, once for the school and once "
    "for the baker, who left the town in the year of the flood and never came back. "
) * 8
ENGINES = ("fp32", "int8", "int4", "transformers")
LOADS = ("alone", "equal8", "mixed8", "equal32")
THREADS = (1, 2)
# Times transformers' tokens per second.
GOALS = {
    ("alone", "fp32"): 1.2,
    ("equal8", "fp32"): 1.1,
    ("mixed8", "fp32"): 1.5,
    ("alone", "int8"): 2.7,
    ("equal8", "int8"): 2.5,
}


@dataclass(frozen=True)
class Load:
    """Requests that are sent at once: token ids of each prompt, and how many tokens each wants."""

    prompts: list[list[int]]
    tokens: list[int]


def loads(ids: list[int], tokens: int) -> dict[str, Load]:
    """Return all loads."""
    lengths = [8, 16, 24, 48, 64, 96, 128, 192]
    wanted = [tokens * part // 8 for part in (2, 3, 5, 6, 9, 10, 13, 16)]
    return {
        "alone": Load([ids[:32]], [tokens]),
        "equal8": Load([ids[i : i + 32] for i in range(8)], [tokens] * 8),
        "mixed8": Load([ids[i : i + n] for i, n in enumerate(lengths)], wanted[::-1]),
        "equal32": Load([ids[i : i + 32] for i in range(32)], [tokens] * 32),
    }


def start(options: argparse.Namespace, stack: ExitStack) -> dict[tuple[str, int], Peer]:
    """Start every engine with every thread count, one after the other."""
    peers = {}
    for engine in dict.fromkeys((*options.engines, "transformers")):
        for threads in options.threads:
            command = [sys.executable, str(HERE / "cpu_worker.py"), engine, str(threads)]
            peers[engine, threads] = stack.enter_context(Peer(command))
    if options.llama_python is not None:
        for threads in options.threads:
            command = [options.llama_python, str(HERE / "peer_llama.py"), str(default_file()), str(threads)]
            peers["llama.cpp", threads] = stack.enter_context(Peer(command))
    return peers


def measure(options: argparse.Namespace) -> list[dict]:
    """Run everything in turn and return one row per load, engine and thread count."""
    manager = PluginManager("")
    model = manager.hook.slotline_open_model(config=EngineConfig(), manager=manager)
    every = loads(model.tokenizer.encode(TEXT), options.tokens)
    with ExitStack() as stack:
        peers = start(options, stack)
        for peer in peers.values():  # the first run of each is slow
            peer.answer(every["alone"].prompts, [4])
        return [row for name in options.loads for row in turns(name, every[name], peers, options.repeats)]


def turns(name: str, load: Load, peers: dict[tuple[str, int], Peer], repeats: int) -> list[dict]:
    """Time one load with every engine, the engines taking turns."""
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in peers}
    answers: dict[tuple[str, int], list[list[int]]] = {}
    for _ in range(repeats):
        for key, peer in peers.items():
            spent, answers[key] = peer.answer(load.prompts, load.tokens)
            seconds[key].append(spent)
    expected, wanted = answers[next(key for key in answers if key[0] == "transformers")], sum(load.tokens)
    print(f"{name}: done", flush=True)
    return [
        {
            "bench": "cpu",
            "load": name,
            "engine": engine,
            "version": peers[engine, threads].version,
            "threads": threads,
            "tokens": wanted,
            "tok_s": round(wanted / statistics.median(runs), 1),
            "runs_s": [round(run, 3) for run in runs],
            "answers": len(expected),
            "same_answers": sum(a == b for a, b in zip(answers[engine, threads], expected, strict=True)),
        }
        for (engine, threads), runs in seconds.items()
    ]


def best(rows: list[dict], load: str, engine: str) -> dict:
    """Return the row of the better thread count."""
    return max((r for r in rows if r["load"] == load and r["engine"] == engine), key=lambda r: r["tok_s"])


def report(rows: list[dict]) -> None:
    """Print a table of the better thread counts, and one JSON line per row."""
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    heads = ("tok/s", "threads", "x transformers", "goal", "same answers")
    print("\n{:8} {:13} {:>7} {:>7} {:>15} {:>5} {:>13}".format("load", "engine", *heads))
    for load in dict.fromkeys(row["load"] for row in rows):
        theirs = best(rows, load, "transformers")["tok_s"]
        for engine in engines:
            row = best(rows, load, engine)
            goal, same = GOALS.get((load, engine), ""), f"{row['same_answers']} of {row['answers']}"
            ratio = f"{row['tok_s'] / theirs:.2f}"
            print(f"{load:8} {engine:13} {row['tok_s']:>7} {row['threads']:>7} {ratio:>15} {goal:>5} {same:>13}")
    for row in rows:
        print("ROW " + json.dumps(row))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS[:3])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES[:2], help="beside transformers")
    parser.add_argument("--threads", nargs="+", type=int, default=THREADS)
    parser.add_argument("--llama-python", help="an interpreter with llama-cpp-python")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = measure(options)
    report(rows)
    keep(rows, "cpu", options.out)


if __name__ == "__main__":
    main()
