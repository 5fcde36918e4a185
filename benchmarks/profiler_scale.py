"""What a profile of a large model costs: CPU seconds and resident memory, each in a process of its own.

    python benchmarks/profiler_scale.py          # writes benchmarks/results/profiler_scale.{json,md}

Llama-3-8B at 1 x 8192 tokens, GPT-3 175B at 1 x 2048, and GPT-3's layers cut short to see that the cost is linear in
ops. Weights are on the meta device; nothing is allocated for them.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
CASES = ("llama-3-8b", "gpt3-12", "gpt3-24", "gpt3-48", "gpt3-96")


def one(case: str) -> dict[str, Any]:
    """Profiles one model in this process."""
    import torch
    import transformers

    import autoplan

    name, _, layers = case.partition("-")
    with torch.device("meta"):
        if name == "llama":
            model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
                )
            )  # fmt: skip
        else:
            model = transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    vocab_size=50257, n_embd=12288, n_layer=int(layers), n_head=96, n_positions=2048,
                    loss_type="ForCausalLM",
                )
            )  # fmt: skip
        ids = torch.zeros(1, 8192 if name == "llama" else 2048, dtype=torch.int64)
    begun, clock = time.process_time(), time.perf_counter()
    profile = autoplan.profile(model, {"input_ids": ids, "labels": ids}, cluster="h100-8x", precision="bf16")
    return {
        "model": case,
        "ops": len(profile.nodes),
        "flops": profile.forward_flops + profile.backward_flops,
        "parameter_bytes": profile.parameter_bytes,
        "cpu_s": time.process_time() - begun,
        "wall_s": time.perf_counter() - clock,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    rows = []
    for case in CASES:
        out = subprocess.run([sys.executable, __file__, case], check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(out.splitlines()[-1]))
    lines = [
        "| model | ops | TFLOP per step | parameters GB | CPU s | wall s | ms per op | resident GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['model']} | {r['ops']} | {r['flops'] / 1e12:.1f} | {r['parameter_bytes'] / 1e9:.1f} | {r['cpu_s']:.1f} "
        f"| {r['wall_s']:.1f} | {r['cpu_s'] / r['ops'] * 1e3:.2f} | {r['resident_bytes'] / 1e9:.2f} |"
        for r in rows
    ]
    print("\n".join(lines))
    text = "# Cost of profiling large models\n\n`python benchmarks/profiler_scale.py`; imports are not timed.\n\n"
    (RESULTS / "profiler_scale.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "profiler_scale.md").write_text(text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(one(sys.argv[1])))
    else:
        main()
