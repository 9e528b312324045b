"""Records ``reload_failed.jsonl`` on real engines: ``… -m tests.traces.record_reload_failed DIR``.

Two engines serve step 30; the weights of step 40 are damaged after they were verified and before
they are loaded, as a failing disk would; step 50 is evaluated by engines that have come back.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from arithmetic import NAME, build_model, build_tokenizer, training_and_held_out, write_eval_set

from vime.eval import EvalDispatcher
from vime.fsm.record import Record


def main(root: Path) -> None:
    """Write ``root/run/trace.jsonl``."""
    root.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, 0)
    model.save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    write_eval_set(root / "sums.jsonl", training_and_held_out()[1][:20])
    args = argparse.Namespace(
        hf_checkpoint=str(root / "base"),
        eval_prompt_data=[NAME, str(root / "sums.jsonl")],
        eval_hf_dir=str(root / "staging"),
        eval_run_dir=str(root / "run"),
        eval_interval=10,
        eval_num_gpus=2,
        eval_max_response_len=4,
        eval_vllm_dtype="float32",
        eval_vllm_max_model_len=64,
    )

    def damage(record: Record) -> None:
        if (record.machine, record.id, record.trigger) == ("point", "40", "pin"):
            with (root / "staging" / "step_40" / "model.safetensors").open("r+b") as file:
                file.write(b"\xff" * 64)

    with EvalDispatcher.from_args(args, exporter=(model, tokenizer)) as dispatcher:
        dispatcher.trace.subscribe(damage)
        dispatcher.wait_until_ready()
        for step in (30, 40, 50):
            print(step, dispatcher.dispatch(step).result(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
